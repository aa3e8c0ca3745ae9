"""GGUF's formats: embeddings, what has no rows, and down projections of another format."""

import pytest
import torch
from support.oracles_experts import group_of
from support.oracles_operators import checked
from support.quantized_layers import (
    ALWAYS_OF_GGUF,
    GGUF_FORMATS,
    check_layer,
    dense,
    place,
    random_matrix,
)
from support.sweep import in_sweep
from support.values import DTYPES, EACH_DTYPE

from torch_moe_mps.ops._checks import dtype_name
from torch_moe_mps.ops.families.linear import embedding_quantized


def dtype_of(format):
    return DTYPES[GGUF_FORMATS.index(format) % 3]


@pytest.mark.parametrize("format", in_sweep(GGUF_FORMATS, ALWAYS_OF_GGUF))
def test_embeddings_are_the_values_in_float32(device, format):
    """Bit for bit: the oracle in float64 rounds to float32 once, and so does ggml."""
    columns = 3 * max(group_of(format), 32)
    weight = random_matrix(19, columns, format, torch.float32, 3)
    ids = torch.tensor([[18, 0, 3], [-1, 19, 7]])
    out = embedding_quantized(
        ids.to(device), *place(weight, device), format=format, dtype=torch.float32
    ).cpu()
    values = torch.from_numpy(dense(weight, format)).float()
    inside = (ids >= 0) & (ids < 19)
    assert torch.equal(out[inside], values[ids[inside]]) and not out[~inside].any()
    dtype = dtype_of(format)
    checked("embedding_quantized", ids.to(device), *place(weight, device), format, dtype_name(dtype))


def test_no_rows(device):
    for format in GGUF_FORMATS:
        columns = max(group_of(format), 32)
        weight, none = (
            random_matrix(3, columns, format, torch.float32, 3),
            torch.empty(2, 0, dtype=torch.int64),
        )
        checked("embedding_quantized", none.to(device), *place(weight, device), format, "float32")
        checked("linear_quantized", torch.empty(0, columns).to(device), *place(weight, device), format)
        weight = tuple(part if part is None else part[:0] for part in weight)
        checked("linear_quantized", torch.ones(2, columns).to(device), *place(weight, device), format)


@pytest.mark.parametrize("dtype", EACH_DTYPE)
@pytest.mark.parametrize(
    "formats",
    in_sweep(
        [("q4_k", "q6_k"), ("q4_k", "affine4_64"), ("q6_k", "affine4_64")],
        [("q4_k", "q6_k"), ("q4_k", "affine4_64")],
    ),
    ids="-".join,
)
def test_scales_need_not_be_those_of_the_activations(device, formats, dtype):
    """A down projection of another type, and of one of MLX's."""
    gate_up, down = formats
    for tokens in (1, 37):
        check_layer(device, (tokens, 2, 3, 256, 256), gate_up, dtype, tokens, down_format=down)
