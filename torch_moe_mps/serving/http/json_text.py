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


def read_json(text: str, rest: Callable[[], None] = lambda: None) -> Any:
    """The value of a text in JSON, in which no recursion of Python's, jinja's or xgrammar's ends.

    Args:
        rest: called now and then while a long text is read.

    Raises: ValueError for a text that is none, nests deeper than that, or has too many objects and lists.
    """
    expected = f"it must nest at most {_MOST_DEEP} deep"
    try:
        value = _Yielding(rest).decode(text) if len(text) > LONG else json.loads(text)
    except RecursionError:
        raise ValueError(expected) from None
    for depth, _ in enumerate(levels(value)):
        if depth >= _MOST_DEEP:
            raise ValueError(expected)
        rest()
    return value


class _Yielding(json.JSONDecoder):
    """Reads a text in Python: in C, Python's lock would be held to the end.

    Args:
        rest: called for each value, and each piece of a string.
    """

    def __init__(self, rest: Callable[[], None]) -> None:
        super().__init__()
        self._containers, self._rest = 0, rest
        self.parse_string = self._string
        self.parse_object = self._counted(_object_of(self._string))
        self.parse_array = self._counted(self._array)
        self.scan_once = json.scanner.py_make_scanner(self)  # type: ignore[attr-defined, unused-ignore]

    def _counted(self, read: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any) -> Any:
            self._containers += 1
            if self._containers > _MOST_CONTAINERS:
                raise ValueError(f"it must have at most {_MOST_CONTAINERS} objects and lists")
            return read(*given)

        return counted

    def _array(self, begun: tuple[str, int], scan_once: Callable[[str, int], Any]) -> Any:
        def scan(text: str, at: int) -> Any:
            self._rest()
            return scan_once(text, at)

        return json.decoder.JSONArray(begun, scan)  # type: ignore[attr-defined, unused-ignore]

    def _string(self, text: str, start: int, strict: bool = True) -> tuple[str, int]:
        """The string that begins there, and where it ends. Raises: json.JSONDecodeError."""
        parts, at = list[str](), start
        while at + _PIECE < len(text):
            self._rest()
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


def _object_of(string: Callable[..., tuple[str, int]]) -> Callable[..., Any]:
    """The reader of an object of json's, with the names of its members read by that of strings, too."""
    own: Any = json.decoder.JSONObject  # type: ignore[attr-defined, unused-ignore]
    names = vars(json.decoder) | {"scanstring": string}
    return types.FunctionType(own.__code__, names, argdefs=own.__defaults__)


def is_unicode(value: Any, rest: Callable[[], None] = lambda: None) -> bool:
    """Whether no text in a value in JSON, names included, has half of a surrogate pair.

    Args:
        rest: called now and then.
    """
    return all(
        _encodes(text, rest)
        for level in levels(value)
        for outer in level
        for text in (*_inside(outer), *(outer if isinstance(outer, dict) else ()))
        if isinstance(text, str)
    )


def _encodes(text: str, rest: Callable[[], None]) -> bool:
    try:
        for at in range(0, max(1, len(text)), LONG):
            rest()
            text[at : at + LONG].encode()
    except UnicodeEncodeError:
        return False
    return True


def levels(value: Any) -> Iterator[list[Any]]:
    """A value in JSON, and then the objects and arrays inside, a level at a time."""
    level = [value]
    while level:
        yield level
        level = [inner for outer in level for inner in _inside(outer) if isinstance(inner, dict | list)]


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
