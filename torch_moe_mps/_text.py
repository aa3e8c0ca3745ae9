"""Model names and error lines, without importing torch."""

import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


def split_gguf(name: str) -> tuple[str, str | None]:
    """(folder or Hub name, GGUF file) of FILE.gguf or NAME:FILE.gguf; None for other names.

    Of a file in several parts, any of them stands for the first.
    """
    if not name.endswith(".gguf"):
        return name, None
    folder, _, file = ("", "", name) if Path(name).exists() else name.partition(":")
    if not (folder and file):
        folder, file = str(Path(name).parent), Path(name).name
    return folder, parts_of(file)[0]


def parts_of(file: str) -> list[str]:
    """Names of all parts of a GGUF file, by the name of one; a file in one part is its only one."""
    match = _PART.search(file)
    count = 1 if match is None else int(match[2])
    if match is None or not 1 <= int(match[1]) <= count:
        return [file]
    return [f"{file[: match.start()]}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


_SHOWN = 80  # characters of a value in an error


def shown(value: object) -> str:
    """Value for an error message, truncated if long, without formatting the rest."""
    text = repr(_beginning(value))
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _beginning(value: Any) -> Any:
    if type(value) is str:
        return value[:_SHOWN]
    if type(value) is list:
        return [_beginning(inner) for inner in value[:_SHOWN]]
    if type(value) is dict:
        return {_beginning(name): _beginning(inner) for name, inner in islice(value.items(), _SHOWN)}
    return value


def first_line(error: object) -> str:
    """First nonempty line of an error or text, or ""."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


def one_of(values: tuple[object, ...]) -> str:
    """Values as text for errors and help, such as "32, 64 or 128"."""
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last


def bytes_in(text: str) -> int | None:
    """Bytes of a text such as "20GB" or "1.5 GiB"; None for any other text, and for none."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    if match is None:
        return None
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** " KMGT".index(match[2].upper() or " ")) or None


def terminal_width() -> int | None:
    """Columns of the terminal that stdout is; None for a file, a pipe or a notebook."""
    return shutil.get_terminal_size().columns if sys.stdout is not None and sys.stdout.isatty() else None


def fitted(lines: Iterable[str]) -> list[str]:
    """Lines of text that break between words at the terminal's width; their parts are indented."""
    width = terminal_width()
    if width is None:
        return [*lines]
    wrapper = textwrap.TextWrapper(
        width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    return [part for line in lines for part in (wrapper.wrap(line) if len(line) > width else [line])]


def aligned(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """The lines of a table; the first `left` columns are aligned to the left, the others to the right.

    A table that is wider than the terminal becomes several, each with the first columns and some others.
    """
    lines: list[str] = []
    for columns in _parts(rows, left):
        widths = [max(len(row[i]) for row in rows) for i in columns]
        sides = [str.ljust if i < left else str.rjust for i in columns]
        cells = (zip(sides, (row[i] for i in columns), widths, strict=True) for row in rows)
        lines += [""] if lines else []
        lines += ["  ".join(side(cell, width) for side, cell, width in line).rstrip() for line in cells]
    return lines


def _parts(rows: Sequence[Sequence[str]], left: int) -> list[list[int]]:
    """The columns of each table into which a wide one is cut."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    first, most = [*range(left)], terminal_width() or sum(widths) + 2 * len(widths)
    parts = [[*first]]
    for i in range(left, len(widths)):
        if len(parts[-1]) > left and sum(widths[j] + 2 for j in (*parts[-1], i)) - 2 > most:
            parts.append([*first])
        parts[-1].append(i)
    return parts


def with_text(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table whose last column is text, which stands below the row where it is too wide.

    The first row is the head; the second one is a line below it.
    """
    lines, width = aligned(rows, len(rows[0])), terminal_width()
    if width is None or max(map(len, lines)) <= width:
        return lines
    rows = [rows[0], *rows[2:]]
    names = aligned([row[:-1] for row in rows], len(rows[0]) - 1)
    indented = textwrap.TextWrapper(
        width, initial_indent="    ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
    return [
        part
        for name, row in zip(names, rows, strict=True)
        for part in (*fitted([name]), *indented.wrap(row[-1]))
    ]


def unit_of(largest: int) -> tuple[float, str]:
    """The bytes and the name of the unit for numbers of bytes up to the largest."""
    return (1e9, "GB") if largest >= 1e9 else (1e6, "MB")


def in_unit(largest: int) -> Callable[[int], str]:
    """A function that formats numbers of bytes in one unit, chosen by the largest."""
    size, name = unit_of(largest)
    digits = 2 if name == "GB" else 1
    return lambda count: f"{count / size:.{digits}f} {name}"
