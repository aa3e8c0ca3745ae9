"""A plan's dispatches in the simulator: what `run` does on a GPU, without one."""

import ctypes
from collections.abc import Callable

from torch import Tensor

from .. import shaderlib
from .plan import Dispatch, Plan

UNBOUND_BYTES = 64  # of memory that a kernel may name and must not depend on


class SimulatedGpu:
    """In place of driver.Gpu: launches a plan's dispatches on tensors of the CPU, checked by the executor."""

    device = "cpu"

    def __init__(self, plan: Plan):
        self.plan = plan
        self.libraries: dict[tuple, shaderlib.ShaderLibrary] = {}

    def synchronize(self) -> None:
        """Every launch has ended when it returns."""

    def kernel(self, dispatch: Dispatch) -> shaderlib.Kernel:
        source, name = self.plan.source(dispatch.library), dispatch.kernel
        if "<" in name:
            source += f'\ntemplate [[host_name("peer")]] [[kernel]] decltype({name}) {name};\n'
            name = "peer"
        key = (source, tuple(dispatch.constants.items()))
        if key not in self.libraries:
            self.libraries[key] = shaderlib.ShaderLibrary(source, dispatch.constants)
        return self.libraries[key].kernel(name)

    def prepare(
        self, dispatch: Dispatch, arguments: dict[int, tuple[Tensor, int]]
    ) -> Callable[[tuple], None]:
        kernel = self.kernel(dispatch)
        data = {b.index: bytes.fromhex(b.data) for b in dispatch.bindings if b.data}
        taken = {
            kernel.arguments[i].index for i in range(kernel.argument_count) if kernel.arguments[i].kind == 0
        }
        data |= {index: bytes(UNBOUND_BYTES) for index in taken - set(data) - set(arguments)}
        memory = {index: ctypes.create_string_buffer(value, len(value)) for index, value in data.items()}

        def launch(grid: tuple) -> None:
            raw = shaderlib.Dispatch(kernel=ctypes.pointer(kernel))
            raw.grid[:], raw.threads[:] = grid, dispatch.threads
            for index, length in dispatch.threadgroup_bytes.items():
                raw.threadgroup_bytes[index] = length
            for index, value in memory.items():
                raw.buffers[index] = shaderlib.Binding(ctypes.addressof(value), len(value), 0)
            for index, (tensor, offset) in arguments.items():
                start = tensor.data_ptr()
                raw.buffers[index] = shaderlib.Binding(start + offset, tensor.nbytes - offset, start)
            shaderlib.execute(raw)

        return launch
