"""The causal convolution, for prompts and single tokens."""

import pytest
import torch
from support.ops.pending import Steps
from support.oracles import FLOAT32_EPS, exact, spacing
from support.values import EACH_DTYPE, numbers

from torch_moe_mps.ops.families.causal_conv1d import causal_conv1d_update_


@pytest.mark.parametrize("dtype", EACH_DTYPE)
def test_the_convolution_of_qwen3_next(device, dtype):
    from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_update as model

    x, state = numbers(2, 48, 1, dtype=dtype), numbers(2, 48, 4, dtype=dtype)
    weight = numbers(48, 4, dtype=dtype)
    ours = state.clone().to(device)
    expected = model(x, state, weight, None, "silu")
    result = causal_conv1d_update_(x.mT.to(device), ours, weight.to(device)).mT
    allowed = 2 * spacing(exact(expected), dtype) + 16 * FLOAT32_EPS + (dtype != torch.float32) * 0.02
    assert (abs(exact(result) - exact(expected)) <= allowed).all()
    assert torch.equal(ours.cpu(), state)


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
