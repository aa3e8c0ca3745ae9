"""Which cases of a test run for every change, and which only in the sweep."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def in_sweep(cases: Iterable[Any], always: Collection[Any]) -> list[Any]:
    """The cases as parameters of a test; those not in `always` run only in the sweep."""
    return [case if case in always else pytest.param(case, marks=pytest.mark.sweep) for case in cases]


def kernels_in_sweep(cases: Iterable[Any], always: Collection[Any]) -> list[Any]:
    """As in_sweep, but the reference runs in all cases for every change: on the CPU nothing is compiled."""
    mark = pytest.mark.kernels_in_sweep
    return [case if case in always else pytest.param(case, marks=mark) for case in cases]


def rows_in_sweep(rows: Iterable[tuple], always: Collection[tuple]) -> list[Any]:
    """As in_sweep, of a test with several parameters."""
    return [pytest.param(*row, marks=() if row in always else pytest.mark.sweep) for row in rows]
