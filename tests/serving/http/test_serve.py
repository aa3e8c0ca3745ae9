"""The commands serve and chat, with a model that this package quantised."""

import argparse
import gc
import json
import logging
import os
import pty
import re
import select
import shutil
import signal
import socket
import sys
import time
import types
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import torch
import transformers
from support import serving, tiny_models
from support.mtp import with_mtp
from support.processes import COMMAND, Forked
from support.serving import expected_text, letters, said
from support.sweep import in_sweep

from torch_moe_mps._install import install_extra
from torch_moe_mps.commands import main, serve
from torch_moe_mps.commands.arguments import parser
from torch_moe_mps.commands.sources import load
from torch_moe_mps.models.caches.quantized_states import QuantizedStates
from torch_moe_mps.models.caches.tiled import TiledLayer
from torch_moe_mps.models.upstream.calls import cache_among
from torch_moe_mps.serving.engine.width import Width
from torch_moe_mps.serving.http.template import NOT_READ, NOT_SHOWN
from torch_moe_mps.serving.prefix_cache import disk


def options(command: str, *arguments) -> argparse.Namespace:
    return parser().parse_args([command, *map(str, arguments)])


def client_of(checkpoint, *arguments, **settings):
    """OpenAI's client of a server of the quantised model."""
    return serving.client_of(checkpoint, "--bits", 4, "--group-size", 32, *arguments, **settings)


@pytest.fixture
def no_cache_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "nowhere"))


@pytest.mark.slow("a server and its clients")
def test_serve_answers_with_the_quantised_model(checkpoint, no_cache_of_the_hub):
    """It names the model, and refuses what it would not do."""
    name = checkpoint.name
    asked = {"model": name, "messages": said("hello"), "temperature": 0, "max_tokens": 6}
    with client_of(checkpoint) as client:
        chat, raw, responses = client.chat.completions, client.completions, client.responses
        assert [model.id for model in client.models.list()] == [name]
        text = expected_text(checkpoint, "hello", 6)
        plain = {"n": 1, "response_format": {"type": "text"}, "presence_penalty": 0.0, "logprobs": False}
        assert chat.create(**asked, **plain).choices[0].message.content == text
        assert raw.create(model=name, prompt="hello", temperature=0, max_tokens=6).choices[0].text == text
        assert responses.create(model=name, input="a", text={"format": {"type": "text"}}).output_text
        for create, field, value in (
            (chat.create, "modalities", ["text", "audio"]),
            (chat.create, "generation_config", "{}"),
            (chat.create, "grammar", "root ::= a"),
            (chat.create, "json_schema", {}),
            (raw.create, "best_of", 2),
            (raw.create, "echo", True),
            (responses.create, "previous_response_id", "a"),
            (responses.create, "conversation", "a"),
            (responses.create, "truncation", "auto"),
            (responses.create, "background", True),
        ):
            needed = {chat.create: {"messages": said("a")}, raw.create: {"prompt": "a"}}
            with pytest.raises(openai.BadRequestError, match=f"'{field}' is not supported") as raised:
                create(model=name, extra_body={field: value}, **needed.get(create, {"input": "a"}))
            assert raised.value.param == field and raised.value.type == "invalid_request_error"
        assert chat.create(**asked | {"model": "another"}).choices[0].message.content == text


def test_prompts_that_the_model_does_not_read_are_refused(checkpoint):
    """It reads 256 tokens, as the server says: a prompt of 255 gets one."""
    with client_of(checkpoint) as client:
        assert [model.context_length for model in client.models.list()] == [256]
        create = client.chat.completions.create
        answer = create(model=str(checkpoint), messages=said("a" * 255))
        assert answer.usage.completion_tokens == 1 and answer.choices[0].finish_reason == "length"
        for stream in (False, True):
            with pytest.raises(
                openai.BadRequestError, match="maximum context length is 256 tokens"
            ) as raised:
                create(model=str(checkpoint), messages=said("a" * 256), stream=stream)
            assert raised.value.code == "context_length_exceeded"


def test_a_server_of_a_model_that_reads_any_number_of_tokens_says_none(checkpoint, tmp_path):
    config = tiny_models.build_config(transformers.Mamba2Config, vocab_size=97)
    transformers.Mamba2ForCausalLM(config).save_pretrained(tmp_path)
    for file in checkpoint.glob("*token*"):
        shutil.copy(file, tmp_path)
    with serving.client_of(tmp_path) as client:
        (model,) = client.models.list()
        assert model.context_length is None


def test_errors_say_what_is_wrong(checkpoint):
    """What is asked wrongly is of the client's class, which does not ask again; and it stops no server."""
    text, picture = [{"type": "text", "text": "a"}], {"type": "image_url", "image_url": {"url": "a.png"}}
    with client_of(checkpoint) as client:
        for messages, reason in (
            (said(""), "The prompt must have at least 1 token, got none"),
            ([{"role": "tool", "content": "a"}], "refuses the messages: TemplateError: no tools"),
            (said([*text, picture]), "This model does not read 'image_url'"),
        ):
            for stream in (False, True):
                with pytest.raises(openai.BadRequestError, match=reason):
                    create = client.with_options(max_retries=1).chat.completions.create
                    create(model=str(checkpoint), messages=messages, stream=stream)
        asked = {"model": str(checkpoint), "messages": said(text), "max_tokens": 6}
        assert client.chat.completions.create(**asked).choices[0].message.content


@pytest.fixture
def computed(monkeypatch):
    """How many tokens each call of a Mixtral computes."""
    counts, own = [], transformers.MixtralModel.forward

    def counted(self, input_ids=None, **kwargs):
        if not input_ids.is_meta:  # a cache's size is asked of a model without weights
            counts.append(input_ids.shape[1])
        return own(self, input_ids=input_ids, **kwargs)

    monkeypatch.setattr(transformers.MixtralModel, "forward", counted)
    return counts


def test_prompts_are_kept_over_requests_and_restarts(checkpoint, tmp_path, computed, capsys, monkeypatch):
    """Two conversations with one beginning, by turns; then another server with the same folder."""
    name, first = str(checkpoint), "thequickbrownfoxjumps" * 2
    monkeypatch.setattr(disk, "BLOCK", 8)
    kept = ["--prompt-folder", str(tmp_path / "kept")]

    def ask(client, chat: list, text: str) -> int:
        """How many tokens of the prompt are computed; the answer is that of a model that keeps nothing."""
        chat += said(text)
        del computed[:]
        answer = client.chat.completions.create(model=name, messages=chat, temperature=0, max_tokens=5)
        content = answer.choices[0].message.content
        count = computed[0]
        assert content == expected_text(checkpoint, "".join(m["content"] for m in chat), 5)
        chat.append({"role": "assistant", "content": content.replace(" ", "")})
        return count

    with client_of(checkpoint, *kept) as client:
        one, other = [], []
        assert ask(client, one, first + "why") == 45
        assert ask(client, other, first + "who") == 1  # "wh" is shared, too
        assert ask(client, one, "next") <= 5 and ask(client, other, "next") <= 5
        assert ask(client, one, "more") <= 5
        stream = client.chat.completions.create(model=name, messages=said(first), max_tokens=99, stream=True)
        next(chunk for chunk in stream if chunk.choices[0].delta.content)
        stream.close()  # a client that goes leaves nothing half computed
        assert ask(client, other, "last") <= 5
    (tmp_path / "notes.txt").write_text("notes")
    with client_of(checkpoint, *kept) as client:
        assert ask(client, [], first + "when") == 4  # behind the prompt whose client went
        assert ask(client, [], first + "wherever") <= 5
        with urllib.request.urlopen(str(client.base_url).replace("v1/", "metrics")) as answer:
            lines = answer.read().decode().splitlines()
        values = dict(line.split() for line in lines if line.startswith("moe_mps_disk"))
        with client_of(checkpoint, *kept) as other:  # the folder is the first one's
            assert ask(other, [], first + "when") == 46
    assert float(values["moe_mps_disk_hits_total"]) == 1 and float(values["moe_mps_disk_tokens_total"]) == 42
    line = f"no prefixes are cached on the disk: {kept[1]} cannot be used: another process"
    assert line in capsys.readouterr().err
    with pytest.raises(ValueError, match="--prompt-folder must be a folder, got the file"):
        client_of(checkpoint, "--prompt-folder", tmp_path / "notes.txt").__enter__()
    with client_of(checkpoint, "--prompt-folder", tmp_path) as client:
        assert ask(client, [], first + "when") == 46
    assert f"no prefixes are cached on the disk: {tmp_path} has other files in it" in capsys.readouterr().err
    assert [*tmp_path.glob("*.txt")] == [tmp_path / "notes.txt"]


def test_the_log_is_as_before():
    logger = logging.getLogger("torch_moe_mps.serving")
    before = [*logger.handlers], logger.propagate, logger.level
    with serve._log("debug"):
        assert not logger.propagate and len(logger.handlers) == 1 and logger.level == logging.DEBUG
    assert ([*logger.handlers], logger.propagate, logger.level) == before


def test_the_memory_of_kept_prompts_is_bounded(checkpoint, computed):
    """With none, only the last one is kept."""
    with client_of(checkpoint, "--prompt-memory", "0") as client:
        create = client.chat.completions.create
        for text, count in (("a" * 40, 40), ("b" * 40, 40), ("a" * 41, 41), ("a" * 42, 1)):
            del computed[:]
            create(model=str(checkpoint), messages=said(text), temperature=0, max_tokens=2)
            assert computed[0] == count


def test_conversations_side_by_side(checkpoint, tmp_path):
    """Each answer is the one that it has alone; kept prompts, probabilities and stops are those of each."""
    texts = ["hello", "abcabcabc", "thequick" * 9, "hello"]
    with client_of(checkpoint, "--parallel", 3, "--prompt-folder", tmp_path / "kept") as client:
        create = client.chat.completions.create
        asked = {"model": "m", "temperature": 0, "max_tokens": 20}

        def ask(number: int) -> str:
            text, stream = texts[number], number % 2 == 1
            answer = create(messages=said(text), stream=stream, **asked)
            if not stream:
                return answer.choices[0].message.content
            return "".join(chunk.choices[0].delta.content or "" for chunk in answer)

        with ThreadPoolExecutor(4) as threads:
            answers = [*threads.map(ask, range(4))]
        assert answers == [expected_text(checkpoint, text, 20) for text in texts]
        again = create(messages=said(texts[2]), n=2, logprobs=True, stop=answers[2][7:12], **asked)
        assert again.usage.prompt_tokens_details.cached_tokens == 71
        for choice in again.choices:
            assert choice.message.content == answers[2][: answers[2].find(answers[2][7:12])]
            assert choice.finish_reason == "stop" and choice.logprobs.content
        drawn = create(messages=said("a"), n=3, seed=1, **asked | {"temperature": 2})
        assert len({choice.message.content for choice in drawn.choices}) == 3
    assert [*(tmp_path / "kept").iterdir()]


@pytest.mark.parametrize("way", ["draft", "lookup"])
def test_draft_tokens_change_nothing(way, checkpoint):
    """Streamed and not; the second request begins in what was kept."""
    arguments = ["--speculative", checkpoint if way == "draft" else "lookup"]
    with client_of(checkpoint, *arguments) as client:
        asked = {"model": str(checkpoint), "messages": said("abcabcabc"), "temperature": 0, "max_tokens": 30}
        text = expected_text(checkpoint, "abcabcabc", 30)
        for _ in range(2):
            assert client.chat.completions.create(**asked).choices[0].message.content == text
            parts = client.chat.completions.create(**asked, stream=True)
            shown = "".join(part.choices[0].delta.content or "" for part in parts)
            assert shown.replace(" ", "") == text.replace(" ", "")


def test_draft_tokens_are_counted(checkpoint, monkeypatch):
    """In the usage of chats and of responses, and in the metrics."""
    monkeypatch.setattr("torch_moe_mps.serving.speculative.asked.Width", lambda width: Width(4))
    with client_of(checkpoint, "--speculative", "lookup") as client:
        asked = {"model": "m", "temperature": 0}
        chat = client.chat.completions.create(messages=said("abc" * 5), max_tokens=20, **asked)
        response = client.responses.create(input="abc" * 5, max_output_tokens=20, **asked)
        shares = [chat.usage.completion_tokens_details, response.usage.output_tokens_details]
        for share in shares:
            assert share.accepted_prediction_tokens + share.rejected_prediction_tokens > 0
        with urllib.request.urlopen(f"{str(client.base_url).removesuffix('/v1/')}/metrics") as shown:
            counted = sum(share.accepted_prediction_tokens for share in shares)
            assert f"moe_mps_accepted_draft_tokens_total {float(counted)}\n" in shown.read().decode()


@pytest.mark.slow("four answers of three servers")
def test_a_checkpoints_own_layers_draft(tmp_path, monkeypatch, capsys):
    """By default, of a model in 4 bits, too; a server starts without them where they cannot be read."""
    monkeypatch.setattr("torch_moe_mps.serving.speculative.asked.Width", lambda width: Width(2))
    asked = {"model": "m", "messages": said("thequick"), "temperature": 0, "max_tokens": 12}
    with with_mtp("deepseek_v3", tmp_path, vocab_size=27):
        letters().save_pretrained(tmp_path)
        four_bits = (tmp_path, "--bits", 4, "--group-size", 32)
        with client_of(*four_bits, "--speculative", "none") as client:
            plain = client.chat.completions.create(**asked)
        with client_of(*four_bits) as client:
            for _ in range(2):  # the second goes on from what is kept
                answer = client.chat.completions.create(**asked)
                assert answer.choices[0].message.content == plain.choices[0].message.content
                counts = answer.usage.completion_tokens_details
                assert counts.accepted_prediction_tokens + counts.rejected_prediction_tokens > 6
        capsys.readouterr()
        monkeypatch.setattr("torch_moe_mps.serving.speculative.asked.Mtp", lambda *given: 1 / 0)
        with client_of(*four_bits) as client:
            answer = client.chat.completions.create(**asked)
            assert answer.choices[0].message.content == plain.choices[0].message.content
        line = "the checkpoint's MTP layers are not used: division by zero"
        assert capsys.readouterr().err.count(line) == 1


@torch.no_grad()
def test_a_chat_is_kept_in_a_folder(checkpoint, tmp_path, monkeypatch, computed):
    """The next chat computes its system prompt no more."""
    monkeypatch.setattr(disk, "BLOCK", 8)
    arguments = ["--system-prompt", "thequickbrownfox" * 4, "--set", "max_new_tokens=4", "--device", "cpu"]
    for question, first in (("hello", 69), ("other", 5)):
        del computed[:]
        lines = iter([question, "!exit"])
        monkeypatch.setattr("builtins.input", lambda prompt, lines=lines: next(lines))
        assert main(["chat", str(checkpoint), *arguments, "--prompt-folder", str(tmp_path)]) == 0
        assert computed[0] == first


def test_chat(checkpoint, monkeypatch, capsys):
    lines = iter(["hello", "a" * 256, "!clear", "hello", "!exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    flags = ["--set", "max_new_tokens=6", "--set", "do_sample=False"]
    assert (
        main(["chat", str(checkpoint), *flags, "--bits", "4", "--group-size", "32", "--device", "cpu"]) == 0
    )
    text = expected_text(checkpoint, "hello", 6)
    printed = capsys.readouterr().out
    assert printed.count(text) == 2 and "This model's maximum context length is 256" in printed


class Terminal:
    """A command that runs in a terminal of its own, after a statement of Python."""

    def __init__(self, *arguments, first: str = "pass"):
        begin = f"import os; os.open(os.ttyname(0), os.O_RDWR); {first}"  # Ctrl-C comes from its terminal
        leader, follower = pty.openpty()
        self.process = Forked(
            f"{begin}; {COMMAND}", *arguments, files=(follower,) * 3, TERM="dumb", COLUMNS=300
        )
        os.close(follower)
        self.leader, self.shown = leader, ""

    def type(self, text: str) -> None:
        self.shown = ""
        os.write(self.leader, text.encode())

    def wait_for(self, text: str, seconds: float = 90) -> None:
        end = time.monotonic() + seconds
        while text not in self.shown:
            assert time.monotonic() < end and self._read(), self.shown

    def _read(self) -> bool:
        if not select.select([self.leader], [], [], 1)[0]:
            return True
        try:
            self.shown += os.read(self.leader, 65536).decode(errors="replace")
        except OSError:  # it has ended
            return False
        return True

    def leave(self) -> tuple[int, str]:
        """The exit code after Ctrl-D, and what is shown until the end.

        A Ctrl-D that comes between the prompt and the first read is lost, so it is typed again.
        """
        self.shown, end = "", time.monotonic() + 90
        while self._read():
            assert time.monotonic() < end, self.shown
            os.write(self.leader, CTRL_D.encode())
        return self.rest(end)

    def rest(self, end: float | None = None) -> tuple[int, str]:
        """The exit code, and what is shown until the end."""
        end = end or time.monotonic() + 90
        while self._read():
            assert time.monotonic() < end, self.shown
        return self.process.wait(60), self.shown


CTRL_C, CTRL_D = "\x03", "\x04"


def test_ctrl_c_ends_the_answer_and_ctrl_d_the_chat(checkpoint, tmp_path):
    """Answers of 200 tokens; after an ended one the chat goes on, and it is kept."""
    flags = ["--set", "max_new_tokens=200", "--set", "do_sample=False", "--device", "cpu"]
    kept = ["--prompt-folder", tmp_path]
    chat = Terminal("chat", checkpoint, *flags, *kept)
    chat.wait_for("is loaded")
    for shown in ("\n", " "):  # before the first token, and in the middle of the answer
        chat.type("hello\n")
        chat.wait_for(f"<{checkpoint.name}>:")
        chat.wait_for(shown)
        chat.type(CTRL_C)
        chat.wait_for(">:")  # the next prompt
        assert "200 tokens" not in chat.shown
    code, shown = chat.leave()
    assert code == 0 and "Traceback" not in shown and "terminate called" not in shown
    assert [*tmp_path.glob("*/*.state")]


def test_ctrl_c_ends_a_server_whose_disk_is_full(checkpoint, tmp_path):
    """It says what it cannot keep."""
    port, folder = serving.free_port(), tmp_path / "kept"
    arguments = ["--port", port, "--device", "cpu", "--prompt-folder", folder, "--log-level", "error"]
    server = Terminal("serve", checkpoint, *arguments, first="from support.disk import fill; fill(2000)")
    with openai.OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none", timeout=60) as client:
        end = time.monotonic() + 90
        while True:
            try:
                client.models.list()
                break
            except openai.APIConnectionError:
                assert time.monotonic() < end and server._read(), server.shown
        asked = {"messages": said("hello"), "temperature": 0, "max_tokens": 3}
        assert client.chat.completions.create(model=str(checkpoint), **asked).choices[0].message.content
    server.type(CTRL_C)
    code, shown = server.rest()
    assert code == 128 + signal.SIGINT and "Traceback" not in shown
    assert (
        f"torch-moe-mps: no prefixes are cached in {folder} any more: " in shown and "File too large" in shown
    )
    assert not [*folder.glob("*/*")]


@pytest.mark.parametrize("times", in_sweep([1, 2], [2]))
def test_ctrl_c_ends_an_answer_within_a_step(times, checkpoint, tmp_path):
    """The client is told; a second one loses no prompts."""
    port, folder = serving.free_port(), tmp_path / "kept"
    kept = ["--prompt-folder", folder, "--parallel", 2]
    first = "from support import serving; serving.last_until_the_server_ends(step=20)"
    server = Terminal("serve", checkpoint, "--port", port, "--device", "cpu", *kept, first=first)
    server.wait_for(f"answers at http://localhost:{port}/v1")
    asked = {"model": "m", "messages": said("hello"), "temperature": 0, "stream": True}
    with openai.OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none", timeout=60) as client:
        chunks, shown = client.chat.completions.create(**asked), 0
        with pytest.raises(openai.APIError, match="The server ends"):
            for shown, _ in enumerate(chunks):
                if shown == 3:
                    server.type(CTRL_C * times)
    code, text = server.rest()
    assert code == 128 + signal.SIGINT and "Traceback" not in text and shown <= 20  # of 250 tokens
    assert max(int(file.stem.rpartition("-")[2]) for file in folder.glob("*/*.state")) > 5  # tokens


@pytest.mark.parametrize("bits", [4, "k4v2", 8, 16])
def test_the_bits_of_keys_and_values(checkpoint, bits):
    model = load(options("chat", checkpoint, "--kv-bits", bits), str(checkpoint), "cpu")
    ids = torch.ones(1, 5, dtype=torch.long)
    cache = cache_among(model.generate(ids, max_new_tokens=2, return_dict_in_generate=True))
    assert [isinstance(layer.keys, QuantizedStates) for layer in cache.layers] == [bits == 8] * 2
    tiled = [layer.bits for layer in cache.layers if isinstance(layer, TiledLayer)]
    assert tiled == ([bits] * 2 if bits in (4, "k4v2") else [])


def test_loading_is_said(checkpoint, capsys):
    """On stderr, and not with --log-level error."""
    load(options("serve", checkpoint, "--bits", 4, "--group-size", 32), str(checkpoint), "cpu")
    said = capsys.readouterr()
    assert f"Reading in 4 bits: {checkpoint}, for cpu\n" in said.err and not said.out
    assert re.search(r"^The model is ready after \d+\.\d s$", said.err, re.M)
    load(options("serve", checkpoint, "--log-level", "error"), str(checkpoint), "cpu")
    assert "eading" not in capsys.readouterr().err


def test_a_server_that_cannot_start_is_one_line(checkpoint, capsys, monkeypatch, refused):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        error = refused("serve", checkpoint, "--port", port)
        assert error == f"--host and --port must be free, got localhost:{port}: Address already in use"
    with pytest.raises(SystemExit, match="2"):
        main(["serve", str(checkpoint), "--log-level", "loud"])
    error = capsys.readouterr().err
    assert "error: argument --log-level: invalid choice: 'loud'" in error and error.count("\n") == 1
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert refused("serve", checkpoint) == f"serve needs `{install_extra('serve')}`, which brings uvicorn"


def test_no_search_for_garbage_walks_the_model(checkpoint, monkeypatch):
    """While the server runs; behind it all is as before."""

    class Ran:
        def __init__(self, *given):
            pass

        def run(self, sockets):
            ran.append(gc.get_freeze_count())

    ran, is_frozen = [], gc.get_freeze_count() > 0  # by the fork server
    monkeypatch.setattr("torch_moe_mps.commands.serve.server_of", Ran)
    given = ["--device", "cpu", "--port", "0", "--prompt-disk", "0", "--log-level", "error"]
    gc.unfreeze()
    try:
        assert main(["serve", str(checkpoint), *given]) == 0
        assert ran.pop() > 100_000 and gc.get_freeze_count() == 0
        gc.freeze()  # objects that somebody else keeps from the search
        with serve._frozen():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        if not is_frozen:
            gc.unfreeze()


def test_tools_that_the_template_does_not_show_are_said(checkpoint, tmp_path, capsys, caplog):
    """At the start, and by each request that has some; what is counted is what the model reads."""
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}] * 3
    with serving.client_of(checkpoint) as client:
        assert f"{checkpoint.name}: {NOT_SHOWN}\n" in capsys.readouterr().err
        used = []
        for more, said_now in (({}, 0), ({"tools": tools}, 1), ({"tools": tools}, 1)):
            caplog.clear()
            with caplog.at_level(logging.INFO, "torch_moe_mps.serving.http.preparing"):
                answer = client.chat.completions.create(model="m", messages=said("a"), max_tokens=1, **more)
            lines = [record.getMessage() for record in caplog.records]
            assert lines == [NOT_SHOWN] * said_now
            used.append(answer.usage.prompt_tokens)
        assert used == [1, 1, 1]
        counted = {"messages": said("a"), "tools": [{"name": "look", "input_schema": {"type": "object"}}]}
        url = f"{client.base_url}messages/count_tokens"
        asked = urllib.request.Request(
            url, json.dumps(counted).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(asked) as answer:
            assert json.load(answer) == {"input_tokens": 1}
    shown = shutil.copytree(checkpoint, tmp_path / "shown")
    (shown / "chat_template.jinja").write_text(
        "{{ tools[0].function.name if tools }}{{ messages[0].content }}"
    )
    with (
        serving.client_of(shown) as client,
        caplog.at_level(logging.INFO, "torch_moe_mps.serving.http.preparing"),
    ):
        caplog.clear()
        answer = client.chat.completions.create(model="m", messages=said("a"), max_tokens=1, tools=tools)
        assert answer.usage.prompt_tokens == 5
        assert [record.getMessage() for record in caplog.records] == [NOT_READ]
        assert NOT_SHOWN not in capsys.readouterr().err


def test_a_base_model_continues_the_text(checkpoint, tmp_path, capsys):
    """Without a chat template: an answer continues a message, and the next message begins a line."""
    shutil.copytree(checkpoint, tmp_path / "base")
    for file in ("chat_template.jinja", "tokenizer_config.json"):
        path = tmp_path / "base" / file
        if file.endswith(".json"):
            told = json.loads(path.read_text())
            told.pop("chat_template", None)
            path.write_text(json.dumps(told))
        else:
            path.unlink(missing_ok=True)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "base").chat_template is None
    turns = [
        {"role": "system", "content": "ab"}, {"role": "user", "content": "cd"},
        {"role": "assistant", "content": "ef"}, {"role": "user", "content": "gh"},
    ]  # fmt: skip
    with client_of(tmp_path / "base") as client:
        for messages, text in ((said("hello"), "hello"), (turns, "ab\ncdef\ngh")):
            answer = client.chat.completions.create(model="m", messages=messages, temperature=0, max_tokens=6)
            assert answer.choices[0].message.content == expected_text(checkpoint, text, 6)
    assert capsys.readouterr().err.count("has no chat template: it continues the text") == 1


@pytest.mark.parametrize("command", ["serve", "generate", "chat", "bench", "perplexity"])
def test_a_model_that_generates_nothing_is_refused_before_it_is_read(command, tmp_path, refused, monkeypatch):
    """There are no weights."""
    transformers.BertConfig(architectures=["BertModel"]).save_pretrained(tmp_path)
    monkeypatch.setattr("torch_moe_mps.commands.sources.check_files", lambda folder: None)
    more = {"generate": ["-p", "a"], "serve": ["--port", 0]}
    error = refused(command, tmp_path, *more.get(command, []), "--device", "cpu")
    assert error == "This model generates no text: sentence-transformers runs encoders and rerankers."


def test_the_part_of_a_model_that_writes_is_served(checkpoint, monkeypatch):
    """As Qwen3-Omni's thinker is, beside which a talker speaks."""
    whole = "torch_moe_mps.commands.serving.load"
    monkeypatch.setattr(whole, lambda *given: types.SimpleNamespace(thinker=load(*given)))
    with client_of(checkpoint) as client:
        answer = client.chat.completions.create(
            model="m", messages=said("hello"), temperature=0, max_tokens=6
        )
        assert answer.choices[0].message.content == expected_text(checkpoint, "hello", 6)
