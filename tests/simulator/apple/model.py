"""The cost of a counted dispatch on an Apple GPU: instructions, bytes, registers, and what bounds it."""

import functools
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .count import SPACES, Counts
from .facts import (
    COSTS,
    LANES,
    LINES_A_CYCLE,
    M3,
    SCHEDULERS,
    SECTOR_BYTES,
    TENSOR_MACS,
    THREADGROUP_BYTES,
    Gpu,
    threads_for,
)
from .kernel import KernelModel
from .latency import RESIDENT, Latency, latency
from .liveness import Registers
from .lower import PRODUCT

_LATER = {"anyshuffle": "anyshuffle3"}  # classes that cost something else from the M3 on
GROUPS = {
    "float": "fma fadd fmul fother",
    "logic": "logic",
    "integer": "iadd iadd64 imul imul64",
    "shift": "shift shiftvar bfe",
    "convert": "convert",
    "bfloat": "bfwiden bfround",
    "select": "select cmp mov",
    "branch": "branch",
    "special": "transc recip rsqrt popcount",
    "simdgroup": "shuffle anyshuffle simdsum scan ballot",
    "matrix": "mma16 mma32",
    "barrier": "barrier",
    "device": "devload devstore",
    "threadgroup": "tgload tgstore",
    "private": "private",
    "atomic": "atomic",
}


@dataclass(frozen=True)
class Bounds:
    """The least microseconds that each resource of a GPU needs; they work side by side.

    `tensor` is infinite on a GPU that has no tensor units, where the model does not know such a product.
    """

    issue: float
    l1: float
    threadgroup: float
    dram: float
    tensor: float = 0.0

    @property
    def binding(self) -> str:
        return max(self.__dict__, key=self.__dict__.get)

    @property
    def predicted_us(self) -> float:
        return max(self.__dict__.values())


@dataclass
class Traffic:
    """Bytes that the L1 moves, and that lanes request from threadgroup memory; lines of the L1 that loads
    touch, once for each load; cycles of the busiest banks of threadgroup memory."""

    l1: float = 0
    threadgroup: float = 0
    lines: float = 0
    bank_cycles: float = 0


class _Accesses(NamedTuple):
    """Loads or stores of simdgroups at one place; `kind` is their class of instructions."""

    kind: str
    instructions: float
    bytes: int  # of a lane
    lanes: float
    sectors: float
    lines: float
    bank_cycles: float
    least_cycles: float


@dataclass(frozen=True)
class Work:
    """The purpose of a dispatch: its multiply-adds, or elements, and the device memory that it must touch."""

    label: str
    macs: int
    dram_bytes: int | None = None


@dataclass(eq=False)
class Measurement:
    """One dispatch. `library` is the compiled shader of its kernel; `work` is what the caller said."""

    kernel: str
    library: Path
    grid: tuple[int, int, int]
    threads: int
    declared_threads: int  # max_total_threads_per_threadgroup, 0 without
    threadgroup_bytes: int
    model: KernelModel
    counts: Counts
    work: Work | None = None

    @property
    def fraction(self) -> float:
        """The part of the threadgroups that were run; counts are scaled by it."""
        return self.counts.groups_run / max(1, self.counts.group_slots.size)

    @property
    def registers(self) -> Registers:
        """Those of a thread on M1."""
        return self.model.registers(native=False)

    @property
    def allowed_threads(self) -> int:
        """The threads of a threadgroup that M1's registers allow; 0 where a thread needs too many."""
        return threads_for(self.registers.halves)

    @property
    def fits(self) -> bool:
        """Whether M1's registers allow the declared bound, or what is launched where none is declared."""
        return self.allowed_threads >= (self.declared_threads or self.threads)

    @property
    def dram_bytes(self) -> float:
        """Bytes of device memory that are touched, each once. Of a sample: as the caller says, or scaled."""
        if self.fraction < 1 and self.work is not None and self.work.dram_bytes is not None:
            return self.work.dram_bytes
        return self.counts.distinct_bytes / self.fraction

    @functools.cached_property
    def uses_tensor_units(self) -> bool:
        """Whether it multiplies matrices on tensor units; what that takes is no part of its slots."""
        return any(i.op == "call" and i.callee == PRODUCT for i in self.model.function.instructions)

    def tensor_us(self, gpu: Gpu) -> float:
        """The least time of its products on tensor units, as if no tile had pairs to spare."""
        if not self.uses_tensor_units or self.work is None:
            return 0.0
        return self.work.macs / (TENSOR_MACS * gpu.core_cycles_per_us) if gpu.has_tensor_units else math.inf

    @property
    def sampling_error(self) -> float:
        """The standard error of the slots, relative, where not all threadgroups were run."""
        slots = self.counts.group_slots[self.counts.group_slots > 0]
        if self.fraction == 1 or len(slots) < 2:
            return 0.0
        return float(slots.std(ddof=1) / slots.mean() / np.sqrt(len(slots)))

    @functools.cached_property
    def _sites(self) -> list[_Accesses]:
        """Accesses of each site that ran, of simdgroups."""
        found = []
        for site, (accesses, lanes, sectors, space, *others) in zip(
            self.model.sites, self.counts.sites, strict=True
        ):
            runs = float(self.counts.blocks[site.block]) / self.fraction
            if runs and accesses:
                class_ = class_of(SPACES[int(space)], site.op)
                counted = (float(each) * runs / float(accesses) for each in (lanes, sectors, *others))
                found.append(_Accesses(class_, runs * site.instructions, site.bytes, *counted))
        return found

    @property
    def bank_conflicts(self) -> float:
        """The cycles that banks of threadgroup memory take, over those without two words in one bank."""
        least = sum(site.least_cycles for site in self._sites)
        return sum(site.bank_cycles for site in self._sites) / least if least else 1.0

    @functools.cache  # noqa: B019  measurements are few
    def classes(self, gpu: Gpu) -> Counter:
        """Instructions that simdgroups execute, by class."""
        found: Counter = Counter()
        for runs, classes in zip(self.counts.blocks, self.model.block_classes(gpu.native_bf16), strict=True):
            for class_ in classes:
                name = _LATER.get(class_, class_) if gpu.family >= M3 else class_
                found[name] += float(runs) / self.fraction
        for site in self._sites:
            found[site.kind] += site.instructions
        return found

    def slots(self, gpu: Gpu) -> float:
        """Issue slots of simdgroups."""
        return sum(n * COSTS[c].slots for c, n in self.classes(gpu).items())

    def slots_per_mac(self, gpu: Gpu) -> float:
        """Issue slots of a lane for each multiply-add."""
        return self.slots(gpu) * LANES / self.work.macs

    def by_group(self, gpu: Gpu) -> dict[str, float]:
        """Instructions of a lane for each multiply-add, by group of classes."""
        classes = self.classes(gpu)
        sums = {group: sum(classes[c] for c in names.split()) for group, names in GROUPS.items()}
        return {group: n * LANES / self.work.macs for group, n in sums.items() if n}

    @property
    def steps(self) -> float:
        """How often a simdgroup waits for device memory: the runs of its most frequent load."""
        sites = zip(self.model.sites, self.counts.sites, strict=True)
        loads = [s.block for s, row in sites if class_of(SPACES[int(row[3])], s.op) == "devload"]
        runs = max((float(self.counts.blocks[block]) for block in loads), default=0.0)
        return runs / max(1, self.counts.groups_run * self.threads // LANES)

    def latency(self, gpu: Gpu) -> Latency:
        """The time of the launch if it has too few simdgroups to hide latency; at least the time of what
        binds it."""
        groups, simdgroups = math.prod(self.grid), self.threads // LANES
        slots = self.slots(gpu) / max(1, groups * simdgroups)
        bound = self.bounds(gpu).predicted_us
        resident = self.allowed_threads // LANES
        found = latency(gpu, groups, simdgroups, slots, self.steps, resident)
        return Latency(*(max(us, bound) for us in found))

    @property
    def occupancy(self) -> float:
        """The part of the simdgroups that hide latency for which a core of an M1 has registers."""
        resident = max(self.threads, self.allowed_threads) // LANES
        return min(1.0, max(1, resident) / RESIDENT)

    def range_us(self, gpu: Gpu) -> tuple[float, float]:
        """The time of what binds it, at least; at most, where no instruction of a simdgroup is independent of
        the one before, so that few simdgroups issue less: a gemm with fewer instructions and more registers
        may be the slower one (fastmlx on an M3 Max)."""
        bounds = self.bounds(gpu)
        return bounds.predicted_us, max(bounds.predicted_us, bounds.issue / self.occupancy)

    @property
    def active_lanes(self) -> float:
        """The part of lanes that take part in what their simdgroup executes."""
        weights = self.model.block_slots
        runs = float((self.counts.blocks * weights).sum())
        return float((self.counts.lane_blocks * weights).sum()) / (LANES * runs) if runs else 0.0

    @functools.cached_property
    def traffic(self) -> Traffic:
        total = Traffic()
        for site in self._sites:
            asked = site.bytes * site.lanes
            if site.kind == "devload":
                # A sector that many lanes read is delivered to each: gemv_wide on an M1 Pro (mlx #3967).
                total.l1 += max(site.sectors * SECTOR_BYTES, asked)
                total.lines += site.lines
            elif site.kind == "devstore":
                total.l1 += asked
            elif site.kind in ("tgload", "tgstore"):
                total.threadgroup += asked
                total.bank_cycles += site.bank_cycles
        return total

    def bounds(self, gpu: Gpu) -> Bounds:
        classes = self.classes(gpu)
        pipes = {"complex": 0.0, "shuffle": 0.0}
        for class_, n in classes.items():
            if COSTS[class_].pipe:
                pipes[COSTS[class_].pipe] += n * COSTS[class_].cycles
        loads = classes["devload"] + classes["devstore"] + classes["private"]
        threadgroup = classes["tgload"] + classes["tgstore"]
        cycle = 1 / gpu.core_cycles_per_us  # of one core's share
        return Bounds(
            issue=max(self.slots(gpu), *pipes.values()) / SCHEDULERS * cycle,
            l1=max(self.traffic.l1 / gpu.l1_bytes, loads, self.traffic.lines / LINES_A_CYCLE) * cycle,
            threadgroup=max(
                self.traffic.threadgroup / THREADGROUP_BYTES, threadgroup, self.traffic.bank_cycles
            )
            * cycle,
            dram=self.dram_bytes / gpu.dram_bytes_per_us,
            tensor=self.tensor_us(gpu),
        )


def class_of(space: str, op: str) -> str:
    """The class of a load or store in a space."""
    if space == "constant":
        return "constload"
    if space == "private":
        return "private"
    if space == "module":
        return "devload"
    return ("dev" if space == "device" else "tg") + op
