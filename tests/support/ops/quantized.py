"""Operators of the family quantized: valid arguments, results in float64, and invalid arguments."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from support import oracles_experts
from support.ops import wrong
from support.ops.experts import (
    as_private,
    experts,
    identity,
    in_rows,
    in_shape,
    invalid_around,
    layer_of_experts,
    norm_of_input,
    part_of,
)
from support.ops.norms import input_rows
from support.ops.routing import draw_moe_router, expected_moe_router
from support.oracles import exact
from support.oracles_experts import Estimate, activate, dequantise, group_of, multiply, roundoff
from support.oracles_operators import Expected, estimated
from torch_moe_mps.ops._sample import E, H, I, T
from torch_moe_mps.ops._samples import sample_arguments

# Options that depend on each other: draw__moe_experts_quantized gives all that is no required tensor.
WHOLE = ("_moe_experts_quantized", "moe_experts_quantized")


def draw_weight(d, prefix: str, experts: int | None, rows: int, columns: int, form: str) -> dict:
    tensors = d.quantized(experts or 1, rows, columns, form, d.dtype(), d.seed + rows)
    packed, *rest = tensors if experts else [None if t is None else t[0] for t in tensors]
    packed = packed.view(torch.int32) if d.flag() else packed
    return {f"{prefix}{p}": t for p, t in zip(("packed", "scales", "zeros"), (packed, *rest), strict=True)}


def columns_of(form: str) -> tuple[int, ...]:
    return tuple(group_of(form) * count for count in (1, 2, 3, 5))


def draw_expert_qmm(d):
    form = d.format()
    (tokens, slots, experts, hidden, _), around, _ = layer_of_experts(d, columns_of(form))
    rows = d.one(8, 1, 33, 64)
    x = d.values(tokens, slots, hidden, dtype=around["x"].dtype) if d.flag() else around["x"]
    return {
        **{"x": x, "topk_ids": around["topk_ids"], "format": form},
        **draw_weight(d, "", experts, rows, hidden, form),
        "bias": d.maybe(lambda: d.values(experts, rows)),
    }


def two_formats(d) -> tuple[tuple, tuple, dict[str, Any], tuple[int, ...]]:
    """The formats of gate_up and down, how they are passed, and sizes that both divide."""
    form = d.format()
    down = d.one(form, form, d.format())
    passed = {"format": form} if down == form else {"format": form, "down_format": down}
    return form, down, passed, columns_of(max(form, down, key=group_of))


def draw__moe_experts_quantized(d, may_choose: bool = True):
    form, down, passed, sizes = two_formats(d)
    (tokens, slots, experts, hidden, inner), around, options = layer_of_experts(d, sizes)
    rows = 2 * inner if options["gated"] else inner
    if may_choose and slots <= experts and d.flag():
        router = d.completed("moe_router", draw_moe_router(d, (experts, slots), tokens))
        around |= {"topk_ids": None, "topk_weights": None}
        del router["ids_dtype"]
        around |= router
    matrices = draw_weight(d, "gate_up_", experts, rows, hidden, form)
    matrices |= draw_weight(d, "down_", experts, hidden, inner, down)
    if around["topk_ids"] is None and d.flag():
        options |= dict.fromkeys(("shared_out", "gate_up_bias", "down_bias"))
        matrices |= {f"shared_{n}": None if m is None else m[0].clone() for n, m in matrices.items()}
    options["weights_on_inputs"] = d.flag()
    if around["topk_ids"] is not None and not options["weights_on_inputs"]:
        options |= identity(d, options)
    return {**around, **passed, **options, **norm_of_input(d, hidden), **matrices}


def draw_moe_experts_quantized(d):
    return part_of("moe_experts_quantized", draw__moe_experts_quantized(d, may_choose=False))


def draw__expert_qmm_transposed(d):
    form = d.format()
    (tokens, slots, experts, hidden, _), around, _ = layer_of_experts(d, columns_of(form))
    rows = d.one(8, 1, 33, 64)
    return {
        "dy": d.values(tokens, slots, rows, dtype=around["x"].dtype),
        **{"topk_ids": around["topk_ids"], "format": form, "sums": d.flag()},
        **draw_weight(d, "", experts, rows, hidden, form),
    }


def dense(a, prefix="", down=False) -> np.ndarray:
    weight = (getattr(a, f"{prefix}{part}") for part in ("packed", "scales", "zeros"))
    return dequantise(*weight, (down and a.down_format) or a.format)


def product(x: Estimate, weight: np.ndarray, bias, dtype: torch.dtype) -> Estimate:
    out = multiply(x, weight, dtype, rounded_weight=True)
    if bias is None:
        return out
    value = out.value + exact(bias)
    return Estimate(value, out.deviation + roundoff(dtype) * abs(value))


def flat_rows(a) -> Estimate:
    shape = int(np.prod(a.x.shape[:-1])), a.x.shape[-1]
    return Estimate(*(part.reshape(shape) for part in input_rows(a)))


def expected_expert_qmm(a):
    return [estimated(oracles_experts.expert_mm(a.x, dense(a), a.topk_ids, a.bias, rounded_weight=True))]


def expected__expert_qmm_transposed(a):
    matrices = dense(a).swapaxes(1, 2)
    slots = oracles_experts.expert_mm(a.dy, matrices, a.topk_ids, dtype=a.dy.dtype)
    if not a.sums:
        return [estimated(slots)]
    deviation = np.sqrt((slots.deviation**2).sum(1))
    return [estimated(oracles_experts.rounded(slots.value.sum(1), deviation, a.dy.dtype))]


def expected__moe_experts_quantized(a):
    shape, a = a.x.shape, in_rows(a)
    sure: Any = True
    if a.logits is not None:
        weights, ids = expected_moe_router(a)
        a = SimpleNamespace(**vars(a) | {"topk_weights": Estimate(weights.value, weights.error)})
        a.topk_ids, sure = torch.from_numpy(ids.value), ids.known
    if a.shared_gate_up_packed is not None:
        other = {} if a.shared_activation is None else {"activation": a.shared_activation}
        shared = mlp(SimpleNamespace(**vars(a) | other), "shared_")
        a = SimpleNamespace(**vars(a) | {"shared_out": shared})
    (out,) = experts(a, dense(a, "gate_up_"), dense(a, "down_", down=True), rounded_weight=True)
    return in_shape([Expected(out.value, out.error, sure)], shape)


def expected_moe_experts_quantized(a):
    a = as_private("moe_experts_quantized", a)
    a.gated = dense(a, "gate_up_").shape[1] == 2 * dense(a, "down_", down=True).shape[2]
    return expected__moe_experts_quantized(a)


def mlp(a, prefix="") -> Estimate:
    inner = product(flat_rows(a), dense(a, f"{prefix}gate_up_"), a.gate_up_bias, a.x.dtype)
    hidden = activate(inner, vars(a), a.x.dtype)
    return product(hidden, dense(a, f"{prefix}down_", down=True), a.down_bias, a.x.dtype)


def invalid_expert_qmm(zeros):
    mxfp4 = {"format": "mxfp4", "zeros": None, "scales": zeros(E, I, 2, dtype=torch.uint8)}
    nvfp4 = mxfp4 | {"format": "nvfp4_global", "scales": zeros(E, I, 4, dtype=torch.uint8)}
    return [
        wrong("float32", zeros=zeros(E, I, 2, dtype=torch.float16)),
        wrong("H, the input dimension of packed, must be a multiple of 32, got 33", x=zeros(T, 33)),
        wrong(
            "zeros must be None for format mxfp4, got (8, 32, 2)",
            **mxfp4 | {"zeros": zeros(E, I, 2)},
        ),
        wrong("scales must be uint8", **mxfp4 | {"scales": zeros(E, I, 2)}),
        wrong("zeros must be a tensor for format nvfp4_global, got None", **nvfp4),
        wrong(
            "zeros must be of shape [E, N, 1] = (8, 32, 1), got (8, 32, 4)",
            **nvfp4 | {"zeros": zeros(E, I, 4, dtype=torch.int32)},
        ),
        wrong("zeros must be int32, got float32", **nvfp4 | {"zeros": zeros(E, I, 1)}),
        wrong(
            "scales must be int32",
            **mxfp4 | {"format": "fp8_32", "packed": zeros(E, I, 16, dtype=torch.int32)},
        ),
    ]


def invalid__expert_qmm_transposed(zeros):
    return [
        wrong("float32", zeros=zeros(E, I, 2, dtype=torch.float16)),
        wrong("scales must be of shape [E, N, H / 32] = (8, 32, 2), got (8, 32, 3)", scales=zeros(E, I, 3)),
    ]


def invalid__moe_experts_quantized(zeros):
    chosen = {"topk_ids": None, "topk_weights": None, "logits": zeros(T, E), "top_k": 2}
    weights = {
        name: tensor[0]
        for name, tensor in sample_arguments(
            "_moe_experts_quantized", str(zeros(0).device), torch.float32
        ).items()
        if name.startswith(("gate_up", "down"))
    }
    shared = chosen | {f"shared_{name}": tensor for name, tensor in weights.items()}
    return [
        wrong(
            "down_zeros must be None for format mxfp4, got (8, 64, 1)",
            down_format="mxfp4",
        ),
        *invalid_around(zeros),
        wrong("shared_out must be given when shared_gate is, got None", shared_gate=zeros(T)),
        wrong("shared_out must be None beside has_identity", shared_out=zeros(T, H), has_identity=True),
        wrong(
            "weights_on_inputs must be False beside has_identity, got True",
            has_identity=True,
            weights_on_inputs=True,
        ),
        wrong("logits must be None beside has_identity", **chosen, has_identity=True),
        wrong("top_k must be 1 without logits, got 2", top_k=2),
        wrong("correction_bias must be None without logits, got (8,)", correction_bias=zeros(E)),
        wrong("top_k must be between 1 and 8, the smaller of E and 64", **chosen | {"top_k": 9}),
        wrong(
            "shared_down_scales must be given with down_scales, and only then, got None",
            **shared | {"shared_down_scales": None},
        ),
        wrong(
            "shared_down_packed must be of shape as one of down_packed = (64, 4), got (63, 4)",
            **shared | {"shared_down_packed": weights["down_packed"][1:]},
        ),
    ]


def invalid_moe_experts_quantized(zeros):
    ungated = {"gate_up_packed": zeros(E, I, 8, dtype=torch.int32)}
    ungated |= {name: zeros(E, I, 2) for name in ("gate_up_scales", "gate_up_zeros")}
    for_these = "gate_up_packed must be of 2I = 64 rows for these options, got (8, 32, 8)"
    return [
        wrong("down_zeros must be None for format mxfp4, got (8, 64, 1)", down_format="mxfp4"),
        *invalid_around(zeros),
        wrong("format must be a name such as affine4_64 or mxfp4", format="affine9_64"),
        wrong(for_these, activation="swiglu_oai", **ungated),
        wrong(for_these, interleaved=True, **ungated),
        wrong(
            "of 2I = 64 rows, or I = 32 without a gate, got (8, 96, 8)",
            gate_up_packed=zeros(E, 3 * I, 8, dtype=torch.int32),
        ),
    ]
