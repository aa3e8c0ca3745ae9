"""An answer, piece by piece: its tokens become text, reasoning and tool calls."""

import time
import uuid
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from tokenizers.decoders import DecodeStream

from ..engine.job import Reason
from .logprobs import Entry, Logprobs
from .protocols.reader import Reader, Sink


@dataclass
class Piece:
    """Some text of an answer, with the entries of the tokens that it ends with."""

    kind: Literal["text", "reasoning"]
    text: str
    entries: list[Entry] = field(default_factory=list)


@dataclass
class Call:
    """A tool call, whose arguments grow: the text of an object in JSON.

    Args:
        id: that the model gave it, or a new one.
        is_whole: True once nothing more comes.
    """

    name: str
    id: str
    parts: list[str] = field(default_factory=list)
    is_whole: bool = False

    @property
    def arguments(self) -> str:
        return "".join(self.parts)


class Arguments(NamedTuple):
    """The next part of the arguments of a call."""

    call: Call
    parts: list[str]

    @property
    def text(self) -> str:
        return "".join(self.parts)


class CallEnd(NamedTuple):
    """The end of a call."""

    call: Call


Item = Piece | Call | Arguments | CallEnd


def new_id(prefix: str) -> str:
    return f"{prefix}{uuid.uuid4().hex}"


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
    """When an answer was submitted, its prefill began, its first token came and it ended; None before."""

    submitted: float = field(default_factory=time.monotonic)
    begun: float | None = None
    first: float | None = None
    ended: float | None = None

    @property
    def generating(self) -> float:
        """Seconds from the first token to the end."""
        return self.ended - self.first if self.ended and self.first else 0.0


class Items:
    """Divides the text of an answer into text, reasoning and calls.

    Args:
        begin: makes the reader that tells them apart; None where all is text.
        prompt: the beginning of the answer that the prompt has.
        ends_at_call: whether text behind a call ends the answer and is left out, as where a call is forced.

    Attributes:
        made: all pieces and calls so far.
        entries: of tokens whose text is not shown yet.
        is_complete: True once text came behind a call that ends the answer.
    """

    def __init__(
        self, begin: Callable[[Sink], Reader] | None = None, prompt: str = "", ends_at_call: bool = False
    ):
        self._ends_at_call = ends_at_call
        self.made: list[Piece | Call] = []
        self.entries: list[Entry] = []
        self.is_complete = False
        self._new: list[Item] = []
        self._kind, self._has_begun = "", False  # the part that goes on, and whether it has a character
        self._blanks: list[str] = []  # at the end of what is shown so far, if it goes on
        self._is_of_prompt = True
        self._reader = None if begin is None else begin(self)
        if self._reader is not None:
            self._reader.feed(prompt)
        self._is_of_prompt = False

    @property
    def is_thinking(self) -> bool:
        return self._reader is not None and self._reader.is_thinking

    def add(self, text: str) -> list[Item]:
        """The items of the next text."""
        if self._reader is not None:
            self._reader.feed(text)
        elif text:
            self._hand_out(Piece("text", text, self._taken()))
        return self._new_items()

    def end(self, shows_blanks: bool) -> list[Item]:
        """The items of what was held back."""
        if self._reader is not None:
            self._reader.end()
        if self._blanks and shows_blanks and self._kind == "text":
            self._hand_out(Piece("text", "".join(self._blanks), self._taken()))
        if self.entries:
            self._hand_out(Piece("text", "", self._taken()))
        return self._new_items()

    # Parts that the reader hands out; blanks around reasoning and text are not part of them.

    def text(self, text: str) -> None:
        self._add("text", text)

    def thought(self, text: str) -> None:
        self._add("reasoning", text)

    def call(self, name: str, own_id: str) -> None:
        self._begin("call")
        if not self._is_of_prompt:
            self._hand_out(Call(name, own_id or new_id("call_")))

    def arguments(self, text: str) -> None:
        call = self._call
        if text and call is not None:
            call.parts.append(text)
            if self._new and isinstance(self._new[-1], Arguments):
                self._new[-1].parts.append(text)
            else:
                self._new.append(Arguments(call, [text]))

    def end_call(self) -> None:
        if (call := self._call) is not None:
            if not call.parts:
                self.arguments("{}")
            call.is_whole = True
            self._new.append(CallEnd(call))

    @property
    def _call(self) -> Call | None:
        """The call that grows; None where the prompt has it."""
        last = self.made[-1] if self.made else None
        return last if isinstance(last, Call) else None

    def _begin(self, kind: str) -> None:
        if kind != self._kind:
            self._kind, self._has_begun = kind, False
            self._blanks.clear()

    def _add(self, kind: Literal["text", "reasoning"], text: str) -> None:
        self._begin(kind)
        whole = text if self._has_begun else text.lstrip()
        shown = whole.rstrip()
        self._has_begun |= bool(shown)
        if self._is_of_prompt:
            return
        if shown and self._ends_at_call and any(isinstance(item, Call) for item in self.made):
            self.is_complete = True
        if shown and not self.is_complete:
            self._hand_out(Piece(kind, "".join((*self._blanks, shown)), self._taken()))
            self._blanks.clear()
        if len(shown) < len(whole):
            self._blanks.append(whole[len(shown) :])

    def _taken(self) -> list[Entry]:
        entries, self.entries = self.entries, []
        return entries

    def _hand_out(self, item: Piece | Call) -> None:
        self.made.append(item)
        self._new.append(item)

    def _new_items(self) -> list[Item]:
        new, self._new = self._new, []
        return new


class Token(NamedTuple):
    """A token that the device has generated: its text, which may wait for the next one, and its entry."""

    text: str
    entry: Entry | None


Event = Token | Reason | Exception  # the latter end an answer


class Answer:
    """One answer. Tokens come on the thread of the device, which finds stop strings; whoever shows the answer
    reads them.

    Args:
        step: makes the text of tokens, see `text_stream`.
        items: divides the text.
        ends: tokens that end an answer.
        hidden: special tokens that are no text.
        logprobs: keeps their probabilities; None where nobody asks.
        show: takes each event, on the thread of the device.

    Attributes:
        tokens: how many were read.
        reason: why it has ended: "stop", "length", "cancelled", or an error.
    """

    def __init__(
        self,
        step: Callable[[int], str | None],
        stops: Sequence[str],
        items: Items,
        ends: set[int],
        hidden: Set[int],
        logprobs: Logprobs | None,
        show: Callable[[Event], object],
    ):
        self._step, self._cut, self._items = step, Cut(stops), items
        self._ends, self._hidden, self._logprobs, self._show = ends, hidden, logprobs, show
        self.tokens = self.reasoning_tokens = 0
        self.reason: Reason | Exception | None = None
        self.read_tokens = self.prompt_tokens = 0
        self.times = Times()

    # On the thread of the device

    def progress(self, read: int, of: int) -> None:
        self.read_tokens = read
        if self.times.begun is None:
            self.times.begun = time.monotonic()

    def append(self, token: int) -> bool:
        """Shows the next token. Returns: whether a stop or a forced call completes the answer."""
        if self.times.first is None:
            self.times.first = time.monotonic()
        text, entry = "", None
        if token not in self._ends:
            if self._logprobs is not None:
                entry = self._logprobs.pop(token)
            if token not in self._hidden:
                text = self._cut.add(self._step(token) or "")
        self._show(Token(text, entry))
        return self._cut.stop is not None or self._items.is_complete

    def end(self, reason: Reason | Exception) -> None:
        self.times.ended = time.monotonic()
        self._show(reason)

    # Where it is shown

    def read(self, event: Event) -> list[Item]:
        """The items of an event."""
        if isinstance(event, Token):
            if self._items.is_complete:  # the device did not know yet
                return []
            self.tokens += 1
            self.reasoning_tokens += self._items.is_thinking
            if event.entry is not None:
                self._items.entries.append(event.entry)
            return self._items.add(event.text)
        reason: Reason | Exception = event
        if self._items.is_complete and isinstance(reason, str):
            reason = "stop"
        items = self._items.add(self._cut.rest())
        items += self._items.end(shows_blanks=self.stop is not None or reason == "length")
        self.reason = reason
        return items

    @property
    def items(self) -> list[Piece | Call]:
        """Pieces and calls; a call that the end of the answer has cut off is none."""
        return [item for item in self._items.made if isinstance(item, Piece) or item.is_whole]

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
