"""pool_window_ against the float64 oracle."""

import pytest
import torch
from support.values import numbers

from torch_moe_mps.ops.families.pooling import _pool_window_


def arguments(device, dtype, batch, tokens, width, rate, overlap, position, turning, room=2):
    columns = width * (2 if overlap else 1)
    shape = batch, (position + tokens) // rate + room, width
    return {
        "kv": numbers(batch, tokens, columns, dtype=dtype).to(device),
        "gate": numbers(batch, tokens, columns, dtype=dtype, seed=1).to(device),
        "position_bias": numbers(rate, columns, seed=2).to(device),
        "state_": numbers(batch, rate * columns // width, 2, columns, dtype=dtype, seed=3).to(device),
        "entries_": numbers(*shape, dtype=dtype, seed=4).to(device),
        "position": position,
        "norm_weight": numbers(width, seed=5).to(device),
        "inv_freq": numbers(turning, seed=6).abs().to(device),
        "rotary_scale": 0.75,
    }


@pytest.mark.parametrize("overlap", [False, True])
def test_any_cut_gives_the_same_bits(device, overlap):
    """And what the state holds before the first token has no part in it."""
    for dtype, width, rate in ((torch.float32, 64, 4), (torch.bfloat16, 36, 4), (torch.float16, 36, 40)):
        whole = arguments(device, dtype, 2, 40, width, rate, overlap, 0, 8)
        _pool_window_(**whole)
        for cuts in ((1,) * 40, (3, 1, 4, 9, 23), (4, 36), (17, 0, 22, 1), (39, 1)):
            state = torch.full_like(whole["state_"], torch.nan)
            given = whole | {"state_": state, "entries_": torch.zeros_like(whole["entries_"])}
            for tokens, begin in zip(cuts, torch.tensor((0, *cuts)).cumsum(0).tolist(), strict=False):
                parts = {name: whole[name][:, begin : begin + tokens] for name in ("kv", "gate")}
                _pool_window_(**given | parts | {"position": begin})
            closed = 40 // rate
            assert torch.equal(given["entries_"][:, :closed], whole["entries_"][:, :closed])
            assert torch.equal(state[:, :40], whole["state_"][:, :40])


def test_what_is_not_finite_stays_in_its_windows(device):
    given = arguments(device, torch.float32, 1, 16, 8, 4, True, 0, 2)
    given["gate"][:, 5, 3] = torch.nan
    _pool_window_(**given)
    assert given["entries_"].isnan().any(-1).tolist() == [[False, False, True, False, False, False]]


def test_one_launch_whatever_the_position(simulated):
    for position in (0, 3, 7, 1000):
        with simulated.trace() as commands:
            _pool_window_(**arguments("mps", torch.bfloat16, 1, 1, 128, 4, True, position, 8))
        assert [line.split()[:3] for line in commands if " grid " in line] == [
            ["pool_windows_bf16", "grid", "1x1x1"]
        ]
