"""How often a token is captured: once a kind of call, over ten requests of each command."""

import openai
import pytest
import torch
import transformers
from support import serving
from support.sweep import in_sweep

import torch_moe_mps
from torch_moe_mps._environment import CAPTURE
from torch_moe_mps.models.capture.replay import Captures

REQUESTS, TOKENS = 10, 5
QUESTIONS = ["hello", "other", "a", "helloyou", "again", "bcd", "hello", "otherone", "zyx", "last"]


@pytest.fixture
def captured(monkeypatch):
    """The kinds of calls that are captured, in their order, and how often a program runs."""
    monkeypatch.setenv(CAPTURE, "1")
    kinds, runs = [], []
    own, run = Captures._record, Captures._replayed

    def capture(self, model, forward, reading, kind):
        kinds.append(reading.key)
        return own(self, model, forward, reading, kind)

    def counted(self, *arguments):
        result = run(self, *arguments)
        runs.append(result is not None)
        return result

    monkeypatch.setattr(Captures, "_record", capture)
    monkeypatch.setattr(Captures, "_replayed", counted)
    return kinds, runs


def assert_once(captured) -> None:
    """One capture a kind of call, a token alone is one kind, and nearly every token is a program's."""
    kinds, runs = captured
    assert len(kinds) == len({*kinds}) and sum((1, 1) in kind for kind in kinds) == 1
    assert sum(runs) >= (REQUESTS - 1) * (TOKENS - 1)


def ask(client: openai.OpenAI, name: str, messages: list, stream: bool) -> str:
    asked = {"model": name, "messages": messages, "temperature": 0, "max_tokens": TOKENS}
    answer = client.chat.completions.create(**asked, stream=stream)
    if stream:
        return "".join(part.choices[0].delta.content or "" for part in answer)
    return answer.choices[0].message.content


@pytest.mark.parametrize("stream", in_sweep([False, True], [True]))
def test_serve(checkpoint, captured, stream):
    """Two conversations in turns, of which each request has all that was said."""
    talks = [[], []]
    with serving.client_of(checkpoint, "--bits", 4, "--group-size", 32) as client:
        for number, question in enumerate(QUESTIONS):
            talk = talks[number % 2]
            talk.append({"role": "user", "content": question})
            talk.append({"role": "assistant", "content": ask(client, str(checkpoint), talk, stream)})
    assert_once(captured)


@torch.no_grad()
def test_a_script(checkpoint, captured):
    model = torch_moe_mps.from_pretrained(checkpoint, bits=4, group_size=32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    for question in QUESTIONS:
        ids = tokenizer(question, return_tensors="pt").input_ids
        model.generate(ids, max_new_tokens=TOKENS, do_sample=False, attention_mask=torch.ones_like(ids))
    assert_once(captured)
