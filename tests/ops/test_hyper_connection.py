"""hyper_connection and _hyper_update against the float64 oracle."""

import torch
from support.oracles_operators import checked
from support.values import numbers


def parameters(count, width, parts, device, dtype=torch.float32):
    rows = (count, 2 * count, 2 * count + count * count)[parts - 1]
    tensors = numbers(rows, count * width, scale=(count * width) ** -0.5), numbers(rows), numbers(parts)
    return [tensor.to(dtype).to(device) for tensor in tensors]


def test_the_mixture_is_doubly_stochastic(device):
    streams = numbers(9, 4, 256, dtype=torch.float16).to(device)
    *_, comb, _ = torch.ops.moe_mps._hyper_connection(streams, *parameters(4, 256, 3, device))
    assert (comb > 0).all()
    assert (comb.sum(-1) - 1).abs().max() < 1e-3 and (comb.sum(-2) - 1).abs().max() < 1e-4


def test_extreme_logits(device):
    """Gates of 0 and 1, and rows of the mixture with one entry."""
    fn, base, scale = parameters(4, 64, 3, device)
    base = torch.tensor([-200.0, 200.0, 90.0, -90.0] * 6, device=device)
    x, post, comb, _ = checked("_hyper_connection", numbers(2, 4, 64).to(device), fn, base, scale)
    assert all(tensor.isfinite().all() for tensor in (x, post, comb))


def test_what_is_not_finite_stays_in_its_token(device):
    fn, base, scale = parameters(4, 64, 3, device)
    for tokens in (1, 3):
        streams = numbers(tokens + 1, 4, 64).to(device)
        streams[tokens, 1, 5] = torch.nan
        for result in torch.ops.moe_mps._hyper_connection(streams, fn, base, scale)[:3]:
            assert result[tokens].isnan().all() and not result[:tokens].isnan().any()
