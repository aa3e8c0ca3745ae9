"""Checks without a Mac that the host code builds for one: `scripts/macos/check_macos [--all | VERSION ...]`.

Every .mm of csrc is compiled for arm64-macos against the headers of PyTorch's macOS wheel and linked against
its libraries, in which every symbol of torch has to be found; every Objective-C selector and class that the
code names has to exist in Apple's metal-cpp headers. The wheels are downloaded once, to MOE_MPS_CACHE or
~/.cache/torch_moe_mps.

It cannot show what Apple's own clang and SDK do, nor anything at run time.
"""

import argparse
import functools
import importlib.util
import os
import re
import runpy
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import paths  # noqa: F401  (for simulator)
from simulator.build import locked, tool
from simulator.build_device import compile_once, precompiled, run, together
from simulator.errors import BuildError

DEFAULT = "2.13.0"
PACKAGE = Path(__file__).parents[2] / "torch_moe_mps"
VERSIONS = runpy.run_path(str(PACKAGE / "_versions.py"))
SUPPORTED = VERSIONS["TORCH"]
NEWEST_NEED = max(VERSIONS["MACOS_OF_TORCH"].values())  # pip takes wheels for older ones, too
SOURCES = PACKAGE / "csrc"
METAL_CPP = "mlx-metal==0.32.4"
TARGET = "aarch64-macos.{}.{}".format(*VERSIONS["MACOS"])
DYLIBS = ("torch_cpu", "torch", "c10")
# What metal-cpp does not cover: developer.apple.com/documentation/metalperformanceshaders/mpscommandbuffer
PERFORMANCE_SHADERS_SELECTORS = {"rootCommandBuffer"}
# Foundation's, of which metal-cpp covers a part only: developer.apple.com/documentation/foundation
FOUNDATION_SELECTORS = {"initWithBytes:length:encoding:", "new", "stringWithUTF8String:"}
FOUNDATION_CLASSES = {"NSConstantString"}
# C names that macOS defines for Objective-C, blocks and C++.
RUNTIME_SYMBOL = re.compile(
    r"_(objc_|OBJC_|_objc_|_Block_|_NSConcrete|__CFConstantStringClassReference$|__cxa_|__gxx_personality_v0$"
    r"|__objc_personality_v0$|_Unwind_)"
)
# What libc++ and libc++abi define: std::, operator new and delete, type information of the fundamental types.
STANDARD_SYMBOL = re.compile(r"__Z(N[KVRO]*St|St|T[CISTV]N?(St|10__cxxabiv1)|T[IS]P?K?[a-z]$|n[wa]|d[la])")


@dataclass
class Result:
    """Checks for one version of torch; `faults` is empty if all is well."""

    version: str
    files: int
    bound: int
    selectors: int
    faults: list[str]
    seconds: float

    def __str__(self) -> str:
        checked = f"{self.files} files, {self.bound} torch symbols bound, {self.selectors} selectors known"
        verdict = "FAILED: " + "; ".join(self.faults) if self.faults else f"ok ({self.seconds:.0f} s)"
        return f"torch {self.version} for macOS: {checked}, {verdict}"


def cache_directory() -> Path:
    root = os.environ.get("MOE_MPS_CACHE")
    path = (Path(root) if root else Path.home() / ".cache" / "torch_moe_mps") / "macos"
    path.mkdir(parents=True, exist_ok=True)
    return path


@functools.cache
def zig() -> Path:
    """The folder of the ziglang package; its clang includes the macOS headers."""
    spec = importlib.util.find_spec("ziglang")
    if spec is None or spec.origin is None:
        raise BuildError("the macOS check needs ziglang: pip install -r tests/requirements.txt")
    return Path(spec.origin).parent


def resolve(version: str) -> str:
    """2.13.0 stays as it is; 2.13 becomes its latest patch."""
    if version.count(".") == 2:
        return version
    listed = run([sys.executable, "-m", "pip", "index", "versions", "torch"], "listing the versions of torch")
    patches = re.findall(rf"\b({re.escape(version)}\.\d+)(?=,|$)", listed, re.MULTILINE)
    if not patches:
        raise BuildError(f"there is no torch {version} to download")
    return max(patches, key=lambda patch: int(patch.rpartition(".")[2]))


def unpacked(requirement: str, wanted: str, part: str = "", macos: tuple[int, int] = NEWEST_NEED) -> Path:
    """The files of a package's wheel for a macOS whose names match, downloaded and unpacked once. `part`
    names them, where others of the same package are wanted elsewhere."""
    folder = cache_directory() / (requirement.replace("==", "-") + part)
    if folder.exists():
        return folder
    with tempfile.TemporaryDirectory(dir=cache_directory()) as scratch:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
        ]
        command += [
            "--only-binary=:all:",
            "--platform",
            "macosx_{}_{}_arm64".format(*macos),
            "--python-version",
            "3.12",
        ]
        run([*command, "--dest", scratch, requirement], f"downloading {requirement} for macOS")
        (wheel,) = Path(scratch).glob("*.whl")
        complete = Path(scratch, "complete")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(complete, [name for name in archive.namelist() if re.search(wanted, name)])
        if not folder.exists():  # another process may have been faster
            complete.rename(folder)
    return folder


def torch_wheel(version: str) -> Path:
    """The torch folder of the macOS wheel: headers, libraries, and how it compiles extensions."""
    wanted = r"torch/(include/|lib/lib(torch|torch_cpu|c10)\.dylib$|utils/cpp_extension\.py$)"
    return unpacked(f"torch=={version}", wanted) / "torch"


@functools.cache
def metal_cpp_names() -> tuple[frozenset[str], frozenset[str]]:
    """The selectors and the classes and protocols of Apple's metal-cpp."""
    folder = unpacked(METAL_CPP, r"mlx/include/metal_cpp/.*\.hpp$")
    text = "\n".join(path.read_text() for path in folder.rglob("*.hpp"))
    selectors = re.findall(r'_PRIVATE_DEF_SEL\(\s*\w+\s*,\s*"([^"]+)"', text)
    return frozenset(selectors), frozenset(re.findall(r"_PRIVATE_DEF_CLS\(\s*(\w+)", text))


@functools.cache
def system_library() -> Path:
    """zig's description of libSystem without the targets that this version of lld does not know."""
    text = (zig() / "lib/libc/darwin/libSystem.tbd").read_text()
    cleaned = re.sub(r",?\s*arm64e\.x1-\w+", "", text)
    folder = cache_directory() / "system"
    folder.mkdir(exist_ok=True)
    partial = folder / f"libSystem.{os.getpid()}"
    partial.write_text(cleaned)
    return partial.replace(folder / "libSystem.tbd")


def compile_all(
    sources: Sequence[Path] | None, wheel: Path, flags: Sequence[str] = (), units: int | None = None
) -> list[Path]:
    """Objects for arm64-macos, with setup.py's language flags and the C++ version that torch asks for.

    Those of the package (None) and those in `units` share precompiled headers; others include what they use.
    """
    standard = max(re.findall(r"-std=c\+\+(\d\d)", (wheel / "utils/cpp_extension.py").read_text()))
    command = [zig() / "zig", "c++", "-target", TARGET, f"-std=c++{standard}", "-g0"]
    command += ["-O0", "-fno-sanitize=undefined"]  # the code is not run; zig would sanitise it
    command += ["-fblocks", "-fobjc-exceptions", "-fno-objc-arc", "-Wall", "-Werror=objc-method-access"]
    command += ["-Imetal/include", "-I."]
    command += ["-isystem", wheel / "include", "-isystem", wheel / "include/torch/csrc/api/include"]
    objects = cache_directory() / "objects"
    objects.mkdir(exist_ok=True)
    command = list(map(str, command))

    # One process compiles, the others wait and find the objects.
    with locked(objects / "build"), ThreadPoolExecutor(os.cpu_count()) as pool:
        if sources is None:
            sources, units = sorted(SOURCES.rglob("*.mm")), 2
        if units is not None:
            command += precompiled(command, wheel.parent.name, objects)
            sources = together(sources, units, objects)
        command += flags
        return list(pool.map(lambda unit: compile_once(unit, command, wheel.parent.name, objects), sources))


def link(objects: Sequence[Path], wheel: Path, target: Path) -> None:
    """A bundle, as setuptools links extensions on a Mac."""
    command = [tool("ld64.lld"), "-arch", "arm64", "-platform_version", "macos", "14.0", "14.0", "-bundle"]
    command += ["-undefined", "dynamic_lookup", "-o", target, *objects]
    command += [
        f"-L{wheel / 'lib'}",
        *(f"-l{name}" for name in DYLIBS),
        f"-L{system_library().parent}",
        "-lSystem",
    ]
    run(command, "linking for macOS")


def check_symbols(library: Path) -> tuple[int, list[str]]:
    """How many symbols torch's libraries define, and which are defined nowhere."""
    listed = run([tool("llvm-nm"), "-m", "-u", library], "listing symbols")
    bound = re.findall(r"(\S+) \(from lib(?:torch_cpu|torch|c10)\)$", listed, re.MULTILINE)
    open_ended = re.findall(r"(\S+) \(dynamically looked up\)$", listed, re.MULTILINE)
    missing = [
        name for name in open_ended if not RUNTIME_SYMBOL.match(name) and not STANDARD_SYMBOL.match(name)
    ]
    if missing:
        readable = run([tool("llvm-cxxfilt"), "--strip-underscore", *missing], "demangling").split("\n")
        return len(bound), [f"no library of torch defines {name}" for name in readable if name]
    return len(bound), []


def section(binary: Path, name: str) -> list[str]:
    """The strings of a section; none where there is no such section."""
    with tempfile.TemporaryDirectory() as scratch:
        dump = Path(scratch, "dump")
        command = [tool("llvm-objcopy"), f"--dump-section={name}={dump}", binary, Path(scratch, "copy")]
        try:
            run(command, "reading a section")
        except BuildError as error:
            if "not found" in str(error):
                return []
            raise
        return [text for text in dump.read_text().split("\0") if text]


def check_names(objects: Sequence[Path]) -> tuple[int, list[str]]:
    """How many selectors are sent, and which selectors and classes Apple does not have."""
    selectors, classes = metal_cpp_names()
    known = selectors | FOUNDATION_SELECTORS | PERFORMANCE_SHADERS_SELECTORS
    sent = {selector for binary in objects for selector in section(binary, "__TEXT,__objc_methname")}
    symbols = "".join(run([tool("llvm-nm"), "-u", binary], "listing symbols") for binary in objects)
    sent |= set(re.findall(r"_objc_msgSend\$(\S+)", symbols))
    used = set(re.findall(r"_OBJC_CLASS_\$_(\w+)", symbols))
    faults = [f"selector {name} is not Apple's" for name in sorted(sent - known)]
    faults += [f"class {name} is not Apple's" for name in sorted(used - classes - FOUNDATION_CLASSES)]
    return len(sent), faults


def build(version: str, target: Path, sources: Sequence[Path] | None = None) -> Path:
    """An extension of sources (by default the package's) for one version of torch, as `target`."""
    wheel = torch_wheel(version)
    link(compile_all(sources, wheel), wheel, target)
    return target


def check(
    version: str,
    sources: Sequence[Path] | None = None,
    flags: Sequence[str] = (),
    units: int | None = None,
) -> Result:
    """Compile, link and check the sources (by default the package's) for one version of torch."""
    started = time.monotonic()
    wheel = torch_wheel(version)
    objects = compile_all(sources, wheel, flags, units)
    with tempfile.TemporaryDirectory() as scratch:
        library = Path(scratch, "_C.so")
        link(objects, wheel, library)
        bound, missing = check_symbols(library)
    selectors, unknown = check_names(objects)
    files = len([*SOURCES.rglob("*.mm")] if sources is None else sources)
    return Result(version, files, bound, selectors, missing + unknown, time.monotonic() - started)


def main() -> int:
    parser = argparse.ArgumentParser(prog="check_macos", description=__doc__.partition("\n")[0])
    parser.add_argument("versions", nargs="*", metavar="VERSION", help=f"of torch, {DEFAULT} unless given")
    parser.add_argument("--all", action="store_true", help="the latest patches of " + ", ".join(SUPPORTED))
    arguments = parser.parse_args()
    failed = False
    for version in arguments.versions or (SUPPORTED if arguments.all else [DEFAULT]):
        try:
            result = check(resolve(version))
        except BuildError as error:
            print(f"torch {version} for macOS: FAILED: {error}", flush=True)
            failed = True
            continue
        print(result, flush=True)
        failed = failed or bool(result.faults)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
