"""Times plans that give the same bits, and keeps for this GPU the clearly faster ones.

A plan says how many simdgroups a threadgroup has, and which kernel runs. Where other numbers, or another
kernel, give the same bits (`launches_of` of csrc/matmul_plan.h numbers them), the first call of a matmul
times all of them by the GPU's own clock, with the arguments of that call. What comes of it is remembered
beside what passed the self-check.
"""

import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._environment import TUNE, is_on
from .._extension import setting
from .._faults import fault_of, synchronize
from .compare import OutOfTime
from .journal import noted
from .machine import has_passed, remember_tuned, say_what_waits, tuned_before
from .probe import no_commits

SECONDS = 0.5  # for a model; what is left is timed the next time
OPERATORS = ("linear_quantized", "_mlp_quantized", "_moe_experts", "_moe_experts_quantized")
MOST_TOKENS = 512  # a longer prompt takes a large part of SECONDS in one round
ROUNDS = 12  # in each half: every launch once
FASTER = 0.97  # times the planned time at most, in all rounds of both halves but one of each
BUFFER_SECONDS = 3e-4  # for a command buffer that is timed
FIRST_CALLS, MOST_CALLS = 4, 64  # in one
BEYOND_CACHES = 64 << 20  # bytes: weights that no cache of a GPU holds from call to call
MOST_COPIES = 16
VARIANT = 100  # kVariant of csrc/matmul_plan.h


class Tuned(NamedTuple):
    """Numbers of the launches, used and planned, and the part of the operator's time that this saves."""

    number: int
    planned: int
    gain: float

    def __str__(self) -> str:
        simdgroups = f"{self.number % VARIANT} simdgroups"
        of = " of the other kernel" if self.number > VARIANT else ""
        return f"{simdgroups}{of} in place of {self.planned}, {self.gain:.0%} faster"


_known: dict[str, Tuned] = {}  # by what `_listed_tunable` calls it
_seconds_left = 0.0


def is_wanted() -> bool:
    """True if matmuls are timed: a check has passed on this machine, and MOE_MPS_TUNE is not 0."""
    return is_on(TUNE) and has_passed()


def start() -> None:
    """Apply what this machine remembers, and let first calls take SECONDS for timing."""
    global _seconds_left
    _seconds_left = SECONDS if is_wanted() else 0.0
    if is_on(TUNE) and not has_passed():
        say_what_waits()
    if _seconds_left:
        for name, result in remembered().items():
            _known[name] = result
            _apply(name)


def remembered() -> dict[str, Tuned]:
    """Results timed on this machine before; none, with a warning, where the file has something else."""
    kept = tuned_before()
    try:
        result = {name: Tuned(*entry) for name, entry in kept.items()}
        if all(map(_is_whole, result.values())):
            return result
    except (AttributeError, TypeError):
        pass
    warnings.warn("torch_moe_mps: what was timed before is damaged, and ignored", stacklevel=2)
    return {}


def _is_whole(found: Tuned) -> bool:
    return type(found.number) is type(found.planned) is int and 0 <= found.gain < 1


def told(found: Mapping[str, Tuned]) -> str | None:
    """The line of a report."""
    if not found:
        return None
    others = [f"{name}: {item}" for name, item in found.items() if item.gain]
    return f"{len(found)} kernels timed on this GPU, {len(others)} run otherwise than planned" + "".join(
        f"\n  {line}" for line in others
    )


def known() -> dict[str, Tuned]:
    """Results that hold in this process."""
    return dict(_known)


def tune(name: str, arguments: Mapping[str, Any]) -> None:
    """Times what a call of an operator runs that has not been timed on this machine, while there is time."""
    global _seconds_left
    if name not in OPERATORS or _seconds_left <= 0:
        return
    x = arguments["x"]
    if not 0 < x.numel() <= MOST_TOKENS * x.shape[-1]:
        return
    synchronize()  # earlier work is not timed
    started = time.monotonic()
    end = started + _seconds_left
    call = partial(getattr(torch.ops.moe_mps, name), **arguments)
    new = {kernel: n for kernel, n in _tunable(call).items() if kernel not in _known and len(n) > 1}
    if new:
        calls = itertools.cycle(_alike(name, arguments))
        with no_commits(), suppress(OutOfTime):
            for kernel, numbers in new.items():
                try:
                    with noted(f"timing {kernel}"):
                        same = _with_equal_bits(kernel, numbers, call)
                        _known[kernel] = choose(same, _rounds(kernel, calls, end))
                finally:
                    _apply(kernel)
        remember_tuned(_known)
    _seconds_left -= time.monotonic() - started


def choose(numbers: Sequence[int], timed: Callable[[Sequence[int]], Mapping[int, float]]) -> Tuned:
    """The number to use; the first is the planned one. `timed` gives the seconds of each, in this order.

    Another one is used where it takes FASTER of the planned time, in each of two halves in all rounds but
    one: a clock that errs at random says so once in 99,000 times, and one wrong time changes nothing.
    """
    planned, *others = numbers
    ratios: dict[int, list[float]] = {number: [] for number in others}
    for _ in range(2):
        slower = dict.fromkeys(ratios, 0)
        for round in range(ROUNDS):
            order = [planned, *ratios]
            order = order[round % len(order) :] + order[: round % len(order)]  # each is the first as often
            seconds = timed(order)
            for number, result in ratios.items():
                result.append(_ratio(seconds[number], seconds[planned]))
                slower[number] += result[-1] > FASTER
            ratios = {number: result for number, result in ratios.items() if slower[number] < 2}
            if not ratios:
                return Tuned(planned, planned, 0.0)
    best = min(ratios, key=lambda number: median(ratios[number]))
    return Tuned(best, planned, 1 - median(ratios[best]))


def _ratio(seconds: float, planned: float) -> float:
    """Infinite where the clock says what cannot be."""
    return seconds / planned if 0 < seconds < math.inf and 0 < planned < math.inf else math.inf


def _rounds(
    kernel: str, calls: Iterator[Callable[[], Tensor]], end: float
) -> Callable[[Sequence[int]], dict[int, float]]:
    """Function that times a round, with so many calls in a command buffer that it takes BUFFER_SECONDS.

    Raises: OutOfTime where another round may last beyond `end`.
    """

    longest = 0.0  # a round's

    def seconds(order: Sequence[int], times: int) -> list[float]:
        for number in order:
            torch.ops.moe_mps._tune(kernel, number)
            torch.ops.moe_mps._time_buffer()
            for _ in range(times):
                next(calls)()
        synchronize()
        return torch.ops.moe_mps._buffer_seconds()

    def timed(order: Sequence[int]) -> dict[int, float]:
        nonlocal longest
        started = time.monotonic()
        if started + longest > end:
            raise OutOfTime
        result = dict(zip(order, seconds(order, times), strict=True))
        longest = max(longest, time.monotonic() - started)
        return result

    if time.monotonic() > end:
        raise OutOfTime
    started = time.monotonic()
    of_one = seconds([0], FIRST_CALLS)[0] / FIRST_CALLS  # it wakes the GPU, too
    longest = time.monotonic() - started
    times = min(MOST_CALLS, max(1, round(BUFFER_SECONDS / of_one))) if of_one > 0 else 1
    return timed


def _alike(name: str, arguments: Mapping[str, Any]) -> list[Callable[[], Tensor]]:
    """Calls with other weights, or other experts, as a token reads none of them twice."""
    call = getattr(torch.ops.moe_mps, name)
    if name.startswith("_moe_experts"):
        experts = arguments["gate_up" if name == "_moe_experts" else "gate_up_packed"].shape[0]
        if (logits := arguments.get("logits")) is not None:
            shifts = range(0, experts, max(1, arguments["top_k"]))[:MOST_COPIES]
            return [partial(call, **{**arguments, "logits": logits.roll(shift, -1)}) for shift in shifts]
        ids = arguments["topk_ids"]
        shifts = range(0, experts, max(1, ids.shape[-1]))[:MOST_COPIES]
        moved = [torch.where(ids < 0, ids, (ids + shift) % experts) for shift in shifts]
        return [partial(call, **{**arguments, "topk_ids": item}) for item in moved]
    size = sum(value.nbytes for value in arguments.values() if isinstance(value, Tensor))
    count = max(1, min(MOST_COPIES, math.ceil(BEYOND_CACHES / size)))
    return [partial(call, **(_copy(arguments) if number else arguments)) for number in range(count)]


def _copy(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in arguments.items()}


def _tunable(call: Callable[[], Tensor]) -> dict[str, list[int]]:
    with setting("_list_tunable", True, False):
        call()
        return torch.ops.moe_mps._listed_tunable()


def _with_equal_bits(kernel: str, numbers: Sequence[int], call: Callable[[], Tensor]) -> list[int]:
    """Launches that give, on this very GPU, the bits of the planned one. Others may not compile."""
    results = {}
    for number in numbers:
        torch.ops.moe_mps._tune(kernel, number)
        try:
            result = call()
        except RuntimeError as error:
            if number == numbers[0] or fault_of(error) is not None:
                raise
            continue
        results[number] = result.view(torch.int16 if result.element_size() == 2 else torch.int32)
    return [number for number, found in results.items() if torch.equal(found, results[numbers[0]])]


def _apply(kernel: str) -> None:
    """Run a matmul by the launch that is known to be faster; as planned, where none is."""
    result = _known.get(kernel)
    torch.ops.moe_mps._tune(kernel, result.number if result and result.gain else 0)
