"""Passes that share, fold and drop calls: on their patterns, and with one thing changed."""

from collections.abc import Callable

import pytest
import torch
from support.graphs import (
    LINEAR,
    NO_CHAINS,
    TOKEN,
    H,
    assert_computes,
    assert_left,
    assert_needed,
    function_of,
    linear,
    name_of,
    operators,
    passes_of,
    recorded,
)
from support.values import numbers as random

from torch_moe_mps.models.graphs.passes import simplify
from torch_moe_mps.models.graphs.tracing import Recorder, key_of

ops = torch.ops.moe_mps


def residual_in_place(x, r):
    out = linear(x)
    out += r
    return out


def numbers_that_are_no_positions(x, r):
    return (
        torch.arange(3) + 5.0,
        torch.arange(3.0) + 5,
        torch.arange(3) + r.view(-1)[:3],
        torch.arange(1, 3) + 5,
        torch.add(torch.arange(3), 5, alpha=2),
    )


def mask_of_none_alone(x, r):
    return (torch.zeros(1, dtype=torch.bool) & (x > r)) | (x > 0)


def lowest_bits(x, r):
    return torch.ones(1, dtype=torch.int32) & (x * 8).int()


def sum_times_one_beside_the_sum(x, r):
    total = x + r
    return total * 1.0, total


def sum_times_ones_that_change(x, r):
    mask = torch.ones(1, 1, H)
    mask.view(-1)[:2].mul_(2)
    return (x + r) * mask


def conjugates(x, r):
    pairs = torch.view_as_complex(x.view(-1, 2))
    return torch.view_as_real((pairs * pairs.conj() + pairs).resolve_conj())


def equal_calls_of_a_changed_input(x, r):
    before = torch.sin(x) * r
    x.view(-1)[:3].add_(1)
    return before, torch.sin(x) * r


def equal_calls_of_a_changed_result(x, r):
    one, two = torch.sin(x), torch.sin(x)
    two.view(-1)[:3].add_(1)
    return one * r, two * r


def equal_calls_whose_first_changes(x, r):
    one, two = torch.sin(x), torch.sin(x)
    one.view(-1)[:3].add_(1)
    return one * r, two * r


# Of equal calls, which run once, with the same bits.
EQUAL: dict[Callable | str, dict[str, int]] = {
    "torch.cos(torch.sin(x)) * r, torch.cos(torch.sin(x)) + r": {"sin": 1, "cos": 1, "mul": 1, "add": 1},
    equal_calls_of_a_changed_input: {"sin": 2, "mul": 2, "add_": 1},
    equal_calls_of_a_changed_result: {"sin": 2, "mul": 2, "add_": 1},
    equal_calls_whose_first_changes: {"sin": 2, "mul": 2, "add_": 1},
    "x.max(-1)[0] * r, x.max(-1)[0] + r, x.max(-1)[1]": {"max": 1, "mul": 1, "add": 1},
    "torch.sin(x), torch.sin(x) + r": {"sin": 1, "add": 1},
    "torch.sin(x), torch.sin(x).view(-1)": {"sin": 2},  # their reader may write into either
    "torch.add(r, 1), torch.add(r, 1.0) * r, torch.add(r, True) * x": {"add": 3, "mul": 2},
    "torch.pow(x, 0.0) * r, torch.pow(x, -0.0) * r": {"pow": 2, "mul": 2},
    "torch.rand_like(x) * r, torch.rand_like(x) * r": {"rand_like": 2, "mul": 2},
}


CASES: dict[Callable | str, dict[str, int]] = {
    residual_in_place: LINEAR,
    numbers_that_are_no_positions: {"arange": 3, "add": 5},
    mask_of_none_alone: {"zeros": 1, "gt": 2, "bitwise_and": 1, "bitwise_or": 1},
    lowest_bits: {"ones": 1, "mul": 1, "_to_copy": 1, "bitwise_and": 1},
    sum_times_one_beside_the_sum: {"add": 1, "mul": 1},
    sum_times_ones_that_change: {"add": 1, "ones": 1, "mul_": 1, "mul": 1},
    conjugates: {"mul": 1, "add": 1, "clone": 1},
    "torch.arange(3) + 5": {"arange": 1},
    "(x + r) * torch.ones(1, 1, dtype=torch.bool)[:, :, None]": {"add": 1},
    "(x + r) * torch.ones(1, 5)[:, -1:].bool()[:, :, None]": {"add": 1},
    "(x + r) * torch.ones(1, H, 2).select(2, 1)": {"add": 1},
    "(x + r) * torch.ones(H, dtype=torch.int32).view(torch.float32)": {"add": 1, "ones": 1, "mul": 1},
    "torch.zeros(1, dtype=torch.bool) | (torch.ones(1, dtype=torch.bool) & (x > r))": {"gt": 1},
    "(x + r) - 0": {"add": 1},
    "torch.ops.aten.sub.Scalar(torch.ops.aten.sub.Scalar(x + r, 0, 3), 1, 3)": {"add": 1, "sub": 1},
    "torch.zeros(1) - (x + r)": {"zeros": 1, "add": 1, "sub": 1},
    "(x + r) * torch.ones(1, dtype=torch.float64)": {"add": 1, "ones": 1, "mul": 1},
    "x * 1": {"mul": 1},
}


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_what_is_left(case):
    assert_left(CASES[case], function_of(case, **globals()), *TOKEN, without=NO_CHAINS)


def test_a_conjugate_is_recorded_again_as_at_first():
    """Whoever reads it gets it by a copy, also where what operators gave is remembered."""
    graphs = [recorded(conjugates, random(1, 1, H), random(1, 1, H)) for _ in range(2)]
    assert operators(graphs[1]) == operators(graphs[0]) == {"mul": 1, "add": 1, "clone": 1}


def test_a_number_is_the_same_as_a_symbol_for_it():
    number = Recorder().symbol(5, 2)
    assert key_of([number - number + 7, number]) == key_of([7, number]) != key_of([number, 7])


@pytest.mark.parametrize("case", EQUAL, ids=name_of)
def test_equal_calls_run_once(case):
    assert_left(EQUAL[case], function_of(case), *TOKEN, without=NO_CHAINS, tolerance=0.0)


def test_what_is_written_for_nobody():
    """Its memory is read by nothing; one that is, through any view, is written."""

    def dead(x):
        mask = torch.zeros_like(x)
        mask.scatter_(1, torch.topk(x, 1)[1], 1)
        mask.view(-1)[:2].copy_(x.view(-1)[:2])
        return x * 2

    def read(x):
        mask = torch.zeros_like(x)
        row = mask.view(-1)
        mask.scatter_(1, torch.topk(x, 1)[1], 1)
        return x + row

    def copied(x):
        mask, other = torch.zeros_like(x), x.clone()
        mask.fill_(1)
        other.copy_(mask)
        return other

    x = random(1, 8)
    assert_left({"mul": 1}, dead, x)
    assert_left({"zeros_like": 1, "topk": 1, "scatter_": 1, "add": 1}, read, x)
    graph = recorded(copied, x)
    simplify(graph)
    assert_computes(graph, copied, x)


@pytest.mark.parametrize("parts", [torch.split, torch.unsafe_split])
def test_what_is_written_into_a_part(parts):
    """The schema of one of them says that parts are new tensors: they are none."""

    def written(x):
        x = x.clone()
        twice = x * 2
        first, _ = parts(x, 4, 1)
        first.mul_(3)
        return x * 2 + twice

    def read(x):
        x = x.clone()
        first, _ = parts(x, 4, 1)
        x.mul_(3)
        return first + 1

    for function in (written, read):
        graph = recorded(function, random(1, 8))
        simplify(graph)
        assert_computes(graph, function, random(1, 8))


@pytest.mark.parametrize("left_out", passes_of("simplify"), ids=name_of)
def test_each_pass_is_needed(left_out):
    """Without it, a pattern above is not found."""
    assert_needed(
        left_out,
        [
            *((function_of(case, **globals()), TOKEN, left) for case, left in CASES.items()),
            *((function_of(case, **globals()), TOKEN, left) for case, left in EQUAL.items()),
        ],
    )
