"""`device="mps"` on Linux: runs .mm and .metal sources unchanged in an ordinary PyTorch.

    install(strict=False)           builds what is stale and loads it; from here on device="mps" works
    load(name, sources)             builds and imports an extension, as torch.utils.cpp_extension.load does
    extension(name, sources)        builds one for torch.ops.load_library
    with trace() as commands: ...   commands: what was encoded, one line of text each
    with intercepted(run): ...      run(dispatch) replaces the executor
    with clocked(run): ...          the GPU's clock: run(dispatch) returns the seconds of a dispatch
    with timeline(run) as times:    the host's clock beside it: times.busy and times.idle of the GPU
    Ssd(latency, rate, depth)       how long reads of a disk take
    with event_limit(seconds):      a wait for an event that takes longer is a finding
    with dropped(): ...             nothing is computed: only the host's time is left
    with counters() as dispatches:  dispatches: what each dispatch read, wrote and waited for
    with torch_memory(recommended): memory as torch's allocator keeps it: recycled, in heaps
    with torch_version(version):    torch's copies and errors are those of another version
    with failing(kind, after):      a command buffer fails, as where macOS stops it
    with ignoring(timeouts):        after so many timeouts macOS runs nothing more of the process
    with working_set(bytes):        a command buffer that needs more memory at once fails
    commits()                       how often the stream was committed
    commit_unseen()                 ends its command buffer as MPSGraph may
    with stream(number):            the thread's stream is another one
    set_schedule(seed)              order of threads and threadgroups; 0 is ascending
    with reads(intercept):          reads of files by host code are late, short or fail
    with own_gpu(seed):             the GPU runs beside the host, on a thread of its own
    with pipeline_limit(threads):   pipelines that allow fewer threads a threadgroup
    shader_library(source)          any MSL text, to run its kernels without PyTorch's stream

Faults of shaders and of host code raise SimulatorError: those of encoding at the call, those of running at
the next synchronisation (`.cpu()`, `.item()`, an operator that runs on the CPU, `torch.mps.synchronize()`).
"""

from .build_device import extension, load
from .errors import SimulatorError
from .runtime import (
    Ssd,
    Stalls,
    called_aten,
    clocked,
    commit_unseen,
    commits,
    counters,
    dropped,
    event_limit,
    failing,
    heaps,
    ignoring,
    install,
    intercepted,
    is_resident,
    live_buffers,
    live_objects,
    one_thread,
    own_gpu,
    pipeline_limit,
    reads,
    reset,
    residency_requests,
    residency_sets,
    set_schedule,
    stream,
    timeline,
    torch_memory,
    torch_version,
    trace,
    working_set,
)
from .shaderlib import DispatchCounters, shader_library

__all__ = [
    "DispatchCounters",
    "SimulatorError",
    "Ssd",
    "Stalls",
    "called_aten",
    "clocked",
    "commit_unseen",
    "commits",
    "counters",
    "dropped",
    "event_limit",
    "extension",
    "failing",
    "heaps",
    "ignoring",
    "install",
    "intercepted",
    "is_resident",
    "live_buffers",
    "live_objects",
    "load",
    "one_thread",
    "own_gpu",
    "pipeline_limit",
    "reads",
    "reset",
    "residency_requests",
    "residency_sets",
    "set_schedule",
    "shader_library",
    "stream",
    "timeline",
    "torch_memory",
    "torch_version",
    "trace",
    "working_set",
]
