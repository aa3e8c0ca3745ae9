"""Texts in JSON of clients. A long one is read in Python, in pieces between which other threads go on."""

import json
import json.decoder
import json.scanner
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_MOST_DEEP = 100
_MOST_CONTAINERS = 1 << 16  # objects and lists in a long text: the search for garbage walks all of them
LONG = 1 << 16  # characters of a text, or octets of a body
_PIECE = 1 << 12  # characters of a string
_scan: Any = json.decoder.scanstring  # type: ignore[attr-defined, unused-ignore]


def read_json(text: str) -> Any:
    """The value of a text in JSON, in which no recursion of Python's, jinja's or xgrammar's ends.

    Raises: ValueError for a text that is none, nests deeper than that, or has too many objects and lists.
    """
    expected = f"it must nest at most {_MOST_DEEP} deep"
    try:
        value = json.loads(text, cls=_Yielding if len(text) > LONG else None)
    except RecursionError:
        raise ValueError(expected) from None
    if any(depth >= _MOST_DEEP for depth, _ in enumerate(_levels(value))):
        raise ValueError(expected)
    return value


class _Yielding(json.JSONDecoder):
    """Reads a text in Python: in C, Python's lock would be held to the end."""

    def __init__(self) -> None:
        super().__init__()
        self._containers = 0
        self.parse_string = _string
        self.parse_object = self._counted(_object)
        self.parse_array = self._counted(json.decoder.JSONArray)  # type: ignore[attr-defined, unused-ignore]
        self.scan_once = json.scanner.py_make_scanner(self)  # type: ignore[attr-defined, unused-ignore]

    def _counted(self, read: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any) -> Any:
            self._containers += 1
            if self._containers > _MOST_CONTAINERS:
                raise ValueError(f"it must have at most {_MOST_CONTAINERS} objects and lists")
            return read(*given)

        return counted


def _string(text: str, start: int, strict: bool = True) -> tuple[str, int]:
    """The string that begins there, and where it ends. Raises: json.JSONDecodeError."""
    parts, at = list[str](), start
    while at + _PIECE < len(text):
        end = _end_of_piece(text, at)
        try:
            part, read = _scan(f'{text[at:end]}"', 0, strict)
        except json.JSONDecodeError:  # with another place than it has in the text
            break
        if read <= end - at:  # the string ends inside
            break
        if "\ud800" <= part[-1] <= "\udbff" and text[end - 1] != part[-1]:
            part, end = part[:-1], end - 6  # the other half of the pair may follow
        parts.append(part)
        at = end
    try:
        last, end = _scan(text, at, strict)
    except json.JSONDecodeError as error:
        place = start - 1 if error.pos == at - 1 else error.pos
        raise json.JSONDecodeError(error.msg, text, place) from None
    return "".join((*parts, last)) if parts else last, end


def _end_of_piece(text: str, at: int) -> int:
    """Where a piece of a string ends, which cuts no escape."""
    end = at + _PIECE
    last = text.rfind("\\", max(at, end - 5), end)
    if last < 0:
        return end
    before = text[at : last + 1]
    begins_one = (len(before) - len(before.rstrip("\\"))) % 2 == 1
    return last if begins_one else end


# The reader of an object of json's, with the names of its members read in pieces, too.
_object = types.FunctionType(
    json.decoder.JSONObject.__code__,  # type: ignore[attr-defined, unused-ignore]
    vars(json.decoder) | {"scanstring": _string},
    argdefs=json.decoder.JSONObject.__defaults__,  # type: ignore[attr-defined, unused-ignore]
)


def is_unicode(value: Any) -> bool:
    """Whether no text in a value in JSON, names included, has half of a surrogate pair."""
    return all(
        _encodes(text)
        for level in _levels(value)
        for outer in level
        for text in (*_inside(outer), *(outer if isinstance(outer, dict) else ()))
        if isinstance(text, str)
    )


def _encodes(text: str) -> bool:
    try:
        for at in range(0, len(text), LONG):
            text[at : at + LONG].encode()
    except UnicodeEncodeError:
        return False
    return True


def _levels(value: Any) -> Iterator[list[Any]]:
    """A value in JSON, and then the objects and arrays inside, a level at a time."""
    level = [value]
    while level:
        yield level
        level = [inner for outer in level for inner in _inside(outer) if isinstance(inner, dict | list)]


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
