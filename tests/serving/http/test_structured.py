"""Answers in a schema: what a model with random weights says is JSON that fits, by any way of asking."""

import json
from types import SimpleNamespace

import openai
import pytest
import torch
import xgrammar
from support import serving
from support.serving import said
from torch.utils._python_dispatch import TorchDispatchMode

from torch_moe_mps.serving.http import structured
from torch_moe_mps.serving.http.limited import Limited
from torch_moe_mps.serving.http.protocols import grammar
from torch_moe_mps.serving.http.request import Refused

SCHEMA = {
    "type": "object",
    "properties": {"sky": {"enum": ["blue", "grey"]}, "clouds": {"type": "boolean"}},
    "required": ["sky", "clouds"],
    "additionalProperties": False,
}
NAMED = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}


def text_of(client, **asked) -> str:
    answer = client.chat.completions.create(model="m", max_tokens=120, **asked)
    chunks = answer if asked.get("stream") else [answer]
    parts = [getattr(c.choices[0], "delta", None) or c.choices[0].message for c in chunks]
    return "".join(part.content or "" for part in parts)


def fits(text: str) -> bool:
    found = json.loads(text)
    return (
        {*found} == {"sky", "clouds"}
        and found["sky"] in ("blue", "grey")
        and found["clouds"] in (True, False)
    )


def test_an_answer_fits_its_schema(client):
    """Greedy and sampled, streamed and not; other requests, before and after, are not touched."""
    free = text_of(client, messages=said("the sky"), temperature=0)
    with pytest.raises(ValueError):
        json.loads(free)
    for asked in ({"temperature": 0}, {"temperature": 2, "seed": 1}, {"temperature": 2, "seed": 2}):
        text = text_of(client, messages=said("the sky"), response_format=NAMED, **asked)
        assert fits(text), text
        assert text_of(client, messages=said("the sky"), response_format=NAMED, stream=True, **asked) == text
    assert text_of(client, messages=said("the sky"), temperature=0) == free
    answer = client.responses.create(
        model="m", input="the sky", temperature=0, max_output_tokens=120,
        text={"format": {"type": "json_schema", "name": "weather", "schema": SCHEMA}},
    )  # fmt: skip
    assert fits(answer.output_text)


def test_any_object(client):
    """It may be longer than what is generated; what there is of it is the beginning of an object."""
    text = text_of(client, messages=said("a"), temperature=0, response_format={"type": "json_object"})
    assert text.lstrip().startswith("{") and (text.count('"') > 0 or json.loads(text) == {})
    assert text_of(client, messages=said("the sky"), temperature=0, response_format={"type": "text"})


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("json", "'response_format' must be an object whose type is text, json_object or json_schema"),
        (
            {"type": "xml"},
            "'response_format' must be an object whose type is text, json_object or json_schema",
        ),
        ({"type": "json_schema"}, "'response_format.json_schema' must be an object with a name and a schema"),
        (
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}},
            "The schema of 'response_format' must be one that xgrammar compiles, got: Circular $ref chain",
        ),
        (
            {"type": "json_schema", "json_schema": {"schema": {"pattern": "(?:" * 20_000 + ")" * 20_000}}},
            "The schema of 'response_format' must have at most 100 parentheses inside of each other",
        ),
        (
            {"type": "json_schema", "json_schema": {"schema": {"enum": [*range(5000)]}}},
            "The schema of 'response_format' must have at most 4096 choices in one place, got 5000.",
        ),
        (
            {"type": "json_schema", "json_schema": {"schema": {"enum": ["a" * 300_000]}}},
            "The schema of 'response_format' must be of at most 262144 characters, got 300014.",
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nothing"}}},
            "The schema of 'response_format' must be one that xgrammar compiles, got: Unsupported type",
        ),
    ],
)
def test_what_is_no_format_is_400(client, asked, message):
    with pytest.raises(openai.BadRequestError) as error:
        text_of(client, messages=said("a"), response_format=asked)
    assert message in error.value.message and "\n" not in error.value.body["message"]


def test_a_schema_needs_tokens_that_begin_it():
    words, config = serving.letters(), SimpleNamespace(eos_token_id=0)
    tag = grammar.of_content({"type": "object"}, None, [])
    with pytest.raises(Refused, match=r"'a' must have an answer that a token begins, got one without any\.$"):
        structured.Grammars().mask(words, config, len(words), tag, "", "a")


class Launches(TorchDispatchMode):
    """Operators that are no views, and the bytes that are copied to the device."""

    def __init__(self):
        super().__init__()
        self.names, self.copied = [], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if name == "_to_copy":
            self.copied += args[0].nbytes
        elif not function.is_view and result.device.type == "meta":
            self.names.append(name)
        return result


def test_what_a_mask_costs_a_token():
    """Of Qwen3's vocabulary: a bit for each token is copied, and four kernels run, whatever the schema."""
    vocabulary = 151936
    words = xgrammar.TokenizerInfo([chr(i) for i in range(128)], vocab_size=vocabulary, stop_token_ids=[127])
    grammar = xgrammar.GrammarCompiler(words).compile_json_schema(json.dumps(SCHEMA), any_whitespace=False)
    mask, ids = (
        structured.Masked(grammar, "", vocabulary, Limited(), KeyError()),
        torch.zeros(1, 3, dtype=torch.int64),
    )
    scores = torch.empty(1, vocabulary, device="meta")
    mask(ids, scores)
    for character in '{"':
        ids = torch.cat([ids, torch.tensor([[ord(character)]])], 1)
        with Launches() as launches:
            mask(ids, scores)
        assert launches.copied == 4 * (vocabulary // 32) == 18992
        assert launches.names == ["__rshift__", "bitwise_and", "eq", "masked_fill"]
