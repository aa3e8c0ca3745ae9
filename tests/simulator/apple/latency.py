"""The time of a launch with too few simdgroups to hide the latency of their loads.

A simdgroup goes through serial steps: it waits for a load, then issues what uses it. All simdgroups of a
core wait and issue together; a scheduler issues one instruction a cycle, and fewer of one simdgroup alone.
How long a load takes and how fast one simdgroup issues are not known well, so the result is a range.
"""

import math
from typing import NamedTuple

from .facts import METAL_BENCHMARKS, SCHEDULERS, Gpu, fact

WAIT_US = fact(
    "wait for a load in a loop of products, us", (0.45, 0.7), "inferred", "all", "llama.cpp #25250"
)
ALONE = fact(
    "instructions a cycle that one simdgroup issues alone",
    (1.0, 0.36),
    "inferred",
    "M1, M2; assumed for later",
    f"{METAL_BENCHMARKS}: an fma takes 2.75 cycles at 4 simdgroups a core",
)
RESIDENT = fact("simdgroups that a core holds at a time", 24, "inferred", "all", METAL_BENCHMARKS)


class Latency(NamedTuple):
    """Microseconds, under the most and the least favourable assumptions."""

    least: float
    most: float


def latency(
    gpu: Gpu, threadgroups: int, simdgroups: int, slots: float, steps: float, resident: int = RESIDENT
) -> Latency:
    """The time of `threadgroups` with `simdgroups` each; a simdgroup issues `slots` in `steps` steps.

    Of `resident` simdgroups a core has registers at a time, of one threadgroup at least.
    """
    resident = max(simdgroups, min(resident, RESIDENT))
    waves, of_last = divmod(math.ceil(threadgroups / gpu.cores) * simdgroups, resident)
    sizes = [resident] * waves + [of_last] * (of_last > 0)

    def us(wait: float, alone: float) -> float:
        shared = sum(slots * max(math.ceil(size / SCHEDULERS), 1 / alone) for size in sizes)
        return shared / (gpu.ghz * 1e3) + len(sizes) * steps * wait

    return Latency(*(us(*assumption) for assumption in zip(WAIT_US, ALONE, strict=True)))
