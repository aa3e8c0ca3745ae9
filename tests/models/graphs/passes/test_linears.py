"""Passes that join linear layers, order their outputs and give them activations."""

from collections.abc import Callable

import pytest
import torch
from support.graphs import (
    CHANGED,
    FORMAT,
    LINEAR,
    NO_CHAINS,
    PARAMETERS,
    ROWS,
    TOKEN,
    H,
    assert_left,
    assert_needed,
    changed,
    function_of,
    linear,
    name_of,
    norm,
    passes_of,
    projected,
)
from support.values import numbers as random
from torch import Tensor
from torch.nn.functional import silu

from torch_moe_mps.quantization import quantize

ops = torch.ops.moe_mps


def linears_of_one_input(x, r):
    a, b = projected(x, 0), projected(x, 1)
    return a.view(1, 1, 2, -1).transpose(1, 2), b * 2


def router_and_gate_of_one_input(x, r):
    row = norm(x[0])
    return tuple(torch.nn.functional.linear(row, each) for each in ROWS[:2])


def linears_of_a_normed_input(x, r):
    normed = norm(x)
    return projected(normed, 0), projected(normed, 1)


def linears_of_an_input_that_changes(x, r):
    x = x.clone()
    row, a = x.view(-1), projected(x, 0)
    row.add_(1)
    return a, projected(x, 1)


def linears_without_parameters(x, r):
    return linear(x) * ops.linear_quantized(x, *(each.data for each in PARAMETERS[0]), format=FORMAT)


def activation_of_the_first_outputs(x, r):
    first, second = projected(x, 0), projected(x, 1)
    return silu(first.view(1, H) / 4), second + 1


def gelu_of_outputs(x, r):
    first, second = projected(x, 0), projected(x, 1)
    return torch.nn.functional.gelu(first), second + 1


def gelu_by_tanh_of_outputs(x, r):
    return torch.nn.functional.gelu(linear(x), approximate="tanh") * r


def activation_of_the_last_outputs(x, r):
    first, second = projected(x, 0), projected(x, 1)
    return first + 1, silu(second)


def activation_of_what_is_read_elsewhere(x, r):
    y = linear(x)
    return silu(y), y * 2


def activation_of_a_quotient_that_is_read_elsewhere(x, r):
    y = linear(x) / 4
    return silu(y), y * 2


def activation_of_a_part_that_is_read_elsewhere(x, r):
    y = linear(x)
    return silu(y / 4), y * 2


def activation_that_changes(x, r):
    y = silu(linear(x))
    y.view(-1).mul_(2)
    return y


def parts_times_a_number(x, r):
    """As LongCat has the queries of its latents."""
    a, b = linear(x).view(1, 1, 4, 16).transpose(1, 2).split([10, 6], -1)
    return (a * 1.5).exp(), b * 1.5


def parts_times_two_numbers(x, r):
    a, b = linear(x).split([40, 24], -1)
    return a * 1.5, b * 2


def a_part_times_a_number(x, r):
    a, b = linear(x).split([40, 24], -1)
    return a * 1.5, b + 1


def outputs_in_another_order(x, r):
    """As Qwen3-Next has them: q, k and v of each head side by side."""
    q, k, v = projected(x, 1).view(1, 1, 2, 64).split([16, 16, 32], 3)
    return torch.cat([each.reshape(1, 1, -1) for each in (q, k)], -1), v.reshape(-1, 32) * 2


def outputs_in_order_and_as_they_are(x, r):
    out = projected(x, 1)
    return out.view(1, 1, 2, 64).transpose(2, 3).reshape(1, 1, 128), out


def outputs_that_are_given_twice(x, r):
    a, b = projected(x, 1).chunk(2, -1)
    return torch.cat([a, b, a], -1)


def outputs_in_order_that_change(x, r):
    return changed(projected(x, 1).view(1, 1, 2, 64).transpose(2, 3).reshape(1, 1, 128))


CASES: dict[Callable | str, dict[str, int]] = {
    "silu(linear(x, residual=r))": {"linear_quantized": 1, "silu": 1},
    "silu(linear(x, activation='silu'))": {"linear_quantized": 1, "silu": 1},
    linears_of_one_input: LINEAR | {"mul": 1},
    linears_of_a_normed_input: LINEAR,
    router_and_gate_of_one_input: {"router_logits": 1},
    linears_of_an_input_that_changes: {"linear_quantized": 2, "clone": 1, "add_": 1},
    linears_without_parameters: {"linear_quantized": 2, "mul": 1},
    activation_of_the_first_outputs: LINEAR | {"add": 1},
    gelu_of_outputs: LINEAR | {"add": 1},
    gelu_by_tanh_of_outputs: LINEAR | {"mul": 1},
    activation_of_the_last_outputs: LINEAR | {"add": 1, "silu": 1},
    activation_of_what_is_read_elsewhere: LINEAR | {"silu": 1, "mul": 1},
    activation_of_a_quotient_that_is_read_elsewhere: LINEAR | {"div": 1, "silu": 1, "mul": 1},
    activation_of_a_part_that_is_read_elsewhere: LINEAR | {"div": 1, "silu": 1, "mul": 1},
    activation_that_changes: LINEAR | {"silu": 1, "mul_": 1},
    parts_times_a_number: LINEAR | {"exp": 1},
    parts_times_two_numbers: LINEAR | {"mul": 2},
    a_part_times_a_number: LINEAR | {"mul": 1, "add": 1},
    "linear(x) * r": LINEAR | {"mul": 1},
    "linear(x, residual=r) * 2": LINEAR | {"mul": 1},
    outputs_in_another_order: LINEAR | {"mul": 1},
    outputs_in_order_and_as_they_are: LINEAR | {"clone": 1, "_unsafe_view": 1},
    outputs_that_are_given_twice: LINEAR | {"cat": 1},
    outputs_in_order_that_change: LINEAR | CHANGED | {"clone": 1, "_unsafe_view": 1},
    "torch.nn.functional.linear(x[0], ROWS[2]), torch.nn.functional.linear(x[0], ROWS[3])": {"mm": 2},
    "projected(x, 0), projected(r, 1)": {"linear_quantized": 2},
    "r + silu(linear(x))": LINEAR,
    "silu(linear(x) + r)": LINEAR | {"silu": 1},
    "silu(linear(x).double())": LINEAR | {"_to_copy": 1, "silu": 1},
    "silu(linear(x) / r)": LINEAR | {"div": 1, "silu": 1},
    'silu(torch.div(linear(x), 0.25, rounding_mode="floor"))': LINEAR | {"div": 1, "silu": 1},
    "silu(silu(linear(x)))": LINEAR | {"silu": 1},
    "torch.cat([projected(x, 0), r], -1)": LINEAR | {"cat": 1},
}


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_what_is_left(case):
    assert_left(CASES[case], function_of(case, **globals()), *TOKEN, without=NO_CHAINS)


def test_linears_whose_outputs_are_seen_as_rows_of_heads():
    """Of two tokens the joined result's parts have no such view."""
    x = random(1, 2, H)
    assert_left({"linear_quantized": 2}, lambda x: (projected(x, 0).view(-1, 16), projected(x, 1)), x)
    assert_left(LINEAR, lambda x: (projected(x, 0).view(1, 2, -1, 16), projected(x, 1)), x)


def test_routers_of_two_tokens_stay():
    """Their operator would copy its part of the rows."""
    assert_left({"mm": 2}, lambda x: tuple(torch.nn.functional.linear(x, r) for r in ROWS[:2]), random(2, H))


def test_linears_of_which_another_program_has_joined_some():
    matrices = [
        [torch.nn.Parameter(part, requires_grad=False) for part in (one.packed, one.scales, one.zeros)]
        for one in (quantize(random(rows, H), 4, 32) for rows in (H, 2 * H, H))
    ]

    def outputs(x: Tensor, count: int) -> tuple[Tensor, ...]:
        return tuple(ops.linear_quantized(x, *matrix, format=FORMAT) for matrix in matrices[:count])

    for count, left in ((2, 1), (3, 2)):
        assert_left({"linear_quantized": left}, lambda x, n=count: outputs(x, n), random(1, 1, H))


@pytest.mark.parametrize("gap", [0.0, 3.0])
def test_linears_of_which_one_has_no_bias(gap):
    """Those of Whisper: a second program finds them joined, unless what lies between is no zero."""

    def parameter(tensor: Tensor) -> torch.nn.Parameter:
        return torch.nn.Parameter(tensor, requires_grad=False)

    matrices = [
        [parameter(part) for part in (one.packed, one.scales, one.zeros)]
        for one in (quantize(random(H, H), 4, 32) for _ in range(3))
    ]
    shared = random(3 * H)
    shared[H : 2 * H] = gap
    biases = [parameter(shared[:H]), None, parameter(shared[2 * H :])]
    if not gap:
        biases = [None if bias is None else parameter(bias.clone()) for bias in biases]

    def outputs(x: Tensor) -> tuple[Tensor, ...]:
        pairs = zip(matrices, biases, strict=True)
        return tuple(ops.linear_quantized(x, *matrix, format=FORMAT, bias=bias) for matrix, bias in pairs)

    for _ in range(2):
        assert_left({"linear_quantized": 3 if gap else 1}, outputs, random(1, 1, H))


@pytest.mark.parametrize("left_out", passes_of("linears"), ids=name_of)
def test_each_pass_is_needed(left_out):
    """Without it, a pattern above is not found."""
    assert_needed(left_out, ((function_of(case, **globals()), TOKEN, left) for case, left in CASES.items()))
