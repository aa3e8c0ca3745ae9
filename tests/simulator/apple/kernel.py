"""A kernel as the model sees it: its IR, the facts that follow from the IR, and an instrumented build that
counts."""

import ctypes
import functools
import re
from pathlib import Path

import numpy as np

from .. import build, shaderlib
from . import compile as ir_of
from .facts import BANKS, CACHE_LINE_BYTES, COSTS, LINE_BYTES, SECTOR_BYTES
from .flow import Flow
from .ir import Function, parse_function
from .lists import writes_lists
from .liveness import Registers, estimate
from .lower import Lowering
from .sites import Site, find_sites

_HERE = Path(__file__).parent
_HOOKS = _HERE / "hooks.cpp"
_FLAGS = ["-march=x86-64-v3", "-fPIC", "-w"]
_SIZES = [
    f"-DAPPLE_SECTOR_BYTES={SECTOR_BYTES}",
    f"-DAPPLE_LINE_BYTES={LINE_BYTES}",
    f"-DAPPLE_CACHE_LINE_BYTES={CACHE_LINE_BYTES}",
    f"-DAPPLE_BANKS={BANKS}",
]
_X86 = """\
target datalayout = "e-m:e-p270:32:32-p271:32:32-p272:64:64-i64:64-i128:128-f80:128-n8:16:32:64-S128"
target triple = "x86_64-pc-linux-gnu\""""


class KernelModel:
    """`constants`: the numbers of the buffers that are references into constant memory."""

    def __init__(self, path: Path, constants: frozenset[int]):
        self.path, self.constants = path, constants

    @functools.cached_property
    def lines(self) -> list[str]:
        return self.path.read_text().splitlines()

    @functools.cached_property
    def function(self) -> Function:
        return parse_function(self.lines, _kernel_function(self.lines))

    @functools.cached_property
    def flow(self) -> Flow:
        return Flow(self.function, self.constants)

    @functools.cached_property
    def sites(self) -> list[Site]:
        return find_sites(self.flow)

    @functools.cached_property
    def writes_lists(self) -> bool:
        return writes_lists(self.flow)

    @functools.cache  # noqa: B019  a model lives as long as the process
    def registers(self, native: bool) -> Registers:
        """The registers of a thread, kept with the builds: large kernels take long."""
        code = _digest("ir.py", "flow.py", "facts.py", "lower.py", "liveness.py")
        key = build.digest(self.path.name, sorted(self.constants), code, native)

        def make(target: Path) -> None:
            found = estimate(self.flow, native)
            target.write_text(f"{found.halves} {found.block} {found.arrays}")

        return Registers(
            *map(int, build.build_once(ir_of.folder() / f"{key}.registers", make).read_text().split())
        )

    @functools.cache  # noqa: B019  a model lives as long as the process
    def block_classes(self, native: bool) -> list[list[str]]:
        """The classes of each block's instructions, but for loads and stores."""
        lowering = Lowering(self.flow, native)
        return [[c for i in b.instructions for c in lowering.classes(i)] for b in self.function.blocks]

    @functools.cached_property
    def block_slots(self) -> np.ndarray:
        """Issue slots of each block, about: to weigh blocks and threadgroups against each other."""
        slots = [sum(COSTS[c].slots for c in classes) for classes in self.block_classes(False)]
        for site in self.sites:
            slots[site.block] += site.instructions
        return np.array(slots, np.float64)

    @functools.cached_property
    def library(self) -> ctypes.CDLL:
        """The kernel with counters, and hooks.cpp."""
        executor = build.executor_library()
        shaderlib.executor()  # whose symbols the kernel needs
        hooks = _hooks()
        code = _digest("ir.py", "flow.py", "sites.py", "kernel.py")

        def make(target: Path) -> None:
            ir, kernel = target.with_suffix(".ll"), target.with_suffix(".o")
            ir.write_text(instrumented(self.lines, self.function, self.sites))
            translate = [build.tool("clang++"), *_FLAGS, "-O1", "-Xclang", "-disable-llvm-passes"]
            ir_of.run([*translate, "-c", ir, "-o", kernel])  # opt has optimised it
            ir_of.run([*build.LINK, kernel, hooks, executor, "-o", target])
            ir.unlink()
            kernel.unlink()

        key = build.digest(self.path.name, code, executor, hooks.name)
        library = ctypes.CDLL(str(build.build_once(ir_of.folder() / f"{key}.so", make)))
        library.apple_distinct_bytes.restype = ctypes.c_uint64
        return library


@functools.cache
def _hooks() -> Path:
    """hooks.cpp, to be linked with each counted kernel."""
    command = [
        build.tool("clang++"),
        *_FLAGS,
        "-std=c++17",
        "-O2",
        "-fvisibility=hidden",
        "-fno-c++-static-destructors",  # which would need crtbegin.o
        *_SIZES,
        "-c",
        _HOOKS,
    ]
    path = ir_of.folder() / f"hooks-{build.digest(_digest('hooks.cpp'), ir_of.headers_digest(), command)}.o"
    return build.build_once(path, lambda target: ir_of.run([*command, "-o", target]))


@functools.cache
def _digest(*names: str) -> str:
    return build.files_digest(*(_HERE / name for name in names))


def _kernel_function(lines: list[str]) -> str:
    """The function that holds the kernel's body: msl_entry*, or what it calls to fetch the arguments."""
    entry = next(re.search(r"@(msl_entry\d+)\(", line).group(1) for line in lines if "@msl_entry" in line)
    calls = [i for i in parse_function(lines, entry).instructions if i.op == "call"]
    return next((c.callee for c in calls if "3msl9signature" in c.callee), entry)


def instrumented(lines: list[str], function: Function, sites: list[Site]) -> str:
    """The IR for this machine, with a counter in each block and a call at each site."""
    before: dict[int, list[str]] = {}
    for block in function.blocks:
        place = before.setdefault(block.body[0].line, [])
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


def library_of(kernel: shaderlib.Kernel) -> tuple[Path, int]:
    """The compiled shader that a kernel is from, and its number there."""
    image = Path(kernel.image.decode())
    stem, _, number = image.stem.rpartition("-")
    return image.with_name(f"{stem}.so"), int(number)


def references(kernel: shaderlib.Kernel) -> frozenset[int]:
    """The buffers that are references into constant memory."""
    arguments = (kernel.arguments[i] for i in range(kernel.argument_count))
    return frozenset(a.index for a in arguments if a.kind == 0 and a.min_bytes and not a.writable)


def model_of(kernel: shaderlib.Kernel) -> KernelModel:
    library, number = library_of(kernel)
    translated = library.with_suffix(".cpp").read_text()
    return _model(ir_of.optimised_ir(translated, number), references(kernel))


@functools.cache
def _model(path: Path, constants: frozenset[int]) -> KernelModel:
    return KernelModel(path, constants)
