"""Qwen4: an indexer that chooses pools of keys, tables of new tokens, means over streams."""

from collections.abc import Callable

import pytest
import torch
from support import families
from support.graphs import (
    LINEAR,
    NO_CHAINS,
    TOKEN,
    H,
    assert_left,
    assert_needed,
    function_of,
    linear,
    name_of,
    passes_of,
)
from support.values import numbers as random
from torch import Tensor

from torch_moe_mps.models.modules.rules.rotary import rotary_tables

ops = torch.ops.moe_mps


POSITIONS = torch.arange(27).view(3, 1, 9)  # of seven tokens before, and of two new ones


FREQUENCIES, AXES = random(4), torch.eye(3)[1:, [0, 1, 2, 0]]


def tables() -> tuple[Tensor, Tensor]:
    return rotary_tables(POSITIONS, FREQUENCIES, 1.0, torch.float32, "halves", AXES)


def tables_of_new_tokens(x, r):
    cos, sin = tables()
    return cos[:, -2:] + sin[:, -2:]


def tables_of_new_and_some_other_tokens(x, r):
    cos, sin = tables()
    return cos[:, -2:] + sin[:, -2:], cos[:, 1:8:3] + sin[:, 1:8:3], sin[:, -3:-1]


def tables_of_new_and_one_of_all_tokens(x, r):
    cos, sin = tables()
    return cos[:, -2:] + sin[:, -2:], sin


def columns_of_tables(x, r):
    cos, sin = tables()
    return cos[..., :2], sin[..., :2]


def tables_that_change(x, r):
    cos, sin = tables()
    shown = cos[:, -2:]
    cos[:, -1:].mul_(2)
    return shown, sin[:, -2:]


MEAN = {"sigmoid": 1, "mul": 1, "mean": 1}


CASES: dict[Callable | str, dict[str, int]] = {
    tables_of_new_tokens: {"_pointwise": 2, "add": 1},
    tables_of_new_and_some_other_tokens: {"_pointwise": 5, "add": 2},
    tables_of_new_and_one_of_all_tokens: {"_pointwise": 2, "add": 1},
    columns_of_tables: {"_pointwise": 2},
    tables_that_change: {"_pointwise": 2, "mul_": 1},
}


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_what_is_left(case):
    assert_left(CASES[case], function_of(case, **globals()), *TOKEN, without=NO_CHAINS)


def test_gates_of_streams_of_two_tokens_stay():
    """Their operator would read the weights for each."""

    def function(x, r):
        return (torch.sigmoid(linear(x)).view(1, 2, 4, 16) * r).mean(-2)

    assert_left(LINEAR | MEAN, function, random(1, 2, H), random(1, 2, 4, 16), without=NO_CHAINS)


@pytest.mark.parametrize("left_out", passes_of("qwen4_exp"), ids=name_of)
def test_each_pass_is_needed(left_out):
    """Without it, a pattern above is not found."""
    assert_needed(left_out, ((function_of(case, **globals()), TOKEN, left) for case, left in CASES.items()))


NAME = "qwen4_exp"


@pytest.mark.slow("a model of streams or indexers is saved, loaded and answers")
def test_a_checkpoint_loads_and_its_tokens_are_those_of_eager_code(tmp_path):
    families.check_tokens(NAME, tmp_path)


@pytest.mark.sweep
@pytest.mark.usefixtures("captured")
def test_launches_of_a_layer(simulated):
    families.check_launches(simulated, NAME, {"linear": 17, "indexed": 19})
