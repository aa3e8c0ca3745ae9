"""moe_gate: norm, matmul and choice of experts in one operator."""

import pytest
import torch
from support.oracles_operators import checked
from support.routing import gate_arguments

from torch_moe_mps.ops.families.routing import moe_gate

NAN, INF = float("nan"), float("inf")


def check(arguments, top_k, renormalize, device):
    checked("moe_gate", *(tensor.to(device) for tensor in arguments), top_k, 1e-6, renormalize)


def test_gate_of_gemma4(device):
    """The shape of the source kernel, and rows longer than a threadgroup's memory holds in float32."""
    check(gate_arguments(3, 2816, 128, torch.bfloat16, torch.float32, 0), 8, False, device)
    check(gate_arguments(2, 16384, 16, torch.bfloat16, torch.bfloat16, 5), 2, True, device)
    # The row is staged again for the experts behind the first 128.
    check(gate_arguments(2, 8200, 130, torch.float16, torch.float32, 6), 4, False, device)


def test_gate_for_many_tokens(device):
    """4 and 16 tokens share the router's rows; rows longer than what is staged of them at once."""
    for dtype in (torch.bfloat16, torch.float32):
        check(gate_arguments(70, 96, 32, dtype, torch.bfloat16, 3), 4, True, device)
        check(gate_arguments(66, 1100, 9, dtype, torch.float32, 4), 2, True, device)
        check(gate_arguments(1100, 260, 5, dtype, torch.float32, 5), 2, False, device)
        check(gate_arguments(1100, 33, 6, dtype, torch.bfloat16, 6), 3, True, device)


def test_gate_of_degenerate_rows(device):
    hidden, router_weight, norm_weight, _ = gate_arguments(3, 64, 16, torch.float32, torch.float32, 1)
    hidden[0] = NAN
    hidden[1] = 0.0
    hidden[2, 3] = INF
    scale = torch.ones(16)
    for renormalize in (True, False):
        tensors = (tensor.to(device) for tensor in (hidden, router_weight, norm_weight, scale))
        weights, ids = moe_gate(*tensors, 4, norm_eps=1e-6, renormalize_after_scale=renormalize)
        assert ids[:2].tolist() == [[0, 1, 2, 3]] * 2
        assert weights[:2].tolist() == [[0.25] * 4] * 2
        assert torch.isfinite(weights).all() and len(set(ids[2].tolist())) == 4


@pytest.mark.parametrize("bad", [NAN, -INF])
def test_gate_with_a_scale_that_is_no_number(device, bad):
    """It reaches every weight of its tokens through the sum, as the formula says."""
    hidden, router_weight, norm_weight, _ = gate_arguments(2, 64, 16, torch.float32, torch.float32, 1)
    scale = torch.ones(16)
    args = [tensor.to(device) for tensor in (hidden, router_weight, norm_weight)]
    _, ids = moe_gate(*args, scale.to(device), 4, norm_eps=1e-6, renormalize_after_scale=True)
    scale[ids[0, 2].item()] = bad
    weights, _ = moe_gate(*args, scale.to(device), 4, norm_eps=1e-6, renormalize_after_scale=True)
    assert weights[0, 2].isnan() and (weights[0].isnan() | (weights[0] == 0.0)).all()
    assert weights[0].isnan().all() == (bad != -INF)


def test_gate_whose_scales_sum_to_zero(device):
    tensors = (
        torch.ones(1, 32),
        torch.zeros(8, 32),
        torch.ones(32),
        torch.tensor([1.0, -1.0, 0, 0, 0, 0, 0, 0]),
    )
    weights, ids = moe_gate(
        *(tensor.to(device) for tensor in tensors), 2, norm_eps=1e-6, renormalize_after_scale=True
    )
    assert ids.tolist() == [[0, 1]] and weights.tolist() == [[0.5, -0.5]]
