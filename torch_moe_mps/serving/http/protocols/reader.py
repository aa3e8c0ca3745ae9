"""Streaming parser of answers: text, reasoning and tool calls.

`Reader` is one state machine for all formats. Its states are generators that yield to wait for more text.
Each character is compared with the marks of one state, so parsing takes linear time. Only a possible start
of a mark or a call is held back. It is text as soon as it can be neither.
"""

import functools
import json
import re
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import regex

from .forms import Form, Tags
from .values import OTHER, TEXT, AllowedValues, escaped, in_json, is_json, kind_of, literal, python_literal

T = TypeVar("T")
Steps = Generator[None, None, T]
Show = Callable[[str], object]
_KEYS = {"name", "arguments", "parameters", "type", "id", "function"}  # a call in JSON may begin with these
_HEX = "0123456789abcdefABCDEF"
_ESCAPES = {"x": (2, _HEX), "u": (4, _HEX), "U": (8, _HEX)} | dict.fromkeys("01234567", (2, "01234567"))
_QUOTES = ('"""', "'''", '"', "'")
_CALL = regex.compile(r"(?P<name>[\w.-]{1,256})\s{0,64}\(")  # in Python
_KEYWORD = regex.compile(r"""([^\s=,()\[\]{}'"]{1,256})\s{0,64}=""")
# Harmony's marks, and the header between a message's first mark and its text.
_BEGINS, _ENDS = ("<|start|>", "<|channel|>"), ("<|end|>", "<|return|>", "<|call|>")
_TO = r"\s{0,8}(?:to=(?:functions\.(?P<name>[^\s<]{1,256})|[^\s<]{1,256}))?"
_HEADER = regex.compile(
    rf"(?:<\|(?:end|return|call)\|>\s{{0,64}}(?=<))?(?:<\|start\|>\w{{1,64}})?{_TO}"
    rf"(?:<\|channel\|>(?P<kind>\w{{1,64}}){_TO}\s{{0,8}}(?:<\|constrain\|>)?\w{{0,64}}\s{{0,8}})?<\|message\|>"
)
_INK = re.compile(r"\S")
_SURROGATE = re.compile(r"[\ud800-\udfff]")  # half of a pair, which has no UTF-8


class Sink(Protocol):
    """Receiver of the parsed parts of an answer."""

    def text(self, text: str) -> object: ...
    def thought(self, text: str) -> object: ...
    def call(self, name: str, own_id: str) -> object:
        """Called at the start of a tool call."""

    def arguments(self, text: str) -> object:
        """Called with the next part of the last call's JSON arguments."""

    def end_call(self, is_whole: bool) -> object:
        """Called at the end of a call.

        Args:
            is_whole: False if its arguments are no JSON.
        """


@dataclass
class _CallObject:
    """State of an object that may be a call.

    Attributes:
        is_function: True for the `function` of another object.
        name: the tool's, or "" before it is read.
        early: parts of arguments that stand in front of the name.
        has_function: True if its `function` is the call.
    """

    is_function: bool
    name: str = ""
    early: list[str] = field(default_factory=list)
    has_arguments: bool = False
    has_function: bool = False


class _Scanner:
    """A text that arrives in parts. `_steps` reads it, and waits at its end for more."""

    _steps: Steps[None]

    def __init__(self) -> None:
        self._text, self._at, self._is_last, self._is_cut = "", 0, False, False
        self._raw: list[str] | None = None  # text read so far that may be a call

    def feed(self, text: str) -> None:
        self._text, self._at = self._text[self._at :] + text, 0
        next(self._steps, None)

    def end(self, is_cut: bool) -> None:
        """Flushes the text held back.

        Args:
            is_cut: True if the model did not end the answer itself. The beginning of a call is no text then.
        """
        self._is_last, self._is_cut = True, is_cut
        self.feed("")

    @property
    def _is_over(self) -> bool:
        return self._is_last and self._at == len(self._text)

    def _value(self, show: Show, ends: tuple[str, ...]) -> Steps[bool]:
        """Copies a JSON value, of a string its content.

        Args:
            ends: marks that end a broken value. They are left unread, and have no meaning inside of strings.

        Returns: True if it is complete.
        """
        char = yield from self._ink()
        if char == '"':
            written = yield from self._string()
            text = _decoded(written)
            show(written if text is None else _SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", text))
            return text is not None
        if char not in ("{", "["):
            return (yield from self._until((), show, (",", "}", "]", *ends))) in (",", "}", "]")
        return (yield from self._rest(0, show, ends))

    def _rest(self, depth: int, show: Show, ends: tuple[str, ...]) -> Steps[bool]:
        """Copies an object or a list to its end, from so many open brackets on. Returns: as `_value`."""
        while (mark := (yield from self._until(('"', "{", "}", "[", "]"), show, ends))) is not None:
            if mark in ends:
                return False
            show(mark)
            if mark == '"':
                yield from self._quoted(mark, show)
            else:
                depth += 1 if mark in "{[" else -1
                if not depth:
                    return True
        return False

    def _string(self) -> Steps[str]:
        """JSON string as it is written, with its quotes."""
        parts = ['"']
        self._pass(1)
        yield from self._quoted('"', parts.append)
        return "".join(parts)

    def _quoted(self, quote: str, show: Show) -> Steps[bool]:
        """Copies a string after its first quote. Returns: True if it is complete."""
        while (mark := (yield from self._until((quote, "\\"), show))) is not None:
            show(mark)
            if mark == quote:
                return True
            yield from self._peek()
            show(self._pass(1))
        return False

    def _until(self, marks: tuple[str, ...], show: Show, ends: tuple[str, ...] = ()) -> Steps[str | None]:
        """Copies text up to a mark. Returns: the mark, or None at the end of the answer.

        Args:
            ends: more marks, which are left unread.
        """
        both = (*marks, *ends)
        pattern, firsts, longest = _compiled(both)
        while True:
            text, found = self._text, pattern.search(self._text, self._at)
            end = len(text) if found is None else found.start()
            if not self._is_last:  # the beginning of a mark, or of a longer one than was found
                for at in range(max(self._at, len(text) - longest + 1), min(end + 1, len(text))):
                    if text[at] in firsts and any(
                        mark.startswith(text[at:]) for mark in both if mark != text[at:]
                    ):
                        end, found = at, None
                        break
            if before := self._pass(end - self._at):
                show(before)
            if found is not None:
                if found[0] in marks:
                    self._pass(len(found[0]))
                return found[0]
            if self._is_last:
                return None
            yield

    def _here(self, marks: tuple[str, ...], keeps: bool = False) -> Steps[str | None]:
        """Reads blanks and the mark that stands behind them. Returns: it, or None if none does.

        Args:
            keeps: True to leave the mark unread.
        """
        if not (yield from self._ink()) or not marks:
            return None
        longest = max(map(len, marks))
        while True:
            rest = self._text[self._at : self._at + longest]
            if not any(mark.startswith(rest) and mark != rest for mark in marks):
                break
            if self._is_last:
                if self._is_cut:
                    self._pass(len(rest))
                break
            yield
        found = max((mark for mark in marks if rest.startswith(mark)), key=len, default=None)
        if found and not keeps:
            self._pass(len(found))
        return found

    def _match(self, pattern: regex.Pattern[str]) -> Steps[regex.Match[str] | None]:
        """Reads what a pattern matches here. Returns: None as soon as it cannot match, nothing read."""
        while True:
            can_grow = not self._is_last or self._is_cut
            found = pattern.match(self._text, self._at, partial=can_grow)
            if found is None or not found.partial:
                self._pass(0 if found is None else found.end() - self._at)
                return found
            if self._is_last:
                self._pass(len(self._text) - self._at)
                return None
            yield

    def _return(self, text: str) -> None:
        """Lets a text that was read be read again."""
        self._text, self._at = text + self._text[self._at :], 0

    def _skip(self, char: str) -> Steps[bool]:
        """Reads the next non-blank character if it is this one. Returns: whether it is."""
        if (yield from self._ink()) != char:
            return False
        self._pass(1)
        return True

    def _ink(self, show: Show = lambda text: None) -> Steps[str]:
        """Next non-blank character, left unread; "" at the end."""
        while (found := _INK.search(self._text, self._at)) is None:
            show(self._pass(len(self._text) - self._at))
            if self._is_last:
                return ""
            yield
        show(self._pass(found.start() - self._at))
        return found[0]

    def _peek(self) -> Steps[str]:
        """Next character, left unread; "" at the end."""
        while self._at == len(self._text) and not self._is_last:
            yield
        return self._text[self._at : self._at + 1]

    def _pass(self, count: int) -> str:
        """Reads characters that are there."""
        text = self._text[self._at : self._at + count]
        self._at += len(text)
        if self._raw is not None and text:
            self._raw.append(text)
        return text


class Reader(_Scanner):
    """Parser of one answer.

    Args:
        schemas: {tool: schema of its arguments}.

    Attributes:
        is_thinking: True while the text is reasoning.
    """

    def __init__(self, form: Form, sink: Sink, schemas: Mapping[str, Any]):
        self._form, self._sink, self._schemas = form, sink, schemas
        self._arguments: list[str] = []  # the last call's, in parts
        super().__init__()
        self.is_thinking = False
        self._steps = self._harmony() if form.arguments == "harmony" else self._answer()
        next(self._steps)

    # Answers

    def _answer(self) -> Steps[None]:
        form, sink = self._form, self._sink
        marks = (form.thought[0], *form.opens, *form.begins)
        while (mark := (yield from self._until(marks, sink.text))) is not None:
            yield from self._thought() if mark == form.thought[0] else self._run(mark, sink.text)

    def _thought(self) -> Steps[None]:
        form, sink = self._form, self._sink
        marks = (form.thought[1], *((*form.opens, *form.begins) if form.ends_thought else ()))
        self.is_thinking = True
        while (mark := (yield from self._until(marks, sink.thought))) not in (form.thought[1], None):
            if (yield from self._run(mark, sink.thought)):
                break
        self.is_thinking = False

    def _run(self, mark: str | None, show: Show) -> Steps[bool]:
        """Reads the calls behind a mark, and the marks around them. Returns: True if there is one.

        Args:
            show: receives text outside of calls.
        """
        form, has_call = self._form, False
        self._raw = [str(mark)]
        while mark is not None:
            if mark in form.begins:
                if not (yield from self._calls(mark)):
                    break
                has_call, self._raw = True, []
            elif mark in form.closes:
                self._raw = []
            mark = yield from self._here((*form.opens, *form.begins, *form.closes))
        raw, self._raw = "".join(self._raw or []), None
        if raw and (form.needs_tool or not (self._is_cut and self._is_over)):
            (self._sink.text if has_call else show)(raw)
        return has_call

    def _harmony(self) -> Steps[None]:
        """Reads an answer in gpt-oss's form: messages with a header for thoughts, calls or text."""
        sink = self._sink
        show: Show = sink.text
        while True:
            found = yield from self._match(_HEADER)
            if found is not None:
                self.is_thinking = found["kind"] == "analysis"
                show = sink.thought if self.is_thinking else sink.text
                if found["name"]:
                    self._begin(found["name"])
                    yield from self._whole_value((*_BEGINS, *_ENDS))
                    yield from self._here(_ENDS)
            elif (mark := (yield from self._here((*_BEGINS, *_ENDS)))) is not None:
                blanks = list[str]()
                if (yield from self._ink(blanks.append)) or mark in _BEGINS:
                    show("".join((mark, *blanks)))
            yield from self._until((), show, (*_BEGINS, *_ENDS))
            if self._is_over:
                return None

    # Calls

    def _calls(self, mark: str) -> Steps[bool]:
        """Reads the calls behind a mark. Returns: False if there is none."""
        form, arguments = self._form, self._form.arguments
        if mark == "{":
            return (yield from self._object())
        char = yield from self._ink()
        if char == "[" and arguments in ("json", "python"):
            return (yield from self._list())
        if char == "{" and arguments == "json":
            self._pass(1)
            return (yield from self._object())
        found = None if form.header is None else (yield from self._match(form.header))
        if found is None:
            return False
        self._begin(found["name"], found.groupdict().get("id") or "")
        if isinstance(arguments, Tags):
            yield from self._tagged(arguments, found["name"])
        elif (yield from self._ink()) != "{":
            self._end()
        elif arguments == "gemma":
            yield from self._gemma()
        else:
            yield from self._whole_value(form.ends)
        return True

    def _list(self) -> Steps[bool]:
        """Reads a bracketed list of calls: JSON objects or Python calls."""
        self._pass(1)
        is_python, has_call = self._form.arguments == "python", False
        while (char := (yield from self._ink())) != "]":
            if char == ",":
                self._pass(1)
            elif not char or (yield from self._here(self._form.ends, keeps=True)):
                return has_call
            elif is_python:
                if not (yield from self._python()):
                    return False
                has_call = True
            elif not (yield from self._skip("{")) or not (yield from self._object()):
                return False
            else:
                has_call = True
            if char != ",":
                self._raw = []
        self._pass(1)
        return True

    def _object(self, is_function: bool = False) -> Steps[bool]:
        """Reads a call object with name and arguments, after its first brace. Returns: True if it is a call.

        Args:
            is_function: True for the `function` of another object.
        """
        call = _CallObject(is_function)
        while (yield from self._ink()) == '"':
            key = _name_of((yield from self._string()))
            if key is None or not (yield from self._skip(":")):
                break
            if self._form.needs_tool and not call.name and key not in _KEYS:
                return (yield from self._no_call())
            if not (yield from self._member(key, call)):
                return False
            if not (yield from self._skip(",")):
                break
        return self._end_object(call, is_closed=(yield from self._skip("}")))

    def _member(self, key: str, call: _CallObject) -> Steps[bool]:
        """Reads the value of a key of a call object. Returns: False if the object is no call."""
        ends = self._form.ends
        if key == "function" and not call.name and not call.is_function and (yield from self._skip("{")):
            call.name, call.has_function = key, (yield from self._object(is_function=True))
            return call.has_function
        if key == "name" and not call.name and (yield from self._ink()) == '"':
            return (yield from self._tool_name(call))
        if key in ("arguments", "parameters") and not call.has_arguments and not call.has_function:
            call.has_arguments = True
            if call.name:
                self._begin(call.name)
            yield from self._value(self._show if call.name else call.early.append, ends)
        else:
            yield from self._value(_nobody, ends)
        return True

    def _tool_name(self, call: _CallObject) -> Steps[bool]:
        """Reads the name of a call, and shows arguments in front of it. Returns: False without a tool."""
        call.name = _name_of((yield from self._string())) or ""
        if self._form.needs_tool and call.name not in self._schemas:
            return (yield from self._no_call())
        if call.name and call.has_arguments:
            self._begin(call.name)
            self._show("".join(call.early))
        return bool(call.name)

    def _end_object(self, call: _CallObject, is_closed: bool) -> bool:
        """True if an object was a call, which ends; False if the object is no call."""
        if call.has_function:
            return True
        if not call.name or not call.has_arguments:
            if not call.name or self._form.needs_tool or not is_closed:
                return False
            self._begin(call.name)
        self._end(is_closed)
        return True

    def _no_call(self) -> Steps[bool]:
        """Shows an object that is none as text, whose inner objects are no calls. Returns: False."""
        raw, self._raw = "".join(self._raw or []), None
        self._sink.text(raw)
        yield from self._rest(1, self._sink.text, self._form.ends)
        self._raw = []
        return False

    def _whole_value(self, ends: tuple[str, ...]) -> Steps[None]:
        """Reads the arguments at the end of a call."""
        self._end((yield from self._value(self._show, ends)))

    def _begin(self, name: str, own_id: str = "") -> None:
        self._raw, self._arguments, self.is_thinking = None, [], False
        self._sink.call(name, own_id)

    def _show(self, text: str) -> None:
        """Shows the next part of the arguments."""
        self._arguments.append(text)
        self._sink.arguments(text)

    def _end(self, is_closed: bool = True) -> None:
        """Ends a call, unless the end of the answer cuts it off."""
        if is_closed or not (self._is_cut and self._is_over):
            self._sink.end_call(is_json("".join(self._arguments) or "{}"))

    # Calls with tagged arguments

    def _tagged(self, tags: Tags, name: str) -> Steps[None]:
        """Reads a call whose arguments stand in tags, and shows them as one JSON object."""
        schema = self._schemas.get(name) or {}
        marks, comma = (tags.begin, tags.end), ""
        self._show("{")
        mark = yield from self._here(marks)
        while mark != tags.end:
            if mark != tags.begin:
                mark = yield from self._until(marks, _nobody, self._form.ends)
                if mark != tags.begin:
                    break
            key, about = list[str](), list[str]()
            ends = (*marks, *self._form.ends)
            found = yield from self._until((tags.key_end, *filter(None, (tags.value,))), key.append, ends)
            if found == tags.key_end and tags.value:
                found = yield from self._until((tags.value,), about.append, ends)
            if found not in (tags.key_end, tags.value):
                yield from self._until((tags.end,), _nobody, self._form.ends)
                return self._end(False)
            key_name, attributes = "".join(key).strip(), "".join(about).strip()
            self._show(f"{comma}{in_json(key_name)}: ")
            comma = ", "
            # a tag may say whether it is a text
            kind = (TEXT if "true" in attributes else OTHER) if attributes else kind_of(schema, key_name)
            mark = yield from self._tag_value(tags, kind)
            if mark is None:
                return self._end(False)
        if mark is not None or not self._is_cut:
            self._show("}")
        self._end(mark is not None)

    def _tag_value(self, tags: Tags, kind: AllowedValues) -> Steps[str | None]:
        """Parses a tagged value up to its end mark. Returns: the mark, as `_to_end`."""
        if not kind.is_text:
            parts = list[str]()
            is_json = (yield from self._ink(parts.append)) in ("{", "[", '"') and not kind.allows_text
            mark = yield from (self._json_to_end if is_json else self._to_end)(tags, parts.append)
            self._show(kind.json_of("".join(parts), tags.padding))
            return mark
        padding, is_first, back = tags.padding, True, ""

        def show(text: str) -> None:
            nonlocal is_first, back
            text, is_first = text.removeprefix(padding) if is_first else text, False
            text, back = back + text, ""
            if padding and text.endswith(padding):
                text, back = text.removesuffix(padding), padding
            self._show(escaped(text))

        self._show('"')
        mark = yield from self._to_end(tags, show)
        self._show('"')
        return mark

    def _to_end(self, tags: Tags, show: Show, *more: str) -> Steps[str | None]:
        """Copies a tagged value up to its end mark, whichever other marks are in it.

        Args:
            more: further marks to stop at.

        Returns: the mark; the first other one if the answer has no end mark any more; None at the end.
        """
        marks = (tags.value_end, *more)
        mark = yield from self._until(marks, show, (tags.begin, tags.end))
        if mark is None or mark in marks:
            return mark
        held = [self._pass(len(mark))]
        found = yield from self._until((tags.value_end,), held.append)
        if found is not None or self._is_cut:
            show("".join(held))
            return found
        self._return("".join(held[1:]))
        return mark

    def _json_to_end(self, tags: Tags, show: Show) -> Steps[str | None]:
        """Copies a tagged value that begins as JSON up to its end mark, which is text in its strings.

        Returns: as `_to_end`.
        """
        parts, skips = list[str](), False  # whether an end mark is in a string
        while (mark := (yield from self._to_end(tags, parts.append, '"'))) == '"':
            written = [mark]
            is_closed = yield from self._quoted(mark, written.append)
            parts += written
            if tags.value_end not in "".join(written):
                continue
            # Without a closing quote, and in Python, the first end mark may be the value's own.
            if (not is_closed and not self._is_cut) or (not skips and _is_python(tags, parts)):
                skips, mark = True, None
                break
            skips = True
        text = "".join(parts)
        if skips and not self._is_cut and not is_json(text):
            text, end, rest = text.partition(tags.value_end)
            self._return(rest + (mark or ""))
            mark = end
        show(text)
        return mark

    # Calls in Python's syntax

    def _python(self) -> Steps[bool]:
        """Reads a call in Python syntax. Returns: False if it is none."""
        found = yield from self._match(_CALL)
        if found is None:
            return False
        self._begin(found["name"])
        self._show("{")
        comma = ""
        while (char := (yield from self._ink())) != ")":
            if char == ",":
                self._pass(1)
                continue
            key = yield from self._match(_KEYWORD)
            if key is None:  # broken, up to a mark
                yield from self._until((), _nobody, self._form.ends)
                self._end(False)
                return True
            self._show(f"{comma}{in_json(key[1])}: ")
            comma = ", "
            if (yield from self._ink()) in ("'", '"'):
                yield from self._python_string()
            else:
                yield from self._python_value()
        self._pass(1)
        self._show("}")
        self._end()
        return True

    def _python_value(self) -> Steps[None]:
        """Shows a literal other than a string. Anything else is shown unchanged, and no JSON."""
        parts, depth = list[str](), 0
        while True:
            ends = self._form.ends if depth else (",", ")", "]", "}", *self._form.ends)
            mark = yield from self._until(("'", '"', *"([{", *(")]}" if depth else "")), parts.append, ends)
            if mark is None or mark in ends:
                break
            parts.append(mark)
            if mark in ("'", '"'):
                yield from self._quoted(mark, parts.append)
            else:
                depth += 1 if mark in "([{" else -1
        text = "".join(parts).strip()
        self._show(python_literal(text) or text or "?")

    def _python_string(self) -> Steps[None]:
        """Shows a Python string in parts.

        It ends at a quote before a valid successor, as models forget to escape inner quotes.
        """
        quote = (yield from self._here(_QUOTES)) or ""

        def show(text: str) -> None:
            self._show(escaped(text))

        self._show('"')
        while (mark := (yield from self._until((quote, "\\"), show))) is not None:
            if mark == "\\":
                yield from self._python_escape()
                continue
            blanks = list[str]()
            char = yield from self._ink(blanks.append)
            if char in (",", ")", "]", "") or (yield from self._here(self._form.ends, keeps=True)):
                break
            if char in ("'", '"') and any(blanks):  # the next string of several in a row
                quote = (yield from self._here(_QUOTES)) or ""
                continue
            show(quote + "".join(blanks))
        if mark is not None:
            self._show('"')

    def _python_escape(self) -> Steps[None]:
        """Shows the character of an escape, after its backslash."""
        char = yield from self._peek()
        self._pass(1)
        count, digits = _ESCAPES.get(char, (0, ""))
        text = char
        while count and (digit := (yield from self._peek())) and digit in digits:
            text, count = text + self._pass(1), count - 1
        shown = python_literal(f"'\\{text}'")
        self._show(escaped(f"\\{text}") if shown is None else shown[1:-1])

    # Gemma's calls

    def _gemma(self) -> Steps[None]:
        """Reads arguments that are JSON without quotes around keys, and with a mark around strings."""
        marks, quote = (*"{}[],:", '<|"|>'), '<|"|>'
        word, comma, depth = list[str](), "", 0

        def show(text: str) -> None:
            nonlocal comma
            if text:
                self._show(comma + text)
                comma = ""

        while (mark := (yield from self._until(marks, word.append, self._form.ends))) in marks:
            text = "".join(word).strip()
            word.clear()
            if mark == quote:
                show('"')
                yield from self._until((quote,), lambda text: self._show(escaped(text)))
                self._show('"')
            elif mark == ":":
                show(in_json(text))
                self._show(": ")
            elif mark in ("{", "["):
                show(mark)
                depth += 1
            else:
                show(literal(text) if text else "")
                if mark == ",":
                    comma = ", "
                    continue
                comma, depth = "", depth - 1
                show(str(mark))
                if not depth:
                    return self._end()
        self._end(False)


def _decoded(written: str) -> str | None:
    """Text of a JSON string, or None."""
    try:
        return str(json.loads(written, strict=False))
    except ValueError:
        return None


def _name_of(written: str) -> str | None:
    """Text of a JSON string that is a name, or None. Half of a pair is no character of a name."""
    text = _decoded(written)
    return None if text is None or _SURROGATE.search(text) else text


def _nobody(text: str) -> None:
    """Sink that discards text."""


@functools.lru_cache(maxsize=256)
def _compiled(marks: tuple[str, ...]) -> tuple[re.Pattern[str], set[str], int]:
    """(pattern of marks, their first characters, length of the longest)."""
    pattern = "|".join(re.escape(mark) for mark in sorted(marks, key=len, reverse=True))
    return re.compile(pattern), {mark[0] for mark in marks}, max(map(len, marks))


def _is_python(tags: Tags, parts: list[str]) -> bool:
    """True if a value is one of Python's up to the first end mark."""
    return python_literal("".join(parts).partition(tags.value_end)[0]) is not None
