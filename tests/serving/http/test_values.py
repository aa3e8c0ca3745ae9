"""Answers and seeds that are hard to write or to count: each protocol answers them, streamed and whole."""

import json
import urllib.request

import pytest
from support.scripted import ask

from torch_moe_mps.serving.engine.ranges import check_seed

OF = {"type": "object", "properties": {"of": {"type": "string"}}}
CALLING = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4000},
             {"type": "function", "function": {"name": "look", "parameters": OF}}),
    "messages": ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4000},
                 {"name": "look", "input_schema": OF}),
    "responses": ("/v1/responses", {"input": "a"}, {"type": "function", "name": "look", "parameters": OF}),
    "custom": ("/v1/responses", {"input": "a"}, {"type": "custom", "name": "look"}),
}  # fmt: skip
LISTS = "[" * 1100 + "]" * 1100
HALF = r'{"of": "a\ud83d"}'
INPUT = r'{"input": "a\ud83d"}'


@pytest.mark.parametrize("arguments", [HALF, INPUT, f'{{"of": {LISTS}}}'], ids=["half", "input", "deep"])
@pytest.mark.parametrize("protocol", CALLING)
def test_arguments_that_are_hard_to_write_break_no_answer(here, protocol, arguments):
    """Half of a pair, which has no UTF-8, and values that nest deeper than Python reads."""
    path, body, tool = CALLING[protocol]
    for stream in (False, True):
        here.says(f'<tool_call>{{"name": "look", "arguments": {arguments}}}</tool_call>')
        asked = urllib.request.Request(
            here.url + path, json.dumps(body | {"tools": [tool], "stream": stream}).encode(),
            {"content-type": "application/json"},
        )  # fmt: skip
        with urllib.request.urlopen(asked, timeout=60) as answer:
            text = answer.read().decode()
        lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")] if stream else [text]
        values = [json.loads(line) for line in lines]
        assert values and values[-1].get("error") is None and values[-1].get("type") != "response.failed"
        if arguments == HALF and not stream:
            calls = {
                "chat": lambda v: json.loads(
                    v["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]
                ),
                "messages": lambda v: v["content"][0]["input"],
                "responses": lambda v: json.loads(v["output"][0]["arguments"]),
                "custom": lambda v: json.loads(v["output"][0]["input"]),
            }
            assert calls[protocol](values[0]) == {"of": "a\ud83d"}


@pytest.mark.parametrize(
    ("seed", "seeds"), [((1 << 63) - 2, [(1 << 63) - 2, (1 << 63) - 1, -1 << 63]), (-1, [-1, 0, 1])]
)
def test_the_seeds_of_several_answers_are_seeds(here, seed, seeds):
    here.says("Hi")
    status, _ = ask(
        here, "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "seed": seed, "n": 3}
    )
    assert status == 200 and [job.seed for job in here.generator.jobs] == seeds
    for job in here.generator.jobs:
        check_seed(job.seed)
