"""Operators of the family heads: valid arguments, results in float64, and invalid arguments."""

from typing import Any

import numpy as np
import torch

from support import oracles_experts
from support.ops import FLOATS, wrong
from support.ops.quantized import columns_of, dense, draw_weight
from support.oracles import exact
from support.oracles_experts import Estimate
from support.oracles_operators import Expected, estimated
from torch_moe_mps.ops._checks import dtype_name
from torch_moe_mps.ops._sample import I, T


def draw_heads(d, columns) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """(heads, rows, columns) of the matrices, and everything else."""
    heads_, rows, transposed = d.one(2, 1, 5), d.width(), d.flag()
    leading, dtype = (d.one(1, 2), d.one(1, 2, 5, 0), heads_), d.dtype()
    tail = d.maybe(lambda: d.values(*leading, d.one(1, 6, 64, 0), dtype=dtype)) if transposed else None
    x = d.values(*leading, rows if transposed else columns, dtype=dtype)
    return (heads_, rows, columns), {"x": x, "transposed": transposed, "appended": tail}


def draw__heads_mm(d):
    shape, around = draw_heads(d, d.width())
    x = around["x"]
    dtype = x.dtype if around["transposed"] or x.dtype != torch.float32 else d.dtype()
    return {**around, "weight": d.values(*shape, dtype=dtype, scale=shape[2] ** -0.5 if shape[2] else 1.0)}


def draw__heads_quantized(d):
    form = d.format()
    (heads_, rows, columns), around = draw_heads(d, d.one(*columns_of(form)))
    dtype = None if around["transposed"] else d.maybe(d.dtype)
    return {
        **around,
        "format": form,
        **draw_weight(d, "", heads_, rows, columns, form),
        "dtype": None if dtype is None else dtype_name(dtype),
    }


def heads(a, matrices, dtype) -> list[Expected]:
    """`matrices`: [Hq, rows, columns], an array, whatever it was packed as; `dtype` is that of the result."""
    batch, tokens, count, width = a.x.shape
    ids = torch.arange(count).expand(batch * tokens, count)
    matrices = matrices.swapaxes(1, 2) if a.transposed else matrices
    x = a.x.reshape(batch * tokens, count, width)
    packed = hasattr(a, "packed")
    product = oracles_experts.expert_mm(x, matrices, ids, rounded_weight=packed, dtype=dtype)
    value, deviation = (part.reshape(batch, tokens, *part.shape[1:]) for part in product)
    if a.appended is not None:
        tail = exact(a.appended)
        value = np.concatenate((value, tail), -1)
        deviation = np.concatenate((deviation, np.zeros_like(tail)), -1)
    return [estimated(Estimate(value, deviation))]


def expected__heads_mm(a):
    return heads(a, exact(a.weight), a.weight.dtype)


def expected__heads_quantized(a):
    return heads(a, dense(a), a.x.dtype if a.dtype is None else getattr(torch, a.dtype))


def invalid__heads_quantized(zeros):
    plain = {"transposed": False, "appended": None}
    return [wrong("of a last dimension of 64, the columns of a matrix", x=zeros(2, T, 4, I), **plain)]


def invalid__heads_mm(zeros):
    plain = {"transposed": False, "appended": None}
    return [
        wrong("of a last dimension of 40, the columns of a matrix", x=zeros(2, T, 4, 16), **plain),
        wrong(
            f"weight must be {FLOATS}, got int32",
            x=zeros(2, T, 4, 40),
            weight=zeros(4, 16, 40, dtype=torch.int32),
            **plain,
        ),
    ]
