"""Measures what the kernels and the cost model assume of a GPU: a page of numbers.

Each is the best of a few runs, by the clock of the host, which waits for the GPU before and after: what takes
less than about 10 ms in all is not measured well.
"""

import math
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._extension import commit_setting, setting
from .._faults import Mark, fault_of, raise_fault
from .._text import first_line
from ..ops.attention import seen_in_order
from ..ops.slots import RESIDENT, register_pool
from .facts import facts
from .journal import noted
from .machine import remember_sdpa
from .units import why_no_sdpa

THREADS = 256  # in a threadgroup
SIMDGROUPS = THREADS // 32
EXPERTS = 8  # read by a token
RANGES = 8  # about as many as codes, scales and biases of an expert lie in
CHAINS = 8  # kProbeChains of probe.metal
FMAS = 8 * CHAINS  # in a step
MATRIX = 8 * 8 * 8  # multiply-adds of two matrices
LIVE = (64, 80, 88, 96, 104, 112, 120, 128)  # numbers that threads of probe_live hold
STRIDES = (1, 2, 4, 8, 16, 32, 33)  # floats between lanes, up to kProbeMostStride
# Threads, tiles and the values of a step of probe_fragments.
FRAGMENT_THREADS, TILES, ROWS, DEPTH = 128, 16, 32, 32
GIVEN_MEMORY = 28 << 10  # bytes
TINY = 2.0**-127  # a subnormal number in single precision


class Sizes(NamedTuple):
    """How much is run; the tests' simulator runs less."""

    dispatches: int = 1000
    buffers: tuple[int, ...] = (1, 10, 100)
    reads: tuple[int, ...] = (16 << 20, 200 << 20, 2 << 30)  # bytes
    idle: tuple[float, ...] = (0.0, 1.0, 3.0)  # seconds
    groups: int = 1024
    expert_groups: int = 64  # threadgroups of an expert, each of which reads so many steps: 2 MiB
    expert_steps: int = 2
    fma_steps: int = 8000
    matrix_steps: int = 4000
    live_steps: int = 1000
    bank_steps: int = 1000
    fragment_steps: int = 64
    queued: int = 40  # buffers
    sustained: float = 5.0  # seconds
    chunk: tuple[int, int, int] = (2048, 8192, 128)  # tokens, keys, and elements of a head
    repeats: int = 5
    asked: int = 100  # requests for slots
    late: tuple[float, ...] = (0.5, 4.0)  # seconds


def probe(
    sizes: Sizes, libraries: Iterable[str], told: Callable[[str], object] = lambda name: None
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
    return {name: _digits(_seconds(partial(compiled, name, []))) for name in libraries}


# --- how it computes


def matrix_layout(sizes: Sizes) -> dict[str, Any]:
    """`as_assumed`, as MatrixPlace has it; else `elements`: two of each lane (8 * row + column)."""
    matrix, held = torch.arange(64.0).to("mps"), torch.empty(64, device="mps")
    _run("probe_layout", [matrix, held], groups=1, threads=32)
    lanes = torch.arange(32)
    first = 8 * (lanes // 16 * 4 + lanes // 2 % 4) + 2 * (lanes // 8 % 2 * 2 + lanes % 2)
    same = torch.equal(held.cpu(), torch.stack([first, first + 1], 1).flatten().float())
    return {"as_assumed": True} if same else {"as_assumed": False, "elements": held.cpu().int().tolist()}


def contraction(sizes: Sizes) -> dict[str, bool]:
    """Whether a * b + c is rounded once, as Apple's compiler has it under safe math, too (Sarek#315): in one
    statement, and where the product has a name of its own."""
    a = torch.tensor([1 + 2.0**-12]).to("mps")
    out = torch.empty(2, device="mps")
    _run("probe_contraction", [a, a, torch.tensor([-1 - 2.0**-11]).to("mps"), out], groups=1, threads=1)
    within, across = (out.cpu() != 0.0).tolist()
    return {"within_a_statement": within, "across_statements": across}


def nan_rules(sizes: Sizes) -> dict[str, Any]:
    """Results of operations on a NaN and a 1, "nan" where one is none."""
    out = torch.zeros(9, dtype=torch.int32, device="mps")
    _run("probe_nan", [torch.tensor([math.nan, 1.0]).to("mps"), out], groups=1, threads=32)
    isnan, compares, as_uint, as_int, *results = out.cpu().tolist()
    names = ("max_of_nan_and_1", "max_of_1_and_nan", "clamp_to_0_and_1", "simd_max", "simd_min")
    numbers = torch.tensor(results, dtype=torch.int32).view(torch.float32).tolist()
    result: dict[str, Any] = {"isnan": bool(isnan), "compares": bool(compares)}
    result |= {"as_uint": as_uint % 2**32, "as_int": as_int}
    return result | {n: "nan" if math.isnan(x) else x for n, x in zip(names, numbers, strict=True)}


def subnormals(sizes: Sizes) -> dict[str, bool]:
    """Whether subnormals of single and half precision survive, as operands and as results."""
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


def bfloat_rounding(sizes: Sizes) -> dict[str, Any]:
    """Whether numbers are rounded to the nearest, ties to even, as torch does on the CPU, and NaN stays."""
    bits = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 0x3F80FFFF, 0xBF817FFF - 2**32, 0x7F7FFFFF])
    x = torch.cat([bits.int().view(torch.float32), torch.tensor([math.nan, math.inf, 1e-30])])
    out = torch.empty(len(x), dtype=torch.bfloat16, device="mps")
    _run("probe_bfloat", [x.to("mps"), out], groups=1, threads=len(x))
    got, right = out.cpu(), x.bfloat16()
    same = torch.equal(got[~right.isnan()], right[~right.isnan()])
    result = {"to_nearest_even": same, "nan_stays": bool(got.isnan().any())}
    return result if same else result | {"bits": got.view(torch.int16).tolist()}


def threadgroup_memory(sizes: Sizes) -> dict[str, bool]:
    """Whether a kernel with 20 KiB of threadgroup memory of its own is right behind one to which the encoder
    gave 28 of the 32 KiB that there are: the length is set back between them."""
    given, own = torch.zeros(2, 32, dtype=torch.int32, device="mps")
    torch.ops.moe_mps._probe_memory(given, own, GIVEN_MEMORY)
    lanes = 31 - torch.arange(32)
    sums = 160 * lanes + 32 * sum(range(160))  # 5,120 numbers, 160 a lane
    return {
        "given": torch.equal(given.cpu(), lanes.int()),
        "own_behind_it": torch.equal(own.cpu(), sums.int()),
    }


def indirect_grid(sizes: Sizes) -> dict[str, Any]:
    """Whether a dispatch has the grid that the one in front of it wrote: 3 x 2 x 1 threadgroups."""
    grid = torch.ones(3, dtype=torch.int32, device="mps")
    counter = torch.zeros(1, dtype=torch.int32, device="mps")
    torch.ops.moe_mps._probe_indirect(grid, counter, 32)
    return {"right": counter.item() == 6, "groups": counter.item()}


# --- how fast


def dispatches(sizes: Sizes) -> dict[str, Any]:
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


def told(sizes: Sizes) -> dict[str, float]:
    """Microseconds, medians: without work between buffers that wait in the queue; and until Metal tells of a
    buffer that the host waits for, from the end of the wait (below 0: before it), and from the GPU's end."""
    x, out = torch.tensor([0.5, 1.0]).to("mps"), torch.empty(sizes.groups * THREADS, device="mps")

    def moments(count: int) -> list[tuple[float, ...]]:
        with no_commits():
            for _ in range(count):
                torch.ops.moe_mps._time_buffer()
                _run("probe_fma", [x, out], sizes.groups, steps=max(1, sizes.fma_steps // 8))
        torch.mps.synchronize()
        waited = time.perf_counter()
        flat = torch.ops.moe_mps._buffer_moments()
        return [(*flat[i : i + 3], waited) for i in range(0, len(flat), 3)]

    moments(2)
    queued = moments(sizes.queued)
    alone = [moments(1)[0] for _ in range(4 * sizes.repeats)]
    result = {
        "between_buffers": median(after[0] - before[1] for before, after in pairwise(queued)),
        "behind_wait": median(told - waited for *_, told, waited in alone),
    }
    behind = median(told - end for _, end, told, _ in alone)
    if 0 <= behind < 1:  # where the GPU's clock is the host's
        result["behind_end"] = behind
    return {name: _digits(seconds * 1e6) for name, seconds in result.items()}


def wake(sizes: Sizes) -> float:
    """From a commit of one empty dispatch until the host goes on."""
    counter = torch.zeros(1, dtype=torch.int32, device="mps")
    return _digits(_best(lambda: _run("probe_empty", [counter], 1, 32), 4 * sizes.repeats) * 1e6)


class _Late:
    """A pool of slots that answers after so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def slots(self, ids: Tensor) -> Tensor:
        time.sleep(self._seconds)
        return ids


def slots_of_experts(sizes: Sizes) -> dict[str, Any]:
    """Microseconds that the GPU waits for slots of experts which are in memory; and by seconds that a pool
    takes to answer whether the GPU goes on, or why not: macOS may stop it before."""
    ids = torch.arange(EXPERTS, dtype=torch.int32, device="mps")

    def asked() -> None:
        for _ in range(sizes.asked):
            torch.ops.moe_mps._expert_slots(ids, RESIDENT)

    goes_on: dict[str, Any] = {}
    for seconds in sizes.late:
        pool = _Late(seconds)
        try:
            torch.ops.moe_mps._expert_slots(ids, register_pool(pool, "a probe", 10 * seconds + 1))
            Mark(ids.device).wait()
            goes_on[f"{seconds:g}"] = True
        except torch.AcceleratorError as error:
            goes_on[f"{seconds:g}"] = first_line(error)
    return {"us": _digits(_best(asked, sizes.repeats) / sizes.asked * 1e6), "goes_on_after_s": goes_on}


def reads(sizes: Sizes) -> dict[str, float]:
    """GB/s by MB; without what the memory of this machine does not hold."""
    result = {}
    for size in filter(_is_held, sizes.reads):
        read, of_one = _reader(size, sizes.groups)
        times = max(1, min(20, sizes.reads[-1] // size))  # small ones again, from the GPU's caches
        seconds = _best(partial(read, times), sizes.repeats)
        result[f"{size / 2**20:g}"] = _digits(of_one * times / seconds / 1e9)
    return result


def expert_reads(sizes: Sizes) -> dict[str, float]:
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


def fma_rate(sizes: Sizes) -> float:
    """10^12 multiply-adds a second in single precision."""
    x = torch.tensor([0.5, 1.0]).to("mps")
    out = torch.empty(sizes.groups * THREADS, device="mps")
    seconds = _best(lambda: _run("probe_fma", [x, out], sizes.groups, steps=sizes.fma_steps), sizes.repeats)
    return _digits(sizes.groups * THREADS * sizes.fma_steps * FMAS / seconds / 1e12)


def matrix_rates(sizes: Sizes) -> dict[str, float]:
    """10^12 multiply-adds a second of 8 x 8 matrices in registers, added up in single precision."""
    result = {}
    work = sizes.groups * SIMDGROUPS * sizes.matrix_steps * CHAINS * MATRIX
    for name, dtype in (("half", torch.float16), ("float", torch.float32)):
        x = torch.ones(128, dtype=dtype, device="mps")
        out = torch.empty(sizes.groups * SIMDGROUPS * CHAINS * 64, device="mps")
        run = partial(_run, f"probe_matrix_{name}", [x, out], sizes.groups, steps=sizes.matrix_steps)
        result[name] = _digits(work / _best(run, sizes.repeats) / 1e12)
    return result


def live_numbers(sizes: Sizes) -> dict[str, dict[str, float]]:
    """By the numbers that a thread needs all the time: 10^12 multiply-adds a second, and the threads that a
    threadgroup may have. Above the registers that a thread can get, the first falls."""
    x, allowed = torch.tensor([0.5, 1.0]).to("mps"), {}
    for line in torch.ops.moe_mps._pipelines("probe_f32", []):
        name, limit, *_ = line.split()
        allowed[name] = int(limit)
    result = {}
    for count in LIVE:
        threads = min(THREADS, allowed[f"probe_live{count}_f32"])
        out = torch.empty(sizes.groups * threads, device="mps")
        run = partial(_run, f"probe_live{count}", [x, out], sizes.groups, threads, sizes.live_steps)
        work = sizes.groups * threads * sizes.live_steps * count
        result[str(count)] = {
            "tmacs": _digits(work / _best(run, sizes.repeats) / 1e12),
            "threads": allowed[f"probe_live{count}_f32"],
        }
    return result


def banks(sizes: Sizes) -> dict[str, float]:
    """{stride in floats between neighbouring lanes: read time of threadgroup memory, relative to stride 1}"""
    out, seconds = torch.empty(sizes.groups * THREADS, device="mps"), {}
    for stride in STRIDES:
        of_lanes = torch.tensor([stride], dtype=torch.int32).to("mps")
        run = partial(_run, "probe_banks", [of_lanes, out], sizes.groups, steps=sizes.bank_steps)
        seconds[str(stride)] = _best(run, sizes.repeats)
    return {stride: _digits(item / seconds["1"]) for stride, item in seconds.items()}


def fragments(sizes: Sizes) -> dict[str, float]:
    """10^12 multiply-adds a second of 4 simdgroups with the same weights: each simdgroup reads its fragments
    from memory (direct), or the threadgroup reads them once (staged)."""
    weights = torch.ones(TILES * ROWS * DEPTH * sizes.fragment_steps, dtype=torch.float16, device="mps")
    simdgroups = FRAGMENT_THREADS // 32
    out, result = torch.empty(sizes.groups * simdgroups * ROWS * 8, device="mps"), {}
    work = sizes.groups * simdgroups * sizes.fragment_steps * ROWS * DEPTH * 8
    for name in ("direct", "staged"):
        kernel, times = f"probe_fragments_{name}", 20
        run = partial(_run, kernel, [weights, out], sizes.groups, FRAGMENT_THREADS, sizes.fragment_steps)
        result[name] = _digits(work * times / _best(partial(run, times), sizes.repeats) / 1e12)
    return result


def sustained(sizes: Sizes) -> dict[str, float]:
    """10^12 multiply-adds a second at first, and after some seconds of work without a pause: the second is
    lower where power or heat limits the clock. `power_mode` and `low_power_mode` of the machine belong to it.
    """
    x, out = torch.tensor([0.5, 1.0]).to("mps"), torch.empty(sizes.groups * THREADS, device="mps")
    run = partial(_run, "probe_fma", [x, out], sizes.groups, steps=sizes.fma_steps)
    work = sizes.groups * THREADS * sizes.fma_steps * FMAS / 1e12
    _seconds(run)
    end = time.monotonic() + sizes.sustained
    rates: list[float] = []
    while time.monotonic() < end or len(rates) < 2:
        rates.append(work / _seconds(run))
    few = max(1, len(rates) // 10)
    return {"first": _digits(median(rates[:few])), "last": _digits(median(rates[-few:]))}


def after_idle(sizes: Sizes) -> dict[str, float]:
    """Milliseconds of reading the largest buffer once, as a token does, after idle seconds."""
    size = max(filter(_is_held, sizes.reads), default=sizes.reads[0])
    read, _ = _reader(size, sizes.groups)
    _best(partial(read, 1), 2)
    result: dict[str, float] = {"mb": size / 2**20}
    for seconds in sizes.idle:
        time.sleep(seconds)
        result[f"{seconds:g}"] = _digits(_seconds(partial(read, 1)) * 1e3)
    return result


def chunk_of_a_prompt(sizes: Sizes) -> dict[str, Any]:
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
    own = _best(lambda: torch.ops.moe_mps.attention(q, k, v, width**-0.5), sizes.repeats)
    sdpa = _best(lambda: F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True), sizes.repeats)
    remember_sdpa(sdpa < own)
    return {"own": _digits(own * 1e3), "torch": _digits(sdpa * 1e3)}


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
    torch.ops.moe_mps._probe(kernel, buffers, groups, threads, steps, times, in_buffer)


def _seconds(call: Callable[[], object]) -> float:
    torch.mps.synchronize()
    started = time.perf_counter()
    call()
    torch.mps.synchronize()
    return time.perf_counter() - started


def _best(call: Callable[[], object], repeats: int) -> float:
    """Behind a run that compiles and wakes the GPU."""
    call()
    return min(_seconds(call) for _ in range(repeats))


def no_commits() -> AbstractContextManager[None]:
    """Commits come from the probe alone."""
    return setting("_commit_every", 0, commit_setting())


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


PARTS: dict[str, Callable[[Sizes], Any]] = {
    "matrix_layout": matrix_layout,
    "contraction": contraction,
    "nan": nan_rules,
    "subnormals": subnormals,
    "bfloat_rounding": bfloat_rounding,
    "threadgroup_memory": threadgroup_memory,
    "indirect_grid": indirect_grid,
    "dispatch_us": dispatches,
    "wake_us": wake,
    "told_us": told,
    "slots_of_experts": slots_of_experts,
    "read_gbs": reads,
    "expert_reads_gbs": expert_reads,
    "fma_tmacs": fma_rate,
    "matrix_tmacs": matrix_rates,
    "live_numbers": live_numbers,
    "bank_conflicts": banks,
    "fragments_tmacs": fragments,
    "sustained_tmacs": sustained,
    "first_read_after_idle_ms": after_idle,
    "chunk_of_a_prompt_ms": chunk_of_a_prompt,
}
