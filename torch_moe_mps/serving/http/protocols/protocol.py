"""Protocol interface: parsing requests, writing answers and errors."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from ..answer import Item, Piece, ToolCall
from ..answers import Answers
from ..request import Refused, Request
from ..served import Served
from .values import in_json, object_of


class AnswerWriter(ABC):
    """Writes one streamed answer as server-sent events."""

    def __init__(self, request: Request, answers: Answers, served: Served):
        self.request, self.answers, self.served = request, answers, served

    @abstractmethod
    def opening(self) -> str: ...

    @abstractmethod
    def item(self, number: int, item: Item) -> str:
        """Events for the next item of an answer."""

    def ended(self, number: int) -> str:
        """Events at the end of one answer."""
        return ""

    @abstractmethod
    def end(self) -> str:
        """Events at the end of the stream."""

    @abstractmethod
    def failed(self, refused: Refused) -> str:
        """Event for an error after the stream has started."""

    def ping(self) -> str:
        """Keep-alive event."""
        answers = self.answers.answers
        read, of = (sum(getattr(a, name) for a in answers) for name in ("read_tokens", "prompt_tokens"))
        return f": {read} of {of} tokens of the prompt are computed\n\n"


class Protocol(ABC):
    """One generating endpoint."""

    path: str

    @abstractmethod
    def read(self, body: dict[str, Any], served: Served) -> Request:
        """Request of a JSON body. Raises: Refused."""

    @abstractmethod
    def whole(self, request: Request, answers: Answers, served: Served) -> dict[str, Any]:
        """Body of a non-streamed answer."""

    @abstractmethod
    def writer(self, request: Request, answers: Answers, served: Served) -> AnswerWriter: ...


@dataclass
class Text:
    """Consecutive text deltas of one kind (text or reasoning)."""

    kind: str
    deltas: list[Piece]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)


def blocks(items: list[Piece | ToolCall]) -> list[Text | ToolCall]:
    """Items of an answer as a list of texts and tool calls, in order."""
    parts: list[Text | ToolCall] = []
    for item in items:
        last = parts[-1] if parts else None
        if isinstance(item, ToolCall):
            parts.append(item)
        elif isinstance(last, Text) and (last.kind == item.kind or not item.text):
            last.deltas.append(item)
        else:
            parts.append(Text(item.kind, [item]))
    return parts


def event(data: dict[str, Any], name: str | None = None) -> str:
    """One server-sent event."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {in_json(data)}\n\n"


def openai_error(refused: Refused) -> dict[str, Any]:
    kind = "server_error" if refused.status >= 500 else "invalid_request_error"
    error = {"message": refused.message, "type": kind, "param": refused.field, "code": refused.code}
    return {"error": error}


def input_of(call: ToolCall) -> str:
    """Input text of a custom tool call; the raw arguments if they have another form."""
    arguments = object_of(call.arguments) or {}
    is_input = [*arguments] == ["input"] and isinstance(arguments["input"], str)
    return arguments["input"] if is_input else call.arguments
