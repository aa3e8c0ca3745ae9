"""Runs what host code on "mps", or `shader_library`, dispatches, and counts instead of checking."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch

from .. import runtime, shaderlib
from .count import Limit, run
from .facts import Gpu
from .kernel import library_of, model_of
from .liveness import Registers
from .model import Measurement, Work

DEFAULT_LIMIT = Limit()


class Recorder:
    """Called with a dispatch, runs and measures it. `work` is by the address of a buffer that is bound."""

    def __init__(self, work: Mapping[int, Work] | None = None, limit: Limit = DEFAULT_LIMIT):
        self.work, self.limit = work or {}, limit
        self.measurements: list[Measurement] = []

    def __call__(self, dispatch: shaderlib.Dispatch) -> shaderlib.Counters:
        kernel = dispatch.kernel.contents
        model = model_of(kernel)
        counts = run(model, dispatch, self.limit)
        addresses = {b.data for b in dispatch.buffers if b.data}
        self.measurements.append(
            Measurement(
                kernel=kernel.name.decode(),
                library=library_of(kernel)[0],
                grid=tuple(dispatch.grid),
                threads=dispatch.threads[0] * dispatch.threads[1] * dispatch.threads[2],
                declared_threads=kernel.max_threads,
                threadgroup_bytes=sum(dispatch.threadgroup_bytes),
                model=model,
                counts=counts,
                work=next((work for address, work in self.work.items() if address in addresses), None),
            )
        )
        return counts.counters


def measure(
    call: Callable[[], object],
    work: Mapping[torch.Tensor, Work] | None = None,
    limit: Limit = DEFAULT_LIMIT,
) -> list[Measurement]:
    """One measurement for each dispatch of `call`, e.g. of an operator on "mps".

    `work` says for weights on "mps" what a dispatch that binds them is for. Results are right if everything
    ran.
    """
    recorder = Recorder({runtime.address(t): w for t, w in (work or {}).items()}, limit)
    with runtime.intercepted(recorder):
        call()
    return recorder.measurements


@contextlib.contextmanager
def clocked(gpu: Gpu, factor: Callable[[shaderlib.Dispatch], float | None]) -> Iterator[dict[tuple, float]]:
    """By the GPU's clock (`runtime.clocked`), a dispatch of the block takes as long as the model predicts for
    `gpu`, times its `factor`; none where that is None. Those of a kernel with equal grids and threads are
    measured once: the block gets the seconds that the model predicts, by these.
    """
    known: dict[tuple, float] = {}

    def seconds(dispatch: shaderlib.Dispatch) -> float:
        times = factor(dispatch)
        key = dispatch.kernel.contents.name.decode(), *dispatch.grid, *dispatch.threads
        if times is None or key in known:
            shaderlib.execute(dispatch)
            return 0.0 if times is None else known[key] * times
        recorder = Recorder()
        recorder(dispatch)
        known[key] = recorder.measurements[0].latency(gpu).most / 1e6
        return known[key] * times

    with runtime.clocked(seconds):
        yield known


def registers(library: Path, name: str, native: bool = False) -> Registers:
    """The registers that a kernel of a compiled shader needs on M1, or with `native` from the M3 on."""
    return model_of(shaderlib.kernels_of(library)[name]).registers(native)


def zeros(type_: type, *shape: int) -> np.ndarray:
    """On a page's boundary, as Metal's buffers are: sectors are counted by addresses."""
    size, page = int(np.prod(shape)) * np.dtype(type_).itemsize, 4096
    memory = np.zeros(size + page, np.uint8)
    start = -memory.ctypes.data % page
    return memory[start : start + size].view(type_).reshape(shape)
