"""`logprobs` and `top_logprobs` of chats, completions and responses, in OpenAI's forms.

They are of the model's own distribution, as vLLM's are: before penalties, biases, masks and temperature.
"""

import functools
import json
import re
from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import LogitsProcessor
from transformers.convert_slow_tokenizer import bytes_to_unicode

from .requests import wrong

MOST, MOST_OF_COMPLETIONS = 20, 5
_INCLUDED = "message.output_text.logprobs"
_LEAST = -9999.0  # OpenAI's for a token that cannot be: JSON has no infinity
_BYTE = re.compile("<0x([0-9A-F]{2})>")


def count_of(body: dict[str, Any], prompt: str | None) -> int | None:
    """Takes what asks for them out of a request: `logprobs`, `top_logprobs`, and the `include` of a response.

    Args:
        prompt: the field that has the prompt: "messages", "prompt" or "input".

    Returns: how many tokens each place of the answer shall have; None where nothing asks.
    Raises: Refused.
    """
    if prompt == "prompt":
        count = body.pop("logprobs", None)
        if count is not None and not (type(count) is int and 0 <= count <= MOST_OF_COMPLETIONS):
            raise wrong("logprobs", f"an integer from 0 to {MOST_OF_COMPLETIONS}", count)
        return count
    if prompt == "input":
        included = body.get("include")
        asked: Any = isinstance(included, list) and _INCLUDED in included
        needed = f"'include' of {_INCLUDED}"
        if asked:
            body["include"] = [each for each in body["include"] if each != _INCLUDED]
    else:
        asked, needed = body.pop("logprobs", None), "'logprobs' true"
        if asked is not None and type(asked) is not bool:
            raise wrong("logprobs", "true or false", asked)
    count = body.pop("top_logprobs", None)
    if count is not None and not (type(count) is int and 0 <= count <= MOST):
        raise wrong("top_logprobs", f"an integer from 0 to {MOST}", count)
    if count and not asked:
        raise wrong("top_logprobs", f"with {needed}", count)
    return count or 0 if asked else None


class Entry(dict[str, Any]):
    """OpenAI's of a token, with the place of its text in the answer."""

    offset: int


class Shown(str):
    """A piece of an answer, with the entries of the tokens that it ends with."""

    logprobs: list[Entry]

    @classmethod
    def of(cls, text: str, entries: list[Entry]) -> "Shown":
        shown = cls(text)
        shown.logprobs = entries
        return shown

    def __add__(self, other: str) -> "Shown":
        return Shown.of(str(self) + str(other), [*self.logprobs, *getattr(other, "logprobs", [])])

    def __radd__(self, other: str) -> "Shown":
        return Shown.of(other + str(self), self.logprobs)


class Logprobs(LogitsProcessor):
    """Keeps the logarithms of probabilities of one sequence until its tokens are known; changes no score.

    Args:
        count: of the most probable tokens, for each place.
    """

    is_first = True  # of all processors: see `prepare_steps`

    def __init__(self, tokenizer: Any, count: int):
        self._tokenizer, self._count = tokenizer, count
        self._rows: deque[Tensor] = deque()
        self._offset = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._rows.append(scores[0].float().log_softmax(-1))
        return scores

    def take(self, token: int) -> Entry:
        """OpenAI's entry of the next token of the sequence."""
        row = self._rows.popleft()
        most = row.topk(self._count)
        top = [self._entry(*pair) for pair in zip(most.indices.tolist(), most.values.tolist(), strict=True)]
        entry = Entry(self._entry(token, row[token].item()), top_logprobs=top)
        entry.offset = self._offset
        self._offset += len(entry["token"])
        return entry

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {**text_of(self._tokenizer, token), "logprob": max(logprob, _LEAST)}


def text_of(tokenizer: Any, token: int) -> dict[str, Any]:
    """A token's text and its octets, which may be a part of a character, of which the text has a sign."""
    once = tokenizer.decode([token])
    twice = tokenizer.decode([token, token])  # a blank in front is left out of the first
    text = twice[len(once) :] if twice.startswith(once) else once
    if "\ufffd" not in text:
        return {"token": text, "bytes": [*text.encode()]}
    piece = tokenizer.convert_ids_to_tokens(token)
    if (byte := _BYTE.fullmatch(piece)) is not None:
        return {"token": text, "bytes": [int(byte[1], 16)]}
    octets = _octets()
    known = all(character in octets for character in piece)
    return {"token": text, "bytes": [octets[character] for character in piece] if known else None}


@functools.cache
def _octets() -> dict[str, int]:
    """{the character that stands for an octet in vocabularies of octets: the octet}."""
    return {character: octet for octet, character in bytes_to_unicode().items()}


def in_completion(own: Callable[..., Any]) -> Callable[..., Any]:
    """Wrapper of the handler's method that builds a whole answer."""

    @functools.wraps(own)
    def build(handler: Any, request_id: str, content: Any, *others: Any, **named: Any) -> Any:
        result = own(handler, request_id, content, *others, **named)
        if isinstance(content, Shown):
            result["choices"][0]["logprobs"] = {"content": content.logprobs, "refusal": None}
        return result

    return build


def in_chunk(own: Callable[..., str]) -> Callable[..., str]:
    """Wrapper of the handler's method that builds a piece of a streamed answer."""

    @functools.wraps(own)
    def build(handler: Any, *others: Any, **named: Any) -> str:
        line = own(handler, *others, **named)
        shown = named.get("content", named.get("reasoning_content"))
        entries = getattr(shown, "logprobs", None)
        if entries is None:
            return line
        body = json.loads(line.removeprefix("data: "))
        body["choices"][0]["logprobs"] = {"content": entries, "refusal": None}
        return str(handler.chunk_to_sse(json.dumps(body)))

    return build


def completion_form(entries: list[Entry]) -> dict[str, Any]:
    """Form for a completion, whose most probable tokens include the one that was chosen."""
    top = [[*entry["top_logprobs"], entry] for entry in entries]
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [{each["token"]: each["logprob"] for each in place} for place in top],
        "text_offset": [entry.offset for entry in entries],
    }


def response_form(entries: list[Entry]) -> list[dict[str, Any]]:
    """Form for a response, which has octets of every token."""
    return [
        _with_octets(entry) | {"top_logprobs": [*map(_with_octets, entry["top_logprobs"])]}
        for entry in entries
    ]


def _with_octets(entry: dict[str, Any]) -> dict[str, Any]:
    return entry | {"bytes": [*entry["token"].encode()]} if entry["bytes"] is None else entry


def filled(own: Callable[..., Any], form: Callable[[list[Entry]], Any]) -> Callable[..., Any]:
    """Function that makes a part of an answer from its text, with the `logprobs` of a text that has them."""

    def make(*others: Any, **named: Any) -> Any:
        entries = getattr(named.get("text", named.get("delta")), "logprobs", None)
        return own(*others, **named | ({} if entries is None else {"logprobs": form(entries)}))

    if (construct := getattr(own, "model_construct", None)) is not None:
        vars(make)["model_construct"] = filled(construct, form)
    return make
