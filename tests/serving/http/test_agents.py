"""Requests of agents and other clients, and their answers, of a model that says what a test tells it to.

`agents/` has bodies of requests that Codex CLI 0.171.0 and Claude Code 2.1.197 sent to this server, two turns
and a title of each, with short texts in place of their own, and fewer tools and arguments.
"""

import itertools
import json
import logging
import re
import time
import urllib.error
import urllib.request
from http.client import HTTPConnection
from pathlib import Path

import openai
import pytest
from support import scripted
from support.serving import said

from torch_moe_mps.serving.http import app, preparing
from torch_moe_mps.serving.http.protocols import conversation
from torch_moe_mps.serving.http.protocols.messages import Messages
from torch_moe_mps.serving.http.protocols.responses import Responses
from torch_moe_mps.serving.http.template import NOT_READ, NOT_SHOWN

SKY = {"type": "object", "properties": {"of": {"type": "string"}}, "required": ["of"]}
CALL = '<tool_call>\n{"name": "look", "arguments": {"of": "sky"}}\n</tool_call>'
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "aaaa"}}
RESULT_WITH_PDF = {"type": "tool_result", "tool_use_id": "t", "content": [PDF]}
THOUGHT = "<think>\nhm\n</think>\n\n"


def post(here, path: str, body: object) -> tuple[int, str]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(here.url + path, content, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def recorded(name: str) -> list[dict]:
    return json.loads((Path(__file__).parent / "agents" / f"{name}.json").read_text())


def events_of(text: str) -> list[dict]:
    """The data of server-sent events, whose names are their types."""
    made = []
    for event in text.strip().split("\n\n"):
        if not event.startswith(":"):
            name, data = event.split("\n")
            made.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {made[-1]['type']}"
    return made


def test_codex(here):
    """A call of its shell, and in the second turn the model reads the call and its output."""
    first, second, _ = recorded("codex")
    call = '<tool_call>\n{"name": "exec_command", "arguments": {"cmd": "echo hello"}}\n</tool_call>'
    here.says(call, "Done.", cached=9, disk=4)
    status, text = post(here, first["path"], first["body"])
    events = events_of(text)
    assert status == 200 and [event["sequence_number"] for event in events] == [*range(len(events))]
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert [kind for kind, _ in itertools.groupby(kinds)] == [
        "created", "in_progress", "output_item.added", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done", "completed",
    ]  # fmt: skip
    (item,) = events[-1]["response"]["output"]
    assert (item["name"], json.loads(item["arguments"])) == ("exec_command", {"cmd": "echo hello"})
    assert events[-1]["response"]["usage"]["input_tokens_details"] == {
        "cached_tokens": 9,
        "disk_tokens": 4,
    }
    prompt = here.generator.prompts[0]
    assert '"multi_agent_v1__spawn_agent"' in prompt and "web_search" not in prompt
    assert here.generator.jobs[0].config.max_new_tokens == 4096 - len(prompt_ids(here, 0))
    events = events_of(post(here, second["path"], second["body"])[1])
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "Done."
    assert "<tool_call>exec_command cmd=echo hello;</tool_call>" in here.generator.prompts[1]
    assert "<|im_start|>tool\na text<|im_end|>" in here.generator.prompts[1]


def prompt_ids(here, number: int) -> list[int]:
    return here.generator.jobs[number].inputs["input_ids"][0].tolist()


def test_claude_code(here):
    """It sends a system message behind the user's, which some templates refuse."""
    first, second, _ = recorded("claude_code")
    call = '<tool_call>\n{"name": "Bash", "arguments": {"command": "echo hello"}}\n</tool_call>'
    here.says(THOUGHT + call, "Done.", cached=9, disk=4)
    status, text = post(here, f"{first['path']}?beta=true", first["body"])
    events = events_of(text)
    assert status == 200
    assert [kind for kind, _ in itertools.groupby(event["type"] for event in events)] == [
        "message_start", "ping",
        "content_block_start", "content_block_delta", "content_block_stop",
        "content_block_start", "content_block_delta", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == "hm"
    parts = [delta["partial_json"] for delta in deltas if "partial_json" in delta]
    assert len(parts) > 5 and json.loads("".join(parts)) == {"command": "echo hello"}
    usage = events[-2]["usage"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use" and usage["cache_read_input_tokens"] == 9
    assert usage["input_tokens"] + 9 == len(prompt_ids(here, 0)) and usage["disk_tokens"] == 4
    events = events_of(post(here, second["path"], second["body"])[1])
    assert [e["delta"]["text"] for e in events if e.get("delta", {}).get("type") == "text_delta"] == [
        *"Done."
    ]
    prompt = here.generator.prompts[1]
    assert "<tool_call>Bash command=echo hello;" in prompt and "<|im_start|>tool\nhello<|im_end|>" in prompt
    assert prompt.startswith("<|im_start|>tools") and "<|im_start|>system\na text\n\na text" not in prompt
    assert prompt.count("<|im_start|>user") == 2  # the system message behind is one of them


@pytest.mark.parametrize(
    ("name", "schema"),
    [
        ("codex", {"type": "string", "minLength": 1, "maxLength": 36}),
        ("claude_code", {"type": "string"}),
    ],
)
def test_titles(here, name, schema):
    """A conversation's, which is asked for beside its first answer: a text in a schema, without tools."""
    *_, title = recorded(name)
    here.says('{"title": "Say hello"}')
    status, text = post(here, title["path"], title["body"])
    deltas = [
        event.get("delta")
        for event in events_of(text)
        if event["type"].endswith(("text.delta", "block_delta"))
    ]
    said_there = "".join(delta if isinstance(delta, str) else delta["text"] for delta in deltas)
    assert status == 200 and json.loads(said_there) == {"title": "Say hello"}
    assert "tools" not in here.generator.prompts[0]
    protocol = {"codex": Responses, "claude_code": Messages}[name]()
    assert protocol.read(title["body"], here.served).form["properties"] == {"title": schema}


def test_messages_of_anthropics_client(here, of_anthropic):
    tools = [{"name": "look", "description": "", "input_schema": SKY}]
    asked = {"model": "m", "max_tokens": 99, "messages": said("hi"), "tools": tools}
    here.says(f"{THOUGHT}I look.\n{CALL}", cached=5)
    with of_anthropic.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop" and "thinking" in kinds
    here.says(f"{THOUGHT}I look.\n{CALL}", cached=5)
    whole = of_anthropic.messages.create(**asked)
    for message in (streamed, whole):
        thought, text, call = message.content
        assert (thought.thinking, text.text, call.name, call.input) == (
            "hm",
            "I look.",
            "look",
            {"of": "sky"},
        )
        assert message.stop_reason == "tool_use" and message.model == "scripted"
        assert message.usage.cache_read_input_tokens == 5
        assert message.usage.input_tokens == len(prompt_ids(here, 0)) - 5
        assert message.usage.output_tokens > 40
        assert message.usage.rejected_prediction_tokens == 0  # OpenAI's name
    counted = of_anthropic.messages.count_tokens(model="m", messages=said("hi"), tools=tools)
    assert counted.input_tokens == len(prompt_ids(here, 0))


def test_a_conversation_with_tools(here, of_anthropic):
    """Results are messages of the tool; pictures, which this model does not read, are left out."""
    here.says("a stop here")
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}
    result = {
        "type": "tool_result",
        "tool_use_id": "t",
        "content": [{"type": "text", "text": "blue"}, picture],
    }
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "sea"}}
    message = of_anthropic.messages.create(
        model="m",
        max_tokens=99,
        system=[
            {"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "so"},
        ],
        messages=[
            {"role": "user", "content": "look"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "so"},
                    {"type": "tool_use", "id": "t", "name": "look", "input": {"of": "sky"}},
                ],
            },
            {
                "role": "user",
                "content": [result, document, {"type": "text", "text": "and?"}, {"type": "other"}],
            },
        ],
        stop_sequences=["stop"],
        thinking={"type": "disabled"},
        metadata={"user_id": "x"},
    )  # fmt: skip
    assert (message.content[0].text, message.stop_reason, message.stop_sequence) == (
        "a ",
        "stop_sequence",
        "stop",
    )
    assert here.generator.prompts[0] == (
        "<|im_start|>system\nbe\nso<|im_end|>\n<|im_start|>user\nlook<|im_end|>\n"
        "<|im_start|>assistant\n<think>hm</think>so<tool_call>look of=sky;</tool_call><|im_end|>\n"
        "<|im_start|>tool\nblue<|im_end|>\n<|im_start|>user\nsea\nand?<|im_end|>\n"
        "<|im_start|>assistant\n<think></think>"
    )


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": said("a")}, "max_tokens"),
        ({"max_tokens": 5}, "messages"),
        ({"max_tokens": 5, "messages": []}, "messages"),
        ({"max_tokens": 5, "messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content[0].text"),
        (
            {"max_tokens": 5, "messages": [{"role": "user", "content": [PDF]}]},
            "'messages[0].content[0].source' must be of the type text: this server reads no other document",
        ),
        (
            {"max_tokens": 5, "messages": [{"role": "user", "content": [RESULT_WITH_PDF]}]},
            "'messages[0].content[0].content[0].source' must be of the type text",
        ),
        (
            {"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "search_result"}]}]},
            "'messages[0].content[0]' must be a block of the type text, image or document, got 'search_",
        ),
        ({"max_tokens": 5, "messages": said("a"), "tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ({"max_tokens": 5, "messages": said("a"), "tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"max_tokens": 5, "messages": said("a"), "temperature": "warm"}, "temperature"),
        ({"max_tokens": 5, "messages": said("a" * 5000)}, "maximum context length is 4096"),
        # The words behind which Claude Code shortens its history, and asks again.
        ({"max_tokens": 5, "messages": said("a" * 4077)}, "prompt is too long: 4096 tokens > 4095 maximum"),
    ],
)
def test_errors_have_anthropics_form(here, body, field):
    status, text = post(here, "/v1/messages", body)
    error = json.loads(text)
    assert status == 400 and error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
    assert field in error["error"]["message"]


def test_a_cut_response_is_incomplete(here, of_openai):
    """Streamed and not; without a limit it has the rest of the context."""
    here.says("hello there")
    asked = {"model": "m", "input": "hi", "max_output_tokens": 5}
    whole = of_openai.responses.create(**asked)
    last = [*of_openai.responses.create(**asked, stream=True)][-1]
    assert last.type == "response.incomplete"
    for response in (whole, last.response):
        assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
        assert response.output_text == "hello" and response.output[0].status == "incomplete"
    response = of_openai.responses.create(model="m", input="hi")
    assert response.status == "completed" and response.output_text == "hello there"
    assert here.generator.jobs[-1].config.max_new_tokens == 4096 - len(prompt_ids(here, -1))


BROKEN = '<tool_call>{"name": "look", "arguments": {"of": sky}}</tool_call>'


@pytest.mark.parametrize(
    ("says", "cut", "arguments", "text", "reasons"),
    [
        (CALL, 0, '{"of": "sky"}', "", ("tool_calls", "tool_use", "completed")),
        (f"{CALL}\nIt is", 3, '{"of": "sky"}', "It", ("length", "max_tokens", "incomplete")),
        (f"{BROKEN}\nIt is", 0, '{"of": sky}', "It is", ("stop", "end_turn", "completed")),
    ],
)
def test_a_stream_and_a_whole_answer_end_alike(here, of_openai, says, cut, arguments, text, reasons):
    """Behind a call, at the maximum length behind one, and behind a call whose arguments are no JSON."""
    here.says(says)
    limit = len(here.served.template.tokenizer(says).input_ids) - cut + (not cut)
    function = {"name": "look", "parameters": SKY}
    asked = {"model": "m", "messages": said("a"), "tools": [{"type": "function", "function": function}]}
    for stream in (False, True):
        answer = of_openai.chat.completions.create(**asked, max_tokens=limit, stream=stream)
        choices = [part.choices[0] for part in answer] if stream else answer.choices
        parts = [choice.delta if stream else choice.message for choice in choices]
        calls = [call.function for part in parts for call in part.tool_calls or ()]
        assert [call.name for call in calls if call.name] == ["look"]
        assert "".join(call.arguments for call in calls) == arguments
        assert "".join(part.content or "" for part in parts) == text
        assert choices[-1].finish_reason == reasons[0]
    tools = [{"name": "look", "input_schema": SKY}]
    _, body = post(here, "/v1/messages", {"messages": said("a"), "tools": tools, "max_tokens": limit})
    assert json.loads(body)["stop_reason"] == reasons[1]
    asked = {"model": "m", "input": "a", "tools": [{"type": "function", **function}]}
    whole = of_openai.responses.create(**asked, max_output_tokens=limit)
    last = [*of_openai.responses.create(**asked, max_output_tokens=limit, stream=True)][-1].response
    for response in (whole, last):
        call = response.output[0]
        assert (call.arguments, call.status == "completed") == (arguments, says != f"{BROKEN}\nIt is")
        assert response.status == reasons[2] and response.output_text == text


def test_a_response_thinks_says_and_calls(here, of_openai):
    tools = [{"type": "function", "name": "look", "parameters": SKY}]
    here.says(f"{THOUGHT}I look.\n{CALL}", cached=3)
    whole = of_openai.responses.create(model="m", input="hi", tools=tools)
    with of_openai.responses.stream(model="m", input="hi", tools=tools) as stream:
        texts = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        streamed = stream.get_final_response()
    assert texts == "I look."
    for response in (whole, streamed):
        thought, message, call = response.output
        assert thought.content[0].text == "hm" and message.content[0].text == "I look."
        assert (call.name, json.loads(call.arguments)) == ("look", {"of": "sky"})
        assert response.usage.input_tokens_details.cached_tokens == 3
        assert response.usage.output_tokens_details.reasoning_tokens > 0


def test_custom_tools_and_namespaces_are_called_as_such(here, of_openai):
    """A custom tool is a function with one text for the model."""
    patch = {
        "type": "custom",
        "name": "apply_patch",
        "description": "d",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"},
    }
    look = {"type": "function", "name": "look", "parameters": SKY}
    space = {"type": "namespace", "name": "sky", "description": "", "tools": [look]}
    calls = '<tool_call>\n{"name": "apply_patch", "arguments": {"input": "+a"}}\n</tool_call>'
    calls += '<tool_call>\n{"name": "sky__look", "arguments": {"of": "x"}}\n</tool_call>'
    here.says(calls)
    custom, call = of_openai.responses.create(model="m", input="hi", tools=[patch, space]).output
    assert (custom.type, custom.name, custom.input) == ("custom_tool_call", "apply_patch", "+a")
    assert (call.type, call.name, call.namespace) == ("function_call", "look", "sky")
    prompt = here.generator.prompts[0]
    assert '"input": {"type": "string"}' in prompt and "start: x" in prompt
    events = [*of_openai.responses.create(model="m", input="hi", tools=[patch, space], stream=True)]
    (done,) = [event for event in events if event.type == "response.custom_tool_call_input.done"]
    assert done.input == "+a"
    here.says(calls)
    chat = {"type": "custom", "custom": {"name": "apply_patch", "description": "d"}}
    message = (
        of_openai.chat.completions.create(model="m", messages=said("hi"), tools=[chat]).choices[0].message
    )
    assert message.tool_calls[0].custom.input == "+a" and message.content is None


def test_items_of_agents_are_read_or_left_out(here, caplog):
    """Known ones become messages; the rest is one line in the log for each type."""
    here.says("ok")
    here.served.say_once.__self__._said.clear()
    items = [
        {"role": "user", "content": "go"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "a", "name": "look", "arguments": '{"of": "s'},
        {"type": "custom_tool_call", "call_id": "b", "name": "patch", "input": "+a"},
        {"type": "local_shell_call", "call_id": "c", "status": "completed", "action": {"command": "ls"}},
        {"type": "function_call_output", "call_id": "a", "output": "one"},
        {
            "type": "custom_tool_call_output",
            "call_id": "b",
            "output": [{"type": "input_text", "text": "two"}],
        },
        {"type": "local_shell_call_output", "id": "c", "output": "three"},
        {"type": "web_search_call", "id": "w"},
        {"type": "item_reference", "id": "r"},
        {"type": "compaction", "encrypted_content": "x"},
        {"type": "additional_tools", "tools": []},
    ]
    with caplog.at_level(logging.INFO, "torch_moe_mps.serving.http.served"):
        for _ in range(2):
            assert (
                post(here, "/v1/responses", {"input": items, "tools": [{"type": "image_generation"}]})[0]
                == 200
            )
    lines = [record.getMessage() for record in caplog.records]
    for kind in ("web_search_call", "item_reference", "compaction", "additional_tools", "image_generation"):
        assert sum(repr(kind) in line for line in lines) == 1
    assert here.generator.prompts[0] == (
        "<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n<think>hm</think>"
        '<tool_call>look arguments={"of": "s;</tool_call><tool_call>patch input=+a;</tool_call>'
        "<tool_call>local_shell command=ls;</tool_call><|im_end|>\n"
        "<|im_start|>tool\none<|im_end|>\n<|im_start|>tool\ntwo<|im_end|>\n<|im_start|>tool\nthree<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_arguments_that_are_cut_off_stay_a_text():
    """A template that takes texts reads what the model wrote."""
    said_so: list[str] = []
    assert conversation.arguments('{"of": "s', said_so.append) == '{"of": "s' and len(said_so) == 1
    assert conversation.arguments('{"of": "s"}', said_so.append) == {"of": "s"} and len(said_so) == 1
    assert conversation.arguments("", said_so.append) == {} and len(said_so) == 1


def test_unknown_fields_are_one_line(here, caplog):
    """Of each protocol, however often they come."""
    here.says("ok")
    here.served.say_once.__self__._said.clear()
    asked = {
        "/v1/chat/completions": {"messages": said("a")},
        "/v1/completions": {"prompt": "a"},
        "/v1/responses": {"input": "a"},
        "/v1/messages": {"messages": said("a"), "max_tokens": 9},
    }
    with caplog.at_level(logging.INFO, "torch_moe_mps.serving.http.served"):
        for path, body in [*asked.items()] * 2:
            more = {"max_tool_calls": 3} if path in ("/v1/chat/completions", "/v1/responses") else {}
            assert post(here, path, body | more | {"new_field": 1})[0] == 200
    said_of_fields = [r.getMessage() for r in caplog.records if r.name.endswith(".served")]
    assert said_of_fields == [f"{path}: the field 'new_field' is not known and ignored" for path in asked]


def test_several_answers(here, of_openai):
    """`n` of a chat, streamed and not; with a seed each has one of its own."""
    here.says("one", "two", "one", "two", cached=2)
    asked = {"model": "m", "messages": said("a"), "n": 2, "seed": 5}
    answer = of_openai.chat.completions.create(**asked)
    assert [choice.message.content for choice in answer.choices] == ["one", "two"]
    assert [job.seed for job in here.generator.jobs] == [5, 6]
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt_ids(here, 0)), 8)
    assert usage.prompt_tokens_details.cached_tokens == 2
    chunks = [
        *of_openai.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    ]
    texts = ["", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == ["one", "two"] and chunks[-1].usage == usage and not chunks[-1].choices
    assert chunks[0].choices[0].delta.role == "assistant"


def test_lists_of_prompts(here, of_openai):
    """Texts and tokens, with `n` answers to each."""
    here.says(*"abcd")
    ids = here.served.template.tokenizer("why").input_ids
    answer = of_openai.completions.create(model="m", prompt=["who", "what"], n=2)
    assert [(choice.index, choice.text) for choice in answer.choices] == [*enumerate("abcd")]
    assert answer.usage.prompt_tokens == 7
    here.says("e")
    assert of_openai.completions.create(model="m", prompt=ids).choices[0].text == "e"
    assert of_openai.completions.create(model="m", prompt=[ids, ids]).choices[1].text == "e"
    assert here.generator.prompts == ["why"] * 3
    for prompt in ([], [""], [[]], [1 << 40], [-1], ["a", 5], [True]):
        assert post(here, "/v1/completions", {"prompt": prompt})[0] == 400


def test_settings_that_other_servers_take(here, of_openai):
    here.says("a")
    more = {"top_k": 7, "min_p": 0.1, "repetition_penalty": 1.5}
    of_openai.chat.completions.create(model="m", messages=said("a"), top_p=0.5, extra_body=more)
    config = here.generator.jobs[0].config
    got = (config.do_sample, config.top_k, config.top_p, config.min_p, config.repetition_penalty)
    assert got == (True, 7, 0.5, 0.1, 1.5)
    of_openai.chat.completions.create(
        model="m", messages=said("a"), extra_body={"top_k": -1, "temperature": 0}
    )
    assert here.generator.jobs[1].config.do_sample is False


def named(name: str) -> dict:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(("choice", "is_forced"), [
    ("required", True), ({"type": "function", "function": {"name": "look"}}, True), ("auto", False)
])  # fmt: skip
def test_a_forced_call_ends_the_turn(here, of_openai, choice, is_forced):
    """What the model says behind it is not generated; calls in a row are, and prose behind a free call."""
    prose = "It is blue, and so on."
    here.says(f"{CALL}\n{CALL}\n{prose}")
    tools = [{"type": "function", "function": {"name": "look", "parameters": SKY}}]
    asked = {"model": "m", "messages": said("a"), "tools": tools, "tool_choice": choice}
    answer = of_openai.chat.completions.create(**asked)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls" and len(choice.message.tool_calls) == 2
    assert choice.message.content == (None if is_forced else prose)
    whole = len(here.served.template.tokenizer(f"{CALL}\n{CALL}\n{prose}").input_ids)
    assert answer.usage.completion_tokens == (whole - len(prose) + 1 if is_forced else whole + 1)
    here.says(f"{CALL}\n{CALL}\n{prose}")
    stream = of_openai.chat.completions.create(**asked, stream=True)
    texts = [part.choices[0].delta.content or "" for part in stream]
    assert "".join(texts) == ("" if is_forced else prose)


def test_the_beginning_of_an_answer(here, of_openai):
    """A last message of the assistant is gone on with; two of them are refused."""
    here.says(" lo ")
    begun = [*said("a"), {"role": "assistant", "content": "hel"}]
    assert of_openai.chat.completions.create(model="m", messages=begun).choices[0].message.content == " lo"
    assert here.generator.prompts[0].endswith("<|im_start|>assistant\nhel")
    with pytest.raises(openai.BadRequestError, match="at most one message of the assistant at the end"):
        of_openai.chat.completions.create(model="m", messages=[*begun, begun[1]])


def test_the_format_keeps_its_schema(here):
    """`json_object` with a schema, as llama.cpp's server takes it, and of responses."""
    for path, body in (
        ("chat", {"response_format": {"type": "json_object", "schema": SKY}, "messages": said("a")}),
        ("responses", {"text": {"format": {"type": "json_object", "schema": SKY}}, "input": "a"}),
    ):
        protocol = app.ChatCompletions() if path == "chat" else Responses()
        assert protocol.read(body, here.served).form == SKY


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/chat/completions", {"messages": said("a")}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": said("a"), "max_tokens": 9}),
    ],
)
def test_pings_while_a_prompt_is_read(here, path, asked, monkeypatch):
    monkeypatch.setattr(app, "PING", 0.05)
    generator = here.says("ok")

    def wait(job):
        for read in (10, 20):
            job.on_progress(read, 30)
            time.sleep(0.12)

    generator.wait = wait
    status, text = post(here, path, asked | {"stream": True})
    assert status == 200
    if path == "/v1/messages":
        assert text.count("event: ping") > 2
    else:
        assert text.count(": 10 of ") >= 1 and text.count(": 20 of ") >= 1


def test_models_health_and_metrics(here, of_openai, of_anthropic):
    """For both clients; the counters say what was asked."""
    here.says("ok")
    assert of_openai.models.retrieve("scripted").id == "scripted"
    with pytest.raises(openai.NotFoundError, match="The model must be scripted"):
        of_openai.models.retrieve("another/model")
    assert of_anthropic.models.list().data[0].display_name == "scripted"
    of_openai.chat.completions.create(model="m", messages=said("a"))
    with urllib.request.urlopen(f"{here.url}/health") as answer:
        assert json.load(answer) == {"status": "ok", "load": "ready", "active": 0, "waiting": 0, "most": 1}
    generator = here.generator
    for active, waiting, load in ((1, 0, "busy"), (1, 2, "full"), (0, 0, "ready")):
        generator.counts.active, generator.counts.waiting = active, waiting
        with urllib.request.urlopen(f"{here.url}/health") as answer:
            assert json.load(answer)["load"] == load
    with urllib.request.urlopen(f"{here.url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert float(values["moe_mps_generated_tokens_total"]) >= 3
    assert float(values['moe_mps_requests_total{path="/v1/chat/completions",status="200"}']) >= 1
    names = "sequences_active", "sequences_most", "cached_tokens_total"
    assert {f"moe_mps_{name}" for name in names} <= values.keys()
    described = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    helps = [line.split(" ", 3)[3] for line in lines if line.startswith("# HELP")]
    assert not [text for text in helps if {"these", "them"} & {*text.split()}]  # each line stands alone
    assert described == {name.partition("{")[0] for name in values}


def test_pages_of_other_sites_are_refused(here):
    asked = urllib.request.Request(f"{here.url}/v1/models", headers={"sec-fetch-site": "cross-site"})
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(asked)
    with scripted.server(origins=("*",)) as open_to_all:
        request = urllib.request.Request(
            f"{open_to_all.url}/v1/models",
            headers={"sec-fetch-site": "cross-site", "origin": "http://a.example"},
        )
        with urllib.request.urlopen(request) as answer:
            assert answer.headers["access-control-allow-origin"] == "*"


def test_pages_of_other_origins_are_refused_where_a_browser_sends_nothing_else(here, caplog):
    """Browsers leave Sec-Fetch-Site out towards http: hosts of a network."""
    body = json.dumps({"messages": said("a"), "max_tokens": 1})

    def status_of(url: str, **headers: str) -> tuple[int, dict]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = asked(url, "POST", named)
        return answer.status, json.load(answer)

    def asked(url: str, method: str, headers: dict):
        connection = HTTPConnection(url.removeprefix("http://"), timeout=60)
        connection.request(method, "/v1/chat/completions", body, headers)
        return connection.getresponse()

    json_type = {"content_type": "application/json"}
    here.says(*["ok"] * 2)
    assert status_of(here.url, **json_type)[0] == 200
    assert status_of(here.url)[0] == 200  # programs that name no type
    foreign = ("http://evil.example", "null", here.url, "http://localhost", "")
    for origin in foreign:
        caplog.clear()
        with caplog.at_level(logging.INFO, "torch_moe_mps.serving.http.app"):
            status, told = status_of(here.url, origin=origin, **json_type)
        assert status == 403 and told["error"]["code"] == "origin_not_allowed", origin
        (line,) = [record.getMessage() for record in caplog.records]
        assert " /v1/chat/completions: 403, " in line and repr(origin) in line
    for kind in ("text/plain", "Text/Plain;charset=UTF-8"):
        status, told = status_of(here.url, content_type=kind)
        assert status == 403 and told["error"]["code"] == "content_type_not_allowed", kind
    with scripted.server(origins=("https://app.example", "null")) as some:
        some.says(*["ok"] * 3)
        for origin in ("https://app.example", "null"):
            allowed = {"origin": origin, "sec_fetch_site": "cross-site"}
            assert status_of(some.url, **allowed, **json_type)[0] == 200
        assert status_of(some.url, origin="https://app.example.evil.example", **json_type)[0] == 403
        headers = {"origin": "https://app.example", "access-control-request-method": "POST"}
        answer = asked(some.url, "OPTIONS", headers)
        assert answer.headers["access-control-allow-origin"] == "https://app.example"


def test_a_base_url_without_v1(here):
    """Clients leave it out."""
    here.says("ok")
    with openai.OpenAI(base_url=here.url, api_key="none", max_retries=0) as client:
        assert (
            client.chat.completions.create(model="m", messages=said("a")).choices[0].message.content == "ok"
        )
        assert client.models.list().data[0].id == "scripted"


def test_errors_of_the_model_are_told(here, of_openai, of_anthropic, anthropic):
    """Streamed and not, in the protocol's form; the server answers the next request."""
    generator = here.says("ok")
    generator.submit = lambda job: job.on_end(RuntimeError("the GPU has stopped"))
    try:
        for stream in (False, True):
            with pytest.raises(openai.APIError, match="the GPU has stopped"):
                [*of_openai.chat.completions.create(model="m", messages=said("a"), stream=stream)]
            with pytest.raises(anthropic.APIError, match="the GPU has stopped"):
                [*of_anthropic.messages.create(model="m", max_tokens=5, messages=said("a"), stream=stream)]
        events = events_of(post(here, "/v1/responses", {"input": "a", "stream": True})[1])
        assert events[-1]["type"] == "response.failed"
        assert "the GPU has stopped" in events[-1]["response"]["error"]["message"]
    finally:
        del generator.submit
    assert of_openai.chat.completions.create(model="m", messages=said("a")).choices[0].message.content == "ok"


def test_effort_switches_thinking_off(here, of_openai):
    here.says("a")
    of_openai.chat.completions.create(model="m", messages=said("a"), reasoning_effort="none")
    assert here.generator.prompts[0].endswith("<think></think>")
    with pytest.raises(openai.BadRequestError, match="'reasoning_effort' must be one of"):
        of_openai.chat.completions.create(model="m", messages=said("a"), reasoning_effort="much")


def test_lines_of_the_log(here, of_openai, caplog):
    here.says("hello", cached=4)
    with caplog.at_level(logging.INFO, "torch_moe_mps.serving.http.app"):
        raw = of_openai.chat.completions.with_raw_response.create(model="m", messages=said("a"))
        deadline = time.monotonic() + 10
        while len(caplog.records) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    begins, line = [record.getMessage() for record in caplog.records]
    prompt = f"prompt {len(prompt_ids(here, 0))} tokens"
    name = raw.headers["x-request-id"]
    assert begins == f"{name} /v1/chat/completions: begins, {prompt}"
    assert line.startswith(f"{name} /v1/chat/completions: waited 0.00 s, {prompt} (4 cached) in ")
    assert ", answer 6 tokens in " in line and "tokens/s), stop" in line


def test_what_would_be_stored_is_a_line(here, caplog):
    """However often a client asks; a request for nothing is none."""
    here.says("ok")
    here.served.say_once.__self__._said.clear()
    with caplog.at_level(logging.INFO, "torch_moe_mps.serving.http.served"):
        for asked in (
            {"store": True},
            {"store": True, "metadata": {"a": "b"}},
            {"store": False, "metadata": {}},
        ):
            assert post(here, "/v1/chat/completions", {"messages": said("a")} | asked)[0] == 200
    assert [record.getMessage() for record in caplog.records if record.name.endswith(".served")] == [
        f"/v1/chat/completions: {name!r} is ignored, as this server stores no answers"
        for name in ("store", "metadata")
    ]


@pytest.mark.parametrize("tokens", [0, 3])
def test_the_line_of_a_client_that_leaves(here, caplog, tokens):
    """While its prompt is read, or its answer comes: seconds until then, and the reason."""
    generator = here.says("hello")

    def submit(job):
        generator.jobs.append(job)
        time.sleep(0.3)
        job.on_progress(0, 1)
        for token in here.served.template.tokenizer("abcdef").input_ids[:tokens]:
            job.on_token(token)

    generator.submit = submit
    body = json.dumps({"messages": said("a"), "stream": True}).encode()
    request = urllib.request.Request(f"{here.url}/v1/chat/completions", body)
    with caplog.at_level(logging.INFO, "torch_moe_mps.serving.http.app"):
        with urllib.request.urlopen(request) as answer:
            answer.readline()
            time.sleep(0.3)
        deadline = time.monotonic() + 10
        while len(caplog.records) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    del generator.submit
    line = caplog.records[-1].getMessage()
    prompt, answered = map(float, re.findall(r" in (-?[0-9.]+) s", line))
    (waited,) = map(float, re.findall(r": waited ([0-9.]+) s, ", line))
    assert 0.3 <= waited < 0.5 and prompt < 0.6  # nothing is counted twice
    assert line.endswith(", the client left") and f", answer {tokens} tokens in " in line
    assert (prompt if tokens == 0 else answered) >= 0.25 and min(prompt, answered) >= 0


def test_the_memory_of_lines_is_bounded(here, caplog):
    """However many fields clients make up, and however long their names are."""
    here.says("ok")
    with caplog.at_level(logging.INFO, "torch_moe_mps.serving.http.served"):
        body = {"messages": said("a"), **{f"f{number}": 1 for number in range(3000)}, "x" * 5000: 1}
        assert post(here, "/v1/chat/completions", body)[0] == 200
    lines = [record.getMessage() for record in caplog.records if record.name.endswith(".served")]
    assert len(lines) == 3001 and max(map(len, lines)) == 200
    assert len(here.served.say_once.__self__._said) <= 1000


LOOK = {"name": "look", "parameters": SKY}
# {protocol: (path, body, tools, choice of none, at most one call)}
CHOICES = {
    "chat": (
        "/v1/chat/completions",
        {"messages": said("a")},
        [{"type": "function", "function": LOOK}],
        "none",
        {"parallel_tool_calls": False},
    ),
    "responses": (
        "/v1/responses",
        {"input": "a"},
        [{"type": "function", **LOOK}],
        "none",
        {"parallel_tool_calls": False},
    ),
    "messages": (
        "/v1/messages",
        {"messages": said("a"), "max_tokens": 400},
        [{"name": "look", "input_schema": SKY}],
        {"type": "none"},
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
    ),
}


def parts_of(protocol: str, text: str) -> tuple[str, str, list[dict]]:
    """The text, the reasoning and the arguments of calls of a whole answer."""
    answer = json.loads(text)
    if protocol == "chat":
        message = answer["choices"][0]["message"]
        calls = [json.loads(call["function"]["arguments"]) for call in message.get("tool_calls", [])]
        return message["content"] or "", message.get("reasoning_content", ""), calls
    if protocol == "responses":
        items = answer["output"]
        texts = {
            kind: "".join(item["content"][0]["text"] for item in items if item["type"] == kind)
            for kind in ("message", "reasoning")
        }
        calls = [json.loads(item["arguments"]) for item in items if item["type"] == "function_call"]
        return texts["message"], texts["reasoning"], calls
    blocks = answer["content"]
    text, thought = ("".join(b.get(name, "") for b in blocks) for name in ("text", "thinking"))
    return text, thought, [block["input"] for block in blocks if block["type"] == "tool_use"]


@pytest.mark.parametrize("protocol", CHOICES)
def test_without_tools_no_call_is_read(here, protocol):
    """Where there are none, or the request chooses none: the marks of calls are text, reasoning is read."""
    path, body, tools, none, _ = CHOICES[protocol]
    here.says(f"{THOUGHT}In Hermes: {CALL} Ho")
    for more in ({}, {"tools": tools, "tool_choice": none}):
        status, text = post(here, path, body | more)
        assert status == 200 and parts_of(protocol, text) == (f"In Hermes: {CALL} Ho", "hm", []), more
        assert '"tool_calls"' not in post(here, path, body | more | {"stream": True})[1]


def test_without_tools_channels_are_read(here, of_openai):
    """In Harmony's form also the text of an answer is in a channel; what would be a call is text."""
    with scripted.templated(here, scripted.TEMPLATE + "{# <|channel|>analysis <|channel|>commentary #}"):
        here.says(
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary "
            'to=functions.look json<|message|>{"of": "sky"}<|call|><|start|>assistant'
            "<|channel|>final<|message|>Hi<|return|>"
        )
        message = of_openai.chat.completions.create(model="m", messages=said("a")).choices[0].message
        assert message.tool_calls is None and message.reasoning_content == "hm"
        assert message.content == '{"of": "sky"}Hi'


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("protocol", CHOICES)
def test_one_call_where_a_request_says_so(here, protocol, choice):
    """The answer ends behind it, and what the model says beside it is not generated."""
    path, body, tools, _, one = CHOICES[protocol]
    asked = {"tool_choice": choice} | body | {"tools": tools} | one
    if protocol == "messages":
        asked["tool_choice"]["type"] = "any" if choice == "required" else "auto"
    here.says(f"{THOUGHT}{CALL}\n{CALL} Ho")
    status, text = post(here, path, asked)
    assert status == 200 and parts_of(protocol, text) == ("", "hm", [{"of": "sky"}])
    usage = json.loads(text)["usage"]
    written = THOUGHT + CALL.partition("\n</tool_call>")[0]
    count = usage["completion_tokens"] if protocol == "chat" else usage["output_tokens"]
    assert count == len(here.served.template.tokenizer(written).input_ids)
    text = post(here, path, asked | {"stream": True})[1]
    began = {"chat": '"name": "look"', "responses": "output_item.added", "messages": '"type": "tool_use"'}
    events = [line for line in text.splitlines() if line.startswith("data: ")]
    kinds = [line for line in events if began[protocol] in line and '"type": "reasoning"' not in line]
    assert len(kinds) == 1 and " Ho" not in text
    here.says(f"{THOUGHT}{CALL}\n{CALL}")
    plain = {name: value for name, value in asked.items() if name not in one} | {"tools": tools}
    assert len(parts_of(protocol, post(here, path, plain)[1])[2]) == 2


class Spelled:
    """In place of a reader: each character of an answer is one step of it."""

    is_thinking = False

    def __init__(self, form, sink, schemas):
        self._sink = sink

    def feed(self, text):
        steps = {"(": lambda: self._sink.call("look", ""), ")": lambda: self._sink.end_call(True)}
        for letter in text:
            if letter in steps:
                steps[letter]()
            elif letter.isupper():
                self._sink.text(letter)
            elif letter.strip():
                self._sink.arguments(letter)

    def end(self, is_cut):
        pass


@pytest.mark.parametrize(
    ("text", "limit", "output"),
    [
        ("A(1)", 99, [("message", "A", "completed"), ("function_call", "1", "completed")]),
        ("(12", 99, [("function_call", "12", "incomplete")]),
        ("(12)", 2, [("function_call", "1", "incomplete")]),
        ("(1(2)AB", 99, [
            ("function_call", "1", "incomplete"), ("function_call", "2", "completed"),
            ("message", "AB", "completed"),
        ]),
        ("(1AB(2", 99, [
            ("function_call", "1", "incomplete"), ("message", "AB", "completed"),
            ("function_call", "2", "incomplete"),
        ]),
        ("(1)AB", 4, [("function_call", "1", "completed"), ("message", "A", "incomplete")]),
    ],
)  # fmt: skip
def test_each_item_of_a_response_is_done(here, of_openai, monkeypatch, text, limit, output):
    """At its own index, incomplete where it is cut; the last event and the whole answer have the same."""
    monkeypatch.setattr(preparing, "Reader", Spelled)
    here.says(text)
    asked = {"model": "m", "input": "a", "tools": [{"type": "function", **LOOK}], "max_output_tokens": limit}
    events = [*of_openai.responses.create(**asked, stream=True)]
    whole = of_openai.responses.create(**asked)

    def shown(item) -> tuple[str, str, str]:
        of_call = item.type == "function_call"
        return item.type, item.arguments if of_call else item.content[0].text, item.status

    added, done = (
        [event for event in events if event.type == f"response.output_item.{name}"]
        for name in ("added", "done")
    )
    assert [shown(event.item) for event in done] == output
    assert [event.output_index for event in added] == [*range(len(output))]
    assert [(event.output_index, event.item.id) for event in done] == [
        (event.output_index, event.item.id) for event in added
    ]
    for response in (whole, events[-1].response):
        assert [shown(item) for item in response.output] == output


@pytest.mark.parametrize(("arguments", "given"), [("null", {"input": "null"}), ("[1]", {"input": "[1]"})])
def test_an_input_that_is_no_object_is_written_once(here, of_anthropic, monkeypatch, arguments, given):
    """At the end of its call."""
    monkeypatch.setattr(preparing, "Reader", Spelled)
    here.says(f"({arguments})A")
    asked = {"model": "m", "max_tokens": 99, "messages": said("a")}
    tools = [{"name": "look", "input_schema": SKY}]
    with of_anthropic.messages.stream(**asked, tools=tools) as stream:
        deltas = [event.delta for event in stream if event.type == "content_block_delta"]
        message = stream.get_final_message()
    assert [json.loads(d.partial_json) for d in deltas if d.type == "input_json_delta"] == [given]
    assert message.content[0].input == given and message.content[1].text == "A"


@pytest.mark.parametrize(
    ("path", "asked"),
    [("/v1/chat/completions", {"messages": said("a")}), ("/v1/completions", {"prompt": "a"})],
)
def test_a_stream_that_the_servers_end_cuts_has_no_finish_reason(here, path, asked):
    """Its last event is the error."""
    generator = here.says("ok")
    generator.submit = lambda job: job.on_end("cancelled")
    try:
        text = post(here, path, asked | {"stream": True})[1]
    finally:
        del generator.submit
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert events[-1]["error"]["code"] == "server_ends"
    reasons = [choice["finish_reason"] for part in events[:-1] for choice in part["choices"]]
    assert not any(reasons), reasons


@pytest.mark.parametrize(
    "field",
    ["frequency_penalty", "logit_bias", "presence_penalty", "seed", "stop"],
)
def test_messages_check_what_they_read_of_openais_fields(here, field):
    body = {"messages": said("a"), "max_tokens": 5, field: [5]}
    status, text = post(here, "/v1/messages", body)
    assert status == 400 and f"'{field}' must be" in json.loads(text)["error"]["message"], text


UNKNOWN = scripted.TEMPLATE.replace("tool_call>", "call>")


@pytest.mark.parametrize(
    ("template", "line"),
    [(UNKNOWN, NOT_READ), ("{{ messages[0].content }}", NOT_SHOWN)],
    ids=["unknown form", "no tools"],
)
def test_tools_that_a_model_does_not_read_or_whose_calls_are_not_read(here, capsys, caplog, template, line):
    """One line says so at the start, in the log at each request with tools, and in its answer."""
    with scripted.templated(here, template):
        assert line in capsys.readouterr().err
        here.says("Done.")
        for path, body, tools, none, _ in CHOICES.values():
            for stream in (False, True):
                asked = body | {"stream": stream}
                for more, count in (
                    ({"tools": tools}, 1),
                    ({"tools": tools, "tool_choice": none}, 0),
                    ({}, 0),
                ):
                    caplog.clear()
                    with caplog.at_level(logging.WARNING, "torch_moe_mps.serving.http.preparing"):
                        text = post(here, path, asked | more)[1]
                    assert (line in text, "warning" in text) == (count > 0, count > 0), (path, more)
                    assert [record.getMessage() for record in caplog.records] == [line] * count
