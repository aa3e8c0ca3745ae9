"""Requests of every protocol with wrong values anywhere."""

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

_SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "enum": ["a", "b"]}}}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "a"}'}}
_FUNCTION = {"name": "weather", "description": "d", "parameters": _SCHEMA}
_SHARED = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 3,
    "stop": ["x"],
    "stream": False,
}
_OWN = {
    "logit_bias": {"5": 1.5},
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
}
# {path: a request that has every field that is read there}
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": _SHARED | _OWN | {
        "model": "m", "max_tokens": 3, "n": 2, "logprobs": True, "top_logprobs": 2, "reasoning_effort": "low",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "t"},
            {"role": "user", "name": "u", "content": "b"},
        ],
        "tools": [{"type": "function", "function": _FUNCTION}, {"type": "custom", "custom": {"name": "c"}}],
        "tool_choice": "auto",
        "chat_template_kwargs": {"enable_thinking": True}, "stream_options": {"include_usage": True},
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA}},
    },
    "/v1/completions": _SHARED | _OWN | {
        "model": "m", "prompt": ["a", "b"], "max_tokens": 3, "n": 2, "logprobs": 2,
        "echo": False, "suffix": "", "best_of": 1,
    },
    "/v1/responses": _SHARED | {
        "model": "m", "instructions": "i", "max_output_tokens": 3, "reasoning": {"effort": "low"},
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
            {"type": "function_call", "call_id": "1", "name": "weather", "namespace": "n", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "t"},
            {"type": "custom_tool_call", "call_id": "2", "name": "c", "input": "x"},
            {"type": "local_shell_call", "call_id": "3", "action": {"command": ["ls"]}},
            {"role": "user", "content": "b"},
        ],
        "tools": [_FUNCTION | {"type": "function"}, {"type": "namespace", "name": "n", "tools": [_FUNCTION]}],
        "tool_choice": {"type": "function", "name": "weather"}, "include": ["message.output_text.logprobs"],
        "top_logprobs": 2, "text": {"format": {"type": "text"}}, "chat_template_kwargs": {"a": 1},
    },
    "/v1/messages": _SHARED | {
        "model": "m", "max_tokens": 3, "system": [{"type": "text", "text": "s"}], "stop_sequences": ["x"],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "r", "signature": ""},
                {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "a"}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "t"}]},
                {"type": "text", "text": "b"},
            ]},
        ],
        "tools": [{"name": "weather", "description": "d", "input_schema": _SCHEMA}],
        "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 9}, "output_config": {"effort": "low"},
    },
}  # fmt: skip
REQUESTS["/v1/messages/count_tokens"] = REQUESTS["/v1/messages"]
_DEEP = json.loads('{"a": [' * 45 + "]}" * 45)
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, 10**30, -(10**30), 0.5, -0.5, 1e300, -1e300,
    float("inf"), float("nan"),
    "", "a", "auto", "none", "required", "5", "é☃\n", "\x00", "x" * 5000, "{", "{}",
    '{"a": ' * 500 + "1" + "}" * 500, "<|im_end|>", "{{ 1 }}",
    [], {}, [[]], [{}], [None], [5], ["a"], {"a": None}, {"": ""}, {"type": None}, {"type": []}, {"type": {}},
    {"type": "text"}, {"type": "text", "text": 5}, {"type": "function"}, {"type": "tool"},
    {"type": "json_object"}, {"type": "namespace", "name": 5},
    {"type": "image_url", "image_url": {"url": "/"}},
    {"name": []}, {"role": []}, {"$ref": "#"},
    {"schema": {"$ref": "#"}}, _DEEP, [_DEEP],
]  # fmt: skip


def places_in(value: Any, at: tuple = ()) -> Iterator[tuple]:
    """The keys and numbers that lead to every value inside of this one."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in inner:
        yield (*at, key)
        yield from places_in(child, (*at, key))


def fuzzed(draws: random.Random) -> tuple[str, dict[str, Any]]:
    path = draws.choice([*REQUESTS])
    body = copy.deepcopy(REQUESTS[path])
    for name in draws.sample([*body], draws.randrange(len(body))):
        if name not in ("tools", "messages", "input", "max_tokens", "max_output_tokens", "prompt"):
            del body[name]  # else one field's refusal hides all others
    for _ in range(draws.randint(0, 2)):
        place = draws.choice([*places_in(body)] or [("model",)])
        parent: Any = body
        for key in place[:-1]:
            parent = parent[key]
        if draws.random() < 0.1:
            del parent[place[-1]]
        else:
            parent[place[-1]] = copy.deepcopy(draws.choice(VALUES))
    return path, body
