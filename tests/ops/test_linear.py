"""linear_quantized, _mlp_quantized and embedding_quantized against float64."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from support.operators import plans_for
from support.oracles_experts import group_of
from support.oracles_operators import checked, expected
from support.pinned import assert_pinned
from support.quantized_layers import check_linear, check_mlp, dense, place, random_matrix
from support.sweep import in_sweep
from support.values import DTYPES, EACH_DTYPE, random

from torch_moe_mps.ops import _decoded, _formats
from torch_moe_mps.ops._checks import dtype_name
from torch_moe_mps.ops.families.linear import _mlp_quantized, embedding_quantized, linear_quantized
from torch_moe_mps.quantization import quantize

IDS = (torch.int32, torch.int64)


@pytest.mark.parametrize("dtype", EACH_DTYPE)
def test_norm_of_the_input(device, dtype):
    """Within the product for one token, in a dispatch of its own for several, for a weight in 16 bits beside
    another dtype and for formats of few bits; with a residual, a bias and an offset. One format has every
    dtype."""
    formats = ["affine4_64", "affine8_32", "affine6_32", "affine2_64", "mxfp4"]
    for i, format in enumerate(formats):
        if i and dtype != DTYPES[i % 3]:
            continue
        columns, rows = 3 * max(group_of(format), 32), 45 + i
        weight = place(random_matrix(rows, columns, format, dtype, i), device)
        mlp = [random_matrix(2 * columns, columns, format, dtype, i + 1)]
        mlp.append(random_matrix(columns, columns, format, dtype, i + 2))
        for tokens in (1, 2, 9) if i == 0 else (1,):
            x = (3.0 * random((tokens, columns), dtype, i)).to(device)
            residual = random((tokens, rows), dtype, i + 4).to(device)
            bias = random((rows,), dtype, i + 5).to(device) if i % 2 else None
            for of_norm in {DTYPES[(i + 1) % 3] if i > 2 else dtype, torch.float32}:
                norm = {
                    "norm_weight": random((columns,), of_norm, i + 3).to(device),
                    "norm_eps": 1e-3,
                    "norm_weight_offset": float(i % 2),
                }
                checked("linear_quantized", x, *weight, format, bias, residual=residual, **norm)
                checked(
                    "_mlp_quantized", x, *(t for each in mlp for t in place(each, device)), format, **norm
                )


@pytest.mark.parametrize("tokens, rows", [(4, 2048), (33, 2048)])
@pytest.mark.parametrize("dtype", EACH_DTYPE)
def test_threadgroups_for_every_core(device, tokens, rows, dtype):
    """So many that the simdgroups of a threadgroup have rows of their own, on a GPU of eight cores."""
    with plans_for("M1") if device == "mps" else nullcontext():
        check_linear(device, (tokens, 64, rows), "affine4_64", dtype, tokens, bias=True)


@pytest.mark.parametrize("dtype", EACH_DTYPE)
def test_simdgroups_share_the_inputs_of_one_token(device, dtype, every_order):
    """With few rows and long inputs, of which the last simdgroups have fewer; normed or not."""
    format, rows, columns = "affine4_64", 45, 2752
    weight = place(random_matrix(rows, columns, format, dtype, 1), device)
    x = (3.0 * random((1, columns), dtype, 2)).to(device)
    residual, bias = random((1, rows), dtype, 3).to(device), random((rows,), dtype, 4).to(device)
    norm = {"norm_weight": random((columns,), dtype, 5).to(device), "norm_weight_offset": 1.0}
    wide = {"norm_weight": random((columns,), torch.float32, 5).to(device)}
    for more in ({"residual": residual}, norm, norm | {"residual": residual}, wide):
        more = more | {"format": format, "bias": bias}
        first = checked("linear_quantized", x, *weight, **more).cpu()
        others = [linear_quantized(x, *weight, **more).cpu() for _ in every_order()]
        assert all(torch.equal(first, other) for other in others)
    up = random_matrix(2 * 64, columns, format, dtype, 6), random_matrix(columns, 64, format, dtype, 7)
    checked("_mlp_quantized", x, *(t for each in up for t in place(each, device)), format, **norm)


@pytest.mark.parametrize("tokens", [1, 3, 9])
@pytest.mark.parametrize("dtype", EACH_DTYPE)
def test_sums_that_are_not_rounded(device, tokens, dtype):
    """Outputs are float32 sums of 16-bit inputs, by the kernels for one token, for a few and for many: nearer
    to float64 than any 16-bit number, most of the time."""
    weight, x = random_matrix(45, 128, "affine4_64", dtype, 1), random((tokens, 128), dtype, 2)
    placed, wide = place(weight, device), {"dtype": "float32"}
    out = checked("linear_quantized", x.to(device), *placed, "affine4_64", **wide).cpu()
    assert out.dtype == torch.float32
    exact = x.double().numpy() @ dense(weight, "affine4_64").T.astype(np.float64)
    assert np.allclose(out, exact, rtol=1e-3 if dtype == torch.float16 else 1e-5, atol=1e-3)
    if dtype != torch.float32:
        assert not torch.equal(out, out.to(dtype).float())
    residual = random((tokens, 45), dtype, 3).to(device)
    checked("linear_quantized", x.to(device), *placed, "affine4_64", residual=residual, **wide)
    if device == "mps":  # scales of another dtype than the inputs: by kernels of float32
        scales = (placed[0], *(part.float() for part in placed[1:]))
        again = linear_quantized(x.to(device), *scales, format="affine4_64", **wide)
        assert again.dtype == torch.float32 and np.allclose(again.cpu(), exact, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_scales_beyond_the_dtype_of_the_activations(device, tokens):
    check_linear(
        device, (tokens, 128, 40), "affine4_64", torch.float16, 3, scale_dtype=torch.float32, bias=True
    )
    check_mlp(device, (tokens, 64, 64), "affine4_64", torch.float16, 4, scale_dtype=torch.float32)


@pytest.mark.parametrize("dtype", in_sweep([torch.float16, torch.bfloat16], [torch.bfloat16]))
def test_a_norm_is_rounded_before_the_product(device, dtype):
    """As models do it: sums of two elements show the difference, which a tolerance of rounding hides."""
    columns = 32
    x, norm = random((64, columns), dtype, 0), random((columns,), torch.float32, 1).abs() + 0.5
    pairs = torch.zeros(1, columns)
    pairs[0, 3:5] = 1
    weight = place(quantize(pairs, mode="mxfp4"), device)
    row = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm
    sums = [each[:, 3:5].sum(1).to(dtype) for each in (row.to(dtype).double(), row)]
    assert (sums[0] != sums[1]).sum() > 8
    result = linear_quantized(x.to(device), *weight, format="mxfp4", norm_weight=norm.to(device))
    assert torch.equal(result.cpu()[:, 0], sums[0])


def test_relu2_where_roundings_decide_the_sign(device):
    """A rounded norm moves sums that are 0 with exact ones: to either side, and by no more than it may."""
    format, columns, rows, dtype = "affine4_32", 96, 33, torch.bfloat16
    weight, x = random_matrix(rows, columns, format, torch.float32, 0), random((1, columns), dtype, 1)
    norm = {"norm_weight": random((columns,), torch.float32, 2), "norm_eps": 1e-5}
    of_norm = {"x": x, "norm_weight": norm["norm_weight"], "norm_eps": norm["norm_eps"]}
    bias = torch.from_numpy(-dense(weight, format) @ expected("rms_norm", of_norm)[0].value[0]).float()
    around = {"activation": "relu2", "factor": -2.0, "dtype": "float32"}
    norm["norm_weight"] = norm["norm_weight"].to(device)
    result = checked(
        "linear_quantized", x.to(device), *place(weight, device), format, bias.to(device), **norm, **around
    )
    assert 0 < (result > 0).sum() < rows and result.max() < 1e-3


OPTIONS = (
    {"activation": "swiglu_oai", "interleaved": True},
    {"activation": "gelu_tanh"},
    {"activation": "relu2", "gated": False},
    {"activation": "silu_clamped", "limit": 0.5},
    {"activation": "silu_capped", "limit": 0.5},
)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: options["activation"])
@pytest.mark.parametrize("dtype", EACH_DTYPE)
def test_mlp(device, options, dtype):
    """Biases, a residual, and a down projection of another format."""
    down_formats = "affine6_64", "mxfp4", "affine6_64"
    for i, tokens in enumerate((1, 4, 12)):
        rows = 96 * (1 + options.get("gated", True))
        around = {
            "gate_up_bias": random((rows,), torch.float32, 20 + i),
            "down_bias": random((64,), dtype, 30 + i),
            "residual": random((tokens, 64), dtype, 40 + i),
        }
        check_mlp(device, (tokens, 64, 96), "affine4_32", dtype, i, **options, **around)
        down = {"down_format": down_formats[i]}
        check_mlp(device, (tokens, 64, 64), "affine4_64", dtype, i, **down, **options)


def check_embedding(device, weight, ids, format, dtype):
    for ids_dtype, out_dtype in zip((*IDS, torch.int32), DTYPES, strict=True):
        placed, indices = place(weight, device), ids.to(device, ids_dtype)
        assert (
            checked("embedding_quantized", indices, *placed, format, dtype_name(out_dtype)).dtype == out_dtype
        )


def test_embedding(device):
    """An id outside reads nothing; any shape of ids; no ids."""
    format = "affine6_64"
    weight = random_matrix(40, 320, format, torch.bfloat16, 0)
    for ids in (torch.tensor([7]), torch.arange(-2, 43), torch.tensor([[[2**31 - 1, -(2**31), 39, 0]]])):
        check_embedding(device, weight, ids, format, torch.bfloat16)
    wide = torch.tensor([2**32 + 3, 3], device=device)
    out = embedding_quantized(wide, *place(weight, device), format=format, dtype=torch.float16).cpu()
    assert (out[0] == 0).all() and (out[1] != 0).any()
    none = torch.zeros(0, 2, dtype=torch.int32, device=device)
    assert embedding_quantized(none, *place(weight, device), format=format, dtype=torch.float32).shape == (
        0,
        2,
        320,
    )


def test_empty(device):
    format = "affine4_32"
    weight, down = (place(random_matrix(64, 32, format, torch.float32, seed), device) for seed in (0, 1))
    x = torch.zeros(2, 0, 32, device=device)
    assert linear_quantized(x, *weight, format=format).shape == (2, 0, 64)
    nothing = [tensor[:0] for tensor in weight]
    assert linear_quantized(x.new_ones(3, 32), *nothing, format=format).shape == (3, 0)
    bias = torch.arange(64.0, device=device)
    narrow = [tensor[:, :0] for tensor in weight]
    out = linear_quantized(x.new_ones(3, 0), *narrow, format=format, bias=bias)
    assert torch.equal(out.cpu(), torch.arange(64.0).expand(3, 64))
    order = torch.arange(63, -1, -1, dtype=torch.int32, device=device)
    out = linear_quantized(x.new_ones(3, 0), *narrow, format=format, bias=bias, order=order)
    assert torch.equal(out.cpu(), torch.arange(63.0, -1.0, -1.0).expand(3, 64))
    gate_up = [tensor[:0] for tensor in weight]
    down = [tensor[:32, :0] for tensor in down]
    out = _mlp_quantized(x.new_ones(3, 32), *gate_up, *down, format=format, down_bias=bias[:32])
    assert torch.equal(out.cpu(), torch.arange(32.0).expand(3, 32))
    assert _mlp_quantized(x, *gate_up, *down, format=format).shape == (2, 0, 32)


@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize("dtype", EACH_DTYPE)
def test_infinite_input(device, tokens, dtype):
    """All outputs of its token become non-finite; other tokens are unaffected."""
    format = "affine4_32"
    weight = random_matrix(33, 64, format, dtype, 1)
    x = random((tokens, 64), dtype, 2)
    x[0, 5] = torch.inf
    out = checked("linear_quantized", x.to(device), *place(weight, device), format).cpu()
    assert not out[0][torch.as_tensor(dense(weight, format)[:, 5] != 0)].isfinite().any()


def test_the_same_bits_every_time(device, every_order):
    format = "affine4_32"
    weight = place(random_matrix(70, 192, format, torch.float32, 0), device)
    for tokens in (1, 4, 20):
        x = random((tokens, 192), torch.float32, 1).to(device)
        first, *others = [linear_quantized(x, *weight, format=format).cpu() for _ in every_order()]
        assert all(torch.equal(other, first) for other in others)


@pytest.mark.parametrize("dtype", EACH_DTYPE)
def test_rows_of_several_layers_are_one_call(device, dtype):
    """Concatenated rows give what the layers give one by one, bit for bit."""
    format = "affine4_64"
    layers = [random_matrix(rows, 128, format, dtype, rows) for rows in (32, 16, 48)]
    together = [
        torch.cat([w.view(torch.int32) if w.dtype == torch.uint32 else w for w in parts])
        for parts in zip(*layers, strict=True)
    ]
    for tokens in (1, 3, 8):
        x = random((tokens, 128), dtype, 1).to(device)
        apart = [linear_quantized(x, *place(layer, device), format=format) for layer in layers]
        out = linear_quantized(x, *place(together, device), format=format)
        assert torch.equal(out.cpu(), torch.cat(apart, -1).cpu())


def test_the_reference_dequantises_some_rows_at_a_time(monkeypatch):
    format = "affine5_64"
    weight, x = random_matrix(23, 128, format, torch.float32, 0), random((4, 128), torch.float32, 1)
    whole = linear_quantized(x, *weight, format=format)
    monkeypatch.setattr(_decoded, "VALUES_AT_ONCE", 5 * 128)
    sizes, own = [], _formats.dequantize_values
    monkeypatch.setattr(_formats, "dequantize_values", lambda *a: sizes.append(len(a[0])) or own(*a))
    in_parts = linear_quantized(x, *weight, format=format)
    assert torch.allclose(in_parts, whole, rtol=0, atol=1e-5) and sizes == [5, 5, 5, 5, 3]


@torch.no_grad()
def test_known_calls_are_multiplied_and_others_are_checked():
    weight, x = random_matrix(23, 128, "affine4_64", torch.float32, 0), random((2, 128), torch.float32, 1)
    values = torch.from_numpy(dense(weight, "affine4_64")).double()
    for _ in range(2):
        out = linear_quantized(x, *weight, format="affine4_64")
        assert torch.allclose(out.double(), x.double() @ values.T, atol=1e-4)
    half = linear_quantized(x.half(), *weight, format="affine4_64")
    assert half.dtype is torch.float16
    assert linear_quantized(x.half(), *weight, format="affine4_64", dtype="float32").dtype == x.dtype
    bias, residual = random((23,), torch.float32, 2), random((2, 23), torch.float32, 3)
    added = linear_quantized(x, *weight, format="affine4_64", bias=bias, residual=residual)
    assert torch.equal(added, out + bias + residual)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(linear_quantized(x, *weight, format="affine4_64"), out)
    packed, scales, zeros = weight
    options = {"format": "affine4_64"}
    for given, changes, message in (
        ((x[:, :64], *weight), {}, "packed must be of shape"),
        ((x[0, 0], *weight), {}, "x must be at least 1-D"),
        ((x, None, scales, zeros), {}, "packed must be a tensor, got None"),
        ((x, packed, None, zeros), {}, "scales must be a tensor, got None"),
        ((x, *weight), {"dtype": "int8"}, "dtype must be one of float32"),
        ((x, *weight), {"format": "affine8_64"}, "packed must be of shape"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=message):
            linear_quantized(*given, **options | changes)


@pytest.mark.pinned
def test_plan(simulated):
    """Kernels and grids for the rows of q, k and v, of a gate and up projection, and of lm_head."""
    lines = []
    for tokens in (1, 2, 4, 5, 8, 9, 64, 512):
        for rows, gated in ((2560, False), (12288, True), (151936, False)):
            plan = torch.ops.moe_mps._plan_linear(tokens, rows, gated)
            lines.append(f"T {tokens}, {rows} rows{', gated' * gated}: {plan}")
    for cores in (8, 32, 40):  # M1, M1 Max, M4 Max
        for tokens in (4, 8, 16, 64):
            plan = torch.ops.moe_mps._plan_linear(tokens, 4096, cores=cores)
            lines.append(f"T {tokens}, 4096 rows, {cores} cores: {plan}")
    assert_pinned("plans", "linear", "\n".join(lines) + "\n")


def test_an_order_that_names_a_column_twice():
    """Nothing of the process's memory is in the column that it leaves out."""
    weight, x = random_matrix(4, 32, "affine4_32", torch.float32, 0), torch.ones(1, 32)
    whole = torch.ops.moe_mps.linear_quantized(x, *weight, format="affine4_32")
    order = torch.tensor([0, 2, 2, 3], dtype=torch.int32)
    for _ in range(3):
        torch.full((1, 4), 7.0)  # what lies in freed memory
        found = torch.ops.moe_mps.linear_quantized(x, *weight, format="affine4_32", order=order)
        assert found[0, 1] == 0.0 and torch.equal(found[:, [0, 3]], whole[:, [0, 3]])
