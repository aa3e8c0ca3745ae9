"""Passes between a router and its experts: on their patterns, and with one thing changed."""

import pytest
import torch
from support.graphs import NO_CHAINS, assert_left, assert_needed, function_of, name_of, passes_of
from support.values import numbers as random
from torch import Tensor
from torch.nn.functional import linear

from torch_moe_mps.quantization import quantize

ops = torch.ops.moe_mps
H, E, K, I = 64, 8, 2, 32

ROUTER, NORM, SCALES, BIAS = random(E, H) / 8, random(H), random(E).abs(), random(E)


def matrices(*stack: int, inner: int = I) -> list[Tensor]:
    both = [quantize(random(*stack, *size) / 8, 4, 32) for size in ((2 * inner, H), (H, inner))]
    return [part for each in both for part in (each.packed, each.scales, each.zeros)]


MATRICES, SHARED, WIDER = matrices(E), matrices(), matrices(inner=2 * I)


def experts(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return ops._moe_experts_quantized(x, weights, ids, *MATRICES, format="affine4_32")


def routed(x: Tensor, logits: Tensor | None = None, **options) -> tuple[Tensor, Tensor]:
    logits = linear(x, ROUTER) if logits is None else logits
    return ops.moe_router(logits, K, **{"scoring": "sigmoid", "norm_topk_prob": True} | options)


def chosen(x):
    weights, ids = routed(x)
    return experts(x, ids.long(), weights)


def every_option(x):
    options = {"correction_bias": BIAS, "num_groups": 4, "top_groups": 2, "masked_score": 0.0, "sum_eps": 0.5}
    weights, ids = routed(x, **options, sum_min=0.1, scaling_factor=2.5, per_expert_scale=SCALES)
    return experts(x, ids, weights)


def behind_a_norm(x):
    x = ops.rms_norm(x, NORM, norm_eps=1e-6)
    weights, ids = routed(x)
    return experts(x, ids, weights)


def gate(x):
    weights, ids = ops.moe_gate(x, ROUTER, NORM, SCALES, K, norm_eps=1e-6, renormalize_after_scale=False)
    return experts(x, ids, weights)


def gate_of_a_multiple(x):
    weights, ids = ops.moe_gate(
        x, ROUTER, NORM * 0.125, SCALES, K, norm_eps=1e-6, renormalize_after_scale=False
    )
    return experts(x, ids, weights)


def gate_that_divides_again(x):
    weights, ids = ops.moe_gate(x, ROUTER, NORM, SCALES, K, norm_eps=1e-6, renormalize_after_scale=True)
    return experts(x, ids, weights)


def ids_that_else_are_read(x):
    weights, ids = routed(x)
    return experts(x, ids, weights), ids + 1


def scaled_behind(x):
    weights, ids = routed(x, scaling_factor=0.5)
    return experts(x, ids, weights) * 2.5


def scaled_by_a_tensor(x):
    weights, ids = routed(x)
    return experts(x, ids, weights) * NORM


def scaled_and_weights_that_else_are_read(x):
    weights, ids = routed(x)
    return experts(x, ids, weights) * 2.5, weights + 1


def weights_that_are_changed(x):
    weights, ids = routed(x)
    return experts(x, ids, weights * 2)


def ids_of_another_router(x):
    weights, _ = routed(x)
    _, ids = routed(x, scoring="softmax", correction_bias=BIAS)
    return experts(x, ids, weights)


def logits_that_change(x):
    logits = linear(x, ROUTER)
    weights, ids = routed(x, logits)
    logits.masked_fill_(logits > logits.mean(), 0)  # an operator that stays one in place
    return experts(x, ids, weights), logits


def beside(x, other=None, weights=SHARED, **options):
    """Experts and an MLP, and what is added to both."""
    mlp = ops._mlp_quantized(x if other is None else other, *weights, format="affine4_32", **options)
    chosen, ids = routed(x)
    return x + (experts(x, ids, chosen) + mlp), mlp


def without_a_residual(x):
    chosen, ids = routed(x)
    return experts(x, ids, chosen) + ops._mlp_quantized(x, *SHARED, format="affine4_32")


def gated_shared_expert(x):
    chosen, ids = routed(x)
    mlp = ops._mlp_quantized(x, *SHARED, format="affine4_32")
    return x + (experts(x, ids, chosen) + torch.sigmoid(linear(x, NORM[None])) * mlp)


def weights_changed_behind_their_cast(x):
    weights, ids = routed(x)
    weights = weights.half()
    weights.masked_fill_(weights > weights.mean(), 0)
    return experts(x, ids, weights)


ONE = {"_moe_experts_quantized": 1}
APART = ONE | {"_mlp_quantized": 1, "mm": 1}
LEFT = {
    chosen: ONE | {"mm": 1},
    every_option: ONE | {"mm": 1},
    behind_a_norm: ONE | {"router_logits": 1},
    gate: ONE | {"router_logits": 1},
    gate_of_a_multiple: ONE | {"router_logits": 1},
    gate_that_divides_again: ONE | {"moe_gate": 1},
    ids_that_else_are_read: ONE | {"mm": 1, "moe_router": 1, "add": 1},
    scaled_behind: ONE | {"mm": 1},
    scaled_by_a_tensor: ONE | {"mm": 1, "mul": 1},
    scaled_and_weights_that_else_are_read: ONE | {"mm": 1, "moe_router": 1, "mul": 1, "add": 1},
    weights_that_are_changed: ONE | {"mm": 1, "moe_router": 1, "mul": 1},
    ids_of_another_router: ONE | {"mm": 1, "moe_router": 2},
    "beside(x)[0]": ONE | {"mm": 1},
    without_a_residual: ONE | {"mm": 1},
    gated_shared_expert: ONE | {"mm": 2},
    "beside(x, torch.cumsum(x, 1))[0]": APART | {"cumsum": 1},
    "beside(x, weights=WIDER)[0]": APART,
    'beside(x, activation="relu")[0]': ONE | {"mm": 1},
    'beside(x, activation="swiglu_oai")[0]': APART,
    "beside(x, down_bias=NORM)[0]": APART,
    "beside(x)": APART,
    weights_changed_behind_their_cast: ONE
    | {"mm": 1, "moe_router": 1, "_to_copy": 1, "gt": 1, "mean": 1, "masked_fill_": 1},
    logits_that_change: ONE | {"mm": 1, "moe_router": 1, "gt": 1, "mean": 1, "masked_fill_": 1},
}


@pytest.mark.parametrize("case", LEFT)
def test_what_is_left(case):
    assert_left(LEFT[case], function_of(case, "x", **globals()), random(1, H), without=NO_CHAINS)


@pytest.mark.parametrize("left_out", passes_of("routing"), ids=name_of)
def test_each_pass_is_needed(left_out):
    """Without it, a pattern above is not found."""
    assert_needed(
        left_out, ((function_of(case, "x", **globals()), (random(1, H),), LEFT[case]) for case in LEFT)
    )
