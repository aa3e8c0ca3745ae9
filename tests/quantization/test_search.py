"""Quantising by importance: never worse than MLX's rule, near the best there is, each matrix by its own."""

import numpy as np
import pytest
import torch
from support.ops.quantize import weighted_errors
from support.oracles_experts import SEARCHED, dequantise, numbers_of
from support.quantized_layers import WEIGHED
from support.sweep import covering
from support.values import DTYPES, awkward_weights

from torch_moe_mps.quantization import quantize


def importance_of(*shape: int, seed: int = 0) -> torch.Tensor:
    """Mean squares over some orders of magnitude, as trained models have them."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(2).exp().square()


def counted(importance: torch.Tensor, format: str) -> torch.Tensor:
    """Importance as it counts: a thousandth of its group's mean at least."""
    groups = importance.unflatten(-1, (-1, numbers_of(format)[1]))
    return torch.maximum(groups, groups.mean(-1, keepdim=True) / 1000).flatten(-2)


@pytest.mark.parametrize(("format", "dtype"), covering(WEIGHED, DTYPES))
def test_no_group_is_worse_than_by_mlx_rule(format, dtype):
    weight, importance = awkward_weights(dtype), importance_of(3, 256)
    importance[1, :128], importance[2] = 0, 1e-20 * importance[2]
    plain, weighed = (quantize(weight, *numbers_of(format), importance=given) for given in (None, importance))
    importance = counted(importance, format)
    theirs, ours = (weighted_errors(weight, each, importance, format) for each in (plain, weighed))
    finite = np.isfinite(theirs)
    # Of groups that MLX decodes exactly, and of those near the largest float16, rounding is all there is.
    rounding = 1e-6 * (importance.double()[:, None] * weight.double().square()).numpy()
    rounding = rounding.reshape(*rounding.shape[:-1], -1, numbers_of(format)[1]).sum(-1)
    assert (ours[finite] <= 1.00001 * theirs[finite] + rounding[finite]).all()
    assert np.mean(ours[theirs > 0] / theirs[theirs > 0]) < 0.97


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_near_the_least_squares(bits):
    """The best of a fine grid of scales and biases, in float64."""
    generator = torch.Generator().manual_seed(bits)
    weight, importance = torch.randn(40, 32, generator=generator), importance_of(32, seed=1).pow(0.3)
    found = quantize(weight, bits, 32, importance=importance)
    ours = weighted_errors(weight, found, importance, f"affine{bits}_32")[:, 0]
    largest, best = 2**bits - 1, 0.0
    for row in weight.double().numpy():
        low, high = row.min(), row.max()
        scales = np.linspace(0.3, 1.1, 81)[:, None, None] * (high - low) / largest
        biases = low + np.linspace(-0.2, 0.6, 161)[None, :, None] * (high - low)
        codes = np.clip(np.round((row - biases) / scales), 0, largest)
        best += (importance.double().numpy() * (codes * scales + biases - row) ** 2).sum(-1).min()
    assert 0.9 * best <= ours.sum() <= 1.15 * best


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_many_bits_gain_as_much(bits, dtype):
    """The range of a group is that of a few inputs, which multiply little: as in trained models."""
    weight, importance = torch.randn(64, 256, generator=torch.Generator().manual_seed(5)), importance_of(256)
    plain, weighed = (quantize(weight.to(dtype), bits, importance=given) for given in (None, importance))
    theirs, ours = (
        weighted_errors(weight.to(dtype), each, importance, f"affine{bits}_64").sum()
        for each in (plain, weighed)
    )
    assert ours < 0.05 * theirs


@pytest.mark.parametrize("format", ["affine3_64", "affine6_32"])
def test_each_matrix_by_its_own_in_any_place(format, monkeypatch):
    weight, importance = torch.randn(5, 24, 128), importance_of(5, 128)
    stack = quantize(weight, *numbers_of(format), importance=importance)
    monkeypatch.setattr("torch_moe_mps.quantization.formats.SEARCHED", 128 * 70)
    monkeypatch.setattr("torch_moe_mps.ops.families.quantize.CHUNK", 128 * 7)
    for index in range(5):
        alone = quantize(weight[index], *numbers_of(format), importance=importance[index])
        for whole, own in zip(stack, alone, strict=True):
            assert whole is own is None or torch.equal(whole.view(torch.uint8)[index], own.view(torch.uint8))


@pytest.mark.parametrize("format", ["affine4_64", "affine3_32"])
def test_on_the_device(device, format):
    """Where a GPU is, it searches, also for weights on the CPU; bits may differ from those of a CPU there."""
    generator = torch.Generator().manual_seed(0)
    weight, importance = torch.randn(2, 24, 128, generator=generator), importance_of(2, 128)
    by_group = counted(importance, format)
    plain = weighted_errors(weight, quantize(weight, *numbers_of(format)), by_group, format)
    for place in ("cpu", device):
        found = quantize(weight.to(place), *numbers_of(format), importance=importance.to(place))
        assert {tensor.device.type for tensor in found if tensor is not None} == {torch.device(place).type}
        ours = weighted_errors(weight, found.map(torch.Tensor.cpu), by_group, format)
        assert (ours <= 1.00001 * plain).all() and ours.sum() < 0.95 * plain.sum()


@pytest.mark.parametrize("format", ["affine3_64", "affine4_32", "affine8_64"])
def test_weights_that_multiply_nothing_stay_near(device, format):
    """Where one or two of a group's inputs have all of the importance; those are as near as by MLX's rule."""
    weight = torch.randn(16, 256, generator=torch.Generator().manual_seed(0)).to(device)
    importance, everything = torch.zeros(256), torch.ones(256)
    importance[[5, 70, 71, 130, 131, 200]] = torch.tensor([1.0, 1, 1e-3, 1, 1, 1])
    plain = quantize(weight, *numbers_of(format))
    found = quantize(weight, *numbers_of(format), importance=importance.to(device))
    weight, plain, found = weight.cpu(), plain.map(torch.Tensor.cpu), found.map(torch.Tensor.cpu)
    theirs, ours = (weighted_errors(weight, each, everything, format).sum() for each in (plain, found))
    assert ours < 2 * theirs
    theirs, ours = (weighted_errors(weight, each, importance, format).sum() for each in (plain, found))
    assert ours < theirs


@pytest.mark.on("cpu")
@pytest.mark.parametrize("form", [*WEIGHED, *SEARCHED])
def test_no_weight_is_further_off_than_the_largest_of_its_group(form, device):
    """A small scale fits few weights that alone have importance; the others stay within the maximum."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(80, 256, generator=generator)
    weight[40:] = torch.where(torch.rand(40, 256, generator=generator) < 0.03, 5 * weight[40:], weight[40:])
    importance = torch.zeros(256)
    importance[[3, 5, 20, 40, 64, 65, 100, 130, 131, 132, 200]] = 1.0
    importance[[16, 96]] = 1e-4
    found = quantize(weight.to(device), *numbers_of(form), importance=importance.to(device))
    decoded = torch.from_numpy(dequantise(*found.map(torch.Tensor.cpu), form))
    parts = (decoded - weight, weight.double())
    apart, sizes = (part.abs().unflatten(1, (-1, numbers_of(form)[1])).amax(-1) for part in parts)
    assert (apart <= (1 + 1e-6) * sizes).all(), (apart / sizes).max()


def test_only_ratios_matter():
    weight, importance = torch.randn(8, 64), importance_of(64)
    first, second = (quantize(weight, 4, importance=factor * importance) for factor in (1.0, 2.0**-80))
    assert torch.equal(first.packed, second.packed)
    zero = quantize(weight, 4, importance=torch.zeros(64))
    assert torch.equal(zero.scales, quantize(weight, 4).scales)


@pytest.mark.parametrize("format", ["affine1_64", "mxfp4", "mxfp8", "nvfp4"])
def test_formats_whose_scales_no_importance_chooses(format):
    message = "^moe_mps::quantize: importance must be for affine formats of 2 bits and more, or ggml's, got "
    with pytest.raises(ValueError, match=f"{message}{format} for weight"):
        quantize(torch.randn(4, 64), *numbers_of(format), importance=torch.ones(64))


@pytest.mark.parametrize(
    "importance, message",
    [
        (torch.ones(63), r"importance must be of shape \[C\] = \(64,\), got \(63,\)"),
        (torch.ones(1, 64), r"importance must be of shape \[C\] = \(64,\), got \(1, 64\)"),
        (torch.ones(64, dtype=torch.float64), "importance must be float32, got float64"),
        (torch.full((64,), torch.nan), "importance must be finite and not negative, got NaN"),
        (-torch.ones(64), "importance must be finite and not negative, got NaN"),
    ],
)
def test_bad_importance(importance, message):
    with pytest.raises(ValueError, match=f"^moe_mps::quantize: {message}"):
        quantize(torch.randn(4, 64), 4, importance=importance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_weight_on_the_cpu_is_searched_on_mps(dtype, simulated, monkeypatch):
    """Three rows of three groups at a time: their scales are no multiple of 4 bytes, which torch asks for."""
    monkeypatch.setattr("torch_moe_mps.quantization.formats.SEARCHED", 3 * 192)
    weight, importance = torch.randn(8, 192).to(dtype), importance_of(192)
    found = quantize(weight, 4, importance=importance)
    expected = quantize(weight.to("mps"), 4, importance=importance.to("mps")).map(torch.Tensor.cpu)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
