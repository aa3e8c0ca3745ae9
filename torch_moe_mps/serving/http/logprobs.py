"""Logarithms of probabilities of tokens, in the forms of chats, completions and responses.

They are of the model's own distribution, as vLLM's are: before penalties, biases, masks and temperature.
"""

import functools
import re
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

from ..._faults import host_copy
from ...transformers.upstream import bytes_to_unicode

_LEAST = -9999.0  # OpenAI's for a token that cannot be: JSON has no infinity
_BYTE = re.compile("<0x([0-9A-F]{2})>")


@dataclass
class Entry:
    """A token of an answer.

    Args:
        octets: of its text, maybe a part of a character; None where they are unknown.
        top: the most probable tokens at its place.
        offset: of its text in the answer.
    """

    token: str
    logprob: float
    octets: list[int] | None
    top: list["Entry"] = field(default_factory=list)
    offset: int = 0

    def chat_form(self) -> dict[str, Any]:
        return self._alone() | {"top_logprobs": [entry._alone() for entry in self.top]}

    def _alone(self) -> dict[str, Any]:
        return {"token": self.token, "bytes": self.octets, "logprob": self.logprob}

    def response_form(self) -> dict[str, Any]:
        """Octets are there for every token."""
        top = [entry._alone() | {"bytes": entry._some_octets()} for entry in self.top]
        return self._alone() | {"bytes": self._some_octets(), "top_logprobs": top}

    def _some_octets(self) -> list[int]:
        return [*self.token.encode()] if self.octets is None else self.octets


def completion_form(entries: list[Entry]) -> dict[str, Any]:
    """The most probable tokens include the one that was chosen."""
    return {
        "tokens": [entry.token for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [{top.token: top.logprob for top in (*entry.top, entry)} for entry in entries],
        "text_offset": [entry.offset for entry in entries],
    }


class Logprobs(LogitsProcessor):
    """Keeps the logarithms of probabilities of one sequence until its tokens are known; changes no score.

    Args:
        count: of the most probable tokens, for each place.
    """

    is_first = True  # the first of all processors: see `in_order`

    def __init__(self, tokenizer: Any, count: int):
        self._tokenizer, self._count = tokenizer, count
        # Log probabilities of each token, on the CPU: [V], those of the most probable tokens, and these: one
        # copy, which the host has waited for when it knows the token: it waits for nothing later.
        self._held: deque[Tensor] = deque()
        self._offset = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        row = scores[0].float().log_softmax(-1)
        most = row.topk(self._count)
        self._held.append(host_copy(torch.cat((row, most.values, most.indices.float()))))
        return scores

    def pop(self, token: int) -> Entry:
        """The entry of the next token of the sequence."""
        held = self._held.popleft()
        logprobs, tokens = held[len(held) - 2 * self._count :].view(2, self._count).tolist()
        top = [self._entry(int(each), logprob) for each, logprob in zip(tokens, logprobs, strict=True)]
        entry = self._entry(token, held[token].item())
        entry.top, entry.offset = top, self._offset
        self._offset += len(entry.token)
        return entry

    def _entry(self, token: int, logprob: float) -> Entry:
        text, octets = text_of(self._tokenizer, token)
        return Entry(text, max(logprob, _LEAST), octets)


def text_of(tokenizer: Any, token: int) -> tuple[str, list[int] | None]:
    """A token's text and its octets; a part of a character is a replacement sign in the text."""
    once = tokenizer.decode([token])
    twice = tokenizer.decode([token, token])  # a blank in front is left out of the first
    text = twice[len(once) :] if twice.startswith(once) else once
    if "\ufffd" not in text:
        return text, [*text.encode()]
    piece = tokenizer.convert_ids_to_tokens(token)
    if (byte := _BYTE.fullmatch(piece)) is not None:
        return text, [int(byte[1], 16)]
    octets = _octets()
    known = all(character in octets for character in piece)
    return text, [octets[character] for character in piece] if known else None


@functools.cache
def _octets() -> dict[str, int]:
    """{the character that stands for an octet in vocabularies of octets: the octet}."""
    return {character: octet for octet, character in bytes_to_unicode().items()}
