"""The sequences of dispatches that run a case: the recorded one, and its peers'."""

import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from simulator.cuda.plan import Binding, Dispatch, Recording
from torch import Tensor

from ..cases.experts import Case

Tensors = dict[str, Tensor]


@dataclass
class Program:
    """Dispatches, and the buffers that they need beside the case's tensors.

    `part` names the part of ours that a peer is compared with, "" for all of it. `derive` makes a peer's own
    inputs from the case's. `wrong(before, after)` is empty or says what is wrong.
    """

    label: str
    dispatches: list[Dispatch]
    results: dict[str, tuple[list[int], str]]
    wrong: Callable[[Tensors, Tensors], str]
    scratch: dict[str, int] = field(default_factory=dict)
    part: str = ""
    derive: Callable[[Tensors], Tensors] = lambda tensors: {}


def ours(case: Case, recording: Recording) -> Program:
    return Program("ours", recording.dispatches, recording.results, case.wrong, recording.scratch)


def parts(case: Case, program: Program) -> dict[str, slice]:
    """The dispatches of each of the case's parts. The second begins where its weights are read first."""
    names = list(case.parts)
    if not names:
        return {}
    first, second = names
    for i, dispatch in enumerate(program.dispatches):
        if any(binding.buffer.startswith(case.parts[second]) for binding in dispatch.bindings):
            return {first: slice(0, i), second: slice(i, None)} if i else {}
    return {}


# What a written-down dispatch is made of.


def bind(index: int, buffer: str, offset: int = 0) -> Binding:
    return Binding(index, buffer=buffer, offset=offset)


def words(index: int, *values: int | float) -> Binding:
    """setBytes of 32-bit numbers."""
    return Binding(
        index, data=struct.pack("".join("f" if isinstance(v, float) else "i" for v in values), *values).hex()
    )


def buffers(*names: str) -> list[Binding]:
    """The first buffer arguments; an empty name is left out."""
    return [bind(i, name) for i, name in enumerate(names) if name]
