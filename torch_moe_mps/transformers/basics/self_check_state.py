"""Operators that have failed the self-check on this machine, and classes that have failed beside their own
code: nothing runs on them."""

from collections.abc import Iterable

from torch import nn

from ...selfcheck.compare import Finding
from .classes import class_before
from .interface import weights_in
from .report import Done

# {operator: what is wrong with it on this machine's GPU}, as the last check of this process found
REFUSED: dict[str, Finding] = {}
# {class: why its modules keep their own code}, as `twin` found behind a transformers that is not known
OWN_CODE: dict[type, str] = {}


def refused() -> frozenset[str]:
    """The operators that have failed on this machine."""
    return frozenset(REFUSED)


def refusal(module: nn.Module, done: Iterable[Done]) -> str | None:
    """Why a module keeps its own code: an operator that would run in its place has failed."""
    failed = [item.operator for item in done if item.operator in REFUSED]
    return f"{failed[0]} fails the self-check on this GPU" if failed and is_on_mps(module) else None


def own_code(module: nn.Module) -> str | None:
    """Why a module keeps its own code, whatever would run in its place."""
    return OWN_CODE.get(class_before(module))


def is_on_mps(module: nn.Module) -> bool:
    return any(weight.device.type == "mps" for weight in weights_in(module))
