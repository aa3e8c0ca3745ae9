"""Compiles the executor and shaders, cached by content; what every other build needs, too."""

import contextlib
import fcntl
import functools
import hashlib
import itertools
import os
import pickle
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .errors import BuildError, ShaderError
from .language.translate import translate

MSL = Path(__file__).parent / "msl"
INCLUDE = MSL / "include"
PACKAGES = "clang-19 lld-19 llvm-19 libobjc-12-dev libblocksruntime-dev"
# What a shader may include; it gets all of it from metal_stdlib.
METAL_HEADERS = [
    "metal_stdlib",
    "metal_atomic",
    "metal_math",
    "metal_integer",
    "metal_simdgroup",
    "metal_simdgroup_matrix",
    "metal_compute",
    "metal_types",
    "metal_type_traits",
    "metal_limits",
    "metal_common",
    "metal_relational",
    "metal_geometric",
    "metal_matrix",
    "metal_array",
    "metal_pack",
    "metal_numeric",
    "metal_uniform",
    "metal_config",
    "metal_quadgroup",
    "metal_logging",
    "metal_raytracing",
    "metal_tensor",
]
# Marks a source that includes MetalPerformancePrimitives: its language is 4.0, and it gets msl_tensor.h.
TENSORS = "#pragma msl tensors"
# A literal without suffix is a float: Metal has no double.
LITERALS = ["-Xclang", "-cl-single-precision-constant"]
LANGUAGE = [
    "-x",
    "c++",
    "-std=c++17",
    "-fdeclspec",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-strict-aliasing",
    *LITERALS,
]
# Products and their sums that are rounded once: none ("off"), those within an expression ("on", as Apple's
# compiler does under safe math), or across statements, too ("fast"). Results may depend on none of these.
CONTRACTION = os.environ.get("METAL_SIMULATOR_CONTRACTION", "on")
# Halves and bfloats are rounded after every operation. The compiler folds constants as the executor runs
# kernels: float32 subnormals are zero.
ARITHMETIC = [
    "-march=x86-64-v3",
    f"-ffp-contract={CONTRACTION}",
    *("-Xclang", "-fdenormal-fp-math-f32=preserve-sign,preserve-sign"),
    *("-Xclang", "-ffloat16-excess-precision=none", "-Xclang", "-fbfloat16-excess-precision=none"),
]
# The compiler calls __tsan_* for each load and store; the executor supplies these functions.
INSTRUMENTATION = [
    "-fsanitize=thread",
    *("-mllvm", "-tsan-instrument-func-entry-exit=0"),
    *("-mllvm", "-tsan-instrument-read-before-write"),
    *("-mllvm", "-tsan-instrument-atomics=0"),
]
# Compiled quickly: optimised as far as accesses count, then the simplest instructions (unless they are to be
# contracted across statements) and registers, and no lines. For the line of a finding the executor compiles
# the kernel once more, with -g1.
GENERATION = [
    "-O1",
    "-g0",
    *("-mllvm", f"-fast-isel={str(CONTRACTION != 'fast').lower()}", "-mllvm", "-optimize-regalloc=false"),
    *("-mllvm", "-disable-lsr", "-mllvm", "-disable-cgp"),
    "-fPIC",
    "-fno-plt",
    "-fno-vectorize",
    "-fno-slp-vectorize",
    "-fvisibility=hidden",
    "-w",
    "-Wno-error=reserved-user-defined-literal",
]
# Of kernels. GNU ld, which clang's package brings along, starts faster than LLVM's.
LINK = ["ld", "-shared"]
PRECOMPILING = ["-x", "c++-header", "-Xclang", "-fno-pch-timestamp", "-fpch-instantiate-templates"]


def cache_directory(part: str = "") -> Path:
    """Where built pieces are kept: METAL_SIMULATOR_CACHE, or a folder in the user's cache."""
    root = Path(os.environ.get("METAL_SIMULATOR_CACHE") or Path.home() / ".cache" / "metal_simulator")
    (root / part).mkdir(parents=True, exist_ok=True)
    return root / part


@functools.cache
def tool(name: str) -> str:
    """An LLVM program, of the version that the flags and the translated shaders are tested with."""
    if found := shutil.which(f"{name}-19"):
        return found
    raise BuildError(f"the simulator needs {name}-19: apt-get install {PACKAGES}")


def digest(*parts) -> str:
    h = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        h.update(len(data).to_bytes(8, "little") + data)
    return h.hexdigest()[:20]


def files_digest(*paths: Path) -> str:
    return digest(*itertools.chain.from_iterable((p.name, p.read_bytes()) for p in sorted(paths)))


@contextlib.contextmanager
def locked(path: Path):
    """One builder of `path` at a time, among threads and processes."""
    with open(f"{path}.lock", "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def attempt(command: Sequence, **options) -> subprocess.CompletedProcess:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=900, **options)


def run(command: Sequence, what: str, **options) -> str:
    """The output of a command; BuildError with its messages where it fails."""
    result = attempt(command, **options)
    if result.returncode:
        raise BuildError(f"{what} failed:\n{result.stderr}")
    return result.stdout


class Spent:
    """CPU seconds of this process that making pieces took: a later run finds them."""

    seconds = 0.0


spent = Spent()


def build_once(path: Path, make) -> Path:
    """`path`, made by `make(temporary path)` unless it is there."""
    if path.exists():
        return path
    with locked(path):
        if not path.exists():
            temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
            before, started = spent.seconds, time.process_time()
            make(temporary)  # which may make others
            spent.seconds = before + time.process_time() - started
            temporary.rename(path)
    return path


def kept(name: str, make: Callable[[], Any]) -> Any:
    """What `make()` returns, made once for a name, which has a digest of all that it depends on."""
    path = cache_directory() / f"{name}.pickle"
    build_once(path, lambda target: target.write_bytes(pickle.dumps(make())))
    return pickle.loads(path.read_bytes())


@functools.cache
def executor_library() -> Path:
    """The executor as a shared library (executor.h)."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise BuildError(f"the simulator runs on Linux x86-64, not on {sys.platform} {platform.machine()}")
    sources = [MSL / "executor.cpp", MSL / "memory.cpp"]
    headers = [MSL / "executor.h", MSL / "memory.h", INCLUDE / "msl_runtime.h"]
    flags = ["-std=c++17", "-O3", "-march=x86-64-v3", "-fPIC", "-shared", "-g1", "-Wall"]
    flags.append(f'-DMSL_SYMBOLIZER="{tool("llvm-symbolizer")}"')
    path = cache_directory() / f"libmsl_executor-{digest(files_digest(*sources, *headers), flags)}.so"

    command = [tool("clang++"), *flags, *sources]
    return build_once(path, lambda target: run([*command, "-o", target], "compiling the executor"))


@functools.cache
def prepared_headers() -> tuple[Path, Path]:
    """(folder with generated headers, precompiled header) for shader compilations."""
    flags = [*LANGUAGE, *ARITHMETIC, *INSTRUMENTATION, *GENERATION]
    key = digest(headers_digest(), TENSORS, METAL_HEADERS)

    def make(target: Path) -> None:
        primitives = target / "stubs" / "MetalPerformancePrimitives"
        primitives.mkdir(parents=True)
        (primitives / "MetalPerformancePrimitives.h").write_text(TENSORS + "\n")
        for name in METAL_HEADERS:
            (target / "stubs" / name).touch()

    folder = build_once(cache_directory() / f"headers-{key}", make)
    return folder, precompiled_library((*flags, "-I", INCLUDE, "-I", folder))


@functools.cache
def precompiled_library(flags: tuple) -> Path:
    """The simulator's metal_stdlib, for shader compilations with these flags."""
    # It holds absolute paths; times it must not hold, as another checkout changes them.
    path = cache_directory() / f"msl_entry-{digest(headers_digest(), flags, PRECOMPILING)}.pch"
    command = [tool("clang++"), *flags, *PRECOMPILING, INCLUDE / "msl_entry.h"]
    return build_once(path, lambda target: run([*command, "-o", target], "precompiling metal_stdlib"))


def headers_digest(*further: Path) -> str:
    return files_digest(*INCLUDE.iterdir(), MSL / "executor.h", *further)


def preprocess(source: str, include: tuple = (), name: str = "program_source") -> str:
    """Macros expanded and local includes inserted; the Metal headers stay out."""
    folder, _ = prepared_headers()
    includes = [f"-I{folder / 'stubs'}", *(f"-I{i}" for i in include)]
    macros = ["-D__METAL__=1", "-D__METAL_MACOS__=1", "-D__METAL_VERSION__=310"]
    if "MetalPerformancePrimitives" in source:
        macros[-1:] = ["-D__METAL_VERSION__=400", "-D__HAVE_TENSOR__=1"]
    command = [
        tool("clang++"),
        "-x",
        "c++",
        "-std=c++17",
        "-E",
        "-nostdinc",
        "-undef",
        *macros,
        *includes,
        "-",
    ]
    result = attempt(command, input=f'# 1 "{name}"\n{source}')
    if result.returncode:
        raise ShaderError(readable(result.stderr))
    return result.stdout


def readable(messages: str) -> str:
    """The compiler's messages without those about the simulator's own headers."""
    return re.sub(r"^In file included from .*\n", "", messages, flags=re.MULTILINE).strip()


# What the libraries of this process were made from: flat source, function constants.
origins: dict[Path, tuple[str, dict]] = {}


def compile_shader(source: str, constants: dict | None = None, include: tuple = ()) -> Path:
    """A shared object that exports `msl_kernels` (executor.h), from MSL source.

    `constants` sets function constants by number (or name). `include` lists folders for local includes,
    unless they are flattened already. Raises ShaderError with the compiler's message.
    """
    values = tuple(sorted((constants or {}).items(), key=str))
    if include:  # what is included may change
        return compile_preprocessed(preprocess(source, include), dict(values))
    path = compile_flat(source, values)
    origins[path] = (source, dict(values))
    return path


@functools.cache
def compile_flat(source: str, constants: tuple) -> Path:
    """As compile_shader. The path is kept, so that a second process does not translate the source again."""
    translator = files_digest(Path(__file__), *Path(__file__).with_name("language").glob("*.py"))
    key = digest(source, constants, translator, *prepared_headers(), executor_library())

    def make(target: Path) -> None:
        target.write_text(str(compile_preprocessed(preprocess(source), dict(constants))))

    return Path(build_once(cache_directory() / f"shader-{key}.path", make).read_text())


# A shader's precompiled header: its code, and calls of all its kernels, so that templates are instantiated.
PRECOMPILED = """\
#define MSL_KERNEL -1
#define MSL_ENTRY(i) static void msl_checked##i
#include "{unit}"
#undef MSL_ENTRY
#undef MSL_KERNEL
#define MSL_CODE
"""


def compile_preprocessed(text: str, constants: dict) -> Path:
    """The table of the shader's kernels. A kernel is compiled when it first runs."""
    folder, stdlib = prepared_headers()
    executor = executor_library()
    code = program(text, constants)
    flags = [*LANGUAGE, *ARITHMETIC, *INSTRUMENTATION, *GENERATION, "-I", INCLUDE, "-I", folder]
    # The absolute paths belong to the key: they stand in the table, and the result must not outlive a move.
    path = cache_directory() / f"shader-{digest(code, PRECOMPILED, stdlib, executor, flags)}.so"
    unit, header, precompiled = (path.with_suffix(end) for end in (".cpp", ".h", ".pch"))

    def make(target: Path) -> None:
        unit.write_text(code)
        header.write_text(PRECOMPILED.format(unit=unit.name))
        compile_ = [tool("clang++"), *flags, "-include-pch", precompiled, "-c", unit]
        strings = [
            f'-DMSL_IMAGE="{path.with_suffix("")}-"',
            f"-DMSL_BUILD(number)={build_command(compile_, executor)}",
        ]
        object_ = target.with_suffix(".o")
        for command in (
            [tool("clang++"), *flags, "-include-pch", stdlib, *PRECOMPILING, header, "-o", precompiled],
            [*compile_, *strings, "-DMSL_TABLE", "-o", object_],
            [*LINK, object_, executor, "-o", target],
        ):
            result = attempt(command)
            if result.returncode:
                raise ShaderError(readable(result.stderr))
        object_.unlink()

    return build_once(path, make)


def program(preprocessed: str, constants: dict) -> str:
    """The C++ of a preprocessed shader, to be compiled with the precompiled header."""
    return in_language_of(preprocessed, translate(preprocessed, constants))


def in_language_of(preprocessed: str, code: str) -> str:
    """Translated code after what a preprocessed source of its language needs."""
    return ('#include "msl_tensor.h"\n' if TENSORS in preprocessed else "") + code


def build_command(compile_: list, executor: Path) -> str:
    """C string literals of the shell command that builds kernel `number` into the file $1, with option $2."""
    link = shlex.join([*LINK, str(executor), "-o"])

    def literal(text: str) -> str:
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

    return (
        literal(shlex.join([*map(str, compile_), "-o"]) + ' "$1.o" $2 -DMSL_KERNEL=')
        + " number "
        + literal(" && " + link + ' "$1.tmp" "$1.o"')
        + literal(' && rm "$1.o" && mv "$1.tmp" "$1"')
    )
