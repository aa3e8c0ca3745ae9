"""`logprobs` of answers: the logarithms of the model's own probabilities, whatever changes what is drawn."""

import math

import openai
import pytest
import torch
import transformers
from support import serving
from support.serving import said
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from torch_moe_mps.serving.http.logprobs import text_of

MOST = "'top_logprobs' must be an integer from 0 to 20"
SKY = {"type": "json_schema", "json_schema": {"name": "sky", "schema": {"enum": ["blue", "grey"]}}}


def answer_of(client, **asked):
    """Text, entries and how many pieces there were."""
    answer = client.chat.completions.create(model="m", messages=said("the sky"), max_tokens=12, **asked)
    chunks = [*answer] if asked.get("stream") else [answer]
    choices = [chunk.choices[0] for chunk in chunks]
    text = "".join((getattr(c, "delta", None) or c.message).content or "" for c in choices)
    return text, [entry for c in choices if c.logprobs for entry in c.logprobs.content], choices


def expected(checkpoint, text: str) -> torch.Tensor:
    """Of each place of an answer, in float64."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    ids = tokenizer("the sky" + text, return_tensors="pt").input_ids
    with torch.no_grad():
        logits = serving.quantised(checkpoint)(ids).logits
    return logits[0, len("the sky") - 1 : -1].double().log_softmax(-1)


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 0},
        {"temperature": 2, "seed": 3, "frequency_penalty": 1.5, "logit_bias": {"65": 30}},
        {"temperature": 0, "response_format": SKY},
    ],
)
def test_of_the_models_own_distribution(client, printable, asked):
    """Streamed and not: one entry for each token but the end, with the most probable ones in order."""
    text, entries, choices = answer_of(client, logprobs=True, top_logprobs=3, **asked)
    rows, tokenizer = expected(printable, text), transformers.AutoTokenizer.from_pretrained(printable)
    ids = tokenizer(text).input_ids
    assert [entry.token for entry in entries] == [*text] and len(rows) == len(text) > 2
    for entry, row, character, token in zip(entries, rows, text, ids, strict=True):
        assert entry.bytes == [*character.encode()]
        assert entry.logprob == pytest.approx(row[token].item(), abs=1e-4)
        values, tokens = row.topk(3)
        assert [top.token for top in entry.top_logprobs] == [tokenizer.decode(each) for each in tokens]
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(values.tolist(), abs=1e-4)
    streamed, same, pieces = answer_of(client, logprobs=True, top_logprobs=3, stream=True, **asked)
    assert streamed == text and [entry.token for entry in same] == [entry.token for entry in entries]
    assert [entry.logprob for entry in same] == pytest.approx([entry.logprob for entry in entries], abs=1e-4)
    for piece in pieces:
        shown = [] if piece.logprobs is None else piece.logprobs.content
        assert "".join(entry.token for entry in shown) == (piece.delta.content or "")
    assert choices[0].logprobs.refusal is None
    if asked["temperature"] == 0:  # other answers are drawn for several tokens at once
        assert answer_of(client, **asked)[0] == text


@pytest.mark.parametrize("stream", [False, True])
def test_completions_have_them_in_their_own_form(client, stream):
    """By tokens, with the place of each in the text, and the chosen one among the most probable."""
    text, entries, _ = answer_of(client, temperature=2, seed=3, logprobs=True, top_logprobs=2)
    asked = {"model": "m", "prompt": "the sky", "max_tokens": 12, "temperature": 2, "seed": 3, "logprobs": 2}
    answer = client.completions.create(stream=stream, **asked)
    found = [chunk.choices[0].logprobs for chunk in (answer if stream else [answer])]
    of = {
        name: [each for part in found if part is not None for each in getattr(part, name)]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    }
    assert of["tokens"] == [entry.token for entry in entries] == [*text]
    assert of["text_offset"] == [*range(len(text))]
    assert of["token_logprobs"] == pytest.approx([entry.logprob for entry in entries], abs=1e-4)
    for place, entry in zip(of["top_logprobs"], entries, strict=True):
        wanted = {each.token: each.logprob for each in (*entry.top_logprobs, entry)}
        assert place == pytest.approx(wanted, abs=1e-4)
    plain = client.completions.create(**asked | {"logprobs": None})
    assert plain.choices[0].logprobs is None


@pytest.mark.parametrize("stream", [False, True])
def test_responses_have_them_where_they_include_them(client, stream):
    text, entries, _ = answer_of(client, temperature=0, logprobs=True, top_logprobs=2)
    asked = {"model": "m", "input": "the sky", "max_output_tokens": 12, "temperature": 0}
    included = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    answer = client.responses.create(stream=stream, **asked, **included)
    parts = []
    if stream:
        events = [*answer]
        deltas = [event for event in events if event.type == "response.output_text.delta"]
        (done,) = (event for event in events if event.type == "response.output_text.done")
        parts += [[entry for event in deltas for entry in event.logprobs], done.logprobs]
        answer = events[-1].response
    assert answer.output_text == text
    parts.append(answer.output[-1].content[0].logprobs)
    for part in parts:
        assert [each.token for each in part] == [entry.token for entry in entries]
        assert [each.logprob for each in part] == pytest.approx([e.logprob for e in entries], abs=1e-4)
        most = [[top.token for top in each.top_logprobs] for each in part]
        assert most == [[top.token for top in entry.top_logprobs] for entry in entries]
    assert parts[-1][0].bytes == entries[0].bytes
    assert client.responses.create(**asked).output[-1].content[0].logprobs is None


def test_none_are_asked(client):
    for asked in ({}, {"logprobs": False}, {"logprobs": None}, {"top_logprobs": 0}):
        for stream in (False, True):
            _, entries, choices = answer_of(client, temperature=0, stream=stream, **asked)
            assert not entries and all(choice.logprobs is None for choice in choices)
    _, entries, _ = answer_of(client, temperature=0, logprobs=True)
    assert len(entries) == 12 and not any(entry.top_logprobs for entry in entries)


def test_a_stop_that_is_held_back(client):
    """Tokens whose text is not shown are told with the next piece, or at the end."""
    text, entries, _ = answer_of(client, temperature=0, logprobs=True)
    stop = text[5:8]
    for stream in (False, True):
        shown, found, _ = answer_of(client, temperature=0, logprobs=True, stop=[stop], stream=stream)
        end = text.find(stop)
        assert shown == text[:end]
        assert [entry.token for entry in found] == [entry.token for entry in entries[: end + len(stop)]]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"logprobs": 1}, "'logprobs' must be true or false, got 1."),
        ({"logprobs": True, "top_logprobs": 21}, f"{MOST}, got 21."),
        ({"logprobs": True, "top_logprobs": True}, f"{MOST}, got True."),
        ({"logprobs": True, "top_logprobs": -1}, f"{MOST}, got -1."),
        ({"top_logprobs": 2}, "'top_logprobs' must be with 'logprobs' true, got 2."),
    ],
)
def test_bad_values_are_400(client, asked, message):
    with pytest.raises(openai.BadRequestError) as error:
        answer_of(client, **asked)
    assert error.value.body["message"] == message


def test_tokens_that_are_parts_of_characters():
    """Octets of byte-level vocabularies and of byte fallback; None where nothing says which they are."""
    euro = "€".encode()
    level = Tokenizer(models.BPE({**{c: i for i, c in enumerate("âĤ¬")}, "Ġa": 3}, []))
    level.pre_tokenizer, level.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    fallback = Tokenizer(models.BPE({**{f"<0x{b:02X}>": i for i, b in enumerate(euro)}, "▁a": 3, "�": 4}, []))
    fallback.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    for tokenizer in (level, fallback):
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
        found = [text_of(fast, token) for token in range(4)]
        assert [octets for _, octets in found] == [*([octet] for octet in euro), [*b" a"]]
        assert found[3][0] == " a" and all("\ufffd" in text for text, _ in found[:3])
    assert text_of(fast, 4) == ("\ufffd", None)


@pytest.mark.parametrize("count", [0, 2])
def test_what_cannot_be_is_a_number(printable, count):
    from torch_moe_mps.serving.http.logprobs import Logprobs

    kept = Logprobs(transformers.AutoTokenizer.from_pretrained(printable), count)
    scores = torch.tensor([[0.0, -math.inf, -math.inf]])
    assert kept(torch.zeros(1, 1, dtype=torch.long), scores) is scores
    entry = kept.pop(1)
    assert entry.logprob == -9999.0 and [top.logprob for top in entry.top] == [0.0, -9999.0][:count]
