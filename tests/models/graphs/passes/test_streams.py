"""The pass that joins the streams of hyper-connections: on its pattern, and with one thing changed."""

from collections.abc import Callable

import pytest
import torch
from support.graphs import NO_CHAINS, TOKEN, H, assert_left, assert_needed, function_of, name_of, passes_of
from support.values import numbers as random

ops = torch.ops.moe_mps


LARGE, MIXING = random(514, H) / 8, (random(24, H) / 8, random(24), random(3))


def mixed_streams(x, r, turned=True):
    """As DeepSeek-V4 computes them."""
    streams = x.view(1, 1, 4, -1)
    _, post, comb, _ = ops._hyper_connection(streams, *MIXING)
    mixed = torch.matmul(comb.transpose(-1, -2) if turned else comb, streams)
    return post.unsqueeze(-1) * r[..., : H // 4].unsqueeze(-2) + mixed


def streams_between_layers(x, r):
    streams = mixed_streams(x, r)
    return ops._hyper_connection(streams, *MIXING)[0], streams


def streams_read_before_the_next_layer(x, r):
    streams = mixed_streams(x, r)
    return streams * 2, ops._hyper_connection(streams, *MIXING)[0]


CASES: dict[Callable | str, dict[str, int]] = {
    streams_between_layers: {"_hyper_connection": 2},
    streams_read_before_the_next_layer: {"_hyper_connection": 2, "_hyper_update": 1, "mul": 1},
}


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_what_is_left(case):
    assert_left(CASES[case], function_of(case, **globals()), *TOKEN, without=NO_CHAINS)


@pytest.mark.parametrize("left_out", passes_of("streams"), ids=name_of)
def test_each_pass_is_needed(left_out):
    """Without it, a pattern above is not found."""
    assert_needed(left_out, ((function_of(case, **globals()), TOKEN, left) for case, left in CASES.items()))
