"""Which branches of the shaders some dispatches take: clang's own coverage, of every kernel that runs.

A branch is a condition of `if`, `for`, `while`, `?:`, `&&` or `||`; it has an outcome for true and one for
false. What the compiler decides (`if constexpr`, constants) is none. Instances of a template count together:
an outcome is taken if any instance takes it.
"""

import ctypes
import functools
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from . import build, shaderlib

_RUNTIME = Path(__file__).with_name("coverage.c")
_FLAGS = [
    *build.LANGUAGE,
    *build.ARITHMETIC,
    *("-O1", "-g0", "-fPIC", "-fno-plt", "-fvisibility=hidden", "-w"),
    "-Wno-error=reserved-user-defined-literal",
    *("-fprofile-instr-generate", "-fcoverage-mapping"),
]


class Outcome(NamedTuple):
    """What a branch can do. `number` tells branches of one line apart, from left to right."""

    file: str
    line: int
    number: int
    taken: bool


class Coverage:
    """Called with a dispatch, runs it and counts; not while accesses are checked."""

    def __init__(self) -> None:
        self._images: dict[Path, ctypes.CDLL] = {}

    def __call__(self, dispatch: shaderlib.Dispatch) -> shaderlib.Counters:
        kernel = dispatch.kernel.contents
        image = _image(Path(kernel.image.decode()))
        if image not in self._images:
            library = self._images[image] = ctypes.CDLL(str(image))
            library.coverage_reset()
        counting = shaderlib.Kernel.from_buffer_copy(kernel)
        number = image.stem.rpartition("-")[2]
        entry = getattr(self._images[image], f"msl_entry{number}")
        counting.entry = ctypes.cast(entry, ctypes.c_void_p).value
        copy = shaderlib.Dispatch.from_buffer_copy(dispatch)
        copy.kernel = ctypes.pointer(counting)
        return shaderlib.execute(copy)

    def outcomes(self, folder: Path) -> dict[Outcome, int]:
        """How often each outcome was taken, of all kernels that ran. `folder` is for temporary files."""
        raws = []
        for number, library in enumerate(self._images.values()):
            raws.append(folder / f"{number}.profraw")
            if library.coverage_write(str(raws[-1]).encode()):
                raise OSError(f"{raws[-1]} cannot be written")
        merged = folder / "merged.profdata"
        build.run([build.tool("llvm-profdata"), "merge", "-o", merged, *raws], "merging coverage")
        objects = [part for image in self._images for part in ("-object", image)]
        command = [build.tool("llvm-cov"), "export", "-format=text", f"-instr-profile={merged}"]
        told = json.loads(build.run([*command, *objects[1:]], "reading coverage"))
        counts: dict[Outcome, int] = defaultdict(int)
        for file in told["data"][0]["files"]:
            if file["filename"].endswith(".cpp"):
                for outcome, count in _of_unit(Path(file["filename"]), file["branches"]):
                    counts[outcome] += count
        # One that is never evaluated is the compiler's, or behind an outcome that is never taken.
        reached = {outcome[:3] for outcome, count in counts.items() if count}
        return {outcome: count for outcome, count in counts.items() if outcome[:3] in reached}


def _image(kernel: Path) -> Path:
    """The kernel's object with counters."""
    unit, number = kernel.stem.rpartition("-")[::2]
    source = kernel.with_name(f"{unit}.cpp")
    folder, _ = build.prepared_headers()
    flags = (*_FLAGS, "-I", build.INCLUDE, "-I", folder)
    executor = build.executor_library()
    key = build.digest(source.name, build.headers_digest(), flags, _RUNTIME.read_bytes(), executor)
    path = build.cache_directory("coverage") / f"{key}-{number}.so"

    def make(target: Path) -> None:
        objects = [target.with_suffix(end) for end in (".o", ".runtime.o")]
        stdlib = build.precompiled_library(flags)
        compile_ = [build.tool("clang++"), *flags, "-include-pch", stdlib, f"-DMSL_KERNEL={number}"]
        build.run([*compile_, "-c", source, "-o", objects[0]], "compiling a kernel with counters")
        runtime = [build.tool("clang"), "-O2", "-fPIC", "-c", _RUNTIME, "-o", objects[1]]
        build.run(runtime, "compiling the counters' runtime")
        build.run([*build.LINK, *objects, executor, "-o", target], "linking a kernel with counters")
        for each in objects:
            each.unlink()

    return build.build_once(path, make)


@functools.cache
def _places(unit: Path) -> list[tuple[str, int]]:
    """(file, line) of the shader for each line of a translated source, by its line markers."""
    file, line, places = "", 0, [("", 0)]
    for text in unit.read_text().splitlines():
        marker = re.match(r'#(?:line)? (\d+) "([^"]*)"', text)
        if marker:
            line, file = int(marker[1]), marker[2]
            places.append(("", 0))
        else:
            places.append((file, line))
            line += 1
    return places


def _of_unit(unit: Path, branches: Iterable[list[int]]) -> Iterable[tuple[Outcome, int]]:
    by_line = defaultdict(lambda: defaultdict(lambda: [0, 0]))
    for line, column, end, end_column, true, false, *_ in branches:
        counts = by_line[line][column, end, end_column]
        counts[0] += true
        counts[1] += false
    for line, places in by_line.items():
        file, original = _places(unit)[line]
        for number, (_, counts) in enumerate(sorted(places.items())):
            for taken, count in zip((True, False), counts, strict=True):
                yield Outcome(file, original, number, taken), count
