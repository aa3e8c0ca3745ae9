"""A program with buffers of its own: ready to run, whole or in part.

`machine` launches kernels: driver.Gpu, or in the tests the simulator. It has `device` (where tensors lie),
`prepare(dispatch, arguments)` (a function of the grid that launches; the arguments are a tensor and a byte
offset for each buffer index) and `synchronize()`.
"""

from collections.abc import Callable

import torch
from simulator.cuda.plan import Dispatch
from torch import Tensor

from .programs import Program, Tensors


def poison(machine, size: int) -> Tensor:
    """Memory that shows when it is read before it is written: NaN in every float type, -1 in integers."""
    return torch.full((size,), 255, dtype=torch.uint8, device=machine.device)


class Replay:
    def __init__(self, machine, program: Program, tensors: Tensors, mutated: tuple[str, ...] = ()):
        self.machine = machine
        self.buffers = tensors | {name: tensors[name].clone() for name in mutated}
        self.buffers |= program.derive(tensors)
        for name, (shape, dtype) in program.results.items():
            self.buffers[name] = empty(machine, shape, getattr(torch, dtype))
        for name, size in program.scratch.items():
            self.buffers[name] = poison(machine, size)
        self.steps = [self.step(dispatch) for dispatch in program.dispatches]

    def step(self, dispatch: Dispatch) -> Callable[[], None]:
        """Launches a dispatch; an indirect grid is read at the first time and kept."""
        arguments = {b.index: (self.buffers[b.buffer], b.offset) for b in dispatch.bindings if not b.data}
        launch = self.machine.prepare(dispatch, arguments)
        known = [dispatch.grid]

        def run() -> None:
            if known[0] is None:
                known[0] = self.read_grid(*dispatch.indirect)
            if all(known[0]):
                launch(known[0])

        return run

    def read_grid(self, name: str, offset: int) -> tuple[int, ...]:
        self.machine.synchronize()
        words = self.buffers[name].flatten().view(torch.uint8)[offset : offset + 12].cpu().view(torch.int32)
        grid = tuple(words.tolist())
        if min(grid) < 0:
            raise RuntimeError(f"the indirect grid in {name} was not written")
        return grid

    def run(self, part: slice = slice(None)) -> None:
        for step in self.steps[part]:
            step()


def empty(machine, shape: list[int], dtype: torch.dtype) -> Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    return poison(machine, size).view(dtype).view(shape)
