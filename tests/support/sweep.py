"""Which cases of a test run for every change, and which only in the sweep."""

import itertools
import zlib
from collections.abc import Collection, Iterable
from typing import Any

import pytest


def in_sweep(cases: Iterable[Any], always: Collection[Any]) -> list[Any]:
    """The cases as parameters of a test; those not in `always` run only in the sweep."""
    return [case if case in always else pytest.param(case, marks=pytest.mark.sweep) for case in cases]


def rows_in_sweep(rows: Iterable[tuple], always: Collection[tuple]) -> list[Any]:
    """As in_sweep, of a test with several parameters."""
    return [pytest.param(*row, marks=() if row in always else pytest.mark.sweep) for row in rows]


def covering(*axes: Iterable[Any]) -> list[Any]:
    """The product of axes as parameters of a test: few cases always, the others only in the sweep.

    Those few have each value of each axis.
    """
    values = [list(axis) for axis in axes]
    cases = itertools.product(*(range(len(axis)) for axis in values))
    most = max(map(len, values))
    always = {tuple(number % len(axis) for axis in values) for number in range(most)}
    return [
        pytest.param(
            *(axis[place] for axis, place in zip(values, case, strict=True)),
            marks=() if case in always else pytest.mark.sweep,
        )
        for case in cases
    ]


def in_part(test: str, part: str) -> bool:
    """True if a test is in a part such as "3/10": each is in one of the parts 0/10 to 9/10.

    Raises: ValueError for other texts.
    """
    number, _, count = part.partition("/")
    if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise ValueError(f"--part: expected N/M with N below M, as 3/10, got {part}")
    return zlib.crc32(test.encode()) % int(count) == int(number)
