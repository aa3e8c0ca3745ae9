"""Streaming parser of answers: text, reasoning and tool calls.

`Reader` is one state machine for all formats. Its states are generators that yield to wait for more text.
Each character is compared with the marks of one state, so parsing takes linear time; only a possible start of
a mark is held back.
"""

import functools
import json
import re
from collections.abc import Callable, Generator, Mapping
from typing import Any, Literal, Protocol, TypeVar

from .forms import Form, Tags

T = TypeVar("T")
Steps = Generator[None, None, T]
Show = Callable[[str], object]
_KEYS = {"name", "arguments", "parameters", "type", "id", "function"}  # a call in JSON may have these
_LITERALS = {"True": "true", "False": "false", "None": "null"}
_ESCAPES = {"'": "'", "\n": "", "x": "\\u00"}  # Python's, by the character behind the backslash
_HARMONY_CALL = "to=functions."  # begins an answer, too, where the prompt has the rest of the header
_HARMONY_NAME = re.compile(r"to=functions\.([^\s<]+)")
_INK = re.compile(r"\S")


class Sink(Protocol):
    """Receiver of the parsed parts of an answer."""

    def text(self, text: str) -> object: ...
    def thought(self, text: str) -> object: ...
    def call(self, name: str, own_id: str) -> object:
        """Called at the start of a tool call."""

    def arguments(self, text: str) -> object:
        """Called with the next part of the last call's JSON arguments."""

    def end_call(self) -> object: ...


class _Scanner:
    """A text that arrives in parts. `_steps` reads it, and waits at its end for more."""

    _steps: Steps[None]

    def __init__(self) -> None:
        self._text, self._at, self._is_last = "", 0, False
        self._raw: list[str] | None = None  # the text of a call that has no name yet

    def feed(self, text: str) -> None:
        self._text, self._at = self._text[self._at :] + text, 0
        next(self._steps, None)

    def end(self) -> None:
        """Flushes text held back at the end; an incomplete call stays incomplete."""
        self._is_last = True
        self.feed("")

    def _value(self, show: Show) -> Steps[bool]:
        """Copies a JSON value, of a string its content. Returns: True if it is complete."""
        char = yield from self._ink()
        if char == '"':
            text = yield from self._string()
            show(text or "")
            return text is not None
        if char not in ("{", "["):
            return (yield from self._until((",", "}", "]"), show, keeps=True)) is not None
        depth = 0
        while (mark := (yield from self._until(('"', "{", "}", "[", "]"), show))) is not None:
            show(mark)
            if mark == '"':
                yield from self._quoted(show)
            else:
                depth += 1 if mark in "{[" else -1
                if not depth:
                    return True
        return False

    def _string(self) -> Steps[str | None]:
        """Content of a JSON string, or None if there is none."""
        parts = ['"']
        self._pass(1)
        yield from self._quoted(parts.append)
        try:
            return str(json.loads("".join(parts), strict=False))
        except ValueError:
            return None

    def _quoted(self, show: Show) -> Steps[None]:
        """Copies a JSON string after its first quote."""
        while (mark := (yield from self._until(('"', "\\"), show))) is not None:
            show(mark)
            if mark == '"':
                return
            show((yield from self._one()))

    def _until(self, marks: tuple[str, ...], show: Show, keeps: bool = False) -> Steps[str | None]:
        """Copies text up to one of the marks. Returns: the mark, or None at the end of the answer.

        Args:
            keeps: True to leave the mark unread.
        """
        pattern, firsts, longest = _compiled(marks)
        while True:
            text = self._text
            if found := pattern.search(text, self._at):
                if before := self._pass(found.start() - self._at):
                    show(before)
                if not keeps:
                    self._pass(len(found[0]))
                return found[0]
            end = len(text)
            if not self._is_last:
                for at in range(max(self._at, end - longest + 1), end):
                    if text[at] in firsts and any(mark.startswith(text[at:]) for mark in marks):
                        end = at
                        break
            if before := self._pass(end - self._at):
                show(before)
            if self._is_last:
                return None
            yield

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

    def _one(self) -> Steps[str]:
        """Reads the next character."""
        while self._at == len(self._text) and not self._is_last:
            yield
        return self._pass(1)

    def _pass(self, count: int) -> str:
        """Emits text to the current sink."""
        text = self._text[self._at : self._at + count]
        self._at += len(text)
        if self._raw is not None:
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
        super().__init__()
        self.is_thinking = False
        self._steps = self._harmony() if form.arguments == "harmony" else self._answer()
        next(self._steps)

    # Answers

    def _answer(self) -> Steps[None]:
        form, (begin, end) = self._form, self._form.thought
        marks = (begin, *form.begins, *form.around)
        while (mark := (yield from self._until(marks, self._sink.text))) is not None:
            if mark == begin:
                yield from self._thought((end,))
            elif mark in form.begins:
                self._raw = [mark]
                yield from self._calls(mark)
                if self._raw is None and form.needs_tool:
                    yield from self._skip(";")
                self._raw = None

    def _thought(self, ends: tuple[str, ...]) -> Steps[str | None]:
        self.is_thinking = True
        mark = yield from self._until(ends, self._sink.thought)
        self.is_thinking = False
        return mark

    def _harmony(self) -> Steps[None]:
        begins, ends = ("<|start|>", "<|channel|>"), ("<|end|>", "<|return|>", "<|call|>")
        mark = yield from self._until((*begins, *ends, _HARMONY_CALL), self._sink.text)
        while mark is not None:
            if mark not in ends:
                header = [mark]
                yield from self._until(("<|message|>",), header.append)
                head = "".join(header)
                if name := _HARMONY_NAME.search(head):
                    self._begin(name[1])
                    yield from self._arguments()
                elif "analysis" in head:
                    mark = yield from self._thought((*begins, *ends))
                    continue
            mark = yield from self._until((*begins, *ends), self._sink.text)

    # Calls

    def _calls(self, mark: str) -> Steps[None]:
        """Parses the tool calls after a mark; anything else is text."""
        arguments = self._form.arguments
        if isinstance(arguments, Tags):
            return (yield from self._tagged(arguments))
        if mark == "{":
            return (yield from self._object())
        char = yield from self._ink()
        if char == "[":
            return (yield from self._list())
        if (yield from self._skip("{")):
            return (yield from self._object())
        yield from self._headed()

    def _list(self) -> Steps[None]:
        """Parses a bracketed list of calls: JSON objects or Python calls."""
        self._pass(1)
        while (char := (yield from self._ink())) not in ("]", ""):
            if self._raw is None:
                self._raw = []
            if char == ",":
                self._pass(1)
            elif char == "{":
                self._pass(1)
                yield from self._object()
            elif self._form.arguments != "python" or not (yield from self._python()):
                return self._is_text()
        self._pass(len(char))

    def _object(self) -> Steps[None]:
        """Parses a call object with name and arguments, after its first brace."""
        name, early = "", list[str]()  # arguments may stand in front of the name
        while (char := (yield from self._ink())) not in ("}", ""):
            key = yield from self._key()
            if key is None:
                return self._is_text()
            if key == "function" and (yield from self._skip("{")):
                return (yield from self._object())
            if key == "name" and not name and (yield from self._ink()) == '"':
                name = (yield from self._string()) or ""
                if not self._may_be(name):
                    return self._is_text()
                self._begin(name)
                self._sink.arguments("".join(early))
            else:
                show = self._sink.arguments if name else early.append
                yield from self._value(show if key in ("arguments", "parameters") else _nobody)
            yield from self._skip(",")
        if not char:
            return
        if not name:
            return self._is_text()
        self._pass(1)
        self._sink.end_call()

    def _key(self) -> Steps[str | None]:
        """Parses a key of a call object and the colon behind it. Returns: None for anything else."""
        if (yield from self._ink()) != '"':
            return None
        key = yield from self._string()
        return key if key in _KEYS and (yield from self._skip(":")) else None

    def _may_be(self, name: str) -> bool:
        """True if a call of this name is one of a tool."""
        return bool(name) and (not self._form.needs_tool or name in self._schemas)

    def _headed(self) -> Steps[None]:
        """Parses a call whose arguments follow a header."""
        form, header = self._form, list[str]()
        mark = yield from self._until(("{", *form.around, *form.begins), header.append, keeps=True)
        found = form.header and form.header.fullmatch("".join(header).strip())
        if not found or mark is None:
            return self._is_text()
        self._begin(found["name"], found.groupdict().get("id") or "")
        if mark == "{":
            yield from self._arguments()
        else:
            self._sink.end_call()

    def _arguments(self) -> Steps[None]:
        """Parses the arguments at the end of a call."""
        if self._form.arguments == "gemma":
            self._pass(1)
            self._sink.arguments("{")
            is_whole = yield from self._loose("}", ('<|"|>',))
        else:
            is_whole = yield from self._value(self._sink.arguments)
        if is_whole:
            self._sink.end_call()

    def _tagged(self, tags: Tags) -> Steps[None]:
        """Parses a call with tagged arguments."""
        name = list[str]()
        yield from self._ink()
        mark = yield from self._until(tags.name_ends, name.append)
        function = "".join(name).strip()
        if mark is None:
            return
        if not re.fullmatch(r"[^\s<>{}]+", function):
            return self._is_text()
        self._begin(function)
        schema = self._schemas.get(function) or {}
        properties, count = schema.get("properties") or {}, 0
        self._sink.arguments("{")
        while mark != tags.end:
            if mark != tags.begin:
                mark = yield from self._until((tags.begin, tags.end), _nobody)
            if mark == tags.begin:
                key, about = list[str](), list[str]()
                behind = (tags.value,) if tags.value else ()
                if (yield from self._until((tags.key_end, *behind), key.append)) == tags.key_end and behind:
                    yield from self._until((tags.value,), about.append)
                own = "".join(key).strip()
                comma = ", " if count else ""
                count += 1
                self._sink.arguments(f"{comma}{_in_json(own)}: ")
                said = "".join(about).strip()
                kind = _kind(properties.get(own))
                if said:  # the tag says whether it is a text
                    kind = "text" if "true" in said else "any"
                mark = yield from self._tag_value(tags, kind)
            if mark is None:
                return
        self._sink.arguments("}")
        self._sink.end_call()

    def _tag_value(self, tags: Tags, kind: str) -> Steps[str | None]:
        """Parses a tagged value up to its end mark, or the next mark if that is missing. Returns: it."""
        ends = tags.value_end, tags.begin, tags.end
        if kind != "text":
            parts = list[str]()
            mark = yield from self._until(ends, parts.append)
            value = "".join(parts).strip()
            self._sink.arguments(_in_json(value) if kind == "choice" else _literal(value))
            return mark
        padding, is_first, back = tags.padding, True, ""

        def show(text: str) -> None:
            nonlocal is_first, back
            text, is_first = text.removeprefix(padding) if is_first else text, False
            text, back = back + text, ""
            if padding and text.endswith(padding):
                text, back = text.removesuffix(padding), padding
            self._sink.arguments(_escaped(text))

        self._sink.arguments('"')
        mark = yield from self._until(ends, show)
        self._sink.arguments('"')
        return mark

    def _python(self) -> Steps[bool]:
        """Parses a call in Python syntax. Returns: False if it is not one."""
        name = list[str]()
        mark = yield from self._until(("(", "]", *self._form.around), name.append)
        function = "".join(name).strip()
        if mark != "(" or not re.fullmatch(r"[\w.-]+", function):
            return mark is None
        self._begin(function)
        self._sink.arguments("{")
        if (yield from self._loose(")", ('"', "'"))):
            self._sink.end_call()
        return True

    def _begin(self, name: str, own_id: str = "") -> None:
        self._raw = None
        self._sink.call(name, own_id)

    def _is_text(self) -> None:
        """Emits everything since the mark as text, as it is not a call."""
        raw, self._raw = self._raw or [], []
        if self._form.needs_tool or not self._is_last or self._at < len(self._text):
            self._sink.text("".join(raw))

    # Values

    def _loose(self, end: str, quotes: tuple[str, ...]) -> Steps[bool]:
        """Converts an object in Gemma or Python syntax to JSON, after its first bracket.

        Returns: True if it is complete.
        """
        ends, key, comma = [(end, "}")], list[str](), ""
        closing, marks = {"{": "}", "[": "]", "(": ")"}, (*"{}[](),:=", *quotes)

        def show(text: str) -> None:
            nonlocal comma
            if text:
                self._sink.arguments(comma + text)
                comma = ""

        def taken() -> str:
            text = "".join(key).strip()
            key.clear()
            return text

        while (mark := (yield from self._until(marks, key.append))) is not None:
            text = taken()
            if mark in quotes:
                show('"')
                yield from self._loose_string(mark)
                self._sink.arguments('"')
            elif mark in (":", "="):
                show(_in_json(text) if text else "")
                self._sink.arguments(": ")
            elif mark in closing:
                ends.append((closing[mark], "}" if mark == "{" else "]"))
                show("{" if mark == "{" else "[")
            else:
                show(_literal(text) if text else "")
                if mark == ",":
                    comma = ", "
                elif mark == ends[-1][0]:
                    comma = ""
                    show(ends.pop()[1])
                    if not ends:
                        return True
        return False

    def _loose_string(self, quote: str) -> Steps[None]:
        """Converts a string to JSON, after its first quote.

        A Python string ends at a quote before a valid successor, as models forget to escape inner quotes.
        """
        is_python = len(quote) == 1
        marks = (quote, "\\") if is_python else (quote,)

        def show(text: str) -> None:
            self._sink.arguments(_escaped(text))

        while (mark := (yield from self._until(marks, show))) is not None:
            if mark == "\\":
                char = yield from self._one()
                escape = f"\\{char}" if char in 'bfnrtu"\\' else _ESCAPES.get(char, f"\\\\{char}")
                self._sink.arguments(escape)
                continue
            blanks = list[str]()
            if not is_python or (yield from self._ink(blanks.append)) in (",", ")", "]", "}", ":", ""):
                return
            show(quote + "".join(blanks))


def _nobody(text: str) -> None:
    """Sink that discards text."""


@functools.lru_cache(maxsize=256)
def _compiled(marks: tuple[str, ...]) -> tuple[re.Pattern[str], set[str], int]:
    """(pattern of marks, their first characters, length of the longest)."""
    pattern = "|".join(re.escape(mark) for mark in sorted(marks, key=len, reverse=True))
    return re.compile(pattern), {mark[0] for mark in marks}, max(map(len, marks))


def _in_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    """JSON-escaped text without quotes."""
    return _in_json(text)[1:-1]


def _literal(text: str) -> str:
    """JSON of a value that is JSON, a Python constant, or text."""
    text = text.strip()
    try:
        json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return _LITERALS.get(text) or _in_json(text)
    return text


def _no_number(name: str) -> None:
    raise ValueError(name)


def _kind(schema: Any) -> Literal["text", "choice", "any"]:
    """Kind of a schema: any string, an enumeration of strings, or anything."""
    schema = schema if isinstance(schema, dict) else {}
    choices = schema.get("enum")
    if isinstance(choices, list) and all(isinstance(choice, str) for choice in choices):
        return "choice"
    return "text" if schema.get("type") in ("string", ["string"]) and choices is None else "any"
