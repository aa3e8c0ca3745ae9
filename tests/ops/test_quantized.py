"""expert_qmm and _moe_experts_quantized against the float64 oracle."""

import itertools

import pytest
import torch
from support.expert_layers import random_ids, to_device
from support.oracles import exact
from support.oracles_experts import assert_close, dequantise, group_of, numbers_of
from support.oracles_experts import expert_mm as expected_mm
from support.oracles_operators import checked
from support.quantized_layers import (
    FORMATS,
    OTHERS,
    check_layer,
    check_linear,
    dense,
    each,
    place,
    random_quantized,
)
from support.sweep import rows_in_sweep
from support.values import DTYPES, EACH_DTYPE, random

from torch_moe_mps._extension import setting
from torch_moe_mps.ops.families.experts import expert_mm
from torch_moe_mps.ops.families.linear import linear_quantized
from torch_moe_mps.ops.families.quantized import _moe_experts_quantized, expert_qmm


@pytest.mark.parametrize("dtype", EACH_DTYPE)
@pytest.mark.parametrize("down_format", ["affine6_64", "affine4_32", "mxfp4"])
def test_a_format_of_its_own_for_down(device, down_format, dtype):
    for i, tokens in enumerate((1, 4, 40)):
        check_layer(device, (tokens, 2, 3, 128, 64), "affine4_64", dtype, i, down_format=down_format)


@pytest.mark.parametrize("wide", ["gate_up", "down"])
@pytest.mark.parametrize("tokens", [1, 4, 40])
def test_scales_beyond_the_dtype_of_the_activations(device, tokens, wide):
    """One matrix has float32 scales that are no float16, which everything else is."""
    format, around = "affine4_64", {"activation": "relu", "gated": False}
    matrices = {
        name: random_quantized(3, 64, 64, format, torch.float16, seed)
        for seed, name in ((0, "gate_up"), (5, "down"))
    }
    packed, scales, zeros = matrices[wide]
    matrices[wide] = packed, scales.float() * 2.0**22, zeros.float() * 2.0**22
    x = random((tokens, 64), torch.float16, 8, 2.0**-12)
    ids, weights = random_ids(tokens, 2, 3, 9, torch.int32), torch.full((tokens, 2), 0.5)
    around["shared_out"], around["residual"] = (
        random((tokens, 64), torch.float16, i, 99.0) for i in (10, 11)
    )
    placed = [part for matrix in matrices.values() for part in place(matrix, device)]
    x, ids, weights = (tensor.to(device) for tensor in (x, ids, weights))
    checked("_moe_experts_quantized", x, weights, ids, *placed, format, **to_device(around, device))


@pytest.mark.parametrize("tokens", [1, 2, 40])
@pytest.mark.parametrize("format", each(FORMATS))
@pytest.mark.parametrize("dtype", EACH_DTYPE)
def test_infinite_input(device, format, tokens, dtype):
    """All outputs of its token become non-finite; other tokens are unaffected."""
    experts, rows, columns = 2, 33, 256
    weight = random_quantized(experts, rows, columns, format, dtype, 1)
    x, ids = random((tokens, columns), dtype, 2), random_ids(tokens, 2, experts, 3, torch.int32)
    x[0, 5] = torch.inf
    out = checked("expert_qmm", x.to(device), ids.to(device), *place(weight, device), format).cpu()
    touched = dense(weight, format)[ids[0].long(), :, 5] != 0
    assert not out[0][torch.as_tensor(touched)].isfinite().any()


@pytest.mark.parametrize("dtype", EACH_DTYPE)
@pytest.mark.parametrize("format", ["affine4_32", "mxfp4"])
def test_options(device, format, dtype):
    hidden, intermediate = 64, 32
    for tokens, experts in ((2, 4), (6, 9), (40, 4)):
        shape = (tokens, 2, experts, hidden, intermediate)
        biases = {
            "gate_up_bias": random((experts, 2 * intermediate), torch.float32, 11),
            "down_bias": random((experts, hidden), dtype, 12),
        }
        around = {
            "shared_gate": random((tokens, 1), dtype, 13),
            "shared_out": random((tokens, hidden), dtype, 14),
            "residual": random((tokens, hidden), dtype, 15),
        }
        oai = {"activation": "swiglu_oai", "interleaved": True}
        check_layer(device, shape, format, dtype, 20, **biases, **oai)
        check_layer(device, shape, format, dtype, 21, **biases, **around, gate_is_logit=True)
        check_layer(device, shape, format, dtype, 22, activation="gelu_tanh", **around)
        check_layer(device, shape, format, dtype, 23, activation="relu2", gated=False)
        check_layer(device, shape, format, dtype, 24, activation="silu_clamped", limit=0.5)


@pytest.mark.parametrize(("format", "dtype"), [*zip(OTHERS, DTYPES, strict=True)])
def test_floats_with_float32_factors(device, format, dtype):
    """One token, a few and many; rows that fill no block, each with a factor of its own."""
    for tokens in (1, 6, 40):
        check_linear(device, (tokens, 384, 37), format, dtype, tokens, bias=True)
        check_layer(device, (tokens, 2, 3, 256, 128), format, dtype, tokens)


@pytest.mark.on("mps")
@pytest.mark.parametrize(
    ("format", "dtype"),
    rows_in_sweep([*zip(FORMATS, itertools.cycle(DTYPES))], [("affine4_64", torch.float16)]),
)
def test_kernels_that_only_the_tuner_takes(device, every_order, format, dtype):
    """One token, also of more experts than simdgroups, and prompts; rows that fill no block, and several
    steps of inputs; in every order of threads."""
    group, biases = group_of(format), {"down_bias": random((12, 4 * group_of(format)), dtype, 12)}
    ids = torch.tensor([[3, -1, 0, 11, 5, 7, 12, 1, 2, 9]], dtype=torch.int32)
    with setting("_take_variants", True, False):
        for _ in every_order():
            check_layer(device, (1, 10, 12, 4 * group, 3 * group), format, dtype, 0, ids=ids, **biases)
            check_layer(
                device, (1, 1, 12, group, 5 * group), format, dtype, 1, activation="relu", gated=False
            )
            check_layer(device, (50, 3, 3, 4 * group, 3 * group), format, dtype, 2, activation="gelu_tanh")
            check_linear(device, (1, 5 * group, 37), format, dtype, 3, bias=True)


@pytest.mark.parametrize("format", ["affine4_32", "mxfp4"])
def test_sentinels_contribute_and_read_nothing(device, format):
    """The scales of experts that no valid id names are NaN (0xFF in mxfp4)."""
    for tokens in (2, 40):
        gate_up = random_quantized(6, 64, 64, format, torch.float32, 0)
        down = random_quantized(6, 64, 32, format, torch.float32, 1)
        for weight in (gate_up, down):
            weight[1][3:] = 255 if format == "mxfp4" else torch.nan
        x, weights = random((tokens, 64), torch.float32, 2), torch.ones(tokens, 4)
        ids = random_ids(tokens, 4, 6, 3, torch.int64)
        ids[ids >= 3] += 2**32 - 3
        ids[-1] = torch.tensor([-1, 6, 2**40, -(2**31)])
        weights[ids >= 6] = torch.nan
        x, ids, weights = x.to(device), ids.to(device), weights.to(device)
        gate_up, down = place(gate_up, device), place(down, device)
        out = checked("_moe_experts_quantized", x, weights, ids, *gate_up, *down, format)
        slots = checked("expert_qmm", x, ids, *gate_up, format)
        assert (out[-1] == 0).all() and (slots[-1] == 0).all()


@pytest.mark.parametrize("format", [FORMATS[0], FORMATS[-1]])
def test_the_same_bits_every_time(device, every_order, format):
    for tokens, experts in ((1, 16), (6, 16), (6, 3), (40, 16)):
        gate_up = place(random_quantized(experts, 64, 64, format, torch.float32, 0), device)
        down = place(random_quantized(experts, 64, 32, format, torch.float32, 3), device)
        x, weights = random((tokens, 64), torch.float32, 6), random((tokens, 8), torch.float32, 7)
        ids = random_ids(tokens, 8, experts, 8, torch.int32)
        x, ids, weights = (tensor.to(device) for tensor in (x, ids, weights))
        first, *others = [
            _moe_experts_quantized(x, weights, ids, *gate_up, *down, format=format).cpu()
            for _ in every_order()
        ]
        assert all(torch.equal(other, first) for other in others)


@pytest.mark.parametrize("tokens", [1, 4, 40])
@pytest.mark.parametrize("format", [FORMATS[0], FORMATS[-1]])
@pytest.mark.parametrize(("experts", "intermediate"), [(0, 64), (3, 0)])
def test_no_experts_or_nothing_between_their_matrices(device, format, experts, intermediate, tokens):
    """What is left is the residual."""

    def empty(rows, columns):
        bits, group_size, mode = numbers_of(format)
        packed = torch.zeros(experts, rows, columns * bits // 32, dtype=torch.int32)
        dtype = torch.uint8 if mode == "mxfp4" else torch.float32
        scales = torch.zeros(experts, rows, columns // group_size, dtype=dtype)
        return place((packed.view(torch.uint32), scales, None if mode == "mxfp4" else scales), device)

    gate_up, down = empty(2 * intermediate, 64), empty(64, intermediate)
    x = random((tokens, 64), torch.float32, 0).to(device)
    ids = torch.tensor([[2, 7]] * tokens, dtype=torch.int32).to(device)
    weights = torch.ones(tokens, 2).to(device)
    out = _moe_experts_quantized(x, weights, ids, *gate_up, *down, format=format, residual=x)
    assert torch.equal(out.cpu(), x.cpu())
    assert not expert_qmm(x, ids, *gate_up, format=format).cpu().any()


def test_every_code_of_mxfp4(device):
    """16 codes with scales from the smallest to the largest, exactly: the sums have one term.

    252 is the largest of which float32 holds every code. x makes normal numbers of the products with 0, but
    on mps a weight below 2^-126, which is subnormal in float32, may count as zero.
    """
    codes = torch.arange(16, dtype=torch.int64)
    packed = torch.stack(
        [(codes[:8] << (4 * torch.arange(8))).sum(), (codes[8:] << (4 * torch.arange(8))).sum()]
    )
    packed = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32).repeat(2).view(1, 1, 4)
    for scale, one in ((0, 8.0), (1, 8.0), (2, 1.0), (100, 1.0), (127, 1.0), (200, 1.0), (252, 1.0)):
        scales = torch.full((1, 1, 1), scale, dtype=torch.uint8)
        values = dequantise(packed, scales, None, "mxfp4").ravel()
        subnormal = (abs(values) < 2.0**-126) & (device == "mps")
        weight = packed.to(device), scales.to(device), None
        for x in (torch.eye(32), torch.eye(64)[:, :32]):
            ids = torch.zeros(len(x), 1, dtype=torch.int32, device=device)
            out = expert_qmm((one * x).to(device), ids, *weight, format="mxfp4")
            found = exact(out).ravel()[:32]
            assert ((found == one * values) | (subnormal & (found == 0))).all() and not exact(out)[32:].any()


@pytest.mark.parametrize("dtype", EACH_DTYPE)
def test_weights_over_4_gib(device, dtype):
    """Only the pages of the expert that is read exist; its packed bytes start behind 2^32."""
    experts, rows, hidden, format = 2**13 + 2, 512, 2048, "affine4_64"
    words, groups = hidden // 8, hidden // 64
    packed = torch.empty(experts, rows, words, dtype=torch.int32, device=device)
    scales, zeros = (torch.empty(experts, rows, groups, dtype=dtype, device=device) for _ in range(2))
    assert (experts - 1) * rows * words * 4 > 2**32
    last = random_quantized(1, rows, hidden, format, dtype, 0)
    for whole, part in zip((packed, scales, zeros), last, strict=True):
        whole[-1:] = (part.view(torch.int32) if part.dtype == torch.uint32 else part).to(device)
    x, zero = random((1, hidden), dtype, 1), torch.zeros(1, 1, dtype=torch.int32)
    ids = torch.full((1, 1), experts - 1, dtype=torch.int32, device=device)
    expected = expected_mm(x, dense(last, format), zero, rounded_weight=True)
    assert_close(expert_qmm(x.to(device), ids, packed, scales, zeros, format=format), expected)


def test_a_matrix_of_more_than_kernels_count(simulated):
    """Bits of a matrix's scales in one format, elements of a dense one: neither is read wrongly."""
    rows, blocks = 2**20, 43
    parts = [
        torch.empty(rows, blocks * size, dtype=dtype, device="mps")
        for size, dtype in ((32, torch.int32), (12, torch.uint8), (2, torch.int16))
    ]
    x = torch.zeros(1, 256 * blocks, dtype=torch.float16, device="mps")
    with pytest.raises(
        RuntimeError, match=r"moe_mps: a packed matrix of shape \[1048576, 1376\] has 4328521728"
    ):
        linear_quantized(x, *parts, format="q4_k")
    ids = torch.zeros(1, 1, dtype=torch.int32, device="mps")
    weight = torch.empty(1, 2**16 + 1, 2**16, dtype=torch.float16, device="mps")
    with pytest.raises(
        RuntimeError, match=r"a matrix of shape \[1, 65537, 65536\] has 4295032832 elements, of which"
    ):
        expert_mm(x[:, :1].expand(1, 2**16), ids, weight)


def test_one_expert_is_dequantised_at_a_time():
    """On the CPU: dense, this stack would take 64 GiB."""
    weight = random_quantized(1, 1024, 1024, FORMATS[0], torch.float32, 0)
    packed, scales, zeros = (tensor.expand(2**14, -1, -1) for tensor in weight)
    x, ids = random((2, 1024), torch.float32, 1), torch.tensor([[3, 16000], [7, 3]])
    expected = expected_mm(x, dense(weight, FORMATS[0]), torch.zeros_like(ids), rounded_weight=True)
    assert_close(expert_qmm(x, ids, packed.view(torch.int32), scales, zeros, format=FORMATS[0]), expected)
