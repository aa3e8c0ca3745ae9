"""Kernels on the GPU that torch uses, through CUDA's driver."""

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from .compile import ENTRY, Compiled, Job, compile_job, job_of
from .plan import Dispatch, Plan

# CUfunction_attribute
THREADS, SHARED_BYTES, LOCAL_BYTES, REGISTERS = 0, 1, 3, 4


class CudaError(RuntimeError):
    pass


@functools.cache
def cuda() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    library.cuGetErrorString.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
    return library


def check(status: int, what: str) -> None:
    if status:
        message = ctypes.c_char_p()
        cuda().cuGetErrorString(status, ctypes.byref(message))
        raise CudaError(f"{what}: {(message.value or b'').decode()} ({status})")


class Kernel:
    def __init__(self, name: str, compiled: Compiled):
        self.name, self.compiled = name, compiled
        self.module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
        check(cuda().cuModuleLoadData(ctypes.byref(self.module), compiled.code), f"loading {name}")
        found = cuda().cuModuleGetFunction(ctypes.byref(self.function), self.module, ENTRY.encode())
        check(found, f"finding {name}")

    def attribute(self, number: int) -> int:
        value = ctypes.c_int()
        check(
            cuda().cuFuncGetAttribute(ctypes.byref(value), number, self.function), f"asking about {self.name}"
        )
        return value.value


class Gpu:
    """Launches the dispatches of a plan and compiles kernels that are not compiled yet."""

    device = "cuda"

    def __init__(self, plan: Plan):
        self.plan = plan
        self.kernels: dict[Job, Kernel] = {}
        self.tf32 = False
        self.architecture = architecture()

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def kernel(self, dispatch: Dispatch) -> Kernel:
        job = job_of(self.plan, dispatch, self.tf32, self.architecture)
        if job not in self.kernels:
            self.kernels[job] = Kernel(dispatch.kernel, compile_job(job))
        return self.kernels[job]

    def prepare(
        self, dispatch: Dispatch, arguments: dict[int, tuple[Tensor, int]]
    ) -> Callable[[tuple], None]:
        kernel = self.kernel(dispatch)
        threads = dispatch.threads[0] * dispatch.threads[1] * dispatch.threads[2]
        if threads > kernel.attribute(THREADS):
            raise CudaError(f"{kernel.name}: {threads} threads, {kernel.attribute(THREADS)} fit")
        if kernel.compiled.matrices and threads % 32:
            raise CudaError(f"{kernel.name}: matrices need whole simdgroups, {threads} threads are none")
        offsets, shared = {}, 0
        for index in kernel.compiled.threadgroups:
            offsets[index] = shared
            shared += -(-dispatch.threadgroup_bytes[index] // 16) * 16
        data = {b.index: bytes.fromhex(b.data) for b in dispatch.bindings if b.data}
        addresses = {i: tensor.data_ptr() + offset for i, (tensor, offset) in arguments.items()}
        values = [argument(data.get(i), addresses.get(i, 0)) for i in kernel.compiled.buffers]
        values += [ctypes.c_uint32(offsets[i]) for i in kernel.compiled.threadgroups]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))

        def launch(grid: tuple) -> None:
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            status = cuda().cuLaunchKernel(
                kernel.function, *grid, *dispatch.threads, shared, stream, pointers, None
            )
            check(status, f"launching {kernel.name} on {grid} of {dispatch.threads}")

        launch.keep = values  # `pointers` points at them
        return launch

    def describe(self, dispatch: Dispatch) -> dict:
        """What the compiler made of a kernel."""
        kernel = self.kernel(dispatch)
        return {
            "kernel": dispatch.kernel,
            "registers": kernel.attribute(REGISTERS),
            "local_bytes": kernel.attribute(LOCAL_BYTES),
            "shared_bytes": kernel.attribute(SHARED_BYTES),
            "threads": list(dispatch.threads),
            "grid": list(dispatch.grid) if dispatch.grid else "indirect",
            "matrices": kernel.compiled.matrices,
        }


def argument(data: bytes | None, address: int):
    """A pointer, or bytes by value, which the entry takes in units of 16."""
    if data is None:
        return ctypes.c_uint64(address)
    return ctypes.create_string_buffer(data, -(-len(data) // 16) * 16)


def architecture() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"
