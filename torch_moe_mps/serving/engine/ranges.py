"""Valid ranges of generation settings, shared by jobs and protocols."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from transformers import GenerationConfig

from ..._text import shown
from .job import Job

Check = tuple[Callable[[Any], bool], str]  # whether a value can be so, and what it must be
LARGEST = 1e6  # number that any dtype of logits bears as a factor or a divisor, with all that follows from it
MOST = (1 << 63) - 1  # the largest that an operator can count
# Entries of settings that list tokens: each step of an answer compares the logits with them.
TOKENS, ENDS, WORDS, WORD_TOKENS, FIRST_TOKENS = 1024, 64, 64, 64, 16


def number(low: float, high: float = LARGEST, open_at_low: bool = False) -> Check:
    """Check for a finite number in a range."""

    def fits(value: Any) -> bool:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and low <= value <= high and not (open_at_low and value == low)

    between = "above {:g} and at most {:g}" if open_at_low else "from {:g} to {:g}"
    return fits, f"a number {between.format(low, high)}"


def integer(low: int, high: int = MOST) -> Check:
    """Check for an integer in a range."""
    return lambda value: type(value) is int and low <= value <= high, f"an integer from {low} to {high}"


_PLACEHOLDER = re.compile("(image|video|audio)_token_(id|index)")  # names in a config
SEED = integer(-MOST - 1)  # for a torch.Generator
_FLAG: Check = (lambda value: isinstance(value, bool)), "true or false"
# {setting of a GenerationConfig: its range, where it is not None}.
SETTINGS: dict[str, Check] = {
    "do_sample": _FLAG,
    "encoder_no_repeat_ngram_size": integer(0),
    "encoder_repetition_penalty": number(0, open_at_low=True),
    "guidance_scale": number(-LARGEST),
    "length_penalty": number(-LARGEST),
    "max_length": integer(1),
    "max_new_tokens": integer(1),
    "max_time": number(0, open_at_low=True),
    "min_length": integer(0),
    "min_new_tokens": integer(0),
    "no_repeat_ngram_size": integer(0),
    "num_beams": ((lambda value: value == 1), "1 (model.generate searches beams)"),
    "num_return_sequences": integer(1, 1),
    "remove_invalid_values": _FLAG,
    "renormalize_logits": _FLAG,
    "repetition_penalty": number(0, open_at_low=True),
    "use_cache": _FLAG,
}
# {the same of how tokens are drawn}: where none is drawn, transformers reads none of these.
DRAWS: dict[str, Check] = {
    "epsilon_cutoff": number(0, 1),
    "eta_cutoff": number(0, 1),
    "min_p": number(0, 1),
    "temperature": number(0, open_at_low=True),
    "top_h": number(0, 1, open_at_low=True),
    "top_k": integer(0),
    "top_p": number(0, 1),
    "typical_p": number(0, 1, open_at_low=True),
}


# Values of `cache_implementation` whose keys and values are those of the engine's cache
_CACHES = (None, "dynamic", "hybrid", "static")


def is_list_of(kind: type, value: Any) -> bool:
    """True for a list or tuple whose entries are all of one type; bool is no int."""
    return isinstance(value, list | tuple) and {*map(type, value)} <= {kind}


def token(vocabulary: int) -> Check:
    """Check for a token of the vocabulary."""
    fits, _ = integer(0, vocabulary - 1)
    return fits, f"of tokens from 0 to {vocabulary - 1}"


def tokens(vocabulary: int) -> dict[str, Check]:
    """{setting: check of its value unless None} of the settings that hold tokens."""
    fits, expected = token(vocabulary)

    def all_fit(value: Any, limit: int) -> bool:
        return isinstance(value, (list, tuple)) and len(value) <= limit and all(map(fits, value))

    def are_lists(value: Any) -> bool:
        is_short = isinstance(value, (list, tuple)) and 0 < len(value) <= WORDS
        return is_short and all(ids and all_fit(ids, WORD_TOKENS) for ids in value)

    def listed(limit: int) -> Check:
        return (lambda value: all_fit(value, limit)), f"a list {expected}, at most {limit}"

    one = fits, expected
    lists = f"a list of at most {WORDS} lists {expected}, each of 1 to {WORD_TOKENS}"
    are_ends, _ = listed(ENDS)
    ends = (lambda value: fits(value) or are_ends(value)), f"{expected}, at most {ENDS}"
    return {
        "bad_words_ids": (are_lists, lists),
        "begin_suppress_tokens": listed(FIRST_TOKENS),
        "bos_token_id": one,
        "eos_token_id": ends,
        "forced_bos_token_id": one,
        "forced_eos_token_id": ends,
        "pad_token_id": one,
        "suppress_tokens": listed(TOKENS),
    }


def vocabulary_of(model: Any) -> int:
    """Vocabulary size of a model."""
    return int(model.config.get_text_config().vocab_size)


def placeholders_of(model: Any) -> set[int]:
    """Placeholder tokens of images and audio, which may lie outside the vocabulary."""
    config = vars(model.config)
    return {value for name, value in config.items() if _PLACEHOLDER.fullmatch(name) and type(value) is int}


def unknown_token(model: Any, ids: Tensor | Sequence[int]) -> int | None:
    """First token of a prompt outside the vocabulary, or None. A GPU would read out of bounds."""
    vocabulary = vocabulary_of(model)
    if isinstance(ids, Tensor):
        ids = ids[(ids < 0) | (ids >= vocabulary)].tolist()
    if not len(ids) or 0 <= min(ids) <= max(ids) < vocabulary:
        return None
    beyond = [token for token in ids if not 0 <= token < vocabulary]
    known = placeholders_of(model) if beyond else ()
    return next((token for token in beyond if token not in known), None)


def check_settings(config: GenerationConfig, defaults: GenerationConfig, vocabulary: int) -> None:
    """Validates generation settings.

    Args:
        defaults: the model's settings; tokens equal to these are not checked.
        vocabulary: the vocabulary size.

    Raises: ValueError for the first setting out of range, and for a search or a cache of `generate` alone.
    """
    for name, check in (SETTINGS | DRAWS if config.do_sample else SETTINGS).items():
        _check(name, check, getattr(config, name, None))
    for name, check in tokens(vocabulary).items():
        if (value := getattr(config, name, None)) != getattr(defaults, name, None):
            _check(name, check, value)
    mode, cache = config.get_generation_mode(), config.cache_implementation
    if mode not in ("greedy_search", "sample"):
        raise ValueError(f"torch_moe_mps: {mode.value} is generate()'s: call model.generate")
    if cache not in _CACHES:
        raise ValueError(f"torch_moe_mps: the cache {cache!r} is generate()'s: call model.generate")


def check_job(model: Any, job: Job) -> None:
    """Validates a job's prompt, settings and seed. Raises: ValueError."""
    if (token := unknown_token(model, job.inputs["input_ids"])) is not None:
        last = vocabulary_of(model) - 1
        raise ValueError(f"torch_moe_mps: prompts must be of tokens from 0 to {last}, got {token}")
    check_settings(job.config, model.generation_config, vocabulary_of(model))
    check_seed(job.seed)


def check_seed(seed: Any) -> None:
    """Validates a seed for torch.Generator. Raises: ValueError."""
    _check("seed", SEED, seed)


def _check(name: str, check: Check, value: Any) -> None:
    fits, expected = check
    if value is not None and not fits(value):
        raise ValueError(f"torch_moe_mps: {name} must be {expected}, got {shown(value)}")
