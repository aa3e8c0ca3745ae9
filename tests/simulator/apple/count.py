"""Runs a dispatch in the executor and counts its blocks and accesses. The results are the kernel's own."""

import ctypes
import itertools
from dataclasses import dataclass, field

import numpy as np

from .. import shaderlib
from .kernel import KernelModel

SKIPPED, COUNTED, TRACED = range(3)  # as in hooks.cpp
SPACES = ("unknown", "device", "constant", "threadgroup", "private", "module")


class _Site(ctypes.Structure):
    _fields_ = (("back", ctypes.c_int32), ("bytes", ctypes.c_uint32), ("is_module", ctypes.c_uint32))


class _Request(ctypes.Structure):
    _fields_ = (
        ("block_count", ctypes.c_uint32),
        ("site_count", ctypes.c_uint32),
        ("sites", ctypes.c_void_p),
        ("block_slots", ctypes.c_void_p),
        ("modes", ctypes.c_void_p),
        ("is_constant", ctypes.c_void_p),
        ("blocks", ctypes.c_void_p),
        ("lane_blocks", ctypes.c_void_p),
        ("site_counts", ctypes.c_void_p),
        ("group_slots", ctypes.c_void_p),
    )


@dataclass(frozen=True)
class Limit:
    """How much of a dispatch is run: accesses are traced in at most `groups` threadgroups, spread evenly.

    The others are only counted; where they would execute more than `slots` instructions of a simdgroup, they
    are left out, and what ran stands for all. Then only part of the results is there. Kernels that write
    lists for later ones are always run whole.
    """

    groups: int = 96
    slots: float = 3e7

    def traced(self, groups: int) -> np.ndarray:
        """The mode of each threadgroup in the first run."""
        modes = np.full(groups, TRACED, np.uint8)
        if groups > self.groups:
            modes[:] = SKIPPED
            # One of each stretch of threadgroups, at places that no regular grid repeats.
            edges = np.linspace(0, groups, self.groups + 1).astype(int)
            for i, (low, high) in enumerate(itertools.pairwise(edges)):
                modes[low + int((i * 0.6180339887 % 1) * (high - low))] = TRACED
        return modes


@dataclass
class Counts:
    """What the threadgroups that ran did. `blocks`, `lane_blocks`: each block's runs by simdgroups, by lanes.

    `sites`: columns accesses, lanes and 32-byte sectors, of traced threadgroups, and the space; lines of the
    cache, and cycles of the busiest bank of threadgroup memory, as they are and without conflicts.
    `group_slots`: issue slots of each threadgroup, 0 for those that did not run.
    """

    blocks: np.ndarray
    lane_blocks: np.ndarray
    sites: np.ndarray
    group_slots: np.ndarray
    distinct_bytes: int = 0
    groups_run: int = 0
    counters: shaderlib.Counters = field(default_factory=shaderlib.Counters)


def run(model: KernelModel, dispatch: shaderlib.Dispatch, limit: Limit) -> Counts:
    """Runs the dispatch, or a sample of its threadgroups, on its own buffers. Raises SimulatorError."""
    groups = int(np.prod(list(dispatch.grid)))
    blocks = len(model.function.blocks)
    counts = Counts(
        np.zeros(blocks, np.uint64),
        np.zeros(blocks, np.uint64),
        np.zeros((len(model.sites), 7), np.uint64),
        np.zeros(groups, np.float64),
    )
    traced = limit.traced(groups)
    _run_groups(model, dispatch, counts, traced, True)
    counts.groups_run = int(np.count_nonzero(traced))
    others = np.where(traced == TRACED, SKIPPED, COUNTED).astype(np.uint8)
    all_slots = counts.group_slots.sum() * groups / counts.groups_run
    if others.any() and (all_slots <= limit.slots or model.writes_lists):
        _run_groups(model, dispatch, counts, others, False)
        counts.groups_run = groups
    counts.distinct_bytes = int(model.library.apple_distinct_bytes())
    return counts


def _run_groups(
    model: KernelModel, dispatch: shaderlib.Dispatch, counts: Counts, modes: np.ndarray, fresh: bool
) -> None:
    by_value = (dispatch.buffers[i].identity == 0 for i in range(shaderlib.BINDINGS))
    constant = np.array([v or i in model.constants for i, v in enumerate(by_value)], np.uint8)
    sites = (_Site * max(1, len(model.sites)))(
        *(_Site(s.back, s.bytes, s.space == "module") for s in model.sites)
    )
    arrays = (model.block_slots, modes, constant, counts.blocks, counts.lane_blocks, counts.sites)
    pointers = [a.ctypes.data for a in (*arrays, counts.group_slots)]
    request = _Request(len(counts.blocks), len(model.sites), ctypes.addressof(sites), *pointers)
    model.library.apple_begin(ctypes.byref(request), int(fresh))
    counting = shaderlib.Kernel.from_buffer_copy(dispatch.kernel.contents)
    counting.entry = ctypes.cast(model.library.apple_entry, ctypes.c_void_p).value
    copy = shaderlib.Dispatch.from_buffer_copy(dispatch)
    copy.kernel = ctypes.pointer(counting)
    counts.counters = shaderlib.execute(copy)
    model.library.apple_end()
