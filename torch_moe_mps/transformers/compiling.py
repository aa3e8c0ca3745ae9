"""The Metal libraries that a model on mps runs, compiled before its first token."""

import itertools
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from ..ops._formats import Format
from .interface import is_experts

_DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
# Files whose libraries depend on a weight's format or on the dtype of ids, not on activations alone.
_OF_WEIGHTS = ("experts", "quantized")


def compile_kernels(model: nn.Module) -> str | None:
    """Compile what a model on mps will run, several libraries at a time. What was done, in one line.

    None where nothing is on mps, or where the extension is missing. A library that does not compile raises
    RuntimeError with Metal's message.
    """
    if not hasattr(torch.ops.moe_mps, "_pipelines"):
        return None
    names = libraries_of(model)
    new = [name for name in names if not torch.ops.moe_mps._is_built(name)]
    if not new:
        return None
    started = time.perf_counter()
    with ThreadPoolExecutor() as pool:
        list(pool.map(torch.ops.moe_mps._pipelines, new))
    line = f"{len(new)} Metal libraries compiled in {time.perf_counter() - started:.1f} s: {', '.join(new)}"
    print(f"torch_moe_mps: {line}", file=sys.stderr)
    return line


def libraries_of(model: nn.Module) -> list[str]:
    """The names of the libraries that the accelerated modules on mps run, in the package's order."""
    used: set[str] = set()
    for module in model.modules():
        tensors = [*module.parameters(recurse=False)]
        if tensors and tensors[0].device.type == "mps":
            used.update(_weight_libraries(module, _dtype(module, model)))
    dtypes = {name.rpartition("_")[2] for name in used}
    for name in torch.ops.moe_mps._libraries():
        file, _, dtype = name.rpartition("_")
        if dtypes and file == "bucket":
            used.add(name)
        elif file == "routing" and dtypes:  # routers compute logits in float32, too
            used.update({name} if dtype in dtypes | {"f32"} else ())
        elif dtype in dtypes and not file.startswith(_OF_WEIGHTS):
            used.add(name)
    return [name for name in torch.ops.moe_mps._libraries() if name in used]


def _weight_libraries(module: nn.Module, dtype: str | None) -> Iterator[str]:
    if dtype is None:
        return
    attributes = ("quantization", "down_quantization", "format")
    formats = [f for f in (getattr(module, name, None) for name in attributes) if isinstance(f, Format)]
    if formats:
        yield from (f"quantized_{format}_{dtype}" for format in formats)
    elif is_experts(module):
        yield f"experts_{dtype}"


def _dtype(module: nn.Module, model: nn.Module) -> str | None:
    """The dtype of the activations: the dtype of the module's weights or scales, or else of the model."""
    every = itertools.chain(module.parameters(recurse=False), model.parameters())
    return next((_DTYPES[p.dtype] for p in every if p.dtype in _DTYPES), None)
