"""The sequences of dispatches that run a case: the recorded one, and its peers'."""

import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from simulator.cuda.plan import Binding, Dispatch, Recording
from torch import Tensor

from ..cases.experts import Case

Tensors = dict[str, Tensor]


@dataclass
class Program:
    """Dispatches, and the buffers that they need beside the case's tensors.

    `part` names the part of ours that a peer is compared with, "" for all of it. `derive` makes a peer's own
    inputs from the case's. `wrong(before, after)` is empty or says what is wrong; None where a peer's kernels
    are checked by other programs.
    """

    label: str
    dispatches: list[Dispatch]
    results: dict[str, tuple[list[int], str]]
    wrong: Callable[[Tensors, Tensors], str] | None
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


def joined(label: str, programs: list[Program], part: str, shared: set[str]) -> Program:
    """Programs after each other. All but the `shared` buffers are each program's own; its results are checked
    where it stands alone."""

    def renamed(number: int, names: dict) -> dict:
        return {f"{name}.{number}": value for name, value in names.items()}

    dispatches, results, scratch = [], {}, {}
    for number, program in enumerate(programs):
        for dispatch in program.dispatches:
            bindings = [
                replace(b, buffer=f"{b.buffer}.{number}") if b.buffer and b.buffer not in shared else b
                for b in dispatch.bindings
            ]
            dispatches.append(replace(dispatch, bindings=bindings))
        results |= renamed(number, program.results)
        scratch |= renamed(number, program.scratch)

    def derive(tensors: Tensors) -> Tensors:
        own = [renamed(number, program.derive(tensors)) for number, program in enumerate(programs)]
        return {name: tensor for names in own for name, tensor in names.items()}

    return Program(label, dispatches, results, None, scratch, part, derive)
