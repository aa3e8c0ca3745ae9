"""An answer, piece by piece: its tokens become text, reasoning and calls of tools."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tokenizers.decoders import DecodeStream

from ..engine.job import Reason
from .logprobs import Entry, Logprobs
from .protocols.tools import REASONING, Call, Parser, call_of


@dataclass
class Piece:
    """Some text of an answer, with the entries of the tokens that it ends with."""

    kind: Literal["text", "reasoning"]
    text: str
    entries: list[Entry] = field(default_factory=list)


Item = Piece | Call


def text_stream(tokenizer: Any, skips_special: bool) -> Callable[[int], str | None]:
    """A function of each next token, which returns the text that can be shown now: what may be a part of a
    character waits for the rest of it, and is left out if that never comes.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        stream = DecodeStream(skip_special_tokens=skips_special)
        return lambda token: stream.step(backend, token)
    ids, shown = list[int](), 0

    def step(token: int) -> str | None:  # for a tokenizer in Python
        nonlocal shown
        ids.append(token)
        before, whole = (
            tokenizer.decode(some, skip_special_tokens=skips_special) for some in (ids[:shown], ids)
        )
        if whole.endswith("\ufffd") or len(whole) <= len(before):
            return None
        del ids[:shown]  # the next token begins with a blank or not by the last ones
        shown = len(ids)
        return str(whole[len(before) :])

    return step


class Cut:
    """Text that ends before the first of some stops, piece by piece.

    What may be the beginning of a stop is held back until it is known not to be one. The time is linear in
    the text (Knuth, Morris and Pratt).

    Attributes:
        stop: the one that has come, if any.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops, self._back = [(stop, _borders(stop)) for stop in stops], ""
        self._matched = [0] * len(stops)  # characters of each stop that the text ends with
        self.stop: str | None = None

    def add(self, piece: str) -> str:
        """Returns: what can be shown now."""
        if self.stop is not None:
            return ""
        text, before = self._back + piece, len(self._back)
        ends = list[tuple[int, str]]()
        for number, (stop, borders) in enumerate(self._stops):
            matched = self._matched[number]
            for place, character in enumerate(piece, before + 1):
                while matched and stop[matched] != character:
                    matched = borders[matched - 1]
                matched += stop[matched] == character
                if matched == len(stop):
                    ends.append((place - matched, stop))
                    break
            self._matched[number] = matched
        if ends:
            place, self.stop = min(ends)
            self._back = ""
            return text[:place]
        shown = len(text) - max(self._matched, default=0)
        self._back = text[shown:]
        return text[:shown]

    def rest(self) -> str:
        """Returns: the text that was held back, at the end."""
        rest, self._back = self._back, ""
        return rest


def _borders(stop: str) -> list[int]:
    """Lengths of the longest proper prefix of each prefix of a text that it ends with, too."""
    borders, matched = [0], 0
    for character in stop[1:]:
        while matched and stop[matched] != character:
            matched = borders[matched - 1]
        matched += stop[matched] == character
        borders.append(matched)
    return borders


@dataclass
class Times:
    """When an answer was submitted, its prompt began to be read (None before that), its first token came, and
    it ended.
    """

    submitted: float = field(default_factory=time.monotonic)
    begun: float | None = None
    first: float = 0.0
    ended: float = 0.0


class Items:
    """Divides the text of an answer into text, reasoning and calls, and hands them out.

    Args:
        parser: tells them apart; None where all is text.
        show: takes each part.
        ends_at_call: whether text behind a call ends the answer and is left out, as where a call is forced.
    """

    def __init__(self, parser: Parser | None, show: Callable[[Item], None], ends_at_call: bool = False):
        self.parser, self._show, self._ends_at_call = parser, show, ends_at_call
        self.made: list[Item] = []
        self.entries: list[Entry] = []  # tokens whose text is not shown yet
        self._blanks = ""  # at the end of what is shown so far, if it goes on
        begun = [] if parser is None else parser.initial_events
        self._goes_on = any(event["type"] == "region_chunk" for event in begun)  # with a text of the prompt
        self.is_complete = False

    @property
    def is_thinking(self) -> bool:
        return self.parser is not None and self.parser.is_thinking

    def add(self, text: str) -> None:
        if text and self.parser is not None:
            self._take(self.parser.feed(text))
        elif text:
            self._hand_out(Piece("text", text, self._taken()))

    def end(self, shows_blanks: bool) -> None:
        """Hands out what was held back."""
        if self.parser is not None:
            self._take(self.parser.finalize()[1])
        if self._blanks and shows_blanks:
            self._hand_out(Piece("text", self._blanks, self._taken()))
        if self.entries:
            self._hand_out(Piece("text", "", self._taken()))

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
        last = self.made[-1] if self.made else None
        is_first = not (isinstance(last, Piece) and last.kind == kind)
        is_first &= not (self._goes_on and last is None)
        whole = text.lstrip() if is_first else self._blanks + text
        shown = whole.rstrip()
        self._blanks = whole[len(shown) :]
        if shown and self._ends_at_call and any(isinstance(item, Call) for item in self.made):
            self.is_complete = True
        if shown and not self.is_complete:
            self._hand_out(Piece(kind, shown, self._taken()))

    def _taken(self) -> list[Entry]:
        entries, self.entries = self.entries, []
        return entries

    def _hand_out(self, item: Item) -> None:
        self.made.append(item)
        self._show(item)


class Answer:
    """One answer. It takes tokens on the thread of the device, and hands out what they are.

    Args:
        step: makes their text, see `text_stream`.
        items: divides the text.
        ends: tokens that end an answer.
        logprobs: keeps their probabilities; None where nobody asks.
        on_end: called behind the last part.

    Attributes:
        tokens: all that were generated.
        reason: why it has ended: "stop", "length", "cancelled", or an error.
    """

    def __init__(
        self,
        step: Callable[[int], str | None],
        stops: Sequence[str],
        items: Items,
        ends: set[int],
        logprobs: Logprobs | None,
        on_end: Callable[[], None],
    ):
        self._step, self._cut, self._items = step, Cut(stops), items
        self._ends, self._logprobs, self._on_end = ends, logprobs, on_end
        self.tokens: list[int] = []
        self.reasoning_tokens = 0
        self.reason: Reason | Exception | None = None
        self.read = self.prompt_tokens = 0
        self.times = Times()

    @property
    def items(self) -> list[Item]:
        return self._items.made

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
        if self.times.begun is None:
            self.times.begun = time.monotonic()

    def take(self, token: int) -> bool:
        """Takes the next token. Returns: whether a stop or a forced call completes the answer."""
        if not self.tokens:
            self.times.first = time.monotonic()
        self.tokens.append(token)
        self.reasoning_tokens += self._items.is_thinking
        is_last = token in self._ends
        if not is_last and self._logprobs is not None:
            self._items.entries.append(self._logprobs.take(token))
        if not is_last or self._items.parser is not None:  # the last one may close a call
            self._items.add(self._cut.add(self._step(token) or ""))
        return self._cut.stop is not None or self._items.is_complete

    def end(self, reason: Reason | Exception) -> None:
        self.times.ended = time.monotonic()
        if not self.tokens:
            self.times.first = self.times.ended
        try:
            self._items.add(self._cut.rest())
            self._items.end(shows_blanks=self.stop is not None or reason == "length")
            self.reason = reason
        except Exception as error:
            self.reason = error
        finally:
            self._on_end()
