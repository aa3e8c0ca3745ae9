"""/v1/messages: answers to Claude Code, to Anthropic's client, and to requests that are wrong."""

import itertools
import json

import pytest
from support.asked import CALL, SKY, THOUGHT, Spelled, events_of, post, prompt_ids, recorded
from support.serving import said

from torch_moe_mps.serving.http import preparing

PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "aaaa"}}


RESULT_WITH_PDF = {"type": "tool_result", "tool_use_id": "t", "content": [PDF]}


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
    "field",
    ["frequency_penalty", "logit_bias", "presence_penalty", "seed", "stop"],
)
def test_messages_check_what_they_read_of_openais_fields(here, field):
    body = {"messages": said("a"), "max_tokens": 5, field: [5]}
    status, text = post(here, "/v1/messages", body)
    assert status == 400 and f"'{field}' must be" in json.loads(text)["error"]["message"], text
