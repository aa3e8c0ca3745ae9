"""Which cases of a test run for every change, and which only in the sweep."""

import itertools
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

import pytest


def in_sweep(cases: Iterable[Any], always: Collection[Any]) -> list[Any]:
    """The cases as parameters of a test; those not in `always` run only in the sweep."""
    return [case if case in always else pytest.param(case, marks=pytest.mark.sweep) for case in cases]


def rows_in_sweep(rows: Iterable[tuple], always: Collection[tuple]) -> list[Any]:
    """As in_sweep, of a test with several parameters."""
    return [pytest.param(*row, marks=() if row in always else pytest.mark.sweep) for row in rows]


def covering(*axes: Iterable[Any], together: int = 1) -> list[Any]:
    """The product of axes as parameters of a test: few cases always, the others only in the sweep.

    Those few have each value of each axis; with `together=2` also each pair of values of different axes.
    """
    values = [list(axis) for axis in axes]
    left = {
        frozenset(zip(chosen, places, strict=True))
        for chosen in itertools.combinations(range(len(values)), together)
        for places in itertools.product(*(range(len(values[axis])) for axis in chosen))
    }
    cases = list(itertools.product(*(range(len(axis)) for axis in values)))
    always: set[tuple[int, ...]] = set()
    used: Counter[tuple[int, int]] = Counter()  # of equally good cases the one whose values came least
    while left:
        gained = {case: {each for each in left if each <= {*enumerate(case)}} for case in cases}
        best = max(cases, key=lambda case: (len(gained[case]), -sum(used[each] for each in enumerate(case))))
        always.add(best)
        used.update(enumerate(best))
        left -= gained[best]
    return [
        pytest.param(
            *(axis[place] for axis, place in zip(values, case, strict=True)),
            marks=() if case in always else pytest.mark.sweep,
        )
        for case in cases
    ]
