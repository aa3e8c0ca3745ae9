"""heads_mm and heads_quantized against the float64 oracle."""

import pytest
import torch
from support.oracles_experts import group_of
from support.oracles_operators import checked
from support.quantized_layers import ALL_FORMATS, each, random_quantized
from support.values import DTYPES, numbers

# B, T, Hq, rows, columns, tail: one of everything, odd sizes, latent attention's, no tokens, no rows.
SHAPES = (
    (1, 1, 1, 1, 1, 1),
    (1, 1, 3, 192, 512, 64),
    (2, 3, 2, 33, 127, 6),
    (1, 5, 4, 40, 260, 0),
    (3, 1, 2, 7, 64, 10),
    (2, 0, 2, 8, 16, 4),
    (1, 2, 2, 0, 16, 4),
)


def of_heads(rows, columns, heads, dtype, device, seed=0):
    """The rows of each head among others of a matrix, as latent attention has them."""
    matrix = numbers(heads * (rows + 5), columns, dtype=dtype, seed=seed, scale=max(columns, 1) ** -0.5)
    return matrix.to(device).view(heads, rows + 5, columns)[:, 5:]


@pytest.mark.parametrize("dtype", DTYPES)
def test_products(device, dtype):
    for i, (batch, tokens, heads, rows, columns, tail) in enumerate(SHAPES):
        weight = of_heads(rows, columns, heads, dtype, device, i)
        checked("heads_mm", numbers(batch, tokens, heads, columns, dtype=dtype).to(device), weight)
        x = numbers(batch, tokens, heads, rows, dtype=dtype).to(device)
        behind = numbers(batch, tokens, heads, tail, dtype=dtype, seed=1).to(device)
        checked("heads_mm", x, weight, transposed=True, tail=behind)
        checked("heads_mm", x, weight.contiguous(), transposed=True)


def test_strides(device):
    """Parts of a query whose heads come first, and a result whose tokens do."""
    query = numbers(2, 3, 4, 24, dtype=torch.bfloat16).to(device).transpose(1, 2)  # [B, T, Hq, D]
    weight = of_heads(16, 40, 3, torch.bfloat16, device)
    x, tail = query[..., :16], query[..., 16:]
    checked("heads_mm", x, weight, transposed=True, tail=tail)
    checked("heads_mm", x[:, :1].expand(-1, 5, -1, -1), weight, transposed=True)
    out = numbers(2, 4, 3, 40, dtype=torch.bfloat16).to(device)
    checked("heads_mm", out, weight)
    checked("heads_mm", out.float(), weight)
    checked("heads_mm", out[:, 1:], weight[:, ::2])
    checked("heads_mm", numbers(40, 3, 4, 2).to(device).permute(3, 2, 1, 0), weight.float())


def test_what_is_not_finite_stays_in_its_head(device):
    x, weight = numbers(1, 2, 3, 16).to(device), numbers(3, 16, 32).to(device)
    x[0, 1, 2, 3] = torch.nan
    out = torch.ops.moe_mps.heads_mm(x, weight, transposed=True)
    assert out[0, 1, 2].isnan().all() and not out[0, 0].isnan().any() and not out[0, 1, :2].isnan().any()


@pytest.mark.parametrize("form", each(ALL_FORMATS, turn=2))
def test_formats(device, form):
    """Rows of each head among others of a matrix; one token and several, both ways."""
    columns, rows, heads = 3 * group_of(form), 10, 3
    dtype = DTYPES[ALL_FORMATS.index(form) % 3]  # whose libraries other tests need, too
    whole = random_quantized(1, heads * (rows + 3), columns, form, dtype, 0)
    parts = [None if t is None else t[0].to(device).view(heads, rows + 3, -1)[:, 3:] for t in whole]
    for tokens in (1, 3):
        x = numbers(2, tokens, heads, rows, dtype=dtype).to(device)
        tail = numbers(2, tokens, heads, 6, dtype=dtype).to(device)
        checked("heads_quantized", x, *parts, form, transposed=True, tail=tail)
        x = numbers(2, tokens, heads, columns).to(device)
        checked("heads_quantized", x, *parts, form, dtype=dtype)
        checked("heads_quantized", x.to(dtype), *parts, form)


def test_matrices_without_rows(device):
    """With gaps between their words, where there are none."""
    for form in ("affine4_64", "mxfp8", "q4_k", "iq1_m"):
        columns = max(group_of(form), 256)
        whole = random_quantized(1, 1, columns, form, torch.float32, 0)
        empty = [t if t is None else t.new_empty(2, 0, 2 * t.shape[-1])[..., ::2].to(device) for t in whole]
        checked("heads_quantized", numbers(1, 1, 2, columns).to(device), *empty, form)


def test_scales_of_another_dtype(device):
    """And rows that do not follow each other: right, from copies."""
    parts = [t.to(device) for t in random_quantized(2, 12, 64, "affine4_32", torch.float32, 0)]
    x = numbers(1, 1, 2, 6, dtype=torch.bfloat16).to(device)
    for transposed in (False, True):
        x = numbers(1, 1, 2, 6 if transposed else 64, dtype=torch.bfloat16).to(device)
        checked("heads_quantized", x, *(t[:, ::2] for t in parts), "affine4_32", transposed=transposed)
