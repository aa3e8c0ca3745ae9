"""Has Apple's compiler compile the Metal libraries of a folder that scripts/macos/shader_sources wrote.

Prints a line for each library, with the compiler's messages where it fails. Ends with 1 if any failed.
Those for tensor units need the SDK of macOS 26, and are left out with an older one. With --release it writes
what a wheel brings: <library>-<key>.metallib, in the names under which the package finds them.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from registers import SDK_WITH_TENSORS, compile_source, link, sdk_version

LIST = "libraries.json"
LEFT_OUT = "those for tensor units need the SDK of macOS 26"


def listed(folder: Path) -> dict[str, dict[str, Any]]:
    """The libraries of a folder that the SDK can compile, as libraries.json has them.

    Raises: SystemExit for a folder that scripts/macos/shader_sources has not written.
    """
    try:
        entries = json.loads((folder / LIST).read_text())
    except (OSError, ValueError) as error:
        raise SystemExit(
            f"{folder} must be a folder that scripts/macos/shader_sources wrote: {error}"
        ) from None
    with_tensors = sdk_version() >= SDK_WITH_TENSORS
    return {name: entry for name, entry in entries.items() if with_tensors or not entry["tensor_units"]}


def part(text: str) -> tuple[int, int]:
    """(N, M) of "N/M", N from 0 on. Raises: ValueError."""
    number, parts = map(int, text.split("/"))
    if not 0 <= number < parts:
        raise ValueError(text)
    return number, parts


def is_released(library: str) -> bool:
    """Whether a wheel brings it compiled: what models in bfloat16 run, as nearly all are. All would be some
    hundred megabytes."""
    in_bfloat16 = library.endswith("_bf16") and not library.startswith("tensor_units")
    return in_bfloat16 or re.fullmatch(r"bucket_i64|routing_\d+_f32", library) is not None


def side_by_side(work: Callable[[str], str], names: list[str]) -> dict[str, str]:
    """{name: what `work(name)` returns}, a line printed behind each."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = {}
        for name, message in zip(names, pool.map(work, names), strict=True):
            results[name] = message
            print(f"{name:32} {f'FAILED: {message}' if message else 'ok'}", flush=True)
    return results


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="compile_shaders", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("build/shaders"))
    parser.add_argument("--release", type=Path, metavar="FOLDER", help="write a wheel's libraries there")
    parser.add_argument("--quick", action="store_true", help="only those of `torch-moe-mps check --quick`")
    parser.add_argument("--part", type=part, default=(0, 1), metavar="N/M", help="every Mth, from the Nth on")
    options = parser.parse_args(arguments)
    libraries = listed(options.folder)
    if options.quick:
        libraries = {name: entry for name, entry in libraries.items() if entry["quick"]}
    first, parts = options.part
    libraries = dict([*libraries.items()][first::parts])
    if options.release is not None:
        libraries = {name: entry for name, entry in libraries.items() if is_released(name)}
        options.release.mkdir(parents=True, exist_ok=True)

    def make(name: str) -> str:
        source = options.folder / f"{name}.metal"
        refused = compile_source(source, libraries[name]["tensor_units"])
        if refused or options.release is None:
            return refused
        return link(source, options.release / libraries[name]["file"])

    results = side_by_side(make, [*libraries])
    refused = sum(map(bool, results.values()))
    left_out = "" if sdk_version() >= SDK_WITH_TENSORS else f"; {LEFT_OUT}"
    print(f"{len(results) - refused} of {len(results)} libraries compile{left_out}")
    return int(refused > 0)


if __name__ == "__main__":
    sys.exit(main())
