"""Whether what was recognised ran, and what is remembered of it."""

import inspect
import sys
from collections.abc import Callable
from typing import Any

from support.models import operators_of
from torch_moe_mps.transformers.modules import rules
from torch_moe_mps.transformers.trials import memory


def by_operators(run: Callable[[], Any], *operators: str) -> Any:
    """The result of a call in which these operators ran: else eager code would be compared with itself."""
    found: list[Any] = []
    ran = operators_of(lambda: found.append(run()))
    assert operators and ran.keys() >= {*operators}, f"{sorted(ran)} ran, not {operators}"
    return found[0]


def forget() -> None:
    """Forgets the results of trials and of traces."""
    memory.forget()
    for name, file in [*sys.modules.items()]:
        own = vars(file).values() if name.startswith(rules.__package__) else []
        for function in own:
            if inspect.isfunction(function) and "known" in function.__code__.co_freevars:
                inspect.getclosurevars(function).nonlocals["known"].clear()
