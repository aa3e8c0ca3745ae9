"""Measures what the kernels and the cost model assume of a GPU: a page of numbers.

Each is the best of a few runs, by the clock of the host, which waits for the GPU before and after: what takes
less than about 10 ms in all is not measured well.
"""

import math
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._extension import commit_setting, setting
from .._faults import Mark, fault_of, raise_fault
from .._text import first_line
from ..ops.families.attention import seen_in_order
from ..ops.families.slots import RESIDENT, new_number, register_pool
from .facts import facts
from .journal import noted
from .machine import SDPA, remember_faster
from .units import why_no_sdpa

THREADS = 256  # in a threadgroup
SIMDGROUPS = THREADS // 32
EXPERTS = 8  # read by a token
RANGES = 8  # about as many as codes, scales and biases of an expert lie in
CHAINS = 8  # kProbeChains of probe.metal
FMAS = 8 * CHAINS  # in a step
MATRIX = 8 * 8 * 8  # multiply-adds of two matrices
TINY = 2.0**-127  # a subnormal number in single precision


class ProbeSizes(NamedTuple):
    """Sizes of the measurements; the tests' simulator takes smaller ones."""

    dispatches: int = 1000
    buffers: tuple[int, ...] = (1, 10, 100)
    reads: tuple[int, ...] = (16 << 20, 200 << 20, 2 << 30)  # bytes
    groups: int = 1024
    expert_groups: int = 64  # threadgroups of an expert, each of which reads so many steps: 2 MiB
    expert_steps: int = 2
    fma_steps: int = 8000
    matrix_steps: int = 4000
    chunk: tuple[int, int, int] = (2048, 8192, 128)  # tokens, keys, and elements of a head
    repeats: int = 5
    asked: int = 100  # requests for slots
    late: tuple[float, ...] = (0.5, 3.0, 4.0, 6.0)  # seconds
    queued: tuple[int, float] = (8, 1.0)  # answers, one after the other, and seconds of each


def probe(
    sizes: ProbeSizes, libraries: Iterable[str], told: Callable[[str], object] = lambda name: None
) -> dict[str, Any]:
    """{part: its results}, with `machine`. A part that fails has its error in its place.

    `libraries` are those whose compiling is timed. `told` is called behind each part with its name.
    """
    result: dict[str, Any] = {"machine": facts()}
    result["compiling_s"] = _found(partial(compiling, ["probe_f32", *libraries]), "compiling")
    for name, part in PARTS.items():
        result[name] = _found(partial(part, sizes), name)
        told(name)
    return result


def _found(part: Callable[[], Any], name: str) -> Any:
    try:
        with noted(f"probing {name}"):
            result = part()
            raise_fault()
            return result
    except RuntimeError as error:
        return {"error": first_line(fault_of(error) or error)}


def compiling(libraries: Iterable[str]) -> dict[str, float]:
    """Seconds, one after the other. macOS caches compiled kernels."""
    compiled = torch.ops.moe_mps._pipelines
    return {name: _digits(_seconds(partial(compiled, name))) for name in libraries}


# --- how it computes


def matrix_layout(sizes: ProbeSizes) -> dict[str, Any]:
    """`as_assumed`, as MatrixPlace has it; else `elements`: two of each lane (8 * row + column)."""
    matrix, elements = torch.arange(64.0).to("mps"), torch.empty(64, device="mps")
    _run("probe_layout", [matrix, elements], groups=1, threads=32)
    lanes = torch.arange(32)
    first = 8 * (lanes // 16 * 4 + lanes // 2 % 4) + 2 * (lanes // 8 % 2 * 2 + lanes % 2)
    same = torch.equal(elements.cpu(), torch.stack([first, first + 1], 1).flatten().float())
    return {"as_assumed": True} if same else {"as_assumed": False, "elements": elements.cpu().int().tolist()}


def nan_rules(sizes: ProbeSizes) -> dict[str, Any]:
    """Results of operations on a NaN and a 1, "nan" where one is none."""
    out = torch.zeros(9, dtype=torch.int32, device="mps")
    _run("probe_nan", [torch.tensor([math.nan, 1.0]).to("mps"), out], groups=1, threads=32)
    isnan, compares, as_uint, as_int, *results = out.cpu().tolist()
    names = ("max_of_nan_and_1", "max_of_1_and_nan", "clamp_to_0_and_1", "simd_max", "simd_min")
    numbers = torch.tensor(results, dtype=torch.int32).view(torch.float32).tolist()
    result: dict[str, Any] = {"isnan": bool(isnan), "compares": bool(compares)}
    result |= {"as_uint": as_uint % 2**32, "as_int": as_int}
    return result | {n: "nan" if math.isnan(x) else x for n, x in zip(names, numbers, strict=True)}


def subnormals(sizes: ProbeSizes) -> dict[str, bool]:
    """True if subnormals of single and half precision survive, as operands and as results."""
    x = torch.tensor([TINY, 2 * TINY, 2.0**-20, 2.0**-14]).to("mps")
    scales = torch.tensor([2.0, 0.5, 1024.0, 0.5]).to("mps")
    single, half = torch.empty(4, device="mps"), torch.empty(4, dtype=torch.float16, device="mps")
    _run("probe_subnormals", [x, scales, single, half], groups=1, threads=4)
    of_single, of_half = (single.cpu() != 0).tolist(), (half.cpu() != 0).tolist()
    return {
        "single_operand": of_single[0],
        "single_result": of_single[1],
        "half_operand": of_half[2],
        "half_result": of_half[3],
    }


def bfloat_rounding(sizes: ProbeSizes) -> dict[str, Any]:
    """True if numbers are rounded to nearest, ties to even, as torch does on the CPU, and NaN stays NaN."""
    bits = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 0x3F80FFFF, 0xBF817FFF - 2**32, 0x7F7FFFFF])
    x = torch.cat([bits.int().view(torch.float32), torch.tensor([math.nan, math.inf, 1e-30])])
    out = torch.empty(len(x), dtype=torch.bfloat16, device="mps")
    _run("probe_bfloat", [x.to("mps"), out], groups=1, threads=len(x))
    got, right = out.cpu(), x.bfloat16()
    same = torch.equal(got[~right.isnan()], right[~right.isnan()])
    result = {"to_nearest_even": same, "nan_stays": bool(got.isnan().any())}
    return result if same else result | {"bits": got.view(torch.int16).tolist()}


# --- how fast


def dispatches(sizes: ProbeSizes) -> dict[str, Any]:
    """Microseconds of a dispatch that does nothing but wait for the one before, by the number of command
    buffers: until all are encoded, and until the GPU has run them."""
    counter = torch.zeros(1, dtype=torch.int32, device="mps")
    count = sizes.dispatches
    result: dict[str, Any] = {"encoded": {}, "run": {}}
    _run("probe_empty", [counter], 1, 32)
    with no_commits():
        for buffers in sizes.buffers:
            encoded, run = [], []
            for _ in range(sizes.repeats):
                torch.mps.synchronize()
                started = time.perf_counter()
                _run("probe_empty", [counter], 1, 32, times=count, in_buffer=max(1, count // buffers))
                encoded.append(time.perf_counter() - started)
                torch.mps.synchronize()
                run.append(time.perf_counter() - started)
            result["encoded"][str(buffers)] = _digits(min(encoded) / count * 1e6)
            result["run"][str(buffers)] = _digits(min(run) / count * 1e6)
    return result


class _Late:
    """A pool of slots that answers a GPU after so many seconds."""

    def __init__(self, seconds: float) -> None:
        self.number = new_number()
        torch.ops.moe_mps._add_late_pool(self.number, seconds)
        register_pool(self, self.number)

    def slots(self, ids: Tensor) -> Tensor:
        return ids


def slots_of_experts(sizes: ProbeSizes) -> float:
    """Microseconds that the GPU waits for slots of experts which are in memory."""
    ids = _ids()

    def asked() -> None:
        for _ in range(sizes.asked):
            torch.ops.moe_mps._expert_slots(ids, RESIDENT)

    return _digits(_best(asked, sizes.repeats) / sizes.asked * 1e6)


def late_answers(sizes: ProbeSizes) -> dict[str, Any]:
    """{seconds until a pool answers: True if the GPU goes on, or the error}.

    "8 x 1" are eight requests of 1 s each, committed at once. macOS may stop a buffer that waits, and after
    several of those all further work of this process.
    """
    ids, goes_on = _ids(), dict[str, Any]()
    count, each = sizes.queued
    for seconds, requests in sorted([*((late, 1) for late in sizes.late), (each, count)]):
        pool = _Late(seconds)
        label = f"{seconds:g}" if requests == 1 else f"{requests} x {seconds:g}"
        try:
            for _ in range(requests):
                torch.ops.moe_mps._expert_slots(ids, pool.number)
            Mark(ids.device).wait()
            goes_on[label] = True
        except torch.AcceleratorError as error:
            goes_on[label] = first_line(error)
    return goes_on


def _ids() -> Tensor:
    return torch.arange(EXPERTS, dtype=torch.int32, device="mps")


def reads(sizes: ProbeSizes) -> dict[str, float]:
    """GB/s by MB; without what the memory of this machine does not hold."""
    result = {}
    for size in filter(_is_held, sizes.reads):
        read, of_one = _reader(size, sizes.groups)
        times = max(1, min(20, sizes.reads[-1] // size))  # small ones again, from the GPU's caches
        seconds = _best(partial(read, times), sizes.repeats)
        result[f"{size / 2**20:g}"] = _digits(of_one * times / seconds / 1e9)
    return result


def expert_reads(sizes: ProbeSizes) -> dict[str, float]:
    """GB/s of the pieces that tokens read of their experts, eight at random places for each layer: with each
    in one block, and in as many ranges as its matrices have; and of as many pieces one behind the other."""
    of_group = THREADS * 4 * 16 * sizes.expert_steps
    size = max(filter(_is_held, sizes.reads), default=sizes.reads[0])
    experts = size // (of_group * sizes.expert_groups)
    layers = max(1, min(48, experts // EXPERTS))
    data = torch.zeros(size // 4, device="mps")
    out = torch.empty(EXPERTS * sizes.expert_groups * THREADS, device="mps")
    chosen = torch.randperm(experts, generator=torch.Generator().manual_seed(0))[: layers * EXPERTS]
    result = {}
    for name, of, ranges in (
        ("experts", chosen, 1),
        ("ranges", chosen, min(RANGES, sizes.expert_groups)),
        ("stream", torch.arange(len(chosen)), 1),
    ):
        of_range = sizes.expert_groups // ranges
        places = torch.arange(ranges)[:, None] * experts * of_range + torch.arange(of_range)
        blocks = (of[:, None, None] * of_range + places).flatten(1)
        starts = (blocks * (of_group // 16)).int().view(layers, -1).to("mps")

        def token(starts: Tensor = starts) -> None:
            for layer in starts:
                _run("probe_read_pieces", [data, layer, out], len(layer), steps=sizes.expert_steps)

        seconds = _best(token, sizes.repeats)
        result[name] = _digits(blocks.numel() * of_group / seconds / 1e9)
    return result


def fma_rate(sizes: ProbeSizes) -> float:
    """10^12 multiply-adds a second in single precision."""
    x = torch.tensor([0.5, 1.0]).to("mps")
    out = torch.empty(sizes.groups * THREADS, device="mps")
    seconds = _best(lambda: _run("probe_fma", [x, out], sizes.groups, steps=sizes.fma_steps), sizes.repeats)
    return _digits(sizes.groups * THREADS * sizes.fma_steps * FMAS / seconds / 1e12)


def matrix_rates(sizes: ProbeSizes) -> dict[str, float]:
    """10^12 multiply-adds a second of 8 x 8 matrices in registers, added up in single precision."""
    result = {}
    work = sizes.groups * SIMDGROUPS * sizes.matrix_steps * CHAINS * MATRIX
    for name, dtype in (("half", torch.float16), ("float", torch.float32)):
        x = torch.ones(128, dtype=dtype, device="mps")
        out = torch.empty(sizes.groups * SIMDGROUPS * CHAINS * 64, device="mps")
        run = partial(_run, f"probe_matrix_{name}", [x, out], sizes.groups, steps=sizes.matrix_steps)
        result[name] = _digits(work / _best(run, sizes.repeats) / 1e12)
    return result


def chunk_of_a_prompt(sizes: ProbeSizes) -> dict[str, Any]:
    """Milliseconds of attention of a prompt's last chunk to all of it, in heads as Qwen3-30B-A3B has, by our
    kernel and by torch's for tensor units. Chunks of later processes run the faster one."""
    if reason := why_no_sdpa():
        return {"left_out": reason}
    tokens, keys, width = sizes.chunk
    q, k, v = (
        torch.randn(1, heads, rows, width, dtype=torch.bfloat16, device="mps")
        for heads, rows in ((32, tokens), (4, keys), (4, keys))
    )
    mask = seen_in_order(tokens, keys, keys, None, None, q.device, 0)
    operator_seconds = _best(
        lambda: torch.ops.moe_mps.cached_attention(q, k, v, scale=width**-0.5), sizes.repeats
    )
    sdpa_seconds = _best(
        lambda: F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True), sizes.repeats
    )
    remember_faster(SDPA, sdpa_seconds < operator_seconds)
    return {"own": _digits(operator_seconds * 1e3), "torch": _digits(sdpa_seconds * 1e3)}


def _is_held(size: int) -> bool:
    return size <= torch.mps.recommended_max_memory() // 2


def _reader(size: int, groups: int) -> tuple[Callable[[int], None], int]:
    """Function that reads memory so many times, and the bytes of one time: whole steps of all threads."""
    of_group = THREADS * 4 * 16
    groups = min(groups, size // of_group)
    steps = size // (groups * of_group)
    data, out = torch.zeros(size // 4, device="mps"), torch.empty(groups * THREADS, device="mps")
    return lambda times: _run("probe_read", [data, out], groups, steps=steps, times=times), (
        steps * groups * of_group
    )


def _run(
    kernel: str,
    buffers: list[Tensor],
    groups: int,
    threads: int = THREADS,
    steps: int = 0,
    times: int = 1,
    in_buffer: int = 0,
) -> None:
    """Runs a kernel of the probe `times` times, `in_buffer` of them in each command buffer."""
    torch.ops.moe_mps._probe(kernel, buffers, groups, threads, steps, times, in_buffer)


def _seconds(call: Callable[[], object]) -> float:
    torch.mps.synchronize()
    started = time.perf_counter()
    call()
    torch.mps.synchronize()
    return time.perf_counter() - started


def _best(call: Callable[[], object], repeats: int) -> float:
    """Shortest time of several runs, after a first run that compiles and wakes the GPU."""
    call()
    return min(_seconds(call) for _ in range(repeats))


def no_commits() -> AbstractContextManager[None]:
    """Commits come from the probe alone."""
    return setting("_commit_every", 0, commit_setting())


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


PARTS: dict[str, Callable[[ProbeSizes], Any]] = {
    "matrix_layout": matrix_layout,
    "nan": nan_rules,
    "subnormals": subnormals,
    "bfloat_rounding": bfloat_rounding,
    "dispatch_us": dispatches,
    "slots_of_experts_us": slots_of_experts,
    "read_gbs": reads,
    "expert_reads_gbs": expert_reads,
    "fma_tmacs": fma_rate,
    "matrix_tmacs": matrix_rates,
    "chunk_of_a_prompt_ms": chunk_of_a_prompt,
    "goes_on_after_s": late_answers,  # the last: see there
}
