"""Writes the source of every Metal library, headers pasted in as at run time, and libraries.json about them.

A Mac compiles these files with Xcode alone: neither torch nor this package is installed there, so that a
fault of the host code hides nothing about a shader. libraries.json has for each library the file under which
the package looks for it compiled, whether it is for tensor units, whether `check --quick` compiles it, and
{kernel: the most threads that it declares, or 0}.
"""

import argparse
import functools
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from simulator.build import compile_shader
from simulator.shaderlib import kernels_of
from support import simulated

from torch_moe_mps.commands.check import QUICK
from torch_moe_mps.ops._formats import Format
from torch_moe_mps.selfcheck.libraries import UNCOMMON, libraries

LIST = "libraries.json"


def names() -> list[str]:
    """All libraries of the package, and the one that measures a GPU."""
    ours = torch.ops.moe_mps
    return [*ours._libraries(), *ours._libraries(tensor_units=True), "probe_f32"]


@functools.cache
def quick_names() -> frozenset[str]:
    """The libraries that `check --quick` compiles, with those of `check --first`."""
    dtypes, formats = ([*names.split(",")] for names in QUICK.values())
    named = libraries([getattr(torch, name) for name in dtypes], [*map(Format.named, formats)])
    return frozenset(name for name in named if not UNCOMMON.match(name))


def described(library: str) -> dict[str, Any]:
    """The entry of a library in libraries.json."""
    ours = torch.ops.moe_mps
    kernels = kernels_of(compile_shader(ours._library_source(library)))
    return {
        "file": ours._library_file(library),
        "tensor_units": library.startswith("tensor_units"),
        "quick": library in quick_names(),
        "kernels": {name: kernel.max_threads for name, kernel in sorted(kernels.items())},
    }


def write(folder: Path, every: list[str]) -> None:
    """<library>.metal for each library, and the list."""
    folder.mkdir(parents=True, exist_ok=True)
    for library in every:
        (folder / f"{library}.metal").write_text(torch.ops.moe_mps._library_source(library))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        entries = dict(zip(every, pool.map(described, every), strict=True))
    (folder / LIST).write_text(json.dumps(entries, indent=1) + "\n")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="shader_sources", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("build/shaders"))
    parser.add_argument("--quick", action="store_true", help="only those of `torch-moe-mps check --quick`")
    options = parser.parse_args(arguments)
    folder = options.folder
    simulated.install()
    every = [name for name in names() if not options.quick or name in quick_names()]
    write(folder, every)
    print(f"{len(every)} libraries in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
