"""`shader_library(source).launch(...)`: runs any MSL text in the executor, without an MPS device."""

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .build import compile_shader, executor_library
from .errors import SimulatorError

BINDINGS = 31
schedule = 0  # the seed of the order of threads, simdgroups and threadgroups; 0 is ascending


class Argument(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int),
        ("index", ctypes.c_int),
        ("min_bytes", ctypes.c_size_t),
        ("writable", ctypes.c_int),
        ("name", ctypes.c_char_p),
    )


class Kernel(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("entry", ctypes.c_void_p),
        ("arguments", ctypes.POINTER(Argument)),
        ("argument_count", ctypes.c_int),
        ("max_threads", ctypes.c_uint),
        ("image", ctypes.c_char_p),
        ("build", ctypes.c_char_p),
    )


class Binding(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
        ("identity", ctypes.c_uint64),
    )


class Traffic(ctypes.Structure):
    """Bytes that one binding of a dispatch saw: every access, and each byte once."""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("bytes_read", "bytes_written", "distinct_bytes_read", "distinct_bytes_written")
    )


COUNTS = (
    "threadgroups",
    "threads",
    "barriers",
    "simdgroup_barriers",
    "simd_operations",
    "atomics",
    "threadgroup_accesses",
)


class Counters(ctypes.Structure):
    _fields_ = (("buffers", Traffic * BINDINGS), *((name, ctypes.c_uint64) for name in COUNTS))


@dataclass
class DispatchCounters:
    """What one dispatch did. `buffers` has the bindings that were accessed, by index."""

    kernel: str
    buffers: dict[int, Traffic]
    threadgroups: int
    threads: int
    barriers: int
    simdgroup_barriers: int
    simd_operations: int
    atomics: int
    threadgroup_accesses: int

    @classmethod
    def of(cls, kernel: str, raw: Counters) -> "DispatchCounters":
        touched = {i: Traffic.from_buffer_copy(t) for i, t in enumerate(raw.buffers) if any(bytes(t))}
        return cls(kernel, touched, *(getattr(raw, name) for name in COUNTS))

    @property
    def bytes_read(self) -> int:
        return sum(traffic.bytes_read for traffic in self.buffers.values())

    @property
    def bytes_written(self) -> int:
        return sum(traffic.bytes_written for traffic in self.buffers.values())


class Dispatch(ctypes.Structure):
    _fields_ = (
        ("kernel", ctypes.POINTER(Kernel)),
        ("buffers", Binding * BINDINGS),
        ("threadgroup_bytes", ctypes.c_size_t * BINDINGS),
        ("grid", ctypes.c_uint * 3),
        ("threads", ctypes.c_uint * 3),
        ("total_threads", ctypes.c_uint * 3),
        ("seed", ctypes.c_uint64),
        ("indirect", ctypes.c_void_p),
    )


# msl_execute of executor.h.
Execute = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.POINTER(Dispatch),
    ctypes.POINTER(Counters),
    ctypes.POINTER(ctypes.c_char),
    ctypes.c_size_t,
)


@functools.cache
def executor() -> Execute:
    library = ctypes.CDLL(str(executor_library()), mode=ctypes.RTLD_GLOBAL)
    return Execute(("msl_execute", library))


def execute(dispatch: Dispatch) -> Counters:
    """Runs one dispatch to its end. Raises SimulatorError on the first finding."""
    counters, message = Counters(), ctypes.create_string_buffer(4096)
    found = executor()(ctypes.byref(dispatch), ctypes.byref(counters), message, len(message))
    if found:
        raise SimulatorError(message.value.decode())
    return counters


def host_bytes(value) -> np.ndarray:
    """The bytes of a buffer argument: the memory itself of an array or a CPU tensor, else a copy."""
    if isinstance(value, (bytes, bytearray)):
        return np.array(bytearray(value), np.uint8)
    if isinstance(value, np.generic):
        return np.frombuffer(bytearray(value.tobytes()), np.uint8)
    if isinstance(value, np.ndarray):
        if not value.flags.c_contiguous:
            raise ValueError("a buffer argument must be contiguous")
        return value.reshape(-1).view(np.uint8)
    if hasattr(value, "untyped_storage"):
        import torch

        if not value.is_contiguous():
            raise ValueError("a buffer argument must be contiguous")
        return value.detach().cpu().reshape(-1).view(torch.uint8).numpy()
    raise TypeError(f"a buffer argument must be bytes, an array or a tensor, got {type(value).__name__}")


@functools.cache
def kernels_of(path: Path) -> dict[str, Kernel]:
    """The kernels of a compiled shader (build.compile_shader), by name."""
    library = ctypes.CDLL(str(path))
    library.msl_kernels.restype = ctypes.POINTER(Kernel)
    count = ctypes.c_int()
    table = library.msl_kernels(ctypes.byref(count))
    return {table[i].name.decode(): table[i] for i in range(count.value)}


class ShaderLibrary:
    """The kernels of one MSL source. `launch` runs one dispatch to its end and returns its counters."""

    def __init__(self, source: str, constants: dict | None = None, include: tuple = ()):
        executor()
        self.path = compile_shader(source, constants, include)
        self._kernels = kernels_of(self.path)

    @property
    def kernel_names(self) -> list[str]:
        return list(self._kernels)

    def kernel(self, name: str) -> Kernel:
        """A kernel by its name, for dispatches that are made by hand."""
        if name not in self._kernels:
            raise KeyError(f"no kernel named {name}; there are {', '.join(self._kernels)}")
        return self._kernels[name]

    def launch(
        self, name, buffers, grid, threads, threadgroup_bytes=(), total_threads=None, seed=None, run=execute
    ) -> DispatchCounters:
        """Runs kernel `name` on `grid` threadgroups of `threads` threads.

        `buffers` maps buffer indices to numpy arrays, tensors, bytes or numpy scalars; arrays and tensors
        bound to writable arguments hold the results afterwards. `threadgroup_bytes` is a list (or dict by
        index) of the lengths of threadgroup arguments. `total_threads` cuts the edge threadgroups as
        dispatchThreads does. `seed` overrides set_schedule. `run` gets the dispatch and gives its counters.
        Raises SimulatorError on the first finding.
        """
        kernel = self.kernel(name)
        dispatch = Dispatch(kernel=ctypes.pointer(kernel), seed=schedule if seed is None else seed)
        dispatch.grid[:], dispatch.threads[:] = (*grid, 1, 1)[:3], (*threads, 1, 1)[:3]
        if total_threads:
            dispatch.total_threads[:] = (*total_threads, 1, 1)[:3]
        lengths = (
            threadgroup_bytes.items() if isinstance(threadgroup_bytes, dict) else enumerate(threadgroup_bytes)
        )
        for index, length in lengths:
            dispatch.threadgroup_bytes[index] = length
        # An object that is bound twice is one memory; bytes and numbers are as if given to setBytes.
        memory = {id(value): host_bytes(value) for value in buffers.values()}
        by_value = {id(value) for value in buffers.values() if isinstance(value, (bytes, np.generic))}
        identities = {key: 0 if key in by_value else number for number, key in enumerate(memory, 1)}
        for index, value in buffers.items():
            data = memory[id(value)]
            dispatch.buffers[index] = Binding(data.ctypes.data, data.size, identities[id(value)])
        try:
            return DispatchCounters.of(name, run(dispatch))
        finally:
            for value in buffers.values():
                if getattr(value, "is_cpu", True) is False:
                    import torch

                    flat = value.detach().reshape(-1).view(torch.uint8)
                    flat.copy_(torch.from_numpy(memory[id(value)]))


def shader_library(msl_source: str, constants: dict | None = None, include: tuple = ()) -> ShaderLibrary:
    """The kernels of an MSL source text, ready to launch; `constants` sets function constants by number."""
    return ShaderLibrary(msl_source, constants, include)
