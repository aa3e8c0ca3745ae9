"""Protocols: how requests are read, answers written, and errors told."""

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from ..answer import Answer, Call, Item, Piece
from ..answers import Answers
from ..request import Refused, Request
from ..served import Served


class Writer(ABC):
    """Writes one streamed answer as server-sent events."""

    def __init__(self, request: Request, answers: Answers, served: Served):
        self.request, self.answers, self.served = request, answers, served

    @abstractmethod
    def begin(self) -> str: ...

    @abstractmethod
    def item(self, number: int, item: Item) -> str:
        """A part of the answer of that number."""

    def ended(self, number: int) -> str:
        """The events behind the last part of the answer of that number."""
        return ""

    @abstractmethod
    def end(self) -> str:
        """The events behind the last answer."""

    @abstractmethod
    def failed(self, refused: Refused) -> str:
        """An error behind the beginning."""

    def ping(self) -> str:
        """Tells the client that its answer is still coming."""
        answers = self.answers.answers
        read, of = (sum(getattr(a, name) for a in answers) for name in ("read_tokens", "prompt_tokens"))
        return f": {read} of {of} tokens of the prompt are computed\n\n"


class Protocol(ABC):
    """One path of the server that generates.

    Attributes:
        counts: the name below the path that counts a prompt's tokens, where there is one.
    """

    path: str
    counts: str | None = None

    @abstractmethod
    def read(self, body: dict[str, Any], served: Served) -> Request:
        """The request of a body. Raises: Refused."""

    @abstractmethod
    def whole(self, request: Request, answers: Answers, served: Served) -> dict[str, Any]:
        """The body of an answer that is not streamed."""

    @abstractmethod
    def writer(self, request: Request, answers: Answers, served: Served) -> Writer: ...

    def read_prompt(self, body: dict[str, Any], served: Served) -> Request:
        """Reads a request whose prompt is only counted. Raises: Refused."""
        return self.read(body, served)


@dataclass
class Text:
    """Consecutive pieces of one kind."""

    kind: str
    pieces: list[Piece]

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


def blocks(answer: Answer) -> list[Text | Call]:
    """An answer as texts and calls, in order."""
    made: list[Text | Call] = []
    for item in answer.items:
        last = made[-1] if made else None
        if isinstance(item, Call):
            made.append(item)
        elif isinstance(last, Text) and (last.kind == item.kind or not item.text):
            last.pieces.append(item)
        else:
            made.append(Text(item.kind, [item]))
    return made


def event(data: dict[str, Any], name: str | None = None) -> str:
    """A server-sent event."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json.dumps(data, ensure_ascii=False)}\n\n"


def openai_error(refused: Refused) -> dict[str, Any]:
    kind = "server_error" if refused.status >= 500 else "invalid_request_error"
    error = {"message": refused.message, "type": kind, "param": refused.field, "code": refused.code}
    return {"error": error}


def input_of(call: Call) -> str:
    """The text that a custom tool is called with; all of the arguments where the model wrote others."""
    try:
        arguments = json.loads(call.arguments)
    except ValueError:
        return call.arguments
    is_input = (
        isinstance(arguments, dict) and [*arguments] == ["input"] and isinstance(arguments["input"], str)
    )
    return arguments["input"] if is_input else call.arguments
