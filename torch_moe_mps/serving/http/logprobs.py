"""Log probabilities of tokens, in the forms of chats, completions and responses.

As in vLLM, they are the model's: before penalties, biases, masks and temperature.
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
from ...models.programs import bytes_to_unicode

_LEAST = -9999.0  # OpenAI's for a token that cannot be: JSON has no infinity
_BYTE = re.compile("<0x([0-9A-F]{2})>")


@dataclass
class TokenLogprob:
    """Log probability of one generated token.

    Args:
        data: UTF-8 bytes of the token, maybe part of a character; None where unknown.
        top: most probable tokens at its position.
        offset: of its text in the answer.
    """

    token: str
    logprob: float
    data: list[int] | None
    top: list["TokenLogprob"] = field(default_factory=list)
    offset: int = 0

    def chat_form(self) -> dict[str, Any]:
        return self._alone() | {"top_logprobs": [entry._alone() for entry in self.top]}

    def _alone(self) -> dict[str, Any]:
        return {"token": self.token, "bytes": self.data, "logprob": self.logprob}

    def response_form(self) -> dict[str, Any]:
        """Form of the Responses API: `bytes` is never null."""
        top = [entry._alone() | {"bytes": entry._known_bytes()} for entry in self.top]
        return self._alone() | {"bytes": self._known_bytes(), "top_logprobs": top}

    def _known_bytes(self) -> list[int]:
        return [*self.token.encode()] if self.data is None else self.data


def completion_form(entries: list[TokenLogprob]) -> dict[str, Any]:
    """`logprobs` of the completions API; top tokens include the sampled one."""
    return {
        "tokens": [entry.token for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [{top.token: top.logprob for top in (*entry.top, entry)} for entry in entries],
        "text_offset": [entry.offset for entry in entries],
    }


class Logprobs(LogitsProcessor):
    """Logits processor that records log probabilities of a sequence and leaves the logits unchanged.

    Args:
        count: number of top tokens per position.
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
        top = row.topk(self._count)
        self._held.append(host_copy(torch.cat((row, top.values, top.indices.float()))))
        return scores

    def pop(self, token: int) -> TokenLogprob:
        """Entry of the next sampled token."""
        row = self._held.popleft()
        logprobs, tokens = row[len(row) - 2 * self._count :].view(2, self._count).tolist()
        top = [self._entry(int(each), logprob) for each, logprob in zip(tokens, logprobs, strict=True)]
        entry = self._entry(token, row[token].item())
        entry.top, entry.offset = top, self._offset
        self._offset += len(entry.token)
        return entry

    def _entry(self, token: int, logprob: float) -> TokenLogprob:
        text, data = text_of(self._tokenizer, token)
        return TokenLogprob(text, max(logprob, _LEAST), data)


def text_of(tokenizer: Any, token: int) -> tuple[str, list[int] | None]:
    """Text and bytes of a token; a partial character becomes U+FFFD in the text."""
    once = tokenizer.decode([token])
    twice = tokenizer.decode([token, token])  # a blank in front is left out of the first
    text = twice[len(once) :] if twice.startswith(once) else once
    if "\ufffd" not in text:
        return text, [*text.encode()]
    name = tokenizer.convert_ids_to_tokens(token)
    if (byte := _BYTE.fullmatch(name)) is not None:
        return text, [int(byte[1], 16)]
    table = _bytes_of_characters()
    known = all(character in table for character in name)
    return text, [table[character] for character in name] if known else None


@functools.cache
def _bytes_of_characters() -> dict[str, int]:
    """Byte values by the characters that stand for them in byte-level vocabularies."""
    return {character: byte for byte, character in bytes_to_unicode().items()}
