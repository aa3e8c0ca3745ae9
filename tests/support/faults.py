"""Kernels with a fault: a text of a shader is another one, or what they write is changed or nonsense."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np


def with_faults(texts: dict[str, str]) -> Callable:
    """For `intercepted`: runs kernels as if each text were the other one, and looks for no other fault."""
    from simulator import build, shaderlib
    from simulator.coverage import Coverage

    broken: dict[Path, dict] = {}
    unchecked = Coverage()

    def run(dispatch) -> None:
        kernel = dispatch.kernel.contents
        path = Path(kernel.image.decode().rpartition("-")[0] + ".so")
        if path not in broken:
            source, constants = build.origins[path]
            for text, wrong in texts.items():
                source = source.replace(text, wrong)
            changed = build.compile_shader(source, constants)
            broken[path] = shaderlib.kernels_of(changed)
        copy = shaderlib.Dispatch.from_buffer_copy(dispatch)
        copy.kernel = type(copy.kernel)(broken[path][kernel.name.decode()])
        unchecked(copy)

    return run


def with_results(start: str, change: Callable[[np.ndarray, np.ndarray], None]) -> Callable:
    """For `intercepted`: runs everything. For kernels whose names start so, `change` then gets the float32
    numbers of the first buffer that they write, which it may change, and those that were there before."""
    from simulator import shaderlib

    def run(dispatch) -> None:
        kernel = dispatch.kernel.contents
        if not kernel.name.decode().startswith(start):
            shaderlib.execute(dispatch)
            return
        arguments = kernel.arguments[: kernel.argument_count]
        index = next(a.index for a in arguments if a.kind == 0 and a.writable)  # no threadgroup memory
        binding = dispatch.buffers[index]
        memory = np.frombuffer((ctypes.c_char * binding.size).from_address(binding.data), np.float32)
        before = memory.copy()
        shaderlib.execute(dispatch)
        change(memory, before)

    return run


def broken(name: str) -> Callable:
    """Runs everything but one kernel: what it would write gets bytes of ones, which are NaN or -1."""
    from simulator import shaderlib

    def run(dispatch) -> None:
        kernel = dispatch.kernel.contents
        if kernel.name.decode() != name:
            shaderlib.execute(dispatch)
            return
        for argument in kernel.arguments[: kernel.argument_count]:
            binding = dispatch.buffers[argument.index]
            if argument.writable:
                ctypes.memset(binding.data, 0xFF, binding.size)

    return run
