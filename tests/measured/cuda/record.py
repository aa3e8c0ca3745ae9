"""The dispatches of the package's operators, taken from the simulated device.

Nothing is executed: host code decides from shapes alone what it encodes, so the inputs are memory without
contents.
"""

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from simulator import build, runtime, shaderlib
from simulator.cuda.plan import Binding, Dispatch, Plan, Recording

from ..cases.experts import Case, family_name
from ..cases.values import Shapes

UNWRITTEN = 0x7FE1  # the simulator's fill of new memory (metal/buffer.mm), of buffers under 64 MiB
FILLED_BYTES = 64 << 20


class RecordError(RuntimeError):
    """Host code did something that a plan cannot express."""


@dataclass
class Memory:
    """An MTLBuffer, as far as the dispatches show it."""

    start: int
    end: int
    written: bool  # without a kernel
    name: str = ""


def record(plan: Plan, case: Case) -> None:
    """Calls the case's operator on the simulated device; adds what it encodes to the plan."""
    import torch_moe_mps  # noqa: F401 (registers the operators)

    shapes = Shapes("mps")
    inputs = {**case.weights(shapes), **case.inputs(shapes)}
    recorder = Recorder(plan)
    with runtime.intercepted(recorder.take):
        returned = case.call(inputs)
        results = returned if isinstance(returned, tuple) else () if returned is None else (returned,)
    names = inputs | {f"result{i}": tensor for i, tensor in enumerate(results)}
    recording = Recording(
        family=family_name(case),
        arguments=case.arguments(),
        dispatches=recorder.named(names),
        results={
            f"result{i}": (list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for i, tensor in enumerate(results)
        },
        scratch=recorder.scratch(),
    )
    plan.recordings.append(recording)


class Recorder:
    """Takes dispatches in; gives their buffers names when all have been seen."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.memories: dict[int, Memory] = {}  # by identity, in order of appearance
        self.dispatches: list[tuple[Dispatch, dict[int, tuple[int, int]], int | None]] = []

    def take(self, raw: shaderlib.Dispatch) -> None:
        kernel = raw.kernel.contents
        name = kernel.name.decode()
        if any(raw.total_threads):
            raise RecordError(f"{name}: dispatchThreads is not replayed")
        file, constants = self.library(kernel)
        bindings, places = [], {}
        for i in range(kernel.argument_count):
            argument = kernel.arguments[i]
            if argument.kind != 0:  # threadgroup memory
                continue
            bound = raw.buffers[argument.index]
            if bound.identity == 0:
                data = ctypes.string_at(bound.data, bound.size).hex()
                bindings.append(Binding(argument.index, data=data))
            else:
                self.see(bound)
                places[argument.index] = (bound.identity, bound.data)
        dispatch = Dispatch(
            library=file,
            kernel=name,
            grid=None if raw.indirect else tuple(raw.grid),
            threads=tuple(raw.threads),
            bindings=bindings,
            threadgroup_bytes={i: n for i, n in enumerate(raw.threadgroup_bytes) if n},
            constants=constants,
        )
        self.dispatches.append((dispatch, places, raw.indirect))

    def library(self, kernel: shaderlib.Kernel) -> tuple[str, dict]:
        path = Path(kernel.image.decode().rpartition("-")[0] + ".so")
        source, constants = build.origins[path]
        name = re.search(r'^#line \d+ "(\w+)', source, re.M)
        return self.plan.add_source(name[1] if name else "library", preprocessed(source)), constants

    def see(self, bound: shaderlib.Binding) -> None:
        start, end = bound.data, bound.data + bound.size
        memory = self.memories.setdefault(bound.identity, Memory(start, end, is_written(start, end)))
        memory.start = min(memory.start, start)

    def named(self, tensors: dict[str, torch.Tensor]) -> list[Dispatch]:
        known = {name: (runtime.address(t), t.untyped_storage().nbytes()) for name, t in tensors.items()}
        scratch = 0
        for memory in self.memories.values():
            for name, (start, size) in known.items():
                if start <= memory.start < start + size:
                    memory.name, memory.start = name, start
                    break
            else:
                memory.name = f"scratch{scratch}"
                scratch += 1
                if memory.written:
                    raise RecordError(f"{memory.name} was filled without a kernel, which a plan cannot say")
        return [self.finished(*entry) for entry in self.dispatches]

    def finished(self, dispatch: Dispatch, places: dict, indirect: int | None) -> Dispatch:
        for index, (identity, address) in places.items():
            memory = self.memories[identity]
            dispatch.bindings.append(Binding(index, memory.name, address - memory.start))
        dispatch.bindings.sort(key=lambda binding: binding.index)
        if indirect is not None:
            memory = next((m for m in self.memories.values() if m.start <= indirect < m.end), None)
            if memory is None:
                raise RecordError(f"{dispatch.kernel}: no kernel writes its indirect grid")
            dispatch.indirect = (memory.name, indirect - memory.start)
        return dispatch

    def scratch(self) -> dict[str, int]:
        return {m.name: m.end - m.start for m in self.memories.values() if m.name.startswith("scratch")}


def is_written(start: int, end: int) -> bool:
    if end - start >= FILLED_BYTES:
        return False
    words = np.frombuffer((ctypes.c_uint16 * ((end - start) // 2)).from_address(start), np.uint16)
    return bool((words != UNWRITTEN).any())


def preprocessed(source: str, include: tuple = ()) -> str:
    """A source without macros, comments, empty lines and line numbers."""
    text = build.preprocess(source, include)
    text = re.sub(r"^# .*\n", "", text, flags=re.M)
    return re.sub(r"\n\s*\n+", "\n", text)
