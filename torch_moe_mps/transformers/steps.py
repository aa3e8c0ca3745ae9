"""A call of `accelerate`, and a step of it with its undoing."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from ..checkpoints.quantize.importance import Importance
from ..checkpoints.quantize.recipe import Recipe
from ..models.basics.configs import ImplementationNames
from ..models.basics.report import Report
from ..models.basics.state import KVBits
from ..ops._formats import Format


@dataclass
class Run:
    """A model, what was asked for it, and what the steps that ran have found.

    Attributes:
        recipe, importance: what to quantise, and how errors are weighed; None for neither.
        kv_bits, check, capture: as in `accelerate`.
        report: has a row for each module once modules are replaced.
        seconds: left for the comparison of operators with the CPU; None where nothing is compared.
        is_unmodified: True if a small model of the class differed from its eager code.
        names: of our implementations, for the configs of the model.
        experts: names of the experts modules with stacks of their own.
        attentions: {name: layer} of attention that the operator runs.
        refused: {name of a module that looks like experts: why no operator runs it}.
    """

    model: nn.Module
    recipe: Recipe | None = None
    importance: Importance | None = None
    kv_bits: KVBits | None = None
    check: bool = True
    capture: bool | None = None
    report: Report = field(default_factory=Report)
    seconds: float | None = None
    is_unmodified: bool = False
    names: ImplementationNames = field(default_factory=ImplementationNames)
    experts: Collection[str] = ()
    attentions: dict[str, nn.Module] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def formats(self) -> dict[str, set[Format]]:
        """{kind of weights: formats that they will get}"""
        return {} if self.recipe is None else self.recipe.formats()


class UndoableStep(NamedTuple):
    """A step, and the function that undoes it in a model; None if nothing in the model is to be undone."""

    make: Callable[[Run], object]
    undo: Callable[[nn.Module], object] | None = None


def undo(steps: Iterable[UndoableStep], model: nn.Module) -> None:
    """Undoes steps in a model, the last one first. A step that was not made leaves nothing to undo."""
    for step in reversed([*steps]):
        if step.undo is not None:
            step.undo(model)
