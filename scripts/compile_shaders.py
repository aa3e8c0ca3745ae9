"""Writes the source of every Metal library, headers pasted in as at run time, and has a compiler compile it.

Prints a line for each library, with the compiler's messages where it fails. Ends with 1 if any failed.
"""

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import torch_moe_mps  # noqa: F401  (brings the operators)

# The language, as compile_options() in csrc/metal/library.mm sets it, with safe math.
COMPILER = ("xcrun", "-sdk", "macosx", "metal", "-std=metal3.1", "-fno-fast-math", "-c")


def write_sources(folder: Path) -> list[Path]:
    """<library>.metal for each library of the package."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name in torch.ops.moe_mps._libraries():
        paths.append(folder / f"{name}.metal")
        paths[-1].write_text(torch.ops.moe_mps._library_source(name))
    return paths


def compile_source(source: Path) -> str:
    """What the compiler says of a source that it refuses; empty if it takes it."""
    command = [*COMPILER, str(source), "-o", str(source.with_suffix(".air"))]
    result = subprocess.run(command, capture_output=True, text=True)
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
    print(f"{len(sources) - refused} of {len(sources)} libraries compile")
    return int(refused > 0)


if __name__ == "__main__":
    sys.exit(main())
