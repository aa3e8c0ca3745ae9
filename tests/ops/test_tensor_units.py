"""Experts and linear layers on tensor units, against the float64 oracle, in several layouts of the units.

In the simulator the seed of the schedule draws which thread has which element: each seed is another layout.
"""

import sys

import pytest
import torch
from support.expert_layers import ACTIVATIONS, check_experts, ids_of_counts, layer
from support.oracles import exact
from support.oracles_experts import assert_close, group_of
from support.oracles_experts import moe_experts as expected_experts
from support.oracles_operators import checked
from support.quantized_layers import (
    EVERY_FORMAT,
    check_layer,
    check_linear,
    check_mlp,
    each,
    place,
    random_quantized,
)
from support.sweep import in_sweep
from support.values import random

from torch_moe_mps.ops.families.experts import _moe_experts, expert_mm

DTYPES = (torch.float16, torch.bfloat16)
FORMAT = "affine4_64"
LAYOUTS = range(6)
# Pairs of each expert, for tiles of at most 32 and of at most 64: full ones, and some of at most 16 pairs,
# which the units multiply at a time.
SMALL_TILES, LARGE_TILES = (5, 0, 43), (17, 3, 0, 160, 140)

if sys.platform == "darwin" and "macOS" in torch.ops.moe_mps._why_no_tensor_units():
    pytest.skip("tensor units need macOS 26", allow_module_level=True)


@pytest.fixture
def layout(request):
    """Multiplies every matrix with enough pairs on tensor units. In the simulator a test must have some such
    products and no other; called with a number, it changes the layout of the units."""
    simulated = None if sys.platform == "darwin" else request.getfixturevalue("simulated")
    torch.ops.moe_mps._set_tensor_units("1")
    if simulated is None:
        yield lambda number: None
    else:
        with simulated.trace() as commands:
            yield simulated.set_schedule
        kernels = {line.split()[0] for line in commands if line.startswith(("gemm", "linear"))}
        assert kernels and not {name for name in kernels if "_tensor_" not in name}
    torch.ops.moe_mps._set_tensor_units("auto")


@pytest.mark.parametrize("format", each(EVERY_FORMAT))
def test_every_format(layout, format):
    """Each with one dtype; the others in the sweep. Inputs of several steps, the last one not full."""
    number = EVERY_FORMAT.index(format)
    dtype, group = DTYPES[number % 2], group_of(format)
    layout(number)
    ids = ids_of_counts(SMALL_TILES, 2, number)
    shape = (*ids.shape, 3, 3 * max(group, 32), max(group, 96) // group * group)
    check_layer("mps", shape, format, dtype, 0, ids=ids)
    check_linear("mps", (18, 2 * max(group, 32), 69), format, dtype, 1, bias=True)


def test_tiles_of_a_gpu_that_tokens_fill(layout):
    torch.ops.moe_mps._plan_for(1)
    try:
        layout(71)
        check_linear("mps", (71, 160, 200), "mxfp4", torch.float16, 0, bias=True)
        check_mlp("mps", (71, 128, 64), FORMAT, torch.bfloat16, 1)
    finally:
        torch.ops.moe_mps._plan_for(0)


@pytest.mark.sweep
@pytest.mark.parametrize("format", each(EVERY_FORMAT))
def test_sweep(layout, format):
    """Each with the other dtype than above, in one layout after the other."""
    number = (EVERY_FORMAT.index(format) + 1) % len(LAYOUTS)
    dtype = DTYPES[number % 2]
    layout(number)
    group = max(group_of(format), 32)
    for i, counts in enumerate((SMALL_TILES, LARGE_TILES)):
        ids = ids_of_counts(counts, 1 + i, number)
        check_layer(
            "mps", (*ids.shape, len(counts), 3 * group, (2 + i) * group), format, dtype, number, ids=ids
        )
    check_mlp("mps", (16 + 13 * number, 2 * group, group), format, dtype, number)


@pytest.mark.parametrize("number", LAYOUTS)
def test_every_layout(layout, number):
    """Tiles of all sizes; outputs that fill blocks of rows, are one more, and are fewer."""
    layout(number)
    dtype = DTYPES[number % 2]
    ids = ids_of_counts(LARGE_TILES, 2, number)
    check_layer("mps", (*ids.shape, 5, 64, 64), FORMAT, dtype, number, ids=ids)
    for tokens, rows in ((16, 64), (33, 65), (64, 1)):
        check_linear("mps", (tokens, 128, rows), FORMAT, dtype, number)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", in_sweep(DTYPES, [torch.bfloat16]))
def test_dense(layout, dtype, transposed):
    """Rows of any length, so that nothing is aligned to 16 bytes; a single input; tiles of both sizes."""
    for number, shape in enumerate(
        ((67, 1, 4, 65, 33), (40, 2, 3, 20, 7), (33, 1, 2, 1, 1), (150, 2, 4, 72, 65))
    ):
        layout(number)
        check_experts("mps", layer(*shape, dtype, number), transposed=transposed)


@pytest.mark.parametrize("dtype", in_sweep(DTYPES, [torch.bfloat16]))
def test_activations(layout, dtype):
    """Each gated in both orders of the rows, and alone."""
    for number, options in enumerate(ACTIVATIONS):
        layout(number)
        shape = (40, 2, 3, 32, 16 + number)
        bias = {"gate_up_bias": random((3, 2 * shape[4]), dtype, 90 + number)}
        check_experts("mps", layer(*shape, dtype, number), **options)
        check_experts("mps", layer(*shape, dtype, number), **options, **bias, interleaved=True)
        if "limit" not in options and options["activation"] != "swiglu_oai":
            check_experts("mps", layer(*shape, dtype, number, gated=False), **options, gated=False)


@pytest.mark.parametrize("dtype", in_sweep(DTYPES, [torch.bfloat16]))
def test_everything_around_the_experts(layout, dtype):
    arguments, residual = layer(50, 3, 4, 36, 20, dtype), random((50, 36), dtype, 21)
    biases = {"gate_up_bias": random((4, 40), torch.float32, 23), "down_bias": random((4, 36), dtype, 24)}
    shared = {"shared_out": random((50, 36), dtype, 20), "shared_gate": random((50, 1), dtype, 22)}
    check_experts("mps", arguments, **biases, residual=residual)
    check_experts(
        "mps",
        arguments,
        **biases,
        **shared,
        residual=residual,
        gate_is_logit=True,
        interleaved=True,
        transposed=True,
    )
    check_mlp("mps", (37, 64, 32), "affine4_32", dtype, 3, residual=random((37, 64), dtype, 25))


def test_two_formats(layout):
    for number, down_format in enumerate(("affine6_64", "mxfp4")):
        check_layer("mps", (40, 2, 3, 128, 64), FORMAT, DTYPES[number], number, down_format=down_format)


def test_weights_with_swapped_dimensions_in_memory(layout):
    """Only one of the two matrices has its inputs first."""
    x, weights, ids, gate_up, down = (t.to("mps") for t in layer(40, 2, 4, 64, 32, torch.float16))
    checked("_moe_experts", x, weights, ids, gate_up.mT.contiguous().mT, down)


@pytest.mark.parametrize("dtype", in_sweep(DTYPES, [torch.bfloat16]))
def test_pairs_without_an_expert(layout, dtype):
    """They give zeros, and their rows of x reach no other pair: here these are NaN, as unused experts are."""
    ids = ids_of_counts((3, 0, 62, 0), 1, 0)
    ids = torch.cat([ids, torch.full((7, 1), -1, dtype=torch.int32), ids[:9]])
    weight = random((4, 70, 40), dtype, 1)
    weight[[1, 3]] = torch.nan
    quantised = random_quantized(4, 70, 64, FORMAT, dtype, 2)
    for operator, width, matrix in (
        ("expert_mm", 40, [weight.to("mps")]),
        ("expert_qmm", 64, place(quantised, "mps")),
    ):
        x = torch.where(ids < 0, torch.nan, random((len(ids), width), dtype, 3))
        format = (FORMAT,) if operator == "expert_qmm" else ()
        out = checked(operator, x.to("mps"), ids.to("mps"), *matrix, *format).cpu()
        assert out.isfinite().all() and not out[ids[:, 0] < 0].any()


def test_nan_and_infinity_stay_with_their_token(layout):
    arguments = list(layer(40, 2, 4, 32, 16, torch.bfloat16))
    clean = expected_experts(arguments[0], *(exact(t) for t in arguments[3:]), *arguments[2:0:-1], {})
    arguments[0][0, 3], arguments[0][1, 5] = torch.nan, torch.inf
    out = _moe_experts(*(tensor.to("mps") for tensor in arguments))
    assert out[0].isnan().all() and not out[1].isfinite().any()
    assert_close(out[2:], type(clean)(*(part[2:] for part in clean)))


def test_sums_are_not_in_16_bit(layout):
    """4096 halves of the smallest step that 1 has in bfloat16: summed in bfloat16 they would vanish."""
    x = torch.full((16, 4097), 2.0**-9, dtype=torch.bfloat16)
    x[:, 0] = 1.0
    weight, ids = torch.ones(1, 3, 4097, dtype=torch.bfloat16), torch.zeros(16, 1, dtype=torch.int32)
    assert (expert_mm(x.to("mps"), ids.to("mps"), weight.to("mps")) == 9.0).all()
