"""MLX's launches, counted."""

import functools

import numpy as np
from simulator import mlx_kernels, shaderlib
from simulator.apple.model import Measurement, Work
from simulator.apple.recorder import Recorder, zeros
from simulator.errors import SimulatorError

from ..cases.mlx_launch import Launch, Matrices


@functools.cache
def library(headers: tuple[str, ...], template: str, constants: tuple) -> shaderlib.ShaderLibrary:
    """A library with one kernel, named "kernel"."""
    root = mlx_kernels.include_folder()
    if root is None:
        raise SimulatorError("MLX's kernel headers are missing: pip install 'mlx[cpu]'")
    source = mlx_kernels.source(headers)
    source += f'template [[host_name("kernel")]] [[kernel]] decltype({template}) {template};\n'
    return shaderlib.shader_library(source, dict(constants), (mlx_kernels.changed_headers(root), root))


def run(launch: Launch, arrays: dict[str, np.ndarray], recorder: Recorder) -> Measurement:
    """Runs a launch on arrays by the names that its arguments give."""
    kernels = library(launch.headers, launch.template, tuple(launch.constants.items()))
    kernel = kernels.kernel("kernel")
    buffers = {}
    for i in range(kernel.argument_count):
        argument = kernel.arguments[i]
        # The kernel does not look at strides and shapes that are not given.
        value = launch.arguments.get(argument.name.decode(), bytes(8))
        buffers[argument.index] = arrays[value] if isinstance(value, str) else value
    kernels.launch("kernel", buffers, launch.grid, launch.threads, run=recorder)
    measurement = recorder.measurements[-1]
    measurement.kernel = launch.template
    return measurement


def measure(
    m: Matrices,
    launch: Launch,
    x_rows: int,
    out_rows: int,
    work: Work,
    recorder: Recorder,
    lists: dict[str, np.ndarray],
) -> Measurement:
    """Runs a launch on zeros: counts depend only on the `lists` (ids and x_rows, or offsets)."""
    out = zeros(np.float32, launch.parts, out_rows, m.rows)
    if launch.parts == 1:
        out = array(m.dtype, out_rows, m.rows)
    arrays = {**weights(m), "x": array(m.dtype, x_rows, m.inputs), "out": out, **lists}
    measurement = run(launch, arrays, recorder)
    measurement.work = work
    return measurement


def array(dtype: str, *shape: int) -> np.ndarray:
    return zeros(np.float32 if dtype == "f32" else np.uint16, *shape)


@functools.lru_cache(maxsize=2)
def weights(m: Matrices) -> dict[str, np.ndarray]:
    f = m.format
    if f.bits == 0:
        return {"w": array(m.dtype, m.experts, m.rows, m.inputs)}
    groups = (m.experts, m.rows, m.inputs // f.group)
    packed = {"w": zeros(np.uint32, m.experts, m.rows, m.inputs * f.bits // 32)}
    if f.mode != "affine":
        return {**packed, "scales": zeros(np.uint8, *groups)}
    return {**packed, "scales": array(m.dtype, *groups), "biases": array(m.dtype, *groups)}
