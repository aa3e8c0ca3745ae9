"""Prints the registers of every kernel on the GPUs of M1 to M5, as Apple's own back end allocates them.

The folder is one that scripts/macos/shader_sources wrote; registers.py reads the registers.
Ends with 1 where a kernel that tokens or prompts run spills, or where one could not be compiled.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from compile_shaders import is_released, listed, side_by_side
from registers import GENERATIONS, of_library

AWAY_FROM_TOKENS = ("quantize_", "probe_")  # libraries that neither tokens nor prompts run


def line(kernel: str, threads: int, row: dict[str, dict[str, Any]]) -> str:
    """A kernel's row of the table: registers, and behind a plus the bytes that it spills."""

    def cell(generation: str) -> str:
        use = row.get(generation)
        if use is None:
            return "-"
        if "error" in use:
            return "FAILED"
        return f"{use['registers']}+{use['spilled']}" if use["spilled"] else str(use["registers"])

    return " ".join([f"{kernel:56} {threads or '-':>7}", *(f"{cell(g):>8}" for g in GENERATIONS)])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="apple_registers", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("build/shaders"))
    parser.add_argument("--all", action="store_true", help="also what a wheel does not bring compiled")
    parser.add_argument("--json", type=Path, default=Path("apple_registers.json"), metavar="FILE")
    options = parser.parse_args(arguments)
    libraries = {
        name: entry
        for name, entry in listed(options.folder).items()
        if options.all or is_released(name) or (entry["tensor_units"] and name.endswith("_bf16"))
    }
    uses: dict[str, dict[str, dict[str, Any]]] = {}

    def measure(name: str) -> str:
        entry = libraries[name]
        try:
            uses[name] = of_library(options.folder / f"{name}.metal", entry["tensor_units"], entry["kernels"])
        except ValueError as error:
            return str(error)
        options.json.write_text(json.dumps(uses, indent=1))  # what is known, if the job ends here
        return ""

    refused = side_by_side(measure, [*libraries])
    print(" ".join([f"{'kernel':56} {'threads':>7}", *(f"{generation:>8}" for generation in GENERATIONS)]))
    failures = [f"{name}: {message}" for name, message in refused.items() if message]
    for name in sorted(uses):
        for kernel, row in uses[name].items():
            print(line(kernel, libraries[name]["kernels"][kernel], row))
            for generation, use in row.items():
                if "error" in use:
                    failures.append(f"{kernel} on {generation}: {use['error']}")
                elif use["spilled"] and not name.startswith(AWAY_FROM_TOKENS):
                    failures.append(f"{kernel} spills {use['spilled']} bytes a thread on {generation}")
    for failure in failures:
        print(f"FAILED: {failure}")
    count = sum(map(len, uses.values()))
    print(f"{count} kernels of {len(uses)} libraries, {len(failures)} failures. Table: {options.json}")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
