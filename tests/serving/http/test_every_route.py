"""What holds for every route that generates: titles, tools, errors, pings, unknown fields."""

import json
import logging
import time

import openai
import pytest
from support import scripted
from support.asked import CALL, LOOK, SKY, THOUGHT, events_of, post, recorded
from support.serving import said

from torch_moe_mps.commands.arguments import parse
from torch_moe_mps.commands.serve import server_of
from torch_moe_mps.serving.http import app
from torch_moe_mps.serving.http.protocols.messages import Messages
from torch_moe_mps.serving.http.protocols.responses import Responses
from torch_moe_mps.serving.http.template import NOT_READ, NOT_SHOWN


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


UNKNOWN = scripted.TEMPLATE.replace("tool_call>", "call>")


@pytest.mark.parametrize(
    ("template", "line"),
    [(UNKNOWN, NOT_READ), ("{{ messages[0].content }}", NOT_SHOWN)],
    ids=["unknown form", "no tools"],
)
def test_tools_that_a_model_does_not_read_or_whose_calls_are_not_read(here, capsys, caplog, template, line):
    """One line says so at the start, in the log at each request with tools, and in its answer."""
    with scripted.templated(here, template):
        server_of(here.served, parse(["serve", "m"]), None)
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
