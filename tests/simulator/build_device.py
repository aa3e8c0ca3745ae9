"""Builds the simulated device, and extensions for it, on Linux, cached by content."""

import functools
import importlib.util
import os
import re
import shutil
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import torch

from . import build
from .build import PACKAGES, digest, tool
from .errors import BuildError

HERE = Path(__file__).resolve().parent  # paths from here hold where the folder is a link, too
TORCH = Path(torch.__file__).resolve().parent
PERSONALITY = HERE / "metal" / "personality.cpp"
PRECOMPILED = HERE / "metal" / "precompiled.h"
LIBRARIES = ("torch", "torch_cpu", "torch_python", "c10", "objc", "BlocksRuntime", "dl")


@functools.cache
def objective_c() -> Path:
    """GCC's directory that has libobjc, not always that of the newest GCC, which clang would look into."""
    found = [path.parents[2] for path in Path("/usr/lib/gcc").glob("*/*/include/objc/objc.h")]
    if not found or not Path("/usr/include/Block.h").exists():
        raise BuildError(f"the simulator needs libobjc and BlocksRuntime: apt-get install {PACKAGES}")
    return max(found, key=lambda path: int(path.name))


@functools.cache
def python_include() -> Path:
    include = Path(sysconfig.get_paths()["include"])
    if not (include / "Python.h").exists():
        raise BuildError("the simulator needs Python's headers: apt-get install python3-dev")
    return include


def check_tools() -> None:
    """Raise BuildError with the packages to install unless everything that is needed is there."""
    for name in ("clang++", "llvm-symbolizer"):
        tool(name)
    objective_c()
    python_include()


def host_flags() -> list[str]:
    """Of every source: Objective-C++, what is plain C++ too, so that one precompiled header serves all."""
    flags = ["-std=c++20", "-fPIC", os.environ.get("METAL_SIMULATOR_OPTIMISE", "-O0")]
    flags += ["-Wall", "-Wno-unused-function", "-Werror=objc-method-access"]
    flags += ["-isystem", str(TORCH / "include"), "-isystem", str(TORCH / "include/torch/csrc/api/include")]
    flags += ["-isystem", str(python_include()), "-Imetal/linux", "-Imetal/include", "-I."]
    flags += ["-fobjc-runtime=gcc", "-fblocks", "-fexceptions", "-fobjc-exceptions"]
    flags += ["-fconstant-string-class=NSConstantString", "-Wno-incomplete-implementation"]
    # GCC's directory holds headers that must not shadow clang's own.
    return [*flags, "-idirafter", str(objective_c() / "include")]


def run(command: Sequence[str | Path], what: str) -> str:
    """The output of a command, run in this folder; BuildError with its messages where it fails."""
    return build.run(command, what, cwd=HERE)


def _headers(dependency_file: Path) -> list[Path]:
    """The files that a compilation read, from make's format, without the source itself."""
    words = re.findall(r"(?:\\.|[^\s\\])+", dependency_file.read_text().replace("\\\n", " "))
    return [Path(re.sub(r"\\(.)", r"\1", word).replace("$$", "$")) for word in words[2:]]


def _contents(files: Sequence[Path]) -> str:
    files = [HERE / file for file in files]
    return digest(*(file.read_bytes() if file.exists() else "missing" for file in files))


def local(path: Path) -> str:
    """A path from here, the same in every checkout: what is built in one serves the others."""
    return os.path.relpath(path, HERE)


def compile_once(source: Path, command: Sequence[str], identity: str, cache: Path) -> Path:
    """The object of `source`, built once for each text of it and of its headers, command and identity."""
    key = digest(local(source), source.read_bytes(), command, identity)
    dependencies = cache / f"{source.stem}-{key}.d"
    if dependencies.exists():
        cached = cache / f"{source.stem}-{key}-{_contents(_headers(dependencies))}.o"
        if cached.exists():
            return cached
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        built, listed = Path(scratch, "out.o"), Path(scratch, "out.d")
        run([*command, "-MMD", "-MF", listed, "-c", "-o", built, local(source)], f"compiling {source.name}")
        cached = cache / f"{source.stem}-{key}-{_contents(_headers(listed))}.o"
        built.replace(cached)
        listed.replace(dependencies)
    return cached


def together(sources: Sequence[Path], units: int, cache: Path) -> list[Path]:
    """At most `units` files in `cache` that include all sources: most of a compilation is that of headers.

    Names in anonymous namespaces must then differ among the sources. Compile with `-I.`.
    """
    made = []
    for number in range(min(units, len(sources))):
        text = "".join(f'#include "{local(source)}"\n' for source in sources[number::units])
        unit = cache / f"unit-{digest(text)}.mm"
        made.append(build.build_once(unit, lambda target, text=text: target.write_text(text)))
    return made


def precompiled(command: Sequence[str], identity: str, cache: Path, header: Path = PRECOMPILED) -> list[str]:
    """The options that make `command` compile with `header`, built once for every checkout."""
    path = cache / f"precompiled-{digest(header.read_bytes(), command, identity)}.pch"

    def make(target: Path) -> None:
        # The result names its source, which has to stay where it is.
        source = shutil.copy(header, path.with_suffix(".h"))
        options = ["-Xclang", "-fno-pch-timestamp", "-fpch-instantiate-templates"]
        run([*command, *options, "-x", "objective-c++-header", source, "-o", target], "precompiling headers")

    build.build_once(path, make)
    return ["-include-pch", str(path), "-x", "objective-c++"]


def build_library(
    name: str,
    sources: Sequence[Path],
    link_with: Sequence[Path] = (),
    flags: Sequence[str] = (),
    units: int | None = None,
) -> Path:
    """Compile `sources` on the cores there are, in `units` or one by one, and link one shared library."""
    cache, version = build.cache_directory("device"), torch.__version__
    command = [tool("clang++"), *host_flags()]

    def compile_object(source: Path) -> Path:
        options = [] if source == PERSONALITY else [*headers, *flags]
        return compile_once(source, [*command, *options], version, cache)

    with build.locked(cache / "build"):  # one process builds, the others wait and find the result
        headers = precompiled(command, version, cache)
        if units:
            sources = together(sources, units, cache)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_object, [*sources, PERSONALITY]))
    link = [tool("clang++"), "-shared", *objects, *link_with]
    link += [f"-L{TORCH / 'lib'}", f"-Wl,-rpath,{TORCH / 'lib'}", f"-L{objective_c()}"]
    link += [f"-l{wanted}" for wanted in LIBRARIES]
    library = cache / f"{name}-{digest(*objects, *link_with)}.so"
    return build.build_once(library, lambda target: run([*link, "-o", target], f"linking {name}"))


def device_library() -> Path:
    """Foundation, Metal and at::mps on Linux, and the PyTorch device."""
    sources = [
        *(HERE / "metal").glob("*.mm"),
        *(HERE / "metal" / name for name in ("commands.cpp", "guards.cpp")),
        *(HERE / "device").glob("*.mm"),
    ]
    sources += (HERE / "device").glob("*.cpp")
    return build_library("device", sorted(sources), units=2)


def extension(
    name: str,
    sources: Sequence[str | Path],
    include: Sequence[str | Path] = (),
    flags: Sequence[str] = (),
    units: int | None = None,
) -> Path:
    """The library of an extension's .mm and .cpp files, built against the simulated device.

    As torch.utils.cpp_extension.load: `include` is its extra_include_paths, `flags` its extra_cflags.
    `units`: sources are included in as many files, which are compiled in a fraction of the time; names in
    anonymous namespaces must then differ among them.
    torch.ops.load_library loads the result. Raises BuildError with the compiler's message.
    """
    options = [*flags, *(f"-I{local(Path(folder).absolute())}" for folder in include)]
    absolute = [Path(source).absolute() for source in sources]
    return build_library(name, absolute, [device_library()], options, units)


def load(
    name: str,
    sources: Sequence[str | Path],
    include: Sequence[str | Path] = (),
    flags: Sequence[str] = (),
) -> ModuleType:
    """Builds an extension that binds a Python module (PYBIND11_MODULE), and imports it."""
    library = extension(name, sources, include, [f"-DTORCH_EXTENSION_NAME={name}", *flags])
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
