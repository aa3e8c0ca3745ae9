"""Other libraries' clients of the server, and two servers behind LiteLLM's proxy."""

import contextlib
import faulthandler
import os
import secrets
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import serving
from support.serving import said

pytestmark = pytest.mark.sweep
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would fetch the prices of others
CALL = '<tool_call>\n{"name": "%s", "arguments": {"of": "sky"}}\n</tool_call>'


def test_langchain(here):
    """An answer, a stream of one, reasoning left out, a tool, and an answer in a schema."""
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel

    @tool
    def look(of: str) -> str:
        """Look at something."""
        return f"{of} is blue"

    class Sky(BaseModel):
        """A part of the sky."""

        of: str

    for of_responses in (False, True):
        chat = ChatOpenAI(
            model="m",
            base_url=f"{here.url}/v1",
            api_key="none",
            use_responses_api=of_responses,
            max_retries=0,
        )
        here.says("<think>\nhm\n</think>\n\nblue", cached=4)
        answer = chat.invoke("why?")
        assert answer.text == "blue" and answer.usage_metadata["input_token_details"]["cache_read"] == 4
        pieces = [*chat.stream("why?")]
        assert "".join(piece.text for piece in pieces) == "blue" and len(pieces) > 4
        here.says(CALL % "look", "It is blue.")
        bound = chat.bind_tools([look])
        turns = [HumanMessage("look up")]
        turns.append(bound.invoke(turns))
        (call,) = turns[-1].tool_calls
        assert (call["name"], call["args"]) == ("look", {"of": "sky"})
        turns.append(ToolMessage(look.invoke(call["args"]), tool_call_id=call["id"]))
        assert bound.invoke(turns).text == "It is blue."
        assert "sky is blue" in here.generator.prompts[1]
        here.says('{"of": "sky"}')
        assert chat.with_structured_output(Sky, method="json_schema").invoke("what?") == Sky(of="sky")


def test_instructor(here):
    """Objects of a class in each of its modes: whole, several, in parts; a wrong one is asked for again."""
    import anthropic
    import instructor
    import openai
    from pydantic import BaseModel

    class Sky(BaseModel):
        of: str

    modes, both = instructor.Mode, '{"tasks": [{"of": "sky"}, {"of": "sea"}]}'
    call, several = CALL % "Sky", (CALL % "IterableSky").replace('{"of": "sky"}', both)
    of_openai = openai.OpenAI(base_url=f"{here.url}/v1", api_key="none", max_retries=0)
    of_anthropic = anthropic.Anthropic(base_url=here.url, api_key="none", max_retries=0)
    with of_openai, of_anthropic:
        ways: list[tuple[Any, str, str]] = [
            (instructor.from_openai(of_openai, mode=mode), call, several)
            for mode in (modes.TOOLS, modes.RESPONSES_TOOLS)
        ]
        for mode in (modes.JSON_SCHEMA, modes.JSON, modes.MD_JSON):
            texts = ['{"of": "sky"}', both]
            if mode is modes.MD_JSON:
                texts = [f"```json\n{text}\n```" for text in texts]
            ways.append((instructor.from_openai(of_openai, mode=mode), *texts))
        ways.append((instructor.from_anthropic(of_anthropic), call, several))
        for client, one, many in ways:
            asked = {"model": "m", "max_tokens": 900, "messages": said("what?"), "response_model": Sky}
            here.says(one.replace('"sky"', "7"), one)
            assert client.create(**asked, max_retries=2).of == "sky"
            assert len(here.generator.prompts) == 2 and "string" in here.generator.prompts[1]
            here.says(one)
            assert [*client.create_partial(**asked)][-1].of == "sky"
            here.says(many)
            assert [each.of for each in client.create_iterable(**asked)] == ["sky", "sea"]


def test_litellm(here):
    """OpenAI's chats and responses, and Anthropic's messages."""
    import litellm

    to = {"api_base": f"{here.url}/v1", "api_key": "none", "num_retries": 0}
    here.says("blue", cached=4)
    answer = litellm.completion(model="openai/m", messages=said("why?"), top_k=3, **to)
    assert answer.choices[0].message.content == "blue"
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    chunks = litellm.completion(model="openai/m", messages=said("why?"), stream=True, **to)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "blue"
    assert litellm.responses(model="openai/m", input="why?", **to).output[0].content[0].text == "blue"
    of_anthropic = to | {"api_base": here.url, "max_tokens": 50}
    answer = litellm.completion(model="anthropic/m", messages=said("why?"), **of_anthropic)
    assert answer.choices[0].message.content == "blue"


@contextlib.contextmanager
def running(command: list[object], folder: Path, says: str, **environment: str) -> Iterator[None]:
    """A command in a process of its own, once it has said a line."""
    process = subprocess.Popen(
        [*map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONUNBUFFERED": "1"} | environment,
    )
    said = []
    try:
        for line in process.stdout:
            said.append(line)
            if says in line:
                break
        else:
            pytest.fail("".join(said[-20:]))
        drained = threading.Thread(target=process.stdout.read)  # so that no line of it waits
        drained.start()
        yield
    finally:
        process.terminate()
        process.wait(60)
    drained.join()


@contextlib.contextmanager
def two_servers(checkpoint: Path) -> Iterator[list[str]]:
    """The URLs of two servers, each in a process of its own."""
    with contextlib.ExitStack() as stack:
        urls = []
        for _ in range(2):
            port, options = serving.free_port(), ("--device", "cpu", "--prompt-disk", "0")
            command = [sys.executable, "-m", "torch_moe_mps", "serve", checkpoint, "--port", port]
            stack.enter_context(running([*command, *options], checkpoint.parent, "answers at"))
            urls.append(f"http://localhost:{port}")
        yield urls


def metric(url: str, name: str) -> int:
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        (line,) = [
            line for line in answer.read().decode().splitlines() if line.startswith(f"moe_mps_{name} ")
        ]
    return int(float(line.split()[1]))


def test_two_servers_behind_the_proxy(checkpoint, tmp_path):
    """By the command of docs/distributed.md: both answer, and a conversation stays where it began."""
    import openai
    import yaml

    faulthandler.dump_traceback_later(1500, exit=True)  # three processes start, which takes long
    with two_servers(checkpoint) as urls:
        to_letters = {"model": "openai/letters", "api_key": "none"}
        settings = {
            "model_list": [
                {"model_name": "letters", "litellm_params": to_letters | {"api_base": f"{url}/v1"}}
                for url in urls
            ],
            "router_settings": {
                "routing_strategy": "least-busy",
                "optional_pre_call_checks": ["session_affinity"],
                "num_retries": 0,
            },
        }
        config, port = tmp_path / "config.yaml", serving.free_port()
        config.write_text(yaml.safe_dump(settings))
        command = [Path(sys.executable).with_name("litellm"), "--config", config, "--port", port]
        key = f"sk-{secrets.token_hex(32)}"
        with (
            running(command, tmp_path, "Uvicorn running on", LITELLM_MASTER_KEY=key),
            openai.OpenAI(base_url=f"http://localhost:{port}", api_key=key, max_retries=0) as client,
        ):

            def ask(text: str, session: str, **more: Any) -> Any:
                more |= {"temperature": 0, "metadata": {"session_id": session}}
                return client.chat.completions.create(model="letters", messages=said(text), **more)

            long = ask("abc" * 9, "a", stream=True, max_tokens=200)
            next(iter(long))
            for number in range(3):
                assert ask("hello", f"b{number}", max_tokens=8).choices[0].message.content
            counts = ("generated_tokens_total", "sequences_active")
            assert all(sum(metric(url, name) for name in counts) > 0 for url in urls)
            for _ in long:
                pass
            begun = "thequick" * 9
            for number in range(4):
                ask(begun, f"c{number}", max_tokens=1)
                again = ask(begun + "brown", f"c{number}", max_tokens=1)
                assert again.usage.prompt_tokens_details.cached_tokens >= len(begun) - 1
