"""Operators of the family linear: valid arguments, results in float64, and invalid arguments."""

from typing import Any

import numpy as np
import torch

from support.ops import wrong
from support.ops.experts import as_private, part_of
from support.ops.quantized import columns_of, dense, draw_weight, flat_rows, mlp, product, two_formats
from support.oracles import FLOAT32_EPS, exact
from support.oracles_experts import DEVIATIONS, Estimate, activate, multiply, numbers_of
from support.oracles_operators import Expected, estimated
from torch_moe_mps.ops._checks import dtype_name
from torch_moe_mps.ops._sample import I, T


def draw__linear_quantized_transposed(d):
    form = d.format()
    columns, rows = d.one(*columns_of(form)), d.one(8, 1, 33, 64, 300)
    dy = d.values(*d.leading(), rows)
    return {"dy": dy, "format": form, **draw_weight(d, "", None, rows, columns, form)}


def draw_linear_quantized(d):
    form = d.format()
    columns, rows, leading = d.one(*columns_of(form)), d.one(8, 1, 33, 64, 300), d.leading()
    x = d.values(*leading, columns)
    activation = d.maybe(lambda: d.one("silu", "gelu", "gelu_tanh", "relu", "relu2"))
    factor = d.one(1.0, 0.25, -2.0)
    return {
        **{"x": x, "format": form, **draw_weight(d, "", None, rows, columns, form)},
        **{"activation": activation, "factor": factor},
        "activated": None if activation is None else d.maybe(lambda: d.one(1, rows, (rows + 1) // 2)),
        "order": d.maybe(lambda: torch.randperm(rows, generator=d.generator).int()),
        "dtype": d.maybe(lambda: "float32"),
    }


def draw__mlp_quantized(d):
    form, down, passed, sizes = two_formats(d)
    hidden, inner, leading, dtype = d.one(*sizes), d.one(*sizes), d.leading(), d.dtype()
    options = dict(d.activation())
    must = "limit" in options or options["activation"] == "swiglu_oai"
    gated = must or d.flag()
    rows = 2 * inner if gated else inner
    return {
        **{"x": d.values(*leading, hidden, dtype=dtype), **passed, **options, "gated": gated},
        **draw_weight(d, "gate_up_", None, rows, hidden, form),
        **draw_weight(d, "down_", None, hidden, inner, down),
        "interleaved": gated and d.flag(),
        "gate_up_bias": d.maybe(lambda: d.values(rows)),
        "down_bias": d.maybe(lambda: d.values(hidden)),
    }


def draw_mlp_quantized(d):
    return part_of("mlp_quantized", draw__mlp_quantized(d))


def draw_embedding_quantized(d):
    form = d.format()
    rows = d.one(8, 1, 33)
    return {
        **{"tokens": d.ids(*d.leading(), experts=rows), "format": form, "dtype": dtype_name(d.dtype())},
        **draw_weight(d, "", None, rows, d.one(*columns_of(form)), form),
    }


def first_activated(rows: Estimate, a) -> Estimate:
    if a.activation is None:
        return Estimate(a.factor * rows.value, abs(a.factor) * rows.deviation)
    own = Estimate(a.factor * rows.value, abs(a.factor) * rows.deviation)
    acted = activate(own, {"activation": a.activation, "gated": False}, torch.float32)
    count = a.packed.shape[0] if a.activated is None else a.activated
    parts = zip(acted, rows, strict=True)
    return Estimate(*(np.hstack((first[:, :count], rest[:, count:])) for first, rest in parts))


def expected_linear_quantized(a):
    out = first_activated(product(flat_rows(a), dense(a), a.bias, a.x.dtype), a)
    shape = (*a.x.shape[:-1], out.value.shape[-1])
    value, deviation = (part.reshape(shape) for part in out)
    known: Any = True
    if a.order is not None:
        order = a.order.numpy()
        value, deviation = (part[..., order.argsort()] for part in (value, deviation))
        known = np.array_equal(np.sort(order), np.arange(len(order)))  # else nothing is said of the result
    value = value if a.residual is None else value + exact(a.residual)
    return [Expected(value, DEVIATIONS * deviation, known)]


def expected__linear_quantized_transposed(a):
    rows, matrix = exact(a.dy), dense(a)
    rows = rows.reshape(int(np.prod(rows.shape[:-1])), rows.shape[-1])
    out = multiply(Estimate(rows, np.zeros_like(rows)), matrix.T, a.dy.dtype, rounded_weight=False)
    shape = (*a.dy.shape[:-1], matrix.shape[1])
    return [estimated(Estimate(*(part.reshape(shape) for part in out)))]


def expected__mlp_quantized(a):
    out = mlp(a)
    value, deviation = (part.reshape(a.x.shape) for part in out)
    if a.residual is not None:
        value = value + exact(a.residual)
    return [estimated(Estimate(value, deviation))]


def expected_mlp_quantized(a):
    return expected__mlp_quantized(as_private("mlp_quantized", a))


def expected_embedding_quantized(a):
    matrix, ids = dense(a), a.tokens.numpy()
    inside = (ids >= 0) & (ids < len(matrix))
    padded = np.concatenate((matrix, np.zeros((1, matrix.shape[1]))))
    value = padded[np.where(inside, ids, len(matrix))]
    # A bias takes back up to 1024 steps, which a code of some bits has more as a half.
    cancels = (8 + 1024 / (2 ** numbers_of(a.format)[0] - 1)) * abs(matrix).max(initial=0.0)
    return [Expected(value, FLOAT32_EPS * (4 * abs(value) + cancels))]


def invalid__linear_quantized_transposed(zeros):
    return [wrong("scales must be of shape [N, C / 32] = (32, 2), got (32, 3)", scales=zeros(I, 3))]


def invalid_linear_quantized(zeros):
    q4_k = {
        **{"format": "q4_k", "x": zeros(T, 256), "packed": zeros(I, 32, dtype=torch.int32)},
        **{"scales": zeros(I, 12, dtype=torch.uint8), "zeros": zeros(I, 2, dtype=torch.int16)},
    }
    return [
        wrong("C, the input dimension of packed, must be a multiple of 32, got 33", x=zeros(T, 33)),
        wrong("C, the input dimension of packed, must be a multiple of 256, got 64", format="q4_k"),
        wrong("scales must be uint8", **q4_k | {"scales": zeros(I, 12)}),
        wrong(
            "zeros must be of shape [N, C * 2 / 256] = (32, 2), got (32, 1)",
            **q4_k | {"zeros": zeros(I, 1, dtype=torch.int16)},
        ),
        wrong("zeros must be a tensor for format q4_k, got None", **q4_k | {"zeros": None}),
        wrong("scales must be int16, got float32", format="q4_0", zeros=None),
        wrong("activated must be between 1 and 32, the rows of packed", activation="silu", activated=0),
        wrong("activated must be between 1 and 32, the rows of packed", activation="silu", activated=I + 1),
        wrong("factor must be a number in the range of float32, got nan", factor=float("nan")),
        wrong("factor must be a finite number, got inf", activation="silu", factor=float("inf")),
        wrong(
            "activation must be None for an x without columns, got 'silu'",
            **{"x": zeros(T, 0), "packed": zeros(I, 0, dtype=torch.int32), "activation": "silu"},
            **{"scales": zeros(I, 0), "zeros": zeros(I, 0)},
        ),
    ]


def invalid__mlp_quantized(zeros):
    return [
        wrong("of an even number of rows 2I", gate_up_packed=zeros(63, 8, dtype=torch.int32)),
        wrong(
            "down_zeros must be None for format mxfp4, got (64, 1)",
            down_format="mxfp4",
        ),
    ]


invalid_mlp_quantized = invalid__mlp_quantized


def invalid_embedding_quantized(zeros):
    return [
        wrong("C, the input dimension of packed, must be a multiple of 128, got 64", format="affine4_128")
    ]
