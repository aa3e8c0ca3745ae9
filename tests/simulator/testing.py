"""For tests: a shader's head, and the finding that a bad kernel must raise. Needs pytest."""

import sys

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
