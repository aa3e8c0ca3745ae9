"""Chains of operations on elements: those that one dispatch computes, and those that stay."""

import pytest
import torch
from support.graphs import (
    NORM,
    OTHER_NORM,
    SCALES,
    assert_left,
    assert_needed,
    function_of,
    name_of,
    passes_of,
)
from support.values import numbers as random
from torch.nn.functional import softplus

ops = torch.ops.moe_mps


def of_elements(dtype):
    return random(1, 1, 64).to(dtype), random(1, 4, 16).to(dtype), torch.tensor([[7]])


# Functions of these three.
def chain(x, y, p):
    return torch.sigmoid(x.half()) * x + 0.5


def chain_with_weights(x, y, p):
    """Values that are read twice, and smaller ones, which are computed for each element."""
    gate = torch.sigmoid(NORM / 0.3)
    return torch.sqrt((torch.sigmoid(-NORM) * (1 + gate)).clamp(min=1e-3)) * x + gate * torch.tanh(x)


def chain_through_views(x, y, p):
    scale = torch.log(p.float() + 1).half().unsqueeze(1) * SCALES[:4].view(1, 4, 1) + 1
    return y * scale.view(1, 4, 1) - torch.exp(-y).square()


def chain_in_two_shapes(x, y, p):
    rows = torch.sigmoid(x).view(1, 4, 16) * y
    return torch.exp(rows * SCALES[:4].view(1, 4, 1)).view(1, 1, 64) + x * SCALES[:1]


def chain_with_one_more_dimension(x, y, p):
    more = (torch.sigmoid(x) * 2).unsqueeze(1) + 1
    return torch.cat((more, x.unsqueeze(1)), -1)


def two_chains(x, y, p):
    mean = (x.float() * 2 + 1).square().mean(-1, keepdim=True)
    return torch.rsqrt(mean + 1) * torch.relu(x)


def chain_of_two_results(x, y, p):
    both = torch.nn.functional.silu(x) * 2
    return both, both.half() + 1


def chain_in_another_order(x, y, p):
    """Its result would have other strides than the model's."""
    return torch.log1p(softplus(y).mT) / torch.maximum(y.mT, p.float())


def other_means_of_a_chain(x, y, p):
    rows = torch.sigmoid(y) * y
    return rows.mean(-1), torch.exp(rows + 1).mean(-2, keepdim=True), (rows * 2).mean(-2)


def chain_that_is_expanded(x, y, p):
    """As repeat_interleave does: what is copied has more elements than the chain before it."""
    return (x * 2).unsqueeze(-1).expand(*x.shape, 2).clone()


def chain_whose_input_changes(x, y, p):
    x = x.clone()
    twice, row = x * 2, x.view(-1)
    row[:3].mul_(2)
    return torch.sigmoid(twice) + 1, x


def chain_whose_value_changes(x, y, p):
    twice = x * 2
    twice.view(-1)[:3].mul_(2)
    return torch.sigmoid(twice)


def long_chain(x, y, p):
    for number in range(40):
        x = torch.sigmoid(x) * (2 + number % 5)
    return x


def chain_of_many_inputs(x, y, p):
    for weight in (NORM, OTHER_NORM, NORM[:1], NORM[1:2], NORM[2:3], NORM[3:4], NORM[4:5], NORM[5:6]):
        x = x * weight + 1
    return x


def chain_of_many_numbers(x, y, p):
    for number in range(20):
        x = x + number / 7
    return x


@pytest.mark.parametrize(
    ("case", "left"),
    [
        (chain, {"_pointwise": 1}),
        (chain_with_weights, {"_pointwise": 1}),
        (chain_through_views, {"_pointwise": 1}),
        (chain_in_two_shapes, {"_pointwise": 1}),
        (chain_with_one_more_dimension, {"_pointwise": 1, "cat": 1}),
        ("(torch.sigmoid(y) * y).mean(-2)", {"_pointwise": 1}),
        (other_means_of_a_chain, {"_pointwise": 2, "mean": 3, "mul": 1}),
        ("torch.exp((torch.sigmoid(y) * 2).view(1, 16, 4)) + 1", {"_pointwise": 2}),
        ("torch.sigmoid((torch.sigmoid(x.float()) * 2).view(torch.int32).float())", {"_pointwise": 2}),
        (two_chains, {"_pointwise": 2, "mean": 1}),
        (chain_of_two_results, {"_pointwise": 2}),
        (chain_in_another_order, {"softplus": 1, "log1p": 1, "_to_copy": 1, "maximum": 1, "div": 1}),
        ("x * 2", {"mul": 1}),
        ("(p + 1) * 2", {"add": 1, "mul": 1}),
        (chain_that_is_expanded, {"mul": 1, "clone": 1}),
        ("x.double() * 2 + 1", {"_to_copy": 1, "mul": 1, "add": 1}),
        ("torch.add(x * 3, x, alpha=2)", {"mul": 1, "add": 1}),
        ("softplus(x * 9, 1, 2) * 3", {"mul": 2, "softplus": 1}),
        (chain_whose_input_changes, {"clone": 1, "mul": 1, "mul_": 1, "_pointwise": 1}),
        (chain_whose_value_changes, {"mul": 1, "mul_": 1, "sigmoid": 1}),
        (long_chain, {"_pointwise": 3}),
        (chain_of_many_inputs, {"_pointwise": 2}),
        (chain_of_many_numbers, {"_pointwise": 2}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chains_of_elements(case, left, dtype):
    tolerance = 1e-2 if dtype == torch.bfloat16 else 2e-6
    function = function_of(case, "x, y, p", **globals())
    assert_left(left, function, *of_elements(dtype), strides=True, tolerance=tolerance)


@pytest.mark.parametrize("left_out", passes_of("pointwise"), ids=name_of)
def test_each_pass_is_needed(left_out):
    """Without it, a pattern above is not found."""
    assert_needed(
        left_out,
        ((case, of_elements(torch.float32), {"_pointwise": 1}) for case in (chain, chain_in_two_shapes)),
    )
