"""For tests: heads of shaders, findings that they must raise, a host beside a GPU. Needs pytest."""

import sys
import time

import numpy as np
import pytest

from .errors import SimulatorError
from .shaderlib import shader_library

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="the simulator runs on Linux")
SEEDS = (0, 1, 2, 3)
HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"


def floats(*shape, fill=0.0):
    return np.full(shape, fill, np.float32)


def finding(source, name="bad", buffers=None, grid=(1,), threads=(64,), **options):
    """The message of the finding that the kernel must raise."""
    with pytest.raises(SimulatorError) as error:
        shader_library(HEAD + source).launch(name, buffers or {0: floats(4096)}, grid, threads, **options)
    return str(error.value)


# A kernel of any statements, in `%s`.
ACROSS = """
kernel void bad(device float* out [[buffer(0)]], uint group [[threadgroup_position_in_grid]],
                uint i [[thread_index_in_threadgroup]]) {
  %s
}
"""


def told(calls, count: int) -> list[str]:
    """What handlers have seen, once there are so many."""
    seen, end = [], time.monotonic() + 60
    while len(seen) < count and time.monotonic() < end:
        seen += calls.seen()
    return seen


def near(*seconds: float):
    """The clock goes on from test to test, and rounds."""
    return pytest.approx(seconds, abs=1e-9)


def answering(calls, first: int, work=lambda: None):
    """A host's thread: it waits for a value of the event, works, and signals the next."""

    def answer() -> bool:
        heard = calls.wait_by_host(first, 60_000)
        work()
        calls.signal_by_host(first + 1)
        return heard

    return answer


def ask(calls, first: int) -> None:
    calls.signal_by_gpu(first), calls.commit(), calls.wait_by_gpu(first + 1)


def usable(calls) -> bool:
    """Whether an operator gives its right result."""
    import torch

    x = torch.arange(100.0, device="mps")
    return calls.axpy(x, x, 2.0).tolist() == (3 * torch.arange(100.0)).tolist()
