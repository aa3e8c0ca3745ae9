"""Whether what was recognised ran, and what is remembered of it."""

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from support.models import operators_of
from torch_moe_mps.models.modules import rules
from torch_moe_mps.models.trials import memory


def by_operators(run: Callable[[], Any], *operators: str) -> Any:
    """The result of a call in which these operators ran: else eager code would be compared with itself."""
    found: list[Any] = []
    ran = operators_of(lambda: found.append(run()))
    assert operators and ran.keys() >= {*operators}, f"{sorted(ran)} ran, not {operators}"
    return found[0]


def forget() -> None:
    """Forgets the results of trials and of traces."""
    for known in _remembered():
        known.clear()


@pytest.fixture
def own_memory() -> Iterator[None]:
    """What a test forgets is known again after it: other tests need not try everything once more."""
    before = [(known, {**known}) for known in _remembered()]
    yield
    for known, results in before:
        known.clear()
        known.update(results)


def _remembered() -> list[dict]:
    found = [memory._known]
    for name, file in [*sys.modules.items()]:
        own = vars(file).values() if name.startswith(rules.__package__) else []
        for function in own:
            if inspect.isfunction(function) and "known" in function.__code__.co_freevars:
                found.append(inspect.getclosurevars(function).nonlocals["known"])
    return found
