"""GGUF's formats in every operator: experts, linear layers, embeddings, from one token to prompts."""

import pytest
import torch
from support.oracles_experts import group_of
from support.oracles_operators import checked
from support.quantized_layers import (
    GGUF_FORMATS,
    check_layer,
    check_linear,
    check_mlp,
    dense,
    place,
    random_matrix,
)
from support.sweep import in_sweep
from support.values import DTYPES

from torch_moe_mps.ops.linear import embedding_quantized

# Each way in which scales and points are stored; the others in the sweep.
ALWAYS = ("q4_1", "q2_k", "q3_k", "q6_k", "iq4_xs", "tq2_0", "iq1_m", "iq2_xs", "iq3_s")
# Embeddings, linear layers and experts share how a format is read: embeddings have all of these.
OF_LINEARS, OF_EXPERTS = (in_sweep(GGUF_FORMATS, ALWAYS[turn::4]) for turn in (0, 2))


def dtype_of(format):
    return DTYPES[GGUF_FORMATS.index(format) % 3]


@pytest.mark.parametrize("format", OF_LINEARS)
def test_linear_layers(device, format):
    """Odd numbers of outputs; one row and the next ones, blocks that are not the first."""
    dtype, columns = dtype_of(format), 2 * max(group_of(format), 64)
    for i, tokens in enumerate((1, 3, 7, 33)):
        check_linear(device, (tokens, columns, 37), format, dtype, i, bias=i % 2 == 1, layout="offset")
    check_mlp(device, (1, columns, max(group_of(format), 32)), format, dtype, 5)


@pytest.mark.parametrize("format", OF_EXPERTS)
def test_experts(device, format):
    dtype, columns = dtype_of(format), max(group_of(format), 32)
    for i, tokens in enumerate((1, 5, 37)):
        check_layer(device, (tokens, 2, 3, columns, columns), format, dtype, i)


@pytest.mark.parametrize("format", in_sweep(GGUF_FORMATS, ALWAYS))
def test_embeddings_are_the_values_in_float32(device, format):
    """Bit for bit: the oracle in float64 rounds to float32 once, and so does ggml."""
    columns = 3 * max(group_of(format), 32)
    weight = random_matrix(19, columns, format, torch.float32, 3)
    ids = torch.tensor([[18, 0, 3], [-1, 19, 7]])
    out = embedding_quantized(ids.to(device), *place(weight, device), format, torch.float32).cpu()
    values = torch.from_numpy(dense(weight, format)).float()
    inside = (ids >= 0) & (ids < 19)
    assert torch.equal(out[inside], values[ids[inside]]) and not out[~inside].any()
    dtype = dtype_of(format)
    checked("embedding_quantized", ids.to(device), *place(weight, device), format, dtype)


def test_no_rows(device):
    for format in GGUF_FORMATS:
        columns = max(group_of(format), 32)
        weight, none = (
            random_matrix(3, columns, format, torch.float32, 3),
            torch.empty(2, 0, dtype=torch.int64),
        )
        checked("embedding_quantized", none.to(device), *place(weight, device), format, torch.float32)
        checked("linear_quantized", torch.empty(0, columns).to(device), *place(weight, device), None, format)
        weight = tuple(part if part is None else part[:0] for part in weight)
        checked("linear_quantized", torch.ones(2, columns).to(device), *place(weight, device), None, format)


def test_scales_need_not_be_those_of_the_activations(device):
    """A down projection of another type, and of one of MLX's."""
    for i, (gate_up, down) in enumerate((("q4_k", "q6_k"), ("q6_k", "affine4_64"))):
        for tokens in (1, 37):
            check_layer(device, (tokens, 2, 3, 256, 256), gate_up, torch.bfloat16, i, down_format=down)
