"""OpenAI's text completions: `/v1/completions`."""

from typing import Any

from ...engine.ranges import integer, is_list_of
from .. import limits
from ..answer import Answer, Item, Piece
from ..answers import Answers
from ..logprobs import completion_form
from ..request import HINTS, OBJECT, SHARED, Chat, Fields, Request, common, wrong
from ..served import Served
from .chat import Chunks, envelope, usage
from .protocol import AnswerWriter, Protocol

_MOST_LOGPROBS = 5
_FIELDS = Fields(
    SHARED
    | {
        "logprobs": integer(0, _MOST_LOGPROBS),
        "max_tokens": integer(1),
        "n": integer(1, limits.ANSWERS),
        "stream_options": OBJECT,
    },
    needed="prompt",
    others=HINTS,
    nothing={"best_of": [1], "echo": [False], "response_format": [], "suffix": [""]},
)


class Completions(Protocol):
    path = "/v1/completions"

    def read(self, body: dict[str, Any], served: Served) -> Request:
        _FIELDS.check(body, self.path, served.say_once)
        return Request(
            prompts=_prompts(body["prompt"]),
            prompt_field="prompt",
            max_tokens=body.get("max_tokens"),
            logprobs=body.get("logprobs"),
            count=body.get("n") or 1,
            **common(body),
        )

    def whole(self, request: Request, answers: Answers, served: Served) -> dict[str, Any]:
        choices = [
            _choice(number, answer.text, answer.entries, _reason(answer))
            for number, answer in enumerate(answers.answers)
        ]
        return envelope("cmpl-", "text_completion", served) | {"choices": choices, "usage": usage(answers)}

    def writer(self, request: Request, answers: Answers, served: Served) -> AnswerWriter:
        return _CompletionChunks(request, answers, served)


class _CompletionChunks(Chunks):
    prefix, kind = "cmpl-", "text_completion"

    def opening(self) -> str:
        return ""

    def item(self, number: int, item: Item) -> str:
        if not isinstance(item, Piece):
            return ""
        return self.choice(_choice(number, item.text, item.entries or None, None))

    def ended(self, number: int) -> str:
        answer = self.answers.answers[number]
        if answer.is_cut:
            return ""
        return self.choice(_choice(number, "", None, _reason(answer)))


def _prompts(value: Any) -> list[Chat | str | list[int]]:
    """Prompts of a field with one or several texts or token lists. Raises: Refused."""
    if _is_prompt(value):
        return [value]
    if isinstance(value, list) and 0 < len(value) <= limits.ANSWERS and all(map(_is_prompt, value)):
        return [*value]
    expected = f"a text, a list of tokens, or a list of at most {limits.ANSWERS} of these"
    raise wrong("prompt", expected, value)


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str) or (bool(value) and is_list_of(int, value))


def _reason(answer: Answer) -> str:
    return "length" if answer.reason == "length" else "stop"


def _choice(number: int, text: str, entries: list[Any] | None, reason: str | None) -> dict[str, Any]:
    logprobs = None if entries is None else completion_form(entries)
    return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": reason}
