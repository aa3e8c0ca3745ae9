"""`bench --beside`: the same tests in mlx-lm, and in llama.cpp, where they are installed."""

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..transformers.checkpoints.mlx.reading import written_by_mlx

_LLAMA_BENCH = "llama-bench"
# (engine, test without its depth, depth, tokens/s of each repeat)
Found = tuple[str, str, int, list[float]]


def check_beside(options: argparse.Namespace, folder: str) -> None:
    """Raises: ValueError for an engine that is not installed, or cannot read the model."""
    if "mlx-lm" in options.beside:
        if importlib.util.find_spec("mlx_lm") is None:
            raise ValueError("--beside mlx-lm needs mlx-lm: pip install mlx-lm")
        if not written_by_mlx(folder):
            expected = "a checkpoint that both read, of MLX (`torch-moe-mps convert --to mlx` writes one)"
            raise ValueError(f"--beside mlx-lm is for {expected}, got {options.model}")
    if "llama.cpp" in options.beside:
        if shutil.which(_LLAMA_BENCH) is None:
            raise ValueError(f"--beside llama.cpp needs {_LLAMA_BENCH} of llama.cpp in PATH")
        if options.gguf is None or not Path(options.gguf).is_file():
            raise ValueError(
                f"--beside llama.cpp needs --gguf with the model as a GGUF file, got {options.gguf}"
            )


def beside(
    options: argparse.Namespace, folder: str, ids: Sequence[int], sampling: dict[str, float]
) -> Iterator[Found]:
    """Runs each engine in a process of its own, with these tokens and this sampling where it takes them."""
    if "mlx-lm" in options.beside:
        yield from _mlx_lm(options, folder, ids, sampling)
    if "llama.cpp" in options.beside:
        yield from _llama_cpp(options)


def _mlx_lm(
    options: argparse.Namespace, folder: str, ids: Sequence[int], sampling: dict[str, float]
) -> Iterator[Found]:
    asked = {"model": folder, "ids": [*ids], "depths": sorted({*options.depth}), "sampling": sampling}
    asked |= {name: getattr(options, name) for name in ("prompt", "generate", "repeats")}
    command = [sys.executable, str(Path(__file__).with_name("mlx_lm_worker.py"))]
    for row in _lines("mlx-lm", command, json.dumps(asked)):
        yield "mlx-lm", f"pp{options.prompt}", row["depth"], row["pp"]
        for kind, rates in zip(("", " sampled"), row["tg"], strict=True):
            yield "mlx-lm", f"tg{options.generate}{kind}", row["depth"], rates


def _llama_cpp(options: argparse.Namespace) -> Iterator[Found]:
    depths = ",".join(map(str, sorted({*options.depth})))
    sizes = ["-p", str(options.prompt), "-n", str(options.generate), "-d", depths, "-r", str(options.repeats)]
    command = [_LLAMA_BENCH, "-m", options.gguf, *sizes, "-o", "jsonl"]
    for row in _lines("llama.cpp", command):
        test = f"pp{row['n_prompt']}" if row["n_prompt"] else f"tg{row['n_gen']}"
        yield "llama.cpp", test, row["n_depth"], row["samples_ts"]


def _lines(engine: str, command: Sequence[str], given: str = "") -> Iterator[dict[str, Any]]:
    """The lines of JSON that a program prints.

    Raises: RuntimeError with its last line if it fails.
    """
    ran = subprocess.run(command, input=given, capture_output=True, text=True)
    if ran.returncode != 0:
        last = (ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"])[-1]
        raise RuntimeError(f"--beside {engine}: {last}")
    yield from (json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{"))
