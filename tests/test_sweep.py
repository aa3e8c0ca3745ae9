"""Which cases of a product run for every change (support/sweep.py)."""

import itertools

from support.sweep import covering

AXES = ["abcde", range(3), (True, False), (None, 8)]


def test_each_value_runs():
    """What is left of the product is in the sweep."""
    made = covering(*AXES)
    always = [case.values for case in made if not case.marks]
    assert all({*values} == {*axis} for values, axis in zip(zip(*always, strict=True), AXES, strict=True))
    assert {case.values for case in made} == {*itertools.product(*AXES)} and len(made) == 60
    assert len(always) == 5
