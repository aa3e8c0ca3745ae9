"""Streamed answers: tokens become text, reasoning and tool calls."""

import time
import uuid
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ..engine.job import Reason
from .logprobs import Logprobs, TokenLogprob
from .protocols.reader import Reader, Sink


@dataclass
class Piece:
    """A text delta of an answer, with the logprob entries of the tokens that end in it."""

    kind: Literal["text", "reasoning"]
    text: str
    entries: list[TokenLogprob] = field(default_factory=list)


@dataclass
class ToolCall:
    """A tool call with growing arguments, a JSON object as text.

    Args:
        id: given by the model, or a new one.
        has_ended: True once the model ended it. A call that the end of the answer cuts off never ends.
        is_whole: True if it ended, and its arguments are JSON.
    """

    name: str
    id: str
    parts: list[str] = field(default_factory=list)
    has_ended: bool = False
    is_whole: bool = False

    @property
    def arguments(self) -> str:
        return "".join(self.parts)


class Arguments(NamedTuple):
    """Next part of a tool call's arguments."""

    call: ToolCall
    parts: list[str]

    @property
    def text(self) -> str:
        return "".join(self.parts)


class CallEnd(NamedTuple):
    """End of a tool call."""

    call: ToolCall


Item = Piece | ToolCall | Arguments | CallEnd


def new_id(prefix: str) -> str:
    return f"{prefix}{uuid.uuid4().hex}"


_MOST_HELD = 16  # tokens of a character that is not complete; more of them are none of a character


def text_stream(tokenizer: Any, skips_special: bool) -> Callable[[int], str | None]:
    """Incremental detokenizer: a function from the next token to its text delta, or None.

    An incomplete UTF-8 character is held back until it is complete, and dropped if it never is.
    """
    decode = getattr(tokenizer, "backend_tokenizer", tokenizer).decode
    ids, shown = list[int](), 0

    def step(token: int) -> str | None:
        nonlocal shown
        ids.append(token)
        before, whole = (decode(some, skip_special_tokens=skips_special) for some in (ids[:shown], ids))
        if not whole.startswith(before):  # an octet that is no character changes the ones before it
            whole = before + decode(ids[shown:], skip_special_tokens=skips_special)
        is_held = whole.endswith("\ufffd") and len(ids) - shown <= _MOST_HELD
        if is_held or len(whole) <= len(before):
            return None
        del ids[:shown]  # the next token begins with a blank or not by the last ones
        shown = len(ids)
        return str(whole[len(before) :])

    return step


class Cut:
    """Streaming search for stop strings; the text ends before the first one.

    A possible start of a stop string is held back. Runs in linear time (Knuth-Morris-Pratt).

    Attributes:
        stop: the stop string that was found, if any.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops, self._back = [(stop, _borders(stop)) for stop in stops], ""
        self._matched = [0] * len(stops)  # characters of each stop that the text ends with
        self.stop: str | None = None

    def add(self, delta: str) -> str:
        """Text that can be shown after the next delta."""
        if self.stop is not None:
            return ""
        text, before = self._back + delta, len(self._back)
        ends = list[tuple[int, str]]()
        for number, (stop, borders) in enumerate(self._stops):
            matched = self._matched[number]
            for place, character in enumerate(delta, before + 1):
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
        """Text still held back at the end."""
        rest, self._back = self._back, ""
        return rest


def _borders(stop: str) -> list[int]:
    """KMP failure function: length of the longest proper border of each prefix of a text."""
    borders, matched = [0], 0
    for character in stop[1:]:
        while matched and stop[matched] != character:
            matched = borders[matched - 1]
        matched += stop[matched] == character
        borders.append(matched)
    return borders


@dataclass
class Times:
    """Timestamps of an answer: submission, start of prefill, first token, end; None if not reached."""

    submitted: float = field(default_factory=time.monotonic)
    begun: float | None = None
    first: float | None = None
    ended: float | None = None

    @property
    def generating(self) -> float:
        """Seconds from the first token to the end of the answer."""
        return self.ended - self.first if self.ended and self.first else 0.0


class Items:
    """Parses the text of an answer into text, reasoning and tool calls.

    Args:
        new_reader: makes the parser; None if everything is text.
        prompt: start of the answer that is part of the prompt.
        has_tools: False to show the arguments of calls as text.
        ends_at: ends the answer behind its first tool call, or at text after tool calls; None does neither.
        new_call_id: makes the id of a call to which the model gives none.

    Attributes:
        made: all text deltas and calls so far.
        entries: logprob entries of tokens whose text is held back.
        is_complete: True once `ends_at` ended the answer.
    """

    def __init__(
        self,
        new_reader: Callable[[Sink], Reader] | None = None,
        prompt: str = "",
        has_tools: bool = True,
        ends_at: Literal["call", "text"] | None = None,
        new_call_id: Callable[[], str] = lambda: new_id("call_"),
    ):
        self._has_tools, self._ends_at, self._new_call_id = has_tools, ends_at, new_call_id
        self.made: list[Piece | ToolCall] = []
        self.entries: list[TokenLogprob] = []
        self.is_complete = False
        self._new: list[Item] = []
        self._kind, self._has_begun = "", False  # the part that goes on, and whether blanks belong to it
        self._blanks: list[str] = []  # at the end of what is shown so far, if it goes on
        self._is_of_prompt = True
        self._reader = None if new_reader is None else new_reader(self)
        if self._reader is not None:
            self._reader.feed(prompt)
        self._is_of_prompt = False

    @property
    def is_thinking(self) -> bool:
        return self._reader is not None and self._reader.is_thinking

    def add(self, text: str) -> list[Item]:
        """Items completed by the next text delta."""
        if self._reader is not None:
            self._reader.feed(text)
        elif text:
            self._hand_out(Piece("text", text, self._taken()))
        return self._new_items()

    def end(self, shows_blanks: bool, is_cut: bool) -> list[Item]:
        """Items of the text held back at the end.

        Args:
            is_cut: True if the model did not end the answer itself.
        """
        if self._reader is not None:
            self._reader.end(is_cut)
        if self._blanks and shows_blanks and self._kind == "text":
            self._hand_out(Piece("text", "".join(self._blanks), self._taken()))
        if self.entries:
            self._hand_out(Piece("text", "", self._taken()))
        return self._new_items()

    # Parts that the reader hands out. Blanks between them, and at the end, are not part of them.

    def text(self, text: str) -> None:
        self._add("text", text)

    def thought(self, text: str) -> None:
        self._add("reasoning", text)

    def call(self, name: str, own_id: str) -> None:
        if not self._has_tools:
            return
        self._begin("call")
        if not self._is_of_prompt and not self.is_complete:
            self._hand_out(ToolCall(name, own_id or self._new_call_id()))

    def arguments(self, text: str) -> None:
        if not self._has_tools:
            return self.text(text)
        call = self._call
        if text and call is not None:
            call.parts.append(text)
            if self._new and isinstance(self._new[-1], Arguments):
                self._new[-1].parts.append(text)
            else:
                self._new.append(Arguments(call, [text]))

    def end_call(self, is_whole: bool) -> None:
        if (call := self._call) is not None:
            if not call.parts:
                self.arguments("{}")
            call.has_ended, call.is_whole = True, is_whole
            self._new.append(CallEnd(call))
            self.is_complete |= self._ends_at == "call"

    @property
    def _call(self) -> ToolCall | None:
        """Tool call that is being parsed; None if it is not part of the answer."""
        last = self.made[-1] if self.made else None
        return last if isinstance(last, ToolCall) and not self.is_complete else None

    def _begin(self, kind: str) -> None:
        if kind != self._kind:
            self._has_begun = not self._kind and kind == "text"  # nothing is before it: blanks belong to it
            self._kind = kind
            self._blanks.clear()

    def _add(self, kind: Literal["text", "reasoning"], text: str) -> None:
        """Adds text to the answer. Blanks at its end are held back until ink follows."""
        self._begin(kind)
        whole = text if self._has_begun else text.lstrip()
        shown = whole.rstrip()
        self._has_begun |= bool(shown)
        if self._is_of_prompt:
            return
        if shown and self._ends_at == "text" and any(isinstance(item, ToolCall) for item in self.made):
            self.is_complete = True
        if shown and not self.is_complete:
            self._hand_out(Piece(kind, "".join((*self._blanks, shown)), self._taken()))
            self._blanks.clear()
        if len(shown) < len(whole):
            self._blanks.append(whole[len(shown) :])

    def _taken(self) -> list[TokenLogprob]:
        entries, self.entries = self.entries, []
        return entries

    def _hand_out(self, item: Piece | ToolCall) -> None:
        self.made.append(item)
        self._new.append(item)

    def _new_items(self) -> list[Item]:
        new, self._new = self._new, []
        return new


class Token(NamedTuple):
    """A generated token: its text delta, if complete, and its logprob entry."""

    text: str
    entry: TokenLogprob | None


Event = Token | Reason | Exception  # the latter end an answer


class Answer:
    """One answer. The device thread appends tokens and finds stop strings; the event loop reads the events.

    Args:
        step: detokenizer, see `text_stream`.
        items: parser of the text.
        ends: end tokens.
        hidden: special tokens without text.
        logprobs: records log probabilities; None if not requested.
        show: called with each event, on the device thread.

    Attributes:
        tokens: number of tokens read.
        reason: "stop", "length", "cancelled", or an error.
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
        """Processes the next token. Returns: True if a stop string or a forced call completes the answer."""
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
        """Items of an event."""
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
        shows_blanks = self.stop is not None or reason == "length"
        items += self._items.end(shows_blanks, is_cut=reason != "stop")
        self.reason = reason
        return items

    @property
    def made(self) -> list[Piece | ToolCall]:
        """Text deltas and tool calls, with those that are not whole."""
        return self._items.made

    @property
    def items(self) -> list[Piece | ToolCall]:
        """Text deltas and tool calls, without a call truncated by the end of the answer."""
        return [item for item in self.made if isinstance(item, Piece) or item.has_ended]

    @property
    def text(self) -> str:
        return self._joined("text")

    @property
    def reasoning(self) -> str:
        return self._joined("reasoning")

    def _joined(self, kind: str) -> str:
        return "".join(item.text for item in self.items if isinstance(item, Piece) and item.kind == kind)

    @property
    def calls(self) -> list[ToolCall]:
        return [item for item in self.items if isinstance(item, ToolCall)]

    @property
    def entries(self) -> list[TokenLogprob] | None:
        """Logprob entries of all tokens except an end token; None if not requested."""
        if self._logprobs is None:
            return None
        return [entry for item in self.items if isinstance(item, Piece) for entry in item.entries]

    @property
    def stop(self) -> str | None:
        """Stop string that ended the answer, if any."""
        return self._cut.stop

    @property
    def is_cut(self) -> bool:
        """True if an error or the server's shutdown ended the answer."""
        return self.reason not in (None, "stop", "length")
