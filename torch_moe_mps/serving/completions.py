"""OpenAI's completions of texts: `/v1/completions`."""

import time
from typing import Any

from .answer import Answer, Item, Piece
from .chat import usage
from .logprobs import completion_form
from .protocol import Protocol, Writer, event, ignore_unknown, new_id, openai_error
from .request import (
    HINTS,
    MOST_ANSWERS,
    OBJECT,
    SHARED,
    Check,
    Refused,
    Request,
    check,
    check_nothing,
    integer,
    sampling,
    wrong,
)
from .served import Answers, Served
from .structured import schema_of

_MOST_LOGPROBS, _MOST_PROMPTS = 5, 64
_CHECKS: dict[str, Check] = SHARED | {
    "logprobs": integer(0, _MOST_LOGPROBS),
    "max_tokens": integer(1),
    "n": integer(1, MOST_ANSWERS),
    "stream_options": OBJECT,
}
_NOTHING: dict[str, list[Any]] = {"best_of": [1], "echo": [False], "suffix": [""]}
_KNOWN = {*_CHECKS, *_NOTHING, *HINTS, "prompt", "response_format"}


class Completions(Protocol):
    path = "/v1/completions"

    def read(self, body: dict[str, Any], served: Served) -> Request:
        check(body, _CHECKS)
        check_nothing(body, _NOTHING)
        ignore_unknown(body, _KNOWN, served, self.path)
        if body.get("prompt") is None:
            raise Refused("'prompt' must be there, got none.", "prompt", "missing_required_parameter")
        return Request(
            prompts=[*_prompts(body["prompt"])],
            prompt_field="prompt",
            most=body.get("max_tokens"),
            schema=schema_of(body.get("response_format"), "response_format"),
            form_field="response_format",
            logprobs=body.get("logprobs"),
            count=body.get("n") or 1,
            **sampling(body),
        )

    def whole(self, request: Request, answers: Answers, served: Served) -> dict[str, Any]:
        choices = [
            _choice(number, answer.text, answer.entries, _reason(answer))
            for number, answer in enumerate(answers.answers)
        ]
        return _envelope(new_id("cmpl-"), served) | {"choices": choices, "usage": usage(answers)}

    def writer(self, request: Request, answers: Answers, served: Served) -> Writer:
        return _Chunks(request, answers, served)


class _Chunks(Writer):
    def __init__(self, *parts: Any):
        super().__init__(*parts)
        self._envelope = _envelope(new_id("cmpl-"), self.served)
        self._wants_usage = bool((self.request.body.get("stream_options") or {}).get("include_usage"))

    def begin(self) -> str:
        return ""

    def item(self, number: int, item: Item) -> str:
        if not isinstance(item, Piece):
            return ""
        return event(self._envelope | {"choices": [_choice(number, item.text, item.entries or None, None)]})

    def ended(self, number: int) -> str:
        choice = _choice(number, "", None, _reason(self.answers.answers[number]))
        return event(self._envelope | {"choices": [choice]})

    def end(self) -> str:
        last = ""
        if self._wants_usage:
            last = event(self._envelope | {"choices": [], "usage": usage(self.answers)})
        return f"{last}data: [DONE]\n\n"

    def failed(self, refused: Refused) -> str:
        return event(openai_error(refused))


def _prompts(value: Any) -> list[str | list[int]]:
    """A text, tokens, or a list of these. Raises: Refused."""
    if isinstance(value, str) or _are_tokens(value):
        return [value]
    is_list = isinstance(value, list) and 0 < len(value) <= _MOST_PROMPTS
    if is_list and all(isinstance(prompt, str) or _are_tokens(prompt) for prompt in value):
        return [*value]
    raise wrong("prompt", f"a text, a list of tokens, or a list of at most {_MOST_PROMPTS} of these", value)


def _are_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _reason(answer: Answer) -> str:
    return "length" if answer.reason == "length" else "stop"


def _choice(number: int, text: str, entries: list[Any] | None, reason: str | None) -> dict[str, Any]:
    logprobs = None if entries is None else completion_form(entries)
    return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _envelope(name: str, served: Served) -> dict[str, Any]:
    return {"id": name, "object": "text_completion", "created": int(time.time()), "model": served.name}
