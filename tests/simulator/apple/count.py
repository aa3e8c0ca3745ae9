"""Runs a kernel in the executor with its blocks and accesses counted. The results are the kernel's own."""

import ctypes
import functools
import hashlib
import itertools
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .. import build, shaderlib
from . import compile as ir_of
from .facts import COSTS
from .flow import Flow
from .ir import parse_function
from .lower import Lowering
from .registers import Registers, estimate
from .sites import Site, find_sites

_HOOKS = Path(__file__).with_name("hooks.cpp")
_X86 = """\
target datalayout = "e-m:e-p270:32:32-p271:32:32-p272:64:64-i64:64-i128:128-f80:128-n8:16:32:64-S128"
target triple = "x86_64-pc-linux-gnu\""""
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


@dataclass
class Counts:
    """What the threadgroups that ran did. `blocks`, `lane_blocks`: each block's runs by simdgroups, by lanes.

    `sites`: columns accesses, lanes and 32-byte sectors, of traced threadgroups, and the space.
    `group_slots`: issue slots of each threadgroup, 0 for those that did not run.
    """

    blocks: np.ndarray
    lane_blocks: np.ndarray
    sites: np.ndarray
    group_slots: np.ndarray
    distinct_bytes: int = 0
    groups_run: int = 0


class KernelModel:
    """A kernel's IR, with what follows from it alone: blocks, sites, registers, classes of instructions."""

    def __init__(self, path: Path, constants: frozenset[int]):
        self.path = path
        self.lines = path.read_text().splitlines()
        self.function = parse_function(self.lines, _kernel_function(self.lines))
        self.flow = Flow(self.function, constants)
        self.sites = find_sites(self.flow)

    @functools.cached_property
    def registers(self) -> Registers:
        return estimate(self.flow)

    @functools.cache  # noqa: B019  a model lives as long as the process
    def block_classes(self, native: bool) -> list[list[str]]:
        """The classes of each block's instructions, but for loads and stores."""
        lowering = Lowering(self.flow, native)
        return [[c for i in b.instructions for c in lowering.classes(i)] for b in self.function.blocks]

    @functools.cached_property
    def block_slots(self) -> np.ndarray:
        slots = [sum(COSTS[c].slots for c in classes) for classes in self.block_classes(False)]
        for site in self.sites:
            slots[site.block] += site.instructions
        return np.array(slots, np.float64)

    @functools.cached_property
    def library(self) -> ctypes.CDLL:
        """The instrumented kernel, built once."""
        executor = build.executor_library()
        ctypes.CDLL(str(executor), mode=ctypes.RTLD_GLOBAL)
        shaderlib.executor()
        key = build.digest(self.path.name, _HOOKS.read_bytes(), _own_code(), executor)
        library = ctypes.CDLL(str(build.build_once(ir_of.folder() / f"{key}.so", self._build)))
        library.apple_distinct_bytes.restype = ctypes.c_uint64
        return library

    def _build(self, target: Path) -> None:
        ir, kernel, hooks = (target.with_suffix(s) for s in (".ll", ".kernel.o", ".hooks.o"))
        ir.write_text(instrumented(self.lines, self.function, self.sites))
        compiler, flags = build.tool("clang++"), ["-O1", "-march=x86-64-v3", "-fPIC", "-w"]
        ir_of.run([compiler, *flags, "-c", ir, "-o", kernel])
        ir_of.run([compiler, *flags, "-std=c++17", "-O2", "-fvisibility=hidden", "-c", _HOOKS, "-o", hooks])
        link = [
            compiler,
            "-shared",
            "-fuse-ld=lld",
            kernel,
            hooks,
            build.executor_library(),
            "-lm",
            "-o",
            target,
        ]
        ir_of.run(link)
        for path in (ir, kernel, hooks):
            path.unlink()

    def run(self, dispatch: shaderlib.Dispatch, limit: "Limit") -> tuple[Counts, shaderlib.Counters]:
        """Runs the dispatch, or a sample of its threadgroups, on its own buffers."""
        groups = int(np.prod(list(dispatch.grid)))
        counts = Counts(
            np.zeros(len(self.function.blocks), np.uint64),
            np.zeros(len(self.function.blocks), np.uint64),
            np.zeros((len(self.sites), 4), np.uint64),
            np.zeros(groups, np.float64),
        )
        traced = limit.traced(groups)
        counters = self._run_groups(dispatch, counts, traced, True)
        counts.groups_run = int(np.count_nonzero(traced))
        others = np.where(traced == TRACED, SKIPPED, COUNTED).astype(np.uint8)
        if others.any() and counts.group_slots.sum() * groups / counts.groups_run <= limit.slots:
            counters = self._run_groups(dispatch, counts, others, False)
            counts.groups_run = groups
        counts.distinct_bytes = int(self.library.apple_distinct_bytes())
        return counts, counters

    def _run_groups(self, dispatch, counts: Counts, modes: np.ndarray, fresh: bool) -> shaderlib.Counters:
        kernel = dispatch.kernel.contents
        by_value = (dispatch.buffers[i].identity == 0 for i in range(shaderlib.BINDINGS))
        constant = np.array([v or i in self.flow.constants for i, v in enumerate(by_value)], np.uint8)
        sites = (_Site * max(1, len(self.sites)))(
            *(_Site(s.back, s.bytes, s.space == "module") for s in self.sites)
        )
        arrays = (self.block_slots, modes, constant, counts.blocks, counts.lane_blocks, counts.sites)
        pointers = [a.ctypes.data for a in (*arrays, counts.group_slots)]
        request = _Request(len(self.function.blocks), len(self.sites), ctypes.addressof(sites), *pointers)
        self.library.apple_begin(ctypes.byref(request), int(fresh))
        entry = ctypes.cast(self.library.apple_entry, ctypes.c_void_p)
        own = shaderlib.Kernel.from_buffer_copy(kernel)
        own.entry = entry.value
        copy = shaderlib.Dispatch.from_buffer_copy(dispatch)
        copy.kernel = ctypes.pointer(own)
        counters = shaderlib.execute(copy)
        self.library.apple_end()
        return counters


@dataclass(frozen=True)
class Limit:
    """How much of a dispatch is run: accesses are traced in at most `groups` threadgroups, spread evenly.

    The others are only counted; where they would execute more than `slots` instructions of a simdgroup, they
    are left out, and what ran stands for all.
    """

    groups: int = 48
    slots: float = 1.5e8

    def traced(self, groups: int) -> np.ndarray:
        modes = np.full(groups, TRACED, np.uint8)
        if groups > self.groups:
            modes[:] = SKIPPED
            # One of each stretch of threadgroups, at places that no regular grid repeats.
            edges = np.linspace(0, groups, self.groups + 1).astype(int)
            for i, (low, high) in enumerate(itertools.pairwise(edges)):
                modes[low + int((i * 0.6180339887 % 1) * (high - low))] = TRACED
        return modes


@functools.cache
def _own_code() -> str:
    files = ("ir.py", "flow.py", "sites.py", "count.py")
    return hashlib.sha1(b"".join((_HOOKS.parent / f).read_bytes() for f in files)).hexdigest()


@functools.cache
def kernel_model(path: Path, constants: frozenset[int]) -> KernelModel:
    return KernelModel(path, constants)


def _kernel_function(lines: list[str]) -> str:
    """The function that holds the kernel's body: msl_entry*, or what it calls to fetch the arguments."""
    entry = next(re.search(r"@(msl_entry\d+)\(", line).group(1) for line in lines if "@msl_entry" in line)
    calls = [i for i in parse_function(lines, entry).instructions if i.op == "call"]
    return next((c.callee for c in calls if "3msl9signature" in c.callee), entry)


def instrumented(lines: list[str], function, sites: list[Site]) -> str:
    """The IR for this machine, with a counter in each block and a call at each site."""
    before: dict[int, list[str]] = {}
    for block in function.blocks:
        at, place = block.body[0].line, before.setdefault(block.body[0].line, [])
        assert at > function.first
        if block.number == 0:
            place.append("  %apple.blocks = call ptr @apple_thread()")
        name = f"%apple.{block.number}"
        place += [
            f"  {name}.at = getelementptr i32, ptr %apple.blocks, i64 {block.number}",
            f"  {name}.old = load i32, ptr {name}.at",
            f"  {name}.new = add i32 {name}.old, 1",
            f"  store i32 {name}.new, ptr {name}.at",
        ]
    for number, site in enumerate(sites):
        call = f"  call void @apple_access(ptr {site.pointer}, i32 {number})"
        before.setdefault(site.leader.line, []).append(call)
    out = []
    for number, line in enumerate(lines):
        out += [*before.get(number, ()), line]
    text = "\n".join([*out, "declare void @apple_access(ptr, i32)", "declare ptr @apple_thread()", ""])
    text = re.sub(r"^target datalayout = .*$", _X86, text, flags=re.M)
    return re.sub(r"@msl_entry\d+\(", "@apple_kernel(", text)


def unit_of(kernel: shaderlib.Kernel) -> tuple[Path, int]:
    """The translated source that a kernel is from, and its number there."""
    stem, _, number = Path(kernel.image.decode()).stem.rpartition("-")
    return Path(kernel.image.decode()).with_name(f"{stem}.cpp"), int(number)


def model_of(kernel: shaderlib.Kernel) -> KernelModel:
    unit, number = unit_of(kernel)
    return kernel_model(ir_of.optimised_ir(unit.read_text(), number), references(kernel))


def references(kernel: shaderlib.Kernel) -> frozenset[int]:
    """The buffers that are references into constant memory."""
    arguments = (kernel.arguments[i] for i in range(kernel.argument_count))
    return frozenset(a.index for a in arguments if a.kind == 0 and a.min_bytes and not a.writable)
