"""/v1/responses: answers to Codex and to OpenAI's client, whole and as events."""

import itertools
import json
import logging

import pytest
from support.asked import CALL, LOOK, SKY, THOUGHT, Spelled, events_of, post, prompt_ids, recorded
from support.serving import said

from torch_moe_mps.serving.http import preparing
from torch_moe_mps.serving.http.protocols import conversation


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
