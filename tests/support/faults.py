"""Kernels with a fault: a text of a shader is another one, or what they write is nonsense."""

import ctypes
from collections.abc import Callable
from pathlib import Path


def with_fault(text: str, wrong: str) -> Callable:
    """For `intercepted`: runs kernels as if `text` were `wrong`, and looks for no other fault."""
    from simulator import build, shaderlib
    from simulator.coverage import Coverage

    broken: dict[Path, dict] = {}
    unchecked = Coverage()

    def run(dispatch) -> None:
        kernel = dispatch.kernel.contents
        path = Path(kernel.image.decode().rpartition("-")[0] + ".so")
        if path not in broken:
            source, constants = build.origins[path]
            changed = build.compile_shader(source.replace(text, wrong), constants)
            broken[path] = shaderlib.kernels_of(changed)
        copy = shaderlib.Dispatch.from_buffer_copy(dispatch)
        copy.kernel = type(copy.kernel)(broken[path][kernel.name.decode()])
        unchecked(copy)

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
