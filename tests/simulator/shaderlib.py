"""`shader_library(source).launch(...)`: runs any MSL text in the executor, without an MPS device."""

import ctypes
import functools
import threading
from pathlib import Path

import numpy as np

from .build import compile_shader, executor_library
from .errors import SimulatorError
from .schedule import current_seed

BINDINGS = 31


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
        ("label", ctypes.c_char_p),
    )


class Traffic(ctypes.Structure):
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

    def as_dict(self) -> dict:
        """Counts by name, and under "buffers" the traffic of every buffer that was touched, by index."""
        result = {name: getattr(self, name) for name in COUNTS}
        traffic = ({name: getattr(b, name) for name, _ in Traffic._fields_} for b in self.buffers)
        result["buffers"] = {i: t for i, t in enumerate(traffic) if any(t.values())}
        return result


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


_executor = None
_loading = threading.Lock()


def executor() -> ctypes.CDLL:
    global _executor
    with _loading:
        if _executor is None:
            library = ctypes.CDLL(str(executor_library()))
            library.msl_execute.argtypes = (
                ctypes.POINTER(Dispatch),
                ctypes.POINTER(Counters),
                ctypes.c_char_p,
                ctypes.c_size_t,
            )
            _executor = library
    return _executor


def execute(dispatch: Dispatch) -> Counters:
    """Runs one dispatch to its end. Raises SimulatorError on the first finding."""
    counters, message = Counters(), ctypes.create_string_buffer(4096)
    found = executor().msl_execute(ctypes.byref(dispatch), ctypes.byref(counters), message, len(message))
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

    def __init__(
        self, source: str, constants: dict | None = None, include: tuple = (), name: str = "program_source"
    ):
        executor()
        self.path = compile_shader(source, constants, include, name)
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
    ) -> dict:
        """Runs kernel `name` on `grid` threadgroups of `threads` threads.

        `buffers` maps buffer indices to numpy arrays, tensors, bytes or numpy scalars; arrays and tensors
        bound to writable arguments hold the results afterwards. `threadgroup_bytes` is a list (or dict by
        index) of the lengths of threadgroup arguments. `total_threads` cuts the edge threadgroups as
        dispatchThreads does. `seed` overrides set_schedule. `run` gets the dispatch and gives its counters.
        Raises SimulatorError on the first finding.
        """
        kernel = self.kernel(name)
        dispatch = Dispatch(kernel=ctypes.pointer(kernel), seed=current_seed() if seed is None else seed)
        for i in range(3):
            dispatch.grid[i] = grid[i] if i < len(grid) else 1
            dispatch.threads[i] = threads[i] if i < len(threads) else 1
            if total_threads:
                dispatch.total_threads[i] = total_threads[i] if i < len(total_threads) else 1
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
            dispatch.buffers[index] = Binding(data.ctypes.data, data.size, identities[id(value)], None)
        try:
            return run(dispatch).as_dict()
        finally:
            for value in buffers.values():
                if getattr(value, "is_cpu", True) is False:
                    import torch

                    flat = value.detach().reshape(-1).view(torch.uint8)
                    flat.copy_(torch.from_numpy(memory[id(value)]))


def shader_library(msl_source: str, constants: dict | None = None, include: tuple = ()) -> ShaderLibrary:
    """The kernels of an MSL source text, ready to launch; `constants` sets function constants by number."""
    return ShaderLibrary(msl_source, constants, include)
