"""Runs kernels of the package's Metal files by `torch.mps.compile_shader`.

Sizes of threadgroups and layouts of parameters come from the same headers as in the package: layout.json.
"""

import ctypes
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_HERE = Path(__file__).parent
_LAYOUT = json.loads((_HERE / "layout.json").read_text())
CONSTANTS: dict[str, int] = _LAYOUT["constants"]
_NAMES = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat"}
_CODES = {torch.float32: "DTYPE_FLOAT", torch.float16: "DTYPE_HALF", torch.bfloat16: "DTYPE_BFLOAT"}
_TYPES = {"uint32_t": ctypes.c_uint32, "uint64_t": ctypes.c_uint64, "float": ctypes.c_float}


def dtype_code(tensor: Tensor | None) -> int:
    return 0 if tensor is None else CONSTANTS[_CODES[tensor.dtype]]


class _Params(ctypes.Structure):
    """ctypes takes any name, and drops what is no member."""

    def __init__(self, *values: Any, **named: Any) -> None:
        if unknown := named.keys() - {name for name, _ in self._fields_}:
            raise TypeError(f"moe_mps: {type(self).__name__} has no {', '.join(sorted(unknown))}")
        super().__init__(*values, **named)


@functools.cache
def struct(name: str) -> type[ctypes.Structure]:
    """A struct of params/."""
    members = [(member, _TYPES.get(kind) or struct(kind)) for kind, member in _LAYOUT["structs"][name]]
    return type(name, (_Params,), {"_fields_": members})


def strides(tensor: Tensor | None, dims: Sequence[int] = (0, 1, 2)) -> Any:
    """TokenStrides of batch, tokens and heads, which are these dimensions."""
    return struct("TokenStrides")(*(0 if tensor is None else tensor.stride(dim) for dim in dims))


def rows_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def start_aligned(*tensors: Tensor) -> bool:
    """Whether all rows start on a multiple of 4 elements."""
    starts = [(t.storage_offset(), *t.stride()[:-1]) for t in tensors]
    return all(start % 4 == 0 for each in starts for start in each)


@functools.cache
def _library(family: str, dtype: torch.dtype) -> Any:
    text = (_HERE / "shaders" / f"{family}.metal").read_text()
    return torch.mps.compile_shader(f'#define MOE_DTYPE {_NAMES[dtype]}\n#define MOE_SUFFIX ""\n{text}')


@functools.lru_cache(1024)
def _on_device(octets: bytes, device: torch.device) -> Tensor:
    """Parameters of a call, which are the same for each token that is generated."""
    return torch.frombuffer(bytearray(octets), dtype=torch.uint8).to(device)


def launch(
    family: str, kernel: str, tensors: Sequence[Tensor], params: Any, groups: Sequence[int], threads: int
) -> None:
    """Encodes one dispatch of `groups` threadgroups; the first tensor has the kernel's dtype."""
    first = tensors[0]
    if first.dtype not in _NAMES:
        raise TypeError(f"moe_mps: {kernel} must have float32, float16 or bfloat16, got {first.dtype}")
    run = getattr(_library(family, first.dtype), kernel)
    total = [groups[0] * threads, *groups[1:]]
    run(*tensors, _on_device(bytes(params), first.device), threads=total, group_size=[threads, 1, 1])
