"""How the tokenizers of GGUF files split text into words, where transformers does it in another way.

A file of a vocabulary of bytes has only a name for the patterns. Those of transformers' table stand there;
here are those that it lacks, as the models' own tokenizers have them. A file of SentencePiece says whether a
space is put in front of a text.
"""

from collections.abc import Mapping
from typing import Any

from .header import header_of

# Names whose text is split as GPT-2's, which transformers does for any name that it does not know.
_AS_GPT_2 = ("exaone4", "gpt-2", "jais", "mpt", "olmo", "phi-2", "roberta-bpe")

_SPACE = "\u2581"  # SentencePiece's
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_REST = r"|\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(digits: str, signs: str = r" ?[^\s\p{L}\p{N}]+[\r\n]*") -> str:
    """Words with what stands in front of them, numbers of some digits, signs."""
    return rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|{signs}{_REST}"


_ONE_DIGIT = (_words(r"\p{N}"),)
_DIGITS_APART = (r"\p{N}", _GPT_2)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*" + _REST,
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_KIMI = (
    r"\p{Han}+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _REST,
)
_EXAONE_MOE = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
)
SPLITS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("glm4", "chatglm-bpe"), (_words(r"\p{N}{1,3}"),)),
    **dict.fromkeys(("hunyuan", "solar-open"), _ONE_DIGIT),
    **dict.fromkeys(("command-r", "refact", "smollm", "starcoder"), _DIGITS_APART),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK_V3),
    "exaone-moe": _EXAONE_MOE,
    "kimi-k2": _KIMI,
    "seed-coder": (_words(r"\p{N}", r" ?[^\s\p{L}\p{N}\r\n]+"),),
}


def check_splits(path: str) -> None:
    """Checks that it is known how a file's vocabulary of bytes splits text into words.

    transformers would split text as GPT-2 does, and give other tokens than the model was trained with.

    Raises: ValueError for a name in `tokenizer.ggml.pre` that is not known.
    """
    from ...models.upstream.weights import tokenizer_mapping

    metadata = header_of(path).metadata
    split = metadata.get("tokenizer.ggml.pre")
    known = {*tokenizer_mapping.GGUF_PRE_TOKENIZER_SPLITS, *_AS_GPT_2, *SPLITS}
    if metadata.get("tokenizer.ggml.model") == "gpt2" and split is not None and split not in known:
        raise ValueError(
            f"tokenizer.ggml.pre must be one of {', '.join(sorted(known))}; got {split}. Take the tokenizer "
            "of the model's own repository"
        )


def set_splits(tokenizer: Any, path: str) -> None:
    """Lets the tokenizer of a file split text as the file says, where transformers does not."""
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers

    metadata, backend = header_of(path).metadata, tokenizer.backend_tokenizer
    match metadata.get("tokenizer.ggml.model"):
        case "gpt2":
            patterns = SPLITS.get(metadata.get("tokenizer.ggml.pre", ""), ())
            if patterns:
                steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
                of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
                backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, of_bytes])
        case "llama" if not metadata["general.architecture"].startswith("gemma"):
            # transformers puts a space in front of all texts but those that begin with one
            has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
            first = [normalizers.Prepend(_SPACE)] if has_prefix else []
            backend.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", _SPACE)])
            backend.pre_tokenizer = None
            if not has_prefix:  # transformers' decoder takes a space away
                parts = decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()
                backend.decoder = decoders.Sequence([*parts])
