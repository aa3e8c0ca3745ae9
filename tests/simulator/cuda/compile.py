"""The kernels of dispatches, translated and compiled in parallel, and kept by content."""

import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from .. import build
from . import nvrtc
from .plan import Dispatch, Plan
from .translate import Entry, translate

MATRIX_MARK = "// simdgroup_matrix"  # in the PTX of a kernel that uses matrices (include/metal_matrix.h)
ENTRY = "metal_kernel"


@dataclass(frozen=True)
class Job:
    """One kernel, compiled for one GPU and for the lengths of what is bound with setBytes."""

    source: str
    kernel: str
    by_value: tuple[tuple[int, int], ...]
    constants: tuple[tuple[int, int | float], ...]
    tf32: bool
    architecture: str

    def key(self) -> str:
        sources = build.files_digest(Path(__file__), Path(__file__).with_name("translate.py"))
        return build.digest(repr(self), sources, nvrtc.identity())


@dataclass
class Compiled:
    """Machine code with the function ENTRY of buffers, then offsets of threadgroup memory."""

    code: bytes
    buffers: list[int]
    threadgroups: list[int]
    matrices: bool
    seconds: float


def job_of(plan: Plan, dispatch: Dispatch, tf32: bool, architecture: str) -> Job:
    return Job(
        source=plan.source(dispatch.library),
        kernel=dispatch.kernel,
        by_value=tuple((b.index, len(b.data) // 2) for b in dispatch.bindings if b.data),
        constants=tuple(sorted(dispatch.constants.items())),
        tf32=tf32,
        architecture=architecture,
    )


def compile_job(job: Job) -> Compiled:
    """Raises nvrtc.CompileError or ShaderError."""
    return build.kept(f"cuda-{job.key()}", lambda: compiled(job))


def compiled(job: Job) -> Compiled:
    started = time.perf_counter()
    entry = Entry(job.kernel, dict(job.by_value))
    program = translate(job.source, {ENTRY: entry}, dict(job.constants))
    options = ["-DMETAL_TF32"] if job.tf32 else []
    # Lanes are numbered for matrices where the kernel uses them: which is seen once it is compiled.
    matrices = "simdgroup_matrix" in job.source
    lanes = ["-DMETAL_MATRIX_LANES"] if matrices else []
    code, ptx = nvrtc.compile_program(program, job.architecture, (*options, *lanes))
    if matrices and MATRIX_MARK not in ptx:
        matrices = False
        code, _ = nvrtc.compile_program(program, job.architecture, tuple(options))
    return Compiled(code, entry.buffers, entry.threadgroups, matrices, time.perf_counter() - started)


def fault(job: Job) -> str:
    """Empty, or why a kernel does not compile."""
    try:
        compile_job(job)
    except Exception as error:  # one kernel's fault is a line of the report
        return f"{job.kernel}: {error}"
    return ""


def compile_all(jobs: Iterable[Job], progress: Callable[[str], None]) -> None:
    """Fills the cache. Call it before CUDA is initialised: it forks."""
    jobs = list(dict.fromkeys(jobs))
    started = time.perf_counter()
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("fork")) as pool:
        futures = [pool.submit(fault, job) for job in jobs]
        for number, future in enumerate(as_completed(futures), 1):
            if message := future.result():
                progress(message)
            if number % 20 == 0 or number == len(jobs):
                progress(f"compiled {number}/{len(jobs)} kernels, {time.perf_counter() - started:.0f} s")
