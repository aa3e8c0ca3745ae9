"""Tokenizers of GGUF files: how they split text into words, and llama.cpp's tokens of 200 texts.

The vocabularies are learned from these texts without words, so that merges reach over the ends of words, and
each other way to split text gives other tokens.
"""

import functools
import io
import json
import unicodedata

import pytest
import regex
import sentencepiece
import torch
from support.gguf_models import small_config, write_model
from support.llama_cpp import tokens
from support.texts import texts
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM

from torch_moe_mps import from_pretrained
from torch_moe_mps.checkpoints.gguf.splits import SPLITS
from torch_moe_mps.checkpoints.source import read_tokenizer

OF_TRANSFORMERS = ("gpt-2", "llama-bpe", "qwen2", "qwen35")
# Their patterns end words where a capital letter follows a small one; llama.cpp knows that of ASCII alone,
# and not at all for Kimi-K2.
BY_CASE = ("gpt-4o", "tekken", "minimax-m2", "kimi-k2")


@functools.cache
def learned() -> tuple[list[str], list[str]]:
    """Tokens and merges of bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts(), trainer)
    stored = json.loads(tokenizer.to_str())["model"]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in stored["merges"]]
    return sorted(stored["vocab"], key=stored["vocab"].get), merges


def write(path, keys, count, architecture="arcee"):
    """A small model with a tokenizer of so many tokens, of which the last one ends texts."""
    config = small_config(architecture)
    config.vocab_size = count
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    ids = {f"tokenizer.ggml.{name}_token_id": count - 1 for name in ("bos", "eos", "padding")}
    return write_model(path, architecture, model, keys={**ids, **keys})


def of_bytes(path, split, padding=(), rows=None, others=None):
    """A file with these tokens of padding in its vocabulary, and with so many embeddings."""
    vocabulary, merges = learned()
    end = len(vocabulary)
    keys = {
        **{"tokenizer.ggml.pre": split, "tokenizer.ggml.tokens": [*vocabulary, "<end>", *padding]},
        **{"tokenizer.ggml.token_type": [1] * end + [3] + [5] * len(padding)},
        **{"tokenizer.ggml.merges": merges, **(others or {})},
        **{f"tokenizer.ggml.{name}_token_id": end for name in ("bos", "eos", "padding")},
    }
    return write(path, keys, rows or end + 1 + len(padding))


def words(path, text: str) -> list[str]:
    tokenizer = read_tokenizer(str(path.parent), path.name, False).backend_tokenizer
    return [text[begin:end] for _, (begin, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


TEXT = "it'S 12345 ab\u6f22\u5b57;cd\n\n x!\nHeLLo"
HAN = "\u6f22\u5b57"
WORDS = {
    "glm4": ["it", "'S", " ", "123", "45", " ab" + HAN, ";cd", "\n\n", " x", "!\n", "HeLLo"],
    "hunyuan": ["it", "'S", " ", *"12345", " ab" + HAN, ";cd", "\n\n", " x", "!\n", "HeLLo"],
    "smollm": ["it", "'", "S", " ", *"12345", " ab" + HAN, ";", "cd", "\n\n", " x", "!", "\n", "HeLLo"],
    "deepseek-v3": ["it", "'S", " ", "123", "45", " ab", HAN, ";cd", "\n\n", " x", "!\n", "HeLLo"],
    "kimi-k2": ["it'S", " ", "123", "45", " ab", HAN, ";cd", "\n\n", " x", "!\n", "He", "LLo"],
    "seed-coder": ["it", "'S", " ", *"12345", " ab" + HAN, ";cd", "\n\n", " x", "!", "\n", "HeLLo"],
    "exaone-moe": ["it", "'S", " ", *"12345", " ab" + HAN, ";cd", "\n\n", " x", "!\n", "HeLLo"],
}


@pytest.mark.parametrize("split", WORDS)
def test_words(tmp_path, split):
    assert words(of_bytes(tmp_path / "model.gguf", split), TEXT) == WORDS[split]


# By the pattern of Moonshot's own tokenizer: words end in front of a capital letter after a small one, in all
# scripts, and Han stands apart.
OF_KIMI = [
    *(["get", "User", "Name"], ["i", "Phone"], ["HTTPServer"], ["École", "ÀLa"], ["ΑΒ", " Αβγ", "Δ"]),
    *(["don't"], ["I'M"], ["x", "'"], [HAN, "ab", HAN], [HAN, "\u304b\u306a"], ["123", "4"], [" .", "Ab"]),
    *(["e\u0301", "E"], ["\u0915\u0940"], ["\n\n", " ", " a"], ["a", "\t\t", "\tb"], ["#a"], ["!?\n", "x"]),
]


def test_words_of_kimi(tmp_path):
    path = of_bytes(tmp_path / "model.gguf", "kimi-k2")
    for expected in OF_KIMI:
        assert words(path, "".join(expected)) == expected


def test_words_of_kimi_are_those_of_another_engine(tmp_path):
    """Of 200 texts, with marks and capital letters, which llama.cpp does not tell from others."""
    path, (pattern,) = of_bytes(tmp_path / "model.gguf", "kimi-k2"), SPLITS["kimi-k2"]
    engine = regex.compile(pattern, regex.V1)  # sets with && are of its version 1
    many = texts()
    assert sum(not is_plain(text) for text in many) >= 50
    for text in many:
        assert words(path, text) == engine.findall(text)


PADDING = [f"[PAD{number}]" for number in range(8)]
WITH_PADDING = [f"ab {PADDING[0]} cd", "".join(PADDING), "[PAD", f"<end>{PADDING[7]}<end>", TEXT]


def test_padding_of_a_vocabulary_is_no_text(tmp_path):
    """Its tokens have embeddings, and stand for no text: that of one is read as any other."""
    padded = of_bytes(tmp_path / "padded.gguf", "gpt-2", PADDING)
    plain = of_bytes(tmp_path / "plain.gguf", "gpt-2")
    first, second = (read_tokenizer(str(tmp_path), path.name, False) for path in (padded, plain))
    count = len(learned()[0]) + 1
    for text in (*WITH_PADDING, *texts()[:20]):
        ids = first(text, add_special_tokens=False).input_ids
        assert ids == second(text, add_special_tokens=False).input_ids
        assert max(ids) < count and first.decode(ids) == text
    assert first.convert_tokens_to_ids(PADDING) == [*range(count, count + 8)]
    model = from_pretrained(str(padded), device_map="cpu", check=False)
    assert model.lm_head.weight.shape[0] == model.get_input_embeddings().weight.shape[0] == count + 8


def test_more_embeddings_than_tokens(tmp_path):
    """Their number is `vocab_size`; without this key it is that of the tokens, and others are refused."""
    path, count = tmp_path / "model.gguf", len(learned()[0]) + 1
    of_bytes(path, "gpt-2", rows=count + 8)
    model = from_pretrained(str(path), device_map="cpu", check=False)
    assert model.config.vocab_size == model.lm_head.weight.shape[0] == count + 8
    tokenizer = read_tokenizer(str(tmp_path), path.name, False)
    assert max(tokenizer(TEXT, add_special_tokens=False).input_ids) < count
    of_bytes(path, "gpt-2", rows=count + 8, others={"vocab_size": None})
    shapes = rf"makes model\.embed_tokens\.weight \({count}, 64\), got \({count + 8}, 64\)$"
    with pytest.raises(
        ValueError, match=rf"^moe_mps::gguf: token_embd\.weight must be of the shape that {shapes}"
    ):
        from_pretrained(str(path), device_map="cpu", check=False)


@pytest.mark.sweep
def test_llama_cpp_reads_text_of_padding_as_any_other(tmp_path):
    path = of_bytes(tmp_path / "model.gguf", "gpt-2", PADDING)
    tokenizer = read_tokenizer(str(tmp_path), path.name, False)
    found = [tokenizer(text, add_special_tokens=False).input_ids for text in WITH_PADDING]
    assert found == tokens(path, WITH_PADDING)


def is_plain(text: str) -> bool:
    """True for a text without marks, and without capital letters but those that begin a word of ASCII."""
    pairs = zip(" " + text, text, strict=False)
    marks = any(unicodedata.category(sign)[0] == "M" for sign in text)
    return not marks and all(b == b.lower() or (b.isascii() and not a.isalpha()) for a, b in pairs)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "split", [*OF_TRANSFORMERS, *BY_CASE, *(each for each in SPLITS if each not in BY_CASE)]
)
def test_llama_cpp_has_the_same_tokens_of_bytes(tmp_path, split):
    path, many = of_bytes(tmp_path / "model.gguf", split), texts()
    if split in BY_CASE:
        many = [*filter(is_plain, many)]
    assert len(many) >= 50
    tokenizer = read_tokenizer(str(tmp_path), path.name, False)
    found = [tokenizer(text, add_special_tokens=False).input_ids for text in many]
    assert found == tokens(path, many)


def of_sentencepiece(path, architecture, prefix):
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts()),
        model_writer=written,
        vocab_size=900,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
        split_by_whitespace=False,
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    ids = range(model.get_piece_size())
    kinds = [
        2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1 for i in ids
    ]
    keys = {
        **{"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default", "tokenizer.ggml.merges": None},
        "tokenizer.ggml.tokens": [*map(model.id_to_piece, ids), "<end>"],
        **{"tokenizer.ggml.scores": [*map(model.get_score, ids), 0.0], "tokenizer.ggml.unknown_token_id": 0},
        **{"tokenizer.ggml.token_type": [*kinds, 3], "tokenizer.ggml.add_space_prefix": prefix},
    }
    return write(path, keys, len(ids) + 1, architecture), model


@pytest.mark.parametrize("prefix", [True, False])
def test_a_space_in_front_is_as_sentencepiece_has_it(tmp_path, prefix):
    path, model = of_sentencepiece(tmp_path / "model.gguf", "arcee", prefix)
    tokenizer = read_tokenizer(str(tmp_path), path.name, False)
    for text in ("ab", " ab", "  ab cd", "\n ab", *texts()[:20]):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert ids == model.encode(text) and tokenizer.decode(ids) == text


@pytest.mark.sweep
@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("architecture", ["arcee", "ernie4_5", "llama:mixtral", "phi3:short"])
def test_llama_cpp_has_the_same_tokens_of_sentencepiece(tmp_path, architecture, prefix):
    path, _ = of_sentencepiece(tmp_path / "model.gguf", architecture, prefix)
    tokenizer, many = read_tokenizer(str(tmp_path), path.name, False), texts()
    found = [tokenizer(text, add_special_tokens=False).input_ids for text in many]
    assert found == tokens(path, many)
