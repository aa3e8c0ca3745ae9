"""Gemma 4: its router that norms, selects and scales, and its layers."""

from collections.abc import Callable

import pytest
import torch
from support import families
from support.graphs import (
    NO_CHAINS,
    NORM,
    ROUTER,
    SCALES,
    TOKEN,
    H,
    K,
    assert_left,
    assert_needed,
    changed,
    experts,
    function_of,
    name_of,
    norm,
    operators,
    passes_of,
    recorded,
)
from support.values import numbers as random

from torch_moe_mps.models.graphs.passes import simplify

ops = torch.ops.moe_mps


def gate(x, r):
    """Gemma 4's router."""
    logits = torch.nn.functional.linear(norm(x[0], None) * NORM * 0.125, ROUTER)
    weights, ids = torch.topk(torch.softmax(logits, -1), K)
    weights /= weights.sum(-1, keepdim=True)
    return experts(x[0], ids, weights * SCALES[ids])


def gate_that_scales_otherwise(x, r):
    logits = torch.nn.functional.linear(norm(x[0], None) * NORM * 0.125, ROUTER)
    weights, ids = torch.topk(torch.softmax(logits, -1), K)
    weights = weights / weights.sum(-1, keepdim=True)
    return experts(x[0], ids, weights + SCALES[ids])


def gate_of_changed_scores(x, r):
    logits = torch.nn.functional.linear(norm(x[0], None) * NORM * 0.125, ROUTER)
    weights, ids = torch.topk(changed(torch.softmax(logits, -1)), K)
    weights /= weights.sum(-1, keepdim=True)
    return experts(x[0], ids, weights * SCALES[ids])


CASES: dict[Callable | str, dict[str, int]] = {
    gate: {"mul": 1, "moe_gate": 1, "_moe_experts": 1},
}


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_what_is_left(case):
    assert_left(CASES[case], function_of(case, **globals()), *TOKEN, without=NO_CHAINS)


@pytest.mark.parametrize("function", [gate_that_scales_otherwise, gate_of_changed_scores])
def test_a_gate_of_another_formula_stays(function):
    graph = recorded(function, random(1, 1, H), random(1, 1, H))
    simplify(graph)
    assert operators(graph)["moe_gate"] == 0 and operators(graph)["topk"] == 1


@pytest.mark.parametrize("left_out", passes_of("gemma4"), ids=name_of)
def test_each_pass_is_needed(left_out):
    """Without it, a pattern above is not found."""
    assert_needed(left_out, ((function_of(case, **globals()), TOKEN, left) for case, left in CASES.items()))


NAME = "gemma4"


def test_a_checkpoint_loads_and_its_tokens_are_those_of_eager_code(tmp_path):
    families.check_tokens(NAME, tmp_path)


@pytest.mark.sweep
def test_every_call(tmp_path):
    families.check_every_call(NAME, tmp_path)


@pytest.mark.sweep
def test_bfloat16_logits():
    families.check_bfloat16(NAME)


@pytest.mark.usefixtures("captured")
def test_launches_of_a_layer(simulated):
    families.check_launches(
        simulated, NAME, {"sliding": 15, "full": 14, "outside": 3}, {"sliding": 38, "full": 38}
    )
