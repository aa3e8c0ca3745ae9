"""Writes the source of every Metal library, headers pasted in as at run time, and has a compiler compile it.

Prints a line for each library, with the compiler's messages where it fails. Ends with 1 if any failed.
Those for tensor units need the SDK of macOS 26, and are left out with an older one. With --release it writes
what a wheel brings: <library>-<key>.metallib, in the names under which the package finds them. The key is of
the source.
"""

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import torch_moe_mps  # noqa: F401  (brings the operators)
from torch_moe_mps._versions import MACOS

# As compile_options() in csrc/metal/library.mm has it: safe math, and the languages.
COMPILER = ("xcrun", "-sdk", "macosx", "metal", "-fno-fast-math", "-Wmetal-addr-spaces", "-c")
LINKER = ("xcrun", "-sdk", "macosx", "metallib")
LANGUAGE = ("-std=metal3.1", "-mmacosx-version-min={}.{}".format(*MACOS))
LANGUAGE_WITH_TENSORS = ("-std=metal4.0",)
SDK_WITH_TENSORS = 26


def sdk_version() -> int:
    """The major version of the SDK; 0 without one."""
    try:
        command = ("xcrun", "-sdk", "macosx", "--show-sdk-version")
        text = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    except OSError:
        return 0
    return int(text.partition(".")[0].strip() or 0)


def write_sources(folder: Path) -> list[Path]:
    """<library>.metal for each library of the package that the SDK can have compiled."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    names = [*torch.ops.moe_mps._libraries(), "probe_f32"]
    if sdk_version() >= SDK_WITH_TENSORS:
        names += torch.ops.moe_mps._libraries(tensor_units=True)
    for name in names:
        paths.append(folder / f"{name}.metal")
        paths[-1].write_text(torch.ops.moe_mps._library_source(name))
    return paths


def is_released(library: str) -> bool:
    """Whether a wheel brings it compiled: what models in bfloat16 run, as nearly all are. All would be some
    hundred megabytes."""
    in_bfloat16 = library.endswith("_bf16") and not library.startswith("tensor_units")
    return in_bfloat16 or library in ("bucket_i64", "routing_f32")


def compile_source(source: Path) -> str:
    """What the compiler says of a source that it refuses; empty if it takes it."""
    language = LANGUAGE_WITH_TENSORS if source.stem.startswith("tensor_units") else LANGUAGE
    return _run(*COMPILER, source, "-o", source.with_suffix(".air"), *language)


def link(source: Path, folder: Path) -> str:
    """What the linker says of a compiled source that it refuses; empty if the library is in the folder."""
    target = folder / torch.ops.moe_mps._library_file(source.stem)
    return _run(*LINKER, source.with_suffix(".air"), "-o", target)


def _run(*command: object) -> str:
    result = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=600)
    return "" if result.returncode == 0 else result.stderr or f"exit code {result.returncode}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="compile_shaders", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("build/shaders"))
    parser.add_argument("--release", type=Path, metavar="FOLDER", help="write a wheel's libraries there")
    options = parser.parse_args(arguments)
    sources = write_sources(options.folder)
    if options.release is not None:
        sources = [source for source in sources if is_released(source.stem)]
        options.release.mkdir(parents=True, exist_ok=True)

    def make(source: Path) -> str:
        refused = compile_source(source)
        return refused or (link(source, options.release) if options.release is not None else "")

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = dict(zip(sources, pool.map(make, sources), strict=True))
    for source, message in results.items():
        print(f"{source.stem:32} {f'FAILED: {message}' if message else 'ok'}")
    refused = sum(map(bool, results.values()))
    left_out = (
        "" if sdk_version() >= SDK_WITH_TENSORS else "; those for tensor units need the SDK of macOS 26"
    )
    print(f"{len(sources) - refused} of {len(sources)} libraries compile{left_out}")
    return int(refused > 0)


if __name__ == "__main__":
    sys.exit(main())
