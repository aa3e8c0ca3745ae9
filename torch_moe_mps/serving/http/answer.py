"""An answer, piece by piece: its tokens become text, reasoning and calls of tools."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..engine.job import Reason
from .logprobs import Entry, Logprobs
from .protocols.tools import REASONING, Call, Parser, call_of

_PARTS = 8  # tokens of which one character is made, at most


@dataclass
class Piece:
    """Some text of an answer, with the entries of the tokens that it ends with."""

    kind: Literal["text", "reasoning"]
    text: str
    entries: list[Entry] = field(default_factory=list)


Item = Piece | Call


class Decoder:
    """Tokens as text, one by one. What may be a part of a character waits for the rest of it, and is left out
    if that never comes.
    """

    def __init__(self, tokenizer: Any, skips_special: bool):
        self._tokenizer, self._skips_special = tokenizer, skips_special
        self._ids: list[int] = []  # the last piece's, by which the next begins with a blank or not
        self._shown = 0

    def add(self, token: int) -> str:
        """Returns: what can be shown now."""
        self._ids.append(token)
        before, whole = self._decode(self._ids[: self._shown]), self._decode(self._ids)
        waits = whole.endswith("\ufffd") and len(self._ids) - self._shown < _PARTS
        if waits or len(whole) <= len(before):
            return ""
        self._ids = self._ids[self._shown :]
        self._shown = len(self._ids)
        return whole[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=self._skips_special)) if ids else ""


class Cut:
    """Text that ends before the first of some stops, piece by piece.

    What may be the beginning of a stop is held back until it is known not to be one.

    Attributes:
        stop: the one that has come, if any.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops, self._back = stops, ""
        self.stop: str | None = None

    def add(self, piece: str) -> str:
        """Returns: what can be shown now."""
        if self.stop is not None:
            return ""
        text, self._back = self._back + piece, ""
        ends = [(place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        if ends:
            place, self.stop = min(ends)
            return text[:place]
        most = max((len(stop) for stop in self._stops), default=1) - 1
        for count in range(min(most, len(text)), 0, -1):
            if any(stop.startswith(text[-count:]) for stop in self._stops):
                self._back = text[-count:]
                return text[:-count]
        return text

    def rest(self) -> str:
        """Returns: the text that was held back, at the end."""
        rest, self._back = self._back, ""
        return rest


class Answer:
    """One answer. It takes tokens on the thread of the device, and hands out what they are.

    Args:
        decoder: makes their text.
        parser: tells text, reasoning and calls apart; None where all is text.
        ends: tokens that end an answer.
        logprobs: keeps their probabilities; None where nobody asks.
        show: takes each part, and None behind the last.

    Attributes:
        tokens: all that were generated.
        reason: why it has ended: "stop", "length", "cancelled", or an error.
        submitted, begun, first, ended: when it was submitted, its prompt began to be read (None before that),
            its first token came, and it ended.
    """

    def __init__(
        self,
        decoder: Decoder,
        stops: Sequence[str],
        parser: Parser | None,
        ends: set[int],
        logprobs: Logprobs | None,
        show: Callable[[Item | None], None],
    ):
        self._decoder, self._cut, self._parser = decoder, Cut(stops), parser
        self._ends, self._logprobs, self._show = ends, logprobs, show
        self._entries: list[Entry] = []  # tokens whose text is not shown yet
        self._blanks = ""  # at the end of what is shown so far, if it goes on
        self.tokens: list[int] = []
        self.items: list[Item] = []
        self.reasoning_tokens = 0
        self.reason: Reason | Exception | None = None
        self.read = self.prompt_tokens = 0
        self.submitted = self.first = self.ended = time.monotonic()
        self.begun: float | None = None
        begun = [] if parser is None else parser.initial_events
        self._goes_on = any(event["type"] == "region_chunk" for event in begun)  # with a text of the prompt

    @property
    def text(self) -> str:
        return self._joined("text")

    @property
    def reasoning(self) -> str:
        return self._joined("reasoning")

    def _joined(self, kind: str) -> str:
        return "".join(item.text for item in self.items if isinstance(item, Piece) and item.kind == kind)

    @property
    def calls(self) -> list[Call]:
        return [item for item in self.items if isinstance(item, Call)]

    @property
    def entries(self) -> list[Entry] | None:
        """The entries of all tokens but one that ends the answer; None where nobody asks."""
        if self._logprobs is None:
            return None
        return [entry for item in self.items if isinstance(item, Piece) for entry in item.entries]

    @property
    def stop(self) -> str | None:
        """The stop that the answer ends before."""
        return self._cut.stop

    @property
    def is_cut(self) -> bool:
        """Whether something other than the model has ended the answer: an error, or the server's end."""
        return self.reason not in (None, "stop", "length")

    def progress(self, read: int, of: int) -> None:
        self.read = read
        if self.begun is None:
            self.begun = time.monotonic()

    def take(self, token: int) -> bool:
        """Takes the next token. Returns: whether a stop has come."""
        if not self.tokens:
            self.first = time.monotonic()
        self.tokens.append(token)
        self.reasoning_tokens += self._parser is not None and self._parser.is_thinking
        if token not in self._ends:
            if self._logprobs is not None:
                self._entries.append(self._logprobs.take(token))
            self._add(self._cut.add(self._decoder.add(token)))
        elif self._parser is not None:  # it may close a call
            self._add(self._cut.add(self._decoder.add(token)))
        return self._cut.stop is not None

    def end(self, reason: Reason | Exception) -> None:
        self.ended = time.monotonic()
        if not self.tokens:
            self.first = self.ended
        try:
            self._add_rest(reason)
            self.reason = reason
        except Exception as error:
            self.reason = error
        finally:
            self._show(None)

    def _add_rest(self, reason: Reason | Exception) -> None:
        """Hands out what was held back."""
        self._add(self._cut.rest())
        if self._parser is not None:
            self._take(self._parser.finalize()[1])
        if self._blanks and (self.stop is not None or reason == "length"):
            self._hand_out(Piece("text", self._blanks, self._taken()))
        if self._entries:
            self._hand_out(Piece("text", "", self._taken()))

    def _add(self, text: str) -> None:
        if text and self._parser is not None:
            self._take(self._parser.feed(text))
        elif text:
            self._hand_out(Piece("text", text, self._taken()))

    def _take(self, events: list[dict[str, Any]]) -> None:
        """Takes what the parser has read; blanks around reasoning and text are not part of them."""
        for event in events:
            kind = event["type"], event.get("field")
            if kind == ("region_close", "tool_calls"):
                if (call := call_of(event["value"])) is not None:
                    self._hand_out(call)
            elif kind[0] == "region_open":
                self._blanks = ""
            elif kind[0] == "region_chunk" and not event.get("dirty"):
                if kind[1] == "content":
                    self._add_part("text", event["text"])
                elif kind[1] in REASONING:
                    self._add_part("reasoning", event["text"])

    def _add_part(self, kind: Literal["text", "reasoning"], text: str) -> None:
        last = self.items[-1] if self.items else None
        is_first = not (isinstance(last, Piece) and last.kind == kind)
        is_first &= not (self._goes_on and last is None)
        whole = text.lstrip() if is_first else self._blanks + text
        shown = whole.rstrip()
        self._blanks = whole[len(shown) :]
        if shown:
            self._hand_out(Piece(kind, shown, self._taken()))

    def _taken(self) -> list[Entry]:
        entries, self._entries = self._entries, []
        return entries

    def _hand_out(self, item: Item) -> None:
        self.items.append(item)
        self._show(item)
