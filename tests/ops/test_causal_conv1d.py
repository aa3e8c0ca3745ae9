"""The causal convolution, for prompts and single tokens."""

import torch
from support.ops.pending import Steps
from support.values import numbers

from torch_moe_mps.ops.families.causal_conv1d import causal_conv1d_update_


def test_positions_that_are_pending(device):
    x, state, weight = (
        numbers(2, 4, 4, 70).to(device),
        numbers(2, 70, 4).to(device),
        numbers(70, 4).to(device),
    )

    def call(states, step, rows, tokens_of_step, **pending):
        taken = slice(0, tokens_of_step) if isinstance(tokens_of_step, int) else tokens_of_step
        return causal_conv1d_update_(x[rows, step, taken], *states, weight, **pending)

    pending = torch.full((2, 70, 8), float("nan"), device=device)
    Steps(device).check([state], pending, call, tolerance=1e-6)  # torch sums windows of many tokens otherwise


def test_a_call_of_no_tokens_takes_in_those_that_are_pending(device):
    x, state, weight = numbers(1, 3, 6).to(device), numbers(1, 6, 4).to(device), numbers(6, 4).to(device)
    pending, right = torch.zeros(1, 6, 8, device=device), state.clone()
    two, none = (torch.tensor([[n]], dtype=torch.int32, device=device) for n in (2, 0))
    causal_conv1d_update_(x[:, :2], right, weight)
    causal_conv1d_update_(x, state, weight, pending_=pending, counts=none, keep=True)
    out = causal_conv1d_update_(x[:, :0], state, weight, pending_=pending, counts=two)
    assert out.shape == (1, 0, 6) and torch.equal(state, right)
