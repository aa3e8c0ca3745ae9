"""Which cases of a product run for every change (support/sweep.py)."""

import itertools

import pytest
from support.sweep import covering

AXES = ["abcde", range(3), (True, False), (None, 8)]


def always_and_others(*axes, together: int = 1) -> tuple[list[tuple], list[tuple]]:
    made = covering(*axes, together=together)
    return [case.values for case in made if not case.marks], [case.values for case in made if case.marks]


@pytest.mark.parametrize(("together", "most"), [(1, 5), (2, 18)])
def test_values_meet(together, most):
    """Each value runs, and with 2 each pair of values of different axes; what is left is in the sweep."""
    always, others = always_and_others(*AXES, together=together)
    for axes in itertools.combinations(range(len(AXES)), together):
        met = {tuple(case[axis] for axis in axes) for case in always}
        assert met == {*itertools.product(*(AXES[axis] for axis in axes))}
    assert {*always, *others} == {*itertools.product(*AXES)} and len(always + others) == 60
    assert len(always) <= most
