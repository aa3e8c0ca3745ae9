"""_heads_mm and _heads_quantized against the float64 oracle."""

import torch
from support.oracles_experts import group_of
from support.oracles_operators import checked
from support.quantized_layers import random_quantized
from support.values import numbers


def test_what_is_not_finite_stays_in_its_head(device):
    x, weight = numbers(1, 2, 3, 16).to(device), numbers(3, 16, 32).to(device)
    x[0, 1, 2, 3] = torch.nan
    out = torch.ops.moe_mps._heads_mm(x, weight, transposed=True)
    assert out[0, 1, 2].isnan().all() and not out[0, 0].isnan().any() and not out[0, 1, :2].isnan().any()


def test_matrices_without_rows(device):
    """With gaps between their words, where there are none."""
    for form in ("affine4_64", "mxfp8", "q4_k", "iq1_m"):
        columns = max(group_of(form), 256)
        whole = random_quantized(1, 1, columns, form, torch.float32, 0)
        empty = [t if t is None else t.new_empty(2, 0, 2 * t.shape[-1])[..., ::2].to(device) for t in whole]
        checked("_heads_quantized", numbers(1, 1, 2, columns).to(device), *empty, form)


def test_scales_of_another_dtype(device):
    """And rows that do not follow each other: right, from copies."""
    parts = [t.to(device) for t in random_quantized(2, 12, 64, "affine4_32", torch.float32, 0)]
    x = numbers(1, 1, 2, 6, dtype=torch.bfloat16).to(device)
    for transposed in (False, True):
        x = numbers(1, 1, 2, 6 if transposed else 64, dtype=torch.bfloat16).to(device)
        checked("_heads_quantized", x, *(t[:, ::2] for t in parts), "affine4_32", transposed=transposed)
