"""Loads the simulated device, and asks it what was encoded and run."""

import contextlib
import ctypes
import errno
import functools
import heapq
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import aten, build_device, shaderlib
from .shaderlib import DispatchCounters

RECOMMENDED = 64 << 30  # bytes of memory of the simulated GPU


class _DispatchCounters(ctypes.Structure):
    _fields_ = (("kernel", ctypes.c_char_p), ("counters", shaderlib.Counters))


class Commands(list[str]):
    """The lines of a trace. Printed, they are the text that expecttest pins."""

    def __str__(self) -> str:
        return "\n".join(self)


_Read = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_int, ctypes.c_long, ctypes.c_long)
_every_read: list[Any] = []  # a read that is late returns into its function


@functools.cache
def _runtime() -> ctypes.CDLL:
    library = ctypes.CDLL(str(build_device.device_library()))
    library.simulator_set_executor.argtypes = [shaderlib.Execute]
    library.simulator_set_schedule.argtypes = [ctypes.c_uint64]
    library.simulator_run_alone.argtypes = [ctypes.c_int, ctypes.c_uint64, ctypes.c_double]
    library.simulator_limit_pipelines.argtypes = [ctypes.c_size_t]
    library.simulator_set_dropping.argtypes = [ctypes.c_int, ctypes.c_int]
    library.simulator_trace_stop.restype = ctypes.c_char_p
    library.simulator_counters_stop.argtypes = [ctypes.POINTER(ctypes.c_size_t)]
    library.simulator_counters_stop.restype = ctypes.POINTER(_DispatchCounters)
    library.simulator_contents.argtypes = [ctypes.c_void_p]
    library.simulator_contents.restype = ctypes.c_void_p
    library.simulator_pool_memory.argtypes = [ctypes.c_size_t]
    library.simulator_set_heap_limit.argtypes = [ctypes.c_size_t]
    library.simulator_is_resident.argtypes = [ctypes.c_void_p]
    library.simulator_called_aten.restype = ctypes.c_char_p
    library.simulator_add_aten.argtypes = [
        ctypes.c_int,
        ctypes.c_char_p,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_size_t,
    ]
    library.simulator_commits.restype = ctypes.c_uint64
    library.simulator_fail_buffer.argtypes = [ctypes.c_uint64, ctypes.c_int, ctypes.c_uint64]
    library.simulator_ignore_buffers.argtypes = [ctypes.c_uint64, ctypes.c_int]
    library.simulator_limit_working_set.argtypes = [ctypes.c_size_t]
    library.simulator_advance_clock.argtypes = [ctypes.c_double]
    library.simulator_time_host.argtypes = [ctypes.c_int, ctypes.c_double, ctypes.c_double]
    library.simulator_advance_host.argtypes = [ctypes.c_double]
    library.simulator_host_clock.restype = ctypes.c_double
    library.simulator_clock.restype = ctypes.c_double
    library.simulator_idle.restype = ctypes.c_double
    library.simulator_time_events.argtypes = [ctypes.c_double, ctypes.c_double]
    library.simulator_waited.restype = ctypes.c_double
    library.simulator_advance_answer.argtypes = [ctypes.c_double]
    library.simulator_answer_clock.restype = ctypes.c_double
    library.simulator_limit_waits.argtypes = [ctypes.c_double]
    library.simulator_intercept_reads.argtypes = [_Read]
    library.simulator_use_stream.argtypes = [ctypes.c_int64]
    library.simulator_live_buffers.restype = ctypes.c_size_t
    library.simulator_live_objects.restype = ctypes.c_long
    return library


@functools.cache
def install(strict: bool = False) -> None:
    """Build what is stale and load it: the executor and the device.

    With `strict`, host code must encode with PyTorch's own stream->commandEncoder(), without command buffers,
    commits or devices of its own, and compile with safe math for language 3.1 (4.0 for sources with tensors).

    From here on device="mps" works in this process. Raises BuildError with the compiler's message, or with
    the packages to install where a tool is missing.
    """
    build_device.check_tools()
    torch.ops.load_library(str(build_device.device_library()))
    _runtime().simulator_set_executor(shaderlib.executor())
    _runtime().simulator_set_strict(strict)
    for version in aten.table():
        minor = int(version.split(".")[1])
        for name, row in aten.operators(version):
            graph, waits, memory = row.get("graph", False), row.get("waits", False), row.get("threadgroup", 0)
            _runtime().simulator_add_aten(minor, name.encode(), graph, waits, memory)
    torch._C._has_mps = True
    if not torch._C._mps_is_available():
        raise RuntimeError(
            "install() comes too late: torch was asked for MPS before and remembers its answer"
        )
    torch.backends.mps.is_available.cache_clear()
    if hasattr(torch.mps, "current_stream"):  # from torch 2.15 on; here there is one stream
        torch.mps.current_stream = torch.mps.default_stream = torch.accelerator.current_stream
    # torch.load restores tensors of other backends through such a pair of functions.
    torch.serialization.register_package(19, _tag, _restore)


def _tag(storage) -> str | None:
    return "mps" if storage.device.type == "mps" else None


def _restore(storage, location: str):
    if not location.startswith("mps"):
        return None
    source = torch.empty(0, dtype=torch.uint8).set_(storage)
    return source.to("mps").untyped_storage()


@contextlib.contextmanager
def stream(number: int) -> Iterator[None]:
    """The current stream of this thread is another one of torch's: with a queue and command buffers of its
    own. 0 is the default one, which threads have in common.
    """
    _runtime().simulator_use_stream(number)
    try:
        yield
    finally:
        _runtime().simulator_use_stream(0)


def commit_unseen() -> None:
    """End the command buffer of the current stream as MPSGraph does within a graph: no host code is told."""
    _runtime().simulator_commit_unseen()


def set_schedule(seed: int) -> None:
    """Choose the order of threads and threadgroups; 0 is ascending. Commands recorded so far run before.

    With an odd one, what is committed runs at once. With the last two of four, completed handlers are called
    late, by another thread, and the newest command buffer's first. With the third of four new tensors have
    what is in memory that was freed, as by `torch_memory`; with others they are NaN.
    """
    torch.mps.synchronize()
    shaderlib.schedule = seed
    _runtime().simulator_set_schedule(seed)
    _runtime().simulator_pool_memory(RECOMMENDED if seed % 4 == 2 else 0)


@contextlib.contextmanager
def own_gpu(seed: int, watchdog: float = 0.0) -> Iterator[None]:
    """The GPU has a thread of its own: what is committed runs while the host goes on.

    `seed` draws how late it begins, how late signals and ends of command buffers are heard of (up to 0.2 ms),
    and how long a thread keeps Python's lock while others want it (up to 5 ms). A wait of the host's for it
    keeps the lock where torch's would. It has none inside of `timeline` and `trace`, whose results are the
    same in each run.

    macOS ends a command buffer that has waited for an event for some 5 s: here for `watchdog` seconds of the
    real clock, or never if it is 0.
    """
    torch.mps.synchronize()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(random.Random(seed).choice((1e-5, 1e-3, interval)))
    _runtime().simulator_run_alone(True, seed, watchdog)
    try:
        yield
        torch.mps.synchronize()
    finally:
        _runtime().simulator_run_alone(False, 0, 0.0)
        sys.setswitchinterval(interval)


@contextlib.contextmanager
def pipeline_limit(threads: int) -> Iterator[None]:
    """Pipelines allow no more threads a threadgroup, as where Apple's compiler takes many registers."""
    _runtime().simulator_limit_pipelines(threads)
    try:
        yield
    finally:
        _runtime().simulator_limit_pipelines(ctypes.c_size_t(-1).value)


@contextlib.contextmanager
def heaps(below: int) -> Iterator[None]:
    """New buffers of fewer bytes lie in a heap, as torch's do on a Mac; otherwise each stands alone."""
    _runtime().simulator_set_heap_limit(below)
    try:
        yield
    finally:
        _runtime().simulator_set_heap_limit(0)


@contextlib.contextmanager
def torch_memory(recommended: int = RECOMMENDED) -> Iterator[None]:
    """New tensors lie in memory as torch's allocator keeps it, on a GPU with this recommended size in bytes.

    A freed buffer is given out again at once, with what is in it. `driver_allocated_memory` counts heaps: of
    8 MiB for tensors up to 1 MiB, 32 MiB below 10 MiB, 1 GiB below 512 MiB, which `empty_cache` returns. From
    torch 2.14 on it finds the places in them itself. From 1.4 of that size on large tensors get heaps of
    their own, and over 1.7 of it none. No tensor may have that size.
    """
    torch.mps.synchronize()
    _runtime().simulator_pool_memory(recommended)
    try:
        yield
        torch.mps.synchronize()
    finally:
        _runtime().simulator_pool_memory(0)


@contextlib.contextmanager
def torch_version(version: str) -> Iterator[None]:
    """The torch whose copies and errors are simulated is another one than SIMULATED_TORCH, or 2.15."""
    torch.mps.synchronize()
    before = _runtime().simulator_torch()
    _runtime().simulator_use_torch(int(version.split(".")[1]))
    try:
        yield
    finally:
        _runtime().simulator_use_torch(before)


def called_aten() -> list[str]:
    """The operators of aten that have run on the device so far; forgets them."""
    return _runtime().simulator_called_aten().decode().split()


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """The first thread that uses the device is the only one: a use by any other raises SimulatorError."""
    torch.mps.synchronize()
    _runtime().simulator_one_thread(1)
    try:
        yield
    finally:
        _runtime().simulator_one_thread(0)


# {how a command buffer fails: Metal's code of the error}
FAILURES = {"victim": 1, "timeout": 2, "fault": 3, "memory": 8}


@dataclass
class Failure:
    """Whether `failing` has made a buffer fail, known when its block ends."""

    happened: bool = False


@contextlib.contextmanager
def failing(kind: str, after: int = 0, also: int = 0) -> Iterator[Failure]:
    """Behind `after` command buffers one fails, and `also` so many that follow: none of its commands runs,
    its status is an error ("timeout", "fault", "memory" or "victim"), and its handlers are called. Nobody
    else is told, as on a Mac: what reads its results gets what was in memory.
    """
    torch.mps.synchronize()
    _runtime().simulator_fail_buffer(after, FAILURES[kind], 1 + also)
    failure = Failure()
    try:
        yield failure
        torch.mps.synchronize()
    finally:
        failure.happened = bool(_runtime().simulator_has_failed())
        _runtime().simulator_fail_buffer(0, 0, 0)


@contextlib.contextmanager
def ignoring(timeouts: int, victims: bool = False) -> Iterator[None]:
    """Once so many command buffers have timed out, all later ones are ignored until the block ends.

    `victims`: those that are committed after one that times out, and have not run, fail with it.
    """
    torch.mps.synchronize()
    _runtime().simulator_ignore_buffers(timeouts, victims)
    try:
        yield
        torch.mps.synchronize()
    finally:
        _runtime().simulator_ignore_buffers(0, 0)


@contextlib.contextmanager
def working_set(size: int) -> Iterator[None]:
    """The GPU may have so many bytes at once: a command buffer whose kernels need more fails.

    It fails as one of `failing("memory")`, and so does each later one that needs as much. Tensors are made
    nevertheless, and what residency sets keep does not count.
    """
    torch.mps.synchronize()
    _runtime().simulator_limit_working_set(size)
    try:
        yield
        torch.mps.synchronize()
    finally:
        _runtime().simulator_limit_working_set(2**64 - 1)


def reset() -> None:
    """Forget recorded commands and findings, and go back to schedule 0."""
    _runtime().simulator_reset()
    set_schedule(0)


def address(tensor: torch.Tensor) -> int:
    """Where the bytes of an mps tensor's storage lie: what a dispatch's bindings point into."""
    return _runtime().simulator_contents(tensor.untyped_storage().data_ptr())


def is_resident(tensor: torch.Tensor) -> bool:
    """Whether an mps tensor's buffer, or the heap that it lies in, is in a residency set."""
    return bool(_runtime().simulator_is_resident(tensor.untyped_storage().data_ptr()))


def residency_sets() -> int:
    """How many residency sets keep memory ready for the GPU."""
    return _runtime().simulator_residency_sets()


def residency_requests() -> int:
    """How often this process has asked for the memory of a residency set."""
    return _runtime().simulator_residency_requests()


def commits() -> int:
    """How often this process has committed the stream, so that the GPU could start."""
    return _runtime().simulator_commits()


def live_buffers() -> int:
    """How many MTLBuffers exist: to find leaks."""
    return _runtime().simulator_live_buffers()


def live_objects() -> int:
    """How many Objective-C objects exist: what host code creates with `new` and does not release stays."""
    return _runtime().simulator_live_objects()


@contextlib.contextmanager
def trace() -> Iterator[Commands]:
    """The commands that are encoded inside the block, there when it ends.

    One line a command: kernel, grid (threadgroups, `threads` for dispatchThreads, or
    the buffer of an indirect dispatch), threads per threadgroup, bindings. A buffer is a letter in the
    order of appearance, with the bytes from the binding's offset to the buffer's end; setBytes is a length.
    A line `synchronize` stands where the CPU waited for commands before it, `commit` where the GPU was given
    them without a wait, `barrier` where one was encoded, `signal event` and `wait for event` likewise.

        fused_norm_add_float grid 4x1x1 of 128x1x1: 0=A[0:4096] 1=B[128:4224] 2=C[0:4096] 3=24 bytes
    """
    commands = Commands()
    _runtime().simulator_trace_start()
    try:
        yield commands
    finally:
        commands.extend(_runtime().simulator_trace_stop().decode().splitlines())


@contextlib.contextmanager
def counters() -> Iterator[list[DispatchCounters]]:
    """The counters of the dispatches that run inside the block, which ends by synchronising."""
    dispatches: list[DispatchCounters] = []
    torch.mps.synchronize()
    _runtime().simulator_counters_start()
    try:
        yield dispatches
        torch.mps.synchronize()
    finally:
        count = ctypes.c_size_t()
        first = _runtime().simulator_counters_stop(ctypes.byref(count))
        raw = (first[i] for i in range(count.value))
        dispatches.extend(DispatchCounters.of(r.kernel.decode(), r.counters) for r in raw)


@contextlib.contextmanager
def intercepted(run: Callable[[shaderlib.Dispatch], None]) -> Iterator[None]:
    """Every dispatch of the block goes to `run` instead of the executor, which ends by synchronising.

    `run` sees kernel, grid (and where an indirect one lies), threads, threadgroup memory and the bytes of
    every binding, after all commands before it have run. `shaderlib.execute(dispatch)` is what would have
    happened. What `run` raises is raised when the block ends.
    """
    errors: list[BaseException] = []

    def call(dispatch, counters, message, size) -> int:
        if not errors:
            try:
                run(dispatch.contents)
            except BaseException as error:
                errors.append(error)
        return 0

    torch.mps.synchronize()
    callback = shaderlib.Execute(call)
    _runtime().simulator_set_executor(callback)
    try:
        yield
        torch.mps.synchronize()
    finally:
        _runtime().simulator_set_executor(shaderlib.executor())
    if errors:
        raise errors[0]


@contextlib.contextmanager
def clocked(run: Callable[[shaderlib.Dispatch], float]) -> Iterator[None]:
    """`run` runs each dispatch of the block, and returns the seconds that it takes: GPUStartTime and
    GPUEndTime of command buffers are by this clock, which stands still outside of such a block."""
    with intercepted(lambda dispatch: _runtime().simulator_advance_clock(run(dispatch))):
        yield


class Timeline:
    """Clocks of the host and of the GPU, in seconds since the block began."""

    def __init__(self) -> None:
        self._began = _runtime().simulator_host_clock()

    @property
    def busy(self) -> float:
        """Seconds that the GPU has worked, of the buffers that have run."""
        return _runtime().simulator_clock() - self._began - self.idle - self.waited

    @property
    def idle(self) -> float:
        """Seconds that the GPU has waited for the host, of the buffers that have run."""
        return _runtime().simulator_idle()

    @property
    def waited(self) -> float:
        """Seconds that the GPU has waited for signals of events, of the buffers that have run."""
        return _runtime().simulator_waited()

    @property
    def now(self) -> float:
        """The host's time."""
        return _runtime().simulator_host_clock() - self._began

    def work(self, seconds: float) -> None:
        """The host works for so long."""
        _runtime().simulator_advance_host(seconds)

    def answer(self, seconds: float) -> float:
        """The thread that answers the GPU's signals works for so long. Its time afterwards.

        Its clock is at the last signal that it has heard of, or at the end of its own work.
        """
        _runtime().simulator_advance_answer(seconds)
        return _runtime().simulator_answer_clock() - self._began


@dataclass(frozen=True)
class Ssd:
    """A disk: how long reads take.

    Attributes:
        latency: seconds until a read has its first byte.
        rate: bytes a second of all reads together.
        depth: reads at once.
    """

    latency: float
    rate: float
    depth: int = 1

    def seconds(self, reads: Sequence[int]) -> float:
        """Seconds until the last of these reads has ended, in bytes, which begin together."""
        ends = [0.0] * self.depth  # of each place in the queue
        transferred = 0.0
        for size in reads:
            begun = heapq.heappop(ends)
            transferred = max(transferred, begun + self.latency) + size / self.rate
            heapq.heappush(ends, transferred)
        return max(ends)


@contextlib.contextmanager
def reads(intercept: Callable[[int, int, int], int]) -> Iterator[None]:
    """Every `preadv` of host code in the block goes through `intercept(file, offset, size)`, by its thread.

    It returns how many bytes are read, as a disk that gives less than was asked, or raises OSError.
    """

    def call(file: int, offset: int, size: int) -> int:
        try:
            return intercept(file, offset, size)
        except OSError as error:
            return -(error.errno or errno.EIO)

    callback = _Read(call)
    _every_read.append(callback)
    _runtime().simulator_intercept_reads(callback)
    try:
        yield
    finally:
        _runtime().simulator_intercept_reads(_Read())


class Stalls:
    """For `reads`: a disk on which some reads stall, as under memory pressure.

    A read that stalls ends once no other read has begun for a while: all reads that somebody wants meanwhile
    pass it.

    Args:
        seed: draws which reads stall.
        share: of the reads.
        quiet: seconds of the real clock without a new read.

    Attributes:
        count: reads that have stalled.
        passed: reads that have passed one that stalled.
    """

    def __init__(self, seed: int, share: float = 0.1, quiet: float = 2e-3) -> None:
        self._random, self._share, self._quiet = random.Random(seed), share, quiet
        self._began, self._stalled, self._changed = 0, 0, threading.Condition()
        self.count = self.passed = 0

    def __call__(self, file: int, offset: int, size: int) -> int:
        with self._changed:
            self._began += 1
            self.passed += self._stalled > 0
            self._changed.notify_all()
            if self._random.random() >= self._share:
                return size
            self.count += 1
            self._stalled += 1
            while True:
                began = self._began
                if not self._changed.wait_for(lambda began=began: self._began > began, self._quiet):
                    break
            self._stalled -= 1
        return size


@contextlib.contextmanager
def event_limit(seconds: float) -> Iterator[None]:
    """A wait of the GPU for an event is a finding after so many seconds of the real clock, not 20."""
    torch.mps.synchronize()
    _runtime().simulator_limit_waits(seconds)
    try:
        yield
    finally:
        _runtime().simulator_limit_waits(0.0)


@contextlib.contextmanager
def timeline(
    run: Callable[[shaderlib.Dispatch], float],
    a_command: float = 0.0,
    an_operator: float = 0.0,
    an_event: float = 0.0,
    an_end: float = 0.0,
) -> Iterator[Timeline]:
    """Clocks of the host and of the GPU, which run beside each other.

    A command buffer begins once it is committed and those before it have ended, and lasts as long as `run`
    says of its dispatches. The host's clock moves by `a_command` for each command and operator that it
    encodes, by `Timeline.work`, and where it waits: to the end of the buffer that it waits for, or of all of
    them, as for a copy from the CPU that blocks.

    Each operator of aten takes the GPU `an_operator`, in the buffer that is open, although the CPU computes
    it at once. Completion handlers are called when the host's clock has passed a buffer's end and the host
    waits or works: whoever waits for a handler alone waits for ever.

    A signal of an event is heard of `an_event` later, by the GPU and by the host's thread that answers it,
    which has a clock of its own: see `Timeline.answer`. A host that waits for a buffer knows of its end
    `an_end` later.
    """
    torch.mps.synchronize()
    _runtime().simulator_time_host(True, a_command, an_operator)
    _runtime().simulator_time_events(an_event, an_end)
    try:
        with clocked(run):
            yield Timeline()
    finally:
        _runtime().simulator_time_host(False, 0.0, 0.0)
        _runtime().simulator_time_events(0.0, 0.0)


@contextlib.contextmanager
def dropped(validate: bool = True) -> Iterator[None]:
    """A null device: nothing is computed inside the block, so only the host's time is left.

    Commands of kernels are encoded and validated, and forgotten where they would run; without `validate` they
    are forgotten at once, so that a call of the encoder costs next to nothing.
    Operators of aten allocate their outputs, in the shapes that their meta kernels give (asked once for each
    signature), and do not compute; attention counts as one. Their values are zeros, and 0, 1, 2, ... for the
    indices of topk and sort, so that the experts of a token differ. Computed are those on integers and
    booleans alone (masks, positions, one_hot), on which a program's flow depends, those whose shapes depend
    on values (nonzero), and copies from and to the CPU. What is in memory before the block stays readable.
    """
    torch.mps.synchronize()
    _runtime().simulator_set_dropping(True, validate)
    try:
        yield
        torch.mps.synchronize()
    finally:
        _runtime().simulator_set_dropping(False, True)
