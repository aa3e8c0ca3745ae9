"""Structured output and forced tool calls, by masking tokens with xgrammar.

The mask of a step is computed on the host from the previous token, so each token waits for the one before.
The model's step is captured as usual; the mask is copied to the device as a bit mask.
"""

import json
import re
import threading
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

from ..._text import first_line, shown
from . import limits
from .limited import BESIDE, Limited, TooLong
from .request import Refused, wrong

_PLACE = re.compile(r"^\[[\d:]+\] \S+:\d+: ")  # time and line of C++ in front of xgrammar's errors

_COMPILES, _MASKS = 10.0, 2.0  # seconds at most, for a grammar with its first mask, and for any later mask
# Seconds that the masks of an answer may compute, in all: the others wait for each of them.
_SPENT, _SPENT_BY_TOKEN = 0.5, 0.005
_KEPT_BYTES = 256 << 20  # in compiled grammars: clients make up any number of them
_ANY_OBJECT = {"type": "object"}
_KINDS = "text, json_object or json_schema"


def schema_of(asked: Any, field: str) -> dict[str, Any] | None:
    """JSON schema of a response format; None for free text.

    Args:
        asked: value of `field`: `response_format` of chats, `format` in the `text` of responses.

    Raises: Refused for another value.
    """
    if asked is None:
        return None
    if not isinstance(asked, dict) or asked.get("type") not in ("text", "json_object", "json_schema"):
        raise wrong(field, f"an object whose type is {_KINDS}", asked)
    if asked["type"] == "text":
        return None
    inner = asked.get("json_schema", asked)
    if asked["type"] == "json_object" and (not isinstance(inner, dict) or inner.get("schema") is None):
        return _ANY_OBJECT
    if not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict):
        raise wrong(f"{field}.json_schema", "an object with a name and a schema", inner)
    return dict(inner["schema"])


class Masked(LogitsProcessor):
    """Logits processor of one sequence that masks tokens its grammar does not allow.

    Args:
        grammar: compiled by xgrammar for the tokenizer.
        begun: start of the answer that is part of the prompt.
        vocabulary: number of logits of the model.
        too_long: error to raise if computing a mask takes too long.

    Raises: ValueError if no answer in the grammar has this start.
    """

    def __init__(self, grammar: Any, begun: str, vocabulary: int, limited: Limited, too_long: Exception):
        import xgrammar

        self._limited, self._too_long, self._spent = limited, too_long, 0.0
        self._matcher = xgrammar.GrammarMatcher(grammar)
        if not self._matcher.accept_string(begun):
            raise ValueError(begun)
        self._bits = xgrammar.allocate_token_bitmask(1, vocabulary)
        self._matcher.fill_next_token_bitmask(self._bits)  # for the first token
        self._shifts = torch.arange(32, dtype=torch.int32)
        self._length: int | None = None
        self._tokens = 0  # in the answer

    @property
    def is_empty(self) -> bool:
        """True if the grammar allows no first token."""
        return not self._bits.any()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        before, self._length = self._length, input_ids.shape[1]
        if before is not None and not self._matcher.is_terminated():
            self._advance(input_ids[0, before:].tolist())
        if self._matcher.is_terminated():  # tokens behind the last one are dropped
            return scores
        mask, self._shifts = self._bits.to(scores.device), self._shifts.to(scores.device)
        allowed = (mask.unsqueeze(-1) >> self._shifts & 1).flatten(1)[:, : scores.shape[1]]
        return scores.masked_fill(allowed == 0, -torch.inf)

    def _advance(self, tokens: list[int]) -> None:
        """Advances the grammar by tokens and computes the next mask."""
        self._tokens += len(tokens)
        try:
            _, seconds = self._limited.call(lambda: self._accept(tokens), _MASKS)
        except TooLong:
            raise self._too_long from None
        self._spent += seconds
        if self._spent > _SPENT + _SPENT_BY_TOKEN * self._tokens:
            raise self._too_long

    def _accept(self, tokens: list[int]) -> None:
        matcher = self._matcher
        for token in tokens:
            if not matcher.accept_token(token):
                raise RuntimeError(f"moe_mps: token {token} does not go on in the answer's schema")
        if not matcher.is_terminated():
            matcher.fill_next_token_bitmask(self._bits)


def check_size(form: Any, field: str) -> None:
    """Raises: Refused for a form that would take xgrammar too much time or stack.

    Args:
        form: a JSON schema, or a list of schemas.
    """

    def check(got: int, limit: int, expected: str) -> None:
        if got > limit:
            line = f"The schema of '{field}' must {expected.format(limit)}, got {got}."
            raise Refused(line, field, "invalid_value")

    choices = "have at most {} choices in one place"
    level, parts, depth = [form], 0, 0
    while level:  # wide and deep ones are refused before they are visited
        parts, depth = parts + len(level), depth + 1
        check(parts, limits.FORM_PARTS, "be of at most {} objects and lists")
        check(depth, limits.DEPTH, "nest at most {} deep")
        check(max(map(len, level)), limits.CHOICES, choices)
        inner = (part.values() if isinstance(part, dict) else part for part in level)
        level = [part for values in inner for part in values if isinstance(part, dict | list)]
    text = json.dumps(form)
    check(len(text), limits.FORM_CHARACTERS, "be of at most {} characters")
    check(text.count("|"), limits.CHOICES, choices)
    check(_parentheses(text), limits.DEPTH, "have at most {} parentheses inside of each other")


def _parentheses(text: str) -> int:
    """Maximum nesting depth of parentheses."""
    depth = deepest = 0
    for mark in re.findall("[()]", text):
        depth = depth + 1 if mark == "(" else max(depth - 1, 0)
        deepest = max(deepest, depth)
    return deepest


class Grammars:
    """Thread-safe grammar compiler of a tokenizer, with xgrammar's cache."""

    def __init__(self) -> None:
        self._compilers: dict[tuple[int, int], Any] = {}  # {(tokenizer, vocabulary): compiler}
        self._limited, self._lock = Limited(), threading.Lock()

    def mask(self, tokenizer: Any, config: Any, vocabulary: int, form: Any, begun: str, field: str) -> Masked:
        """Logits processor for a grammar.

        Args:
            form: a structural tag of xgrammar, of schemas after `check_size`.
            begun: start of the answer that is part of the prompt.
            field: request field of the form, for errors.

        Raises: Refused for an unsupported schema, one that allows no first token, an answer that begins
            otherwise, and compilation that takes too long.
        """
        if self._limited.is_busy:
            message = f"'{field}' must wait: the server is busy with schemas and grammars that take long."
            raise Refused(message, field, "busy", 503)
        compiler = self._compiler(tokenizer, config, vocabulary)
        message = (
            f"The schema of '{field}' must be one that is quickly compiled and followed, got one that is not."
        )
        too_long = Refused(message, field, "invalid_value")

        def made() -> Masked:
            compiled = compiler.compile_structural_tag(form)
            return Masked(compiled, begun, vocabulary, self._limited, too_long)

        try:
            masked, _ = self._limited.call(made, _COMPILES)
        except TooLong:
            raise too_long from None
        except ValueError:
            message = f"The start of the answer in the messages must fit '{field}', got {shown(begun)}."
            raise Refused(message, field, "invalid_value") from None
        except RuntimeError as error:
            reason = _PLACE.sub("", first_line(error))
            message = f"The schema of '{field}' must be one that xgrammar compiles, got: {reason}"
            raise Refused(message, field, "invalid_value") from None
        if masked.is_empty:
            message = f"The schema of '{field}' must have an answer that a token begins, got one without any."
            raise Refused(message, field, "invalid_value")
        return masked

    def _compiler(self, tokenizer: Any, config: Any, vocabulary: int) -> Any:
        """The compiler of grammars for a tokenizer and a vocabulary size, made once."""
        import xgrammar

        key = id(tokenizer), vocabulary
        with self._lock:
            if key not in self._compilers:
                ends = config.eos_token_id
                ends = ends if isinstance(ends, list) else [ends]
                info = xgrammar.TokenizerInfo.from_huggingface(
                    tokenizer, vocab_size=vocabulary, stop_token_ids=[end for end in ends if end is not None]
                )
                self._compilers[key] = xgrammar.GrammarCompiler(
                    info, max_threads=BESIDE, cache_limit_bytes=_KEPT_BYTES
                )
        return self._compilers[key]
