"""Writes the source of every Metal library, headers pasted in as at run time, and has a compiler compile it.

Prints a line for each library, with the compiler's messages where it fails. Ends with 1 if any failed.
Those for tensor units need the SDK of macOS 26, and are left out with an older one.
"""

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import torch_moe_mps  # noqa: F401  (brings the operators)

# As compile_options() in csrc/metal/library.mm has it: safe math, and the languages.
COMPILER = ("xcrun", "-sdk", "macosx", "metal", "-fno-fast-math", "-Wmetal-addr-spaces", "-c")
LANGUAGE, LANGUAGE_WITH_TENSORS = "-std=metal3.1", "-std=metal4.0"
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


def compile_source(source: Path) -> str:
    """What the compiler says of a source that it refuses; empty if it takes it."""
    language = LANGUAGE_WITH_TENSORS if source.stem.startswith("tensor_units") else LANGUAGE
    command = [*COMPILER, str(source), "-o", str(source.with_suffix(".air")), language]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    return "" if result.returncode == 0 else result.stderr or f"exit code {result.returncode}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="compile_shaders", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("build/shaders"))
    sources = write_sources(parser.parse_args(arguments).folder)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = dict(zip(sources, pool.map(compile_source, sources), strict=True))
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
