"""Metal libraries: which there are, whether they compile, and which of their kernels ran."""

import re
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import torch

from ..ops._formats import Format
from .calls import DTYPES
from .compare import Finding
from .journal import noted

COMPILERS = 4  # at once, each with memory of its own: Macs begin at 8 GB
# The libraries of a format: behind "quantized_" in their names.
PARTS = ("", "joined_", "few_", "prompts_", "heads_")

# Libraries of training, of dense experts, and of few models: calls.common_subjects has no call of them.
UNCOMMON = re.compile(
    "attention_.*(512|affine8|selected|tailed)|write_cache|experts|index|pooling|hyper_connection"
    "|lora|quantize_|quantized_heads|tiles"
)


def compile_side_by_side(
    names: Iterable[str], built: Callable[[str], object] = lambda name: None
) -> list[Finding]:
    """Findings of libraries that Metal fails to compile, COMPILERS at a time; calls `built` with each name.

    Returns: what failed.
    """
    findings = []
    with ThreadPoolExecutor(COMPILERS) as pool:
        futures = {pool.submit(_compile, name): name for name in names}
        for future in as_completed(futures):
            error = future.exception()
            if error is not None:
                findings.append(Finding(futures[future], "does not compile", message=str(error)))
            built(futures[future])
    return findings


def _compile(name: str) -> None:
    with noted(f"compiling {name}"):
        _pipelines_of(name)


def pipelines(names: Iterable[str]) -> list[dict[str, Any]]:
    """The kernels of libraries that compile: the threads of a threadgroup that Metal allows, the most that a
    plan has asked for in this process, and bytes of threadgroup memory."""
    lines = (line.split() for name in names for line in _pipelines_of(name))
    return [
        {"kernel": kernel, "allowed": int(allowed), "launched": int(launched), "bytes": int(memory)}
        for kernel, allowed, launched, memory in lines
    ]


def _pipelines_of(name: str) -> list[str]:
    lines: list[str] = torch.ops.moe_mps._pipelines(name)
    return lines


def libraries(dtypes: Collection[torch.dtype], formats: Collection[Format]) -> list[str]:
    """The names of the libraries for activations of these dtypes and weights in these formats."""
    endings = {DTYPES[dtype] for dtype in dtypes}
    wanted = {f"quantized_{part}{format}" for format in formats for part in PARTS}
    return [
        name
        for name in torch.ops.moe_mps._libraries()
        for file, _, dtype in (name.rpartition("_"),)
        if dtype in endings | {"i32", "i64"} and (file in wanted or not file.startswith("quantized"))
    ]
