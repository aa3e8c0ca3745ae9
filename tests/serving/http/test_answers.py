"""Parts of the server: text of tokens, stops, penalties, pictures, and where it listens."""

import random
import time
from types import SimpleNamespace

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from torch_moe_mps.commands.serve import sockets_of
from torch_moe_mps.serving.engine.penalties import Penalties
from torch_moe_mps.serving.http.answer import Cut, text_stream


@pytest.fixture(scope="module")
def octets():
    """A tokenizer whose tokens are octets, as vocabularies of GPT-2 write them."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    level = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    level.pre_tokenizer, level.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=level)


@pytest.mark.parametrize("is_fast", [True, False])
@pytest.mark.parametrize("text", ["a € and 👩‍👩‍👧 é", "日本語\ufffd!", ""])
def test_text_comes_character_by_character(octets, text, is_fast):
    """And wherever the answer is cut off, no part of a character is shown."""
    ids = octets(text).input_ids
    tokenizer = octets if is_fast else SimpleNamespace(decode=octets.decode)
    for end in range(len(ids) + 1):
        step = text_stream(tokenizer, skips_special=True)
        shown = [step(token) or "" for token in ids[:end]]
        whole = text.encode()[:end].decode(errors="ignore")
        assert "".join(shown) in (whole, whole.removesuffix("\ufffd"))
        assert all("\ufffd" not in piece for piece in shown) or "\ufffd" in text


@pytest.mark.parametrize("is_fast", [True, False])
def test_octets_that_are_no_characters_come_with_the_next_one(octets, is_fast):
    broken, letter = octets.convert_tokens_to_ids(["ÿ", "a"])  # the octet 255
    tokenizer = octets if is_fast else SimpleNamespace(decode=octets.decode)
    step = text_stream(tokenizer, skips_special=True)
    assert [step(token) for token in [letter, broken, broken, letter]] == ["a", None, None, "\ufffd\ufffda"]


@pytest.fixture(scope="module")
def fallback():
    """A tokenizer of letters with blanks, and of octets for the rest, as Llama 2's vocabulary."""
    words = [*(f"<0x{octet:02X}>" for octet in range(256)), "▁a", "b"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "b"))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


A, B = 256, 257


@pytest.mark.parametrize("is_fast", [True, False])
@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ([A, 0xC3, 0xA9, A], "aé a"),
        ([A, 0xC3, A, B], "a\ufffd ab"),
        ([0xC3, 0xA9, 0xFF, A], "é\ufffd a"),  # which makes none of the octet before, either
        ([0xC3, 0xA9, 0xFF, 0xC3, 0xA9, B], "é\ufffd\ufffd\ufffdb"),
        ([B, *[0xFF] * 40, B], "b" + "\ufffd" * 40 + "b"),
    ],
)
def test_octets_that_are_no_characters_end_no_answer(fallback, tokens, text, is_fast):
    tokenizer = fallback if is_fast else SimpleNamespace(decode=fallback.decode)
    step = text_stream(tokenizer, skips_special=True)
    assert "".join(step(token) or "" for token in tokens) == text


def test_random_octets_end_no_answer(fallback):
    """Each letter comes, in order, whatever stands between; nothing is held back for long."""
    draws = random.Random(1)
    for _ in range(50):
        tokens = [draws.choice((A, B, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xFF, 0x62)) for _ in range(60)]
        step = text_stream(fallback, skips_special=True)
        shown = [step(token) or "" for token in [*tokens, B]]
        letters = [letter for letter in "".join(shown) if letter in "ab"]
        assert len(letters) >= sum(token in (A, B) for token in tokens) + 1


@pytest.mark.parametrize("stops", [("bc",), ("bcd", "cx"), ("zz", "e")])
def test_a_text_ends_before_its_first_stop(stops):
    """However it is cut into pieces."""
    text = "aabcdbcxe"
    ends = [text.find(stop) for stop in stops if stop in text]
    for size in range(1, len(text)):
        cut = Cut(stops)
        shown = "".join(cut.add(text[at : at + size]) for at in range(0, len(text), size)) + cut.rest()
        assert shown == text[: min(ends)] and cut.stop in stops


def test_a_stop_that_repeats_itself_is_found_where_it_begins_first():
    draws = random.Random(1)
    for _ in range(200):
        stop, text = ("".join(draws.choices("ab", k=count)) for count in (draws.randint(1, 6), 40))
        cut, shown = Cut([stop]), ""
        for character in text:
            shown += cut.add(character)
        assert shown + cut.rest() == text.partition(stop)[0], (stop, text)


def test_stops_take_linear_time():
    """Of 1,024 characters each, all but the last of which a text repeats."""
    cut, begun = Cut(["a" * 1023 + chr(98 + number) for number in range(16)]), time.process_time()
    shown = "".join(cut.add("aaaa") for _ in range(2000))
    assert shown + cut.rest() == "a" * 8000 and time.process_time() - begun < 2


def test_penalties_are_openais():
    """The formula in float64, of the answer alone."""
    ids = torch.tensor([[4, 4, 1, 2, 2, 2, 0]])
    scores = torch.randn(1, 6, generator=torch.Generator().manual_seed(0))
    got = Penalties(3, 0.7, -0.3)(ids, scores)
    counts = torch.tensor([1, 0, 3, 0, 0, 0], dtype=torch.float64)
    expected = scores.double() - 0.7 * counts + 0.3 * (counts > 0)
    assert torch.allclose(got.double(), expected, atol=1e-6)


def test_localhost_is_both_of_its_addresses():
    sockets = sockets_of("localhost", 0)
    try:
        addresses = {listener.getsockname()[:2] for listener in sockets}
        port = sockets[0].getsockname()[1]
        assert {("127.0.0.1", port)} <= addresses <= {("127.0.0.1", port), ("::1", port)}
        with pytest.raises(
            OSError, match=r"--host and --port must be free, got localhost:.*: Address already in use"
        ):
            sockets_of("localhost", port)
    finally:
        for listener in sockets:
            listener.close()
