"""From a translated shader to the LLVM IR that a compiler for a GPU would see.

The C++ of the simulator is lowered by clang without any optimisation, and then by `opt` without a target: no
vector registers, no 64-bit integers, everything inlined, loops unrolled where their length is known.
"""

import re
from pathlib import Path

from .. import build

INCLUDE = Path(__file__).parent / "include"  # in front of the simulator's: what is not counted as it is run
_FLAGS = [
    *build.LANGUAGE,
    "-march=x86-64-v3",
    "-ffp-contract=fast",
    "-fno-math-errno",
    *("-Xclang", "-ffloat16-excess-precision=none", "-Xclang", "-fbfloat16-excess-precision=none"),
    *("-O2", "-Xclang", "-disable-llvm-passes"),
    # The places of barriers and simdgroup functions: for messages only, and no reason to compile again.
    *("-D__builtin_LINE()=0", '-D__builtin_FILE()=""'),
    *("-fno-plt", "-fPIC", "-fvisibility=hidden", "-w", "-Wno-error=reserved-user-defined-literal"),
]
_OPTIMISATIONS = [
    "-passes=default<O2>",
    "-inline-threshold=1000000",
    "-unroll-threshold=4000",
    "-unroll-runtime=false",
    "-unroll-allow-partial=false",
    "-unroll-partial-threshold=0",
    "-disable-vector-combine",
    "-vectorize-loops=false",
    "-vectorize-slp=false",
]
_NO_TARGET = 'target datalayout = "e-m:e-i64:64-i128:128-n8:16:32-S128"'


def folder() -> Path:
    return build.cache_directory("apple")


def run(command: list) -> None:
    build.run(command, Path(command[0]).name)


def headers_digest() -> str:
    return build.headers_digest(*INCLUDE.iterdir())


def optimised_ir(unit: str, number: int) -> Path:
    """The IR of kernel `number` of a translated source.

    Cached by what clang makes of the kernel, so that a change of another kernel in the source costs little.
    """
    code = re.sub(r"^(# \d|#line).*$", "", unit, flags=re.M)
    key = build.digest(code, number, _FLAGS, headers_digest())
    name = build.build_once(folder() / f"{key}.name", lambda target: _make(code, number, target)).read_text()
    return folder() / name


def _make(code: str, number: int, name: Path) -> None:
    headers, _ = build.prepared_headers()
    source, raw = name.with_suffix(".cpp"), name.with_suffix(".raw")
    source.write_text(code)
    flags = (*_FLAGS, "-I", INCLUDE, "-I", build.INCLUDE, "-I", headers)
    command = [build.tool("clang++"), *flags, "-include-pch", build.precompiled_library(flags)]
    run([*command, f"-DMSL_KERNEL={number}", "-S", "-emit-llvm", source, "-o", raw])
    text = without_target(raw.read_text())
    path = folder() / f"{build.digest(text, _OPTIMISATIONS)}.ll"
    build.build_once(path, lambda target: target.write_text(optimised(text)))
    name.write_text(path.name)
    source.unlink()
    raw.unlink()


def optimised(text: str, *further: str) -> str:
    """IR without a target after the passes of `_OPTIMISATIONS`, and then `further` ones."""
    for options in (_OPTIMISATIONS, *([f"-passes={name}"] for name in further)):
        text = build.run([build.tool("opt"), *options, "-S"], "opt", input=text)
    return text


def without_target(text: str) -> str:
    text = re.sub(r"^target datalayout = .*$", _NO_TARGET, text, flags=re.M)
    text = re.sub(r"^(target triple|source_filename|; ModuleID) .*$", "", text, flags=re.M)
    return re.sub(r'"(?:target-cpu|target-features|tune-cpu)"="[^"]*" ?', "", text)
