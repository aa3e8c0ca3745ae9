#!/usr/bin/env python
"""The speed of `convert`: megabytes of bfloat16 weights that it reads a second, by layout that is written.

A model of random weights is converted in 4 bit. A tiny one in a process of its own says what the command
costs besides. Times of the processor count little what else the machine does. --importance compares
quantising by importance, from a file, with plain quantising, in turns.
"""

import argparse
import contextlib
import io
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils import logging

from torch_moe_mps.transformers.checkpoints.quantize.importance import Importance
from torch_moe_mps.transformers.checkpoints.quantize.target import quantizable

MOE = {"num_experts_per_tok": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 512}


def model_of(layers: int, hidden: int, intermediate: int, experts: int) -> PreTrainedModel:
    config = Qwen3MoeConfig(
        num_hidden_layers=layers, hidden_size=hidden, intermediate_size=hidden, num_experts=experts,
        moe_intermediate_size=intermediate, head_dim=64, eos_token_id=None, bos_token_id=None, **MOE,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.02)
    return model


def save_importance(model: PreTrainedModel, file: Path) -> None:
    """Write importance of random numbers."""
    means = {}
    for target in quantizable(model).values():
        for parameter in target.parameters:
            matrices, _, columns = target.rows_first(getattr(target.module, parameter)).shape
            mean = torch.rand(matrices, columns).square()
            means[target.path(parameter)] = mean if target.kind == "experts" else mean[0]
    Importance(means).save(file)


def convert(source: Path, layout: str, *more: str) -> tuple[float, float]:
    """Seconds, and seconds of the processor."""
    from torch_moe_mps.commands import main

    with tempfile.TemporaryDirectory(dir=source.parent) as folder:
        arguments = ["convert", str(source), f"{folder}/new", "--bits", "4", "--to", layout, *more]
        printed = io.StringIO()
        started = time.perf_counter(), time.process_time()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            failed = main(arguments)
        seconds = time.perf_counter() - started[0], time.process_time() - started[1]
    if failed:
        raise SystemExit(printed.getvalue())
    return seconds


def start(source: Path) -> tuple[float, float]:
    """The same of a process that converts a tiny model."""
    command = [sys.executable, "-m", "torch_moe_mps", "convert", str(source), f"{source}-new"]
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter() - started, used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=15, help="of 40 MB each (15)")
    parser.add_argument("--repeat", type=int, default=3, help="the fastest counts (3)")
    parser.add_argument("--importance", action="store_true", help="compare quantising by importance")
    options = parser.parse_args()
    logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"tiny": (1, 128, 128, 8), "large": (options.layers, 768, 512, 16)}
        for name, shape in sizes.items():
            model = model_of(*shape)
            model.save_pretrained(Path(folder) / name)
        file = Path(folder) / "importance.safetensors"
        if options.importance:
            save_importance(model, file)
        del model
        megabytes = sum(f.stat().st_size for f in Path(folder).glob("large/*.safetensors")) / 1e6
        print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}")
        seconds, cpu = start(Path(folder) / "tiny")
        print(f"start of the command: {seconds:.1f} s, {cpu:.1f} s of the processor")
        convert(Path(folder) / "tiny", "moe_mps")
        runs: dict[str, tuple[str, ...]] = {"moe_mps": ("moe_mps",), "mlx": ("mlx",)}
        if options.importance:
            runs = {"plain": ("moe_mps",), "by importance": ("moe_mps", "--importance", str(file))}
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
        for _ in range(options.repeat):
            for name, arguments in runs.items():
                times[name].append(convert(Path(folder) / "large", *arguments))
        least = {name: [min(values) for values in zip(*each, strict=True)] for name, each in times.items()}
        for name, (best, cpu) in least.items():
            print(
                f"{name}: {megabytes:.0f} MB in {best:.1f} s, {cpu:.1f} s of the processor: "
                f"{megabytes / best:.0f} MB/s, {megabytes / cpu:.0f} MB/s of it"
            )
        if options.importance:
            ratio = least["by importance"][1] / least["plain"][1]
            print(f"by importance it takes {ratio:.2f} times the processor's time")


if __name__ == "__main__":
    main()
