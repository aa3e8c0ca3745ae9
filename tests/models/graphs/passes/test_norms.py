"""Passes that put norms into the operators behind them: on their patterns, and with one thing changed."""

from collections.abc import Callable

import pytest
import torch
from support.graphs import (
    FORMAT,
    GATE,
    LINEAR,
    NO_CHAINS,
    NORM,
    OTHER_NORM,
    ROUTER,
    TOKEN,
    H,
    assert_left,
    assert_needed,
    function_of,
    linear,
    name_of,
    norm,
    passes_of,
    routed,
)
from support.values import numbers as random

from torch_moe_mps.quantization import quantize

ops = torch.ops.moe_mps


LARGE, MIXING = random(514, H) / 8, (random(24, H) / 8, random(24), random(3))


def norm_of_input(x, r):
    normed = norm(x)
    return linear(normed), linear(normed)


def norm_of_router_and_experts(x, r):
    normed = norm(x).view(1, H)
    return routed(normed)


def norm_that_else_is_read(x, r):
    normed = norm(x)
    return linear(normed), normed


def norm_of_what_changes(x, r):
    x = x.clone()
    row, normed = x.view(-1), norm(x)
    row.add_(1)
    return linear(normed), x


def norm_of_sum_with_weights_of_rows(x, r):
    total = x.view(1, 2, -1) + r.view(1, 2, -1)
    return norm(total, NORM.view(2, -1)), total


def norm_in_sum_and_operator(x, r):
    total = r + linear(x)
    return linear(norm(total)), total


def whole_layer(x, r):
    total = r + linear(norm(x))
    return total + routed(norm(total, OTHER_NORM).view(1, H)).view(1, 1, H)


def norm_of_two_rows(x, r):
    """Wider than the rows that the operator reads."""
    normed = norm(torch.cat([x, r], -1), torch.cat([NORM, OTHER_NORM]))
    return linear(normed.view(2, H))


def norm_of_sum_with_a_late_weight(x, r):
    total = x + r
    return norm(total, NORM * r.view(-1)), total


def norm_before_scaled_sum(x, r):
    normed = norm(x[0])
    return torch.addmm(GATE[0, :1], normed, GATE.t(), beta=2), linear(normed)


def norm_before_sum_of_rows(x, r):
    normed = norm(x[0])
    return torch.addmm(r[0, :, :1], normed, GATE.t()), linear(normed)


def norm_before_small_matrix(x, r):
    normed = norm(x[0])
    return torch.nn.functional.linear(normed, ROUTER), linear(normed)


def norm_before_large_matrix(x, r):
    normed = norm(x[0])
    return torch.nn.functional.linear(normed, LARGE), linear(normed)


CASES: dict[Callable | str, dict[str, int]] = {
    norm_of_input: {"linear_quantized": 2},
    norm_of_router_and_experts: {"router_logits": 1, "moe_router": 1, "_moe_experts": 1},
    norm_that_else_is_read: LINEAR | {"rms_norm": 1},
    norm_of_what_changes: LINEAR | {"rms_norm": 1, "clone": 1, "add_": 1},
    norm_of_sum_with_weights_of_rows: {"rms_norm": 1, "add": 1},
    norm_in_sum_and_operator: {"linear_quantized": 2},
    whole_layer: {"linear_quantized": 1, "router_logits": 1, "moe_router": 1, "_moe_experts": 1},
    norm_of_two_rows: LINEAR | {"cat": 2, "rms_norm": 1},
    norm_of_sum_with_a_late_weight: {"add": 1, "mul": 1, "rms_norm": 1},
    norm_before_scaled_sum: LINEAR | {"rms_norm": 1, "addmm": 1},
    norm_before_sum_of_rows: LINEAR | {"rms_norm": 1, "addmm": 1},
    norm_before_small_matrix: LINEAR | {"router_logits": 1},
    norm_before_large_matrix: LINEAR | {"rms_norm": 1, "mm": 1},
    "r + norm(x).view(torch.int32).float()": {"rms_norm": 1, "_to_copy": 1, "add": 1},
    "linear(norm(x, None))": LINEAR | {"rms_norm": 1},
}


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_what_is_left(case):
    tolerance = 1e-3 if "moe_router" in CASES[case] else 1e-6  # its weights rounded
    assert_left(CASES[case], function_of(case, **globals()), *TOKEN, without=NO_CHAINS, tolerance=tolerance)


def test_norms_of_several_tokens_stay():
    """Each operator would have to norm all of them again."""
    left = {"rms_norm": 1, "linear_quantized": 2}
    assert_left(left, norm_of_input, random(1, 3, H), random(1, 3, H))


def test_norms_with_weights_of_another_dtype():
    """Those in float32 join products in 16 bits; others would be a launch for each product."""
    halves, narrow = quantize(random(H, H).half() / 8, 4, 32), NORM.half()

    def joined(x):
        normed = norm(x)
        return ops.linear_quantized(normed, halves.packed, halves.scales, halves.zeros, format=FORMAT)

    def apart(x):
        return linear(norm(x, narrow))

    assert_left(LINEAR, joined, random(1, 1, H).half(), tolerance=1e-3)
    assert_left(LINEAR | {"rms_norm": 1}, apart, random(1, 1, H))


@pytest.mark.parametrize("left_out", [*passes_of("norms"), *passes_of("inkling")], ids=name_of)
def test_each_pass_is_needed(left_out):
    """Without it, a pattern above is not found."""
    assert_needed(left_out, ((function_of(case, **globals()), TOKEN, left) for case, left in CASES.items()))
