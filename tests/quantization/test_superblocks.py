"""Weights quantised to ggml's types with integers as scales."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from gguf import dequantize as values_of_ggml
from support.gguf_blocks import SIZES, type_of
from support.oracles_experts import GGML, SEARCHED
from support.sweep import in_sweep, rows_in_sweep

from torch_moe_mps._weight_formats import ROWS, Integers
from torch_moe_mps.ops._formats import LEVELS, dequantize_values, pack
from torch_moe_mps.quantization import QuantizedWeight, dequantize, gguf, quantize

EVERY = sorted(SEARCHED)


def weights(*shape: int) -> torch.Tensor:
    """Normal, with an outlier in a hundred."""
    torch.manual_seed(0)
    weight = 0.05 * torch.randn(shape)
    return torch.where(torch.rand(shape) < 0.01, 6 * weight, weight)


def importance_of(*shape: int) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(shape).mul(1.5).exp()


def values(weight: QuantizedWeight) -> torch.Tensor:
    return dequantize_values(weight.packed, weight.scales, weight.zeros, weight.format)


def as_it_counts(weight: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
    """Importance [R, C] of weights: large ones of a superblock count more."""
    squares = weight.double().square().unflatten(-1, (-1, 256))
    return importance.double() * (2 * squares.mean(-1, keepdim=True) + squares).sqrt().flatten(-2)


def error(weight: torch.Tensor, quantized: QuantizedWeight, importance: torch.Tensor) -> float:
    return float((importance.double() * (values(quantized).double() - weight).square()).sum())


def bits(*tensors: torch.Tensor) -> np.ndarray:
    """The bits [rows, n] of tensors with as many rows."""
    octets = [np.atleast_2d(tensor.contiguous().numpy()).view(np.uint8) for tensor in tensors]
    return np.unpackbits(np.concatenate(octets, 1), axis=1, bitorder="little")


def blocks_of(weight: QuantizedWeight) -> np.ndarray:
    """ggml's blocks of a matrix of 256 columns: `from_blocks` only moves bits and turns some over."""
    size = 8 * SIZES[weight.format.name][1]
    ones = np.packbits(np.eye(size + 1, size, dtype=np.uint8), axis=1, bitorder="little")
    moved = bits(*gguf.from_blocks(torch.from_numpy(ones), weight.format.name))
    turned, moved = moved[-1], moved[:-1] ^ moved[-1]
    assert (moved.sum(0) == 1).all() and (moved.sum(1) == 1).all()
    found = (bits(*weight) ^ turned) @ moved.T
    return np.packbits(found.astype(np.uint8), axis=1, bitorder="little")


def test_the_types():
    ours = [name for name, row in ROWS.items() if isinstance(row.scales, Integers)]
    assert sorted(ours) == EVERY and all(SIZES[name][0] == 256 for name in EVERY)


@pytest.mark.parametrize("name", EVERY)
def test_ggml_decodes_the_same(name):
    weight = weights(24, 256)
    found = quantize(weight, mode=name, importance=importance_of(256))
    assert found.nbytes == 24 * SIZES[name][1] and found.format.name == name
    assert np.array_equal(values_of_ggml(blocks_of(found), type_of(name)), values(found).numpy())
    decoded = dequantize(found, torch.float32)
    assert torch.equal(decoded, values(found)) and (decoded - weight).abs().mean() < 0.02


def least_error(weight: np.ndarray, importance: np.ndarray, name: str, found: QuantizedWeight) -> float:
    """Of a superblock, in float64: all integers of every group, for d and m around those of a result."""
    kind = GGML[name]
    size, top = kind.group_size, 2**kind.bits - 1
    w, k = weight.reshape(-1, 1, size), importance.reshape(-1, 1, size)
    halves = found.zeros.numpy().view(np.float16).astype(np.float64).flatten()
    factors = np.linspace(0.94, 1.06, {"q2_k": 11, "q4_k": 5}.get(name, 61))
    best = np.inf
    if kind.minima:
        most = 2**kind.integers.bits - 1
        s, n = (x.reshape(1, -1, 1) for x in np.meshgrid(np.arange(1.0, most + 1), np.arange(most + 1.0)))
        for a, b in product(factors, factors):
            scale, minimum = halves[0] * a * s, halves[1] * b * n
            codes = np.clip(np.rint((w + minimum) / scale), 0, top)
            best = min(best, (k * (codes * scale - minimum - w) ** 2).sum(-1).min(-1).sum())
        return best
    centre = kind.integers.centre
    s = np.arange(-centre, centre, dtype=np.float64).reshape(1, -1, 1)
    s[s == 0] = 1e-9
    for a in factors:
        scale = halves[0] * a * s
        if name == "iq4_xs":
            levels = np.array(LEVELS, np.float64)
            numbers = levels[np.abs((w / scale)[..., None] - levels).argmin(-1)]
        else:
            half = (top + 1) // 2
            numbers = np.clip(np.rint(w / scale), -half, half - 1)
        best = min(best, (k * (numbers * scale - w) ** 2).sum(-1).min(-1).sum())
    return best


NEAR = (("q2_k", 1.1), ("q3_k", 1.1), ("q4_k", 1.1), ("q6_k", 1.25), ("iq4_xs", 1.1))


@pytest.mark.slow("two seconds each: the other search is long")
@pytest.mark.parametrize(("name", "most"), rows_in_sweep(NEAR, NEAR[2:3]))
def test_near_the_best_of_a_long_search(name, most):
    ours = theirs = 0.0
    for seed in range(1 if name == "q4_k" else 4):
        weight, importance = weights(8, 256)[seed : seed + 1], importance_of(8, 256)[seed]
        found = quantize(weight, mode=name, importance=importance)
        importance = as_it_counts(weight, importance)
        ours += error(weight, found, importance)
        theirs += least_error(weight.double().numpy(), importance.numpy(), name, found)
    assert ours < most * theirs


@pytest.mark.parametrize("name", EVERY)
def test_importance_is_honoured(name):
    """What multiplies much errs less, and the whole error is smaller; only ratios matter."""
    weight, importance = weights(64, 512), importance_of(512)
    plain, found = (quantize(weight, mode=name, importance=k) for k in (None, importance))
    counts = as_it_counts(weight, importance)
    assert error(weight, found, counts) < 0.9 * error(weight, plain, counts)
    assert error(weight, plain, torch.ones(512)) < error(weight, found, torch.ones(512))
    again = quantize(weight, mode=name, importance=2.0**-80 * importance)
    assert torch.equal(again.packed, found.packed)
    alike = quantize(weight, mode=name, importance=torch.zeros(512))
    assert torch.equal(alike.packed, plain.packed) and torch.equal(alike.scales, plain.scales)


@pytest.mark.parametrize("name", EVERY)
def test_large_weights_count_more(name):
    """An importance that is less by as much is none."""
    weight = weights(64, 1, 256)
    counts = as_it_counts(weight.flatten(1), torch.ones(256))
    found, plain = (quantize(weight, mode=name, importance=k) for k in ((1 / counts).float(), None))
    assert (values(found) == values(plain)).float().mean() > 0.9


@pytest.mark.parametrize("name", EVERY)
def test_the_nearest_code_is_chosen(name):
    """No other code of a weight stands for a value that is nearer to it."""
    weight = weights(16, 256)
    found = quantize(weight, mode=name, importance=importance_of(256))
    apart = torch.full_like(weight, torch.inf)
    for code in range(1 << found.format.bits):
        packed = pack(torch.full(weight.shape, code, dtype=torch.uint8), found.format.bits)
        apart = torch.minimum(apart, (values(replace(found, packed=packed)) - weight).abs())
    assert torch.allclose((values(found) - weight).abs(), apart, rtol=0, atol=1e-7)


@pytest.mark.parametrize(("name", "bits"), [("q3_k", 3), ("q4_k", 4), ("iq4_xs", 4), ("q5_k", 5)])
def test_less_error_than_groups_of_64(name, bits):
    """In at most as many bytes, by the same importance."""
    weight, importance = weights(64, 512), importance_of(512)
    affine = quantize(weight, bits, importance=importance)
    found = quantize(weight, mode=name, importance=importance)
    assert found.nbytes <= quantize(weight.half(), bits).nbytes
    assert error(weight, found, importance) < 0.9 * error(weight, affine, importance)


NUMBERS = {"q3_k": [*range(-4, 4)], "q6_k": [*range(-32, 32)], "iq4_xs": LEVELS}


@pytest.mark.parametrize("name", EVERY)
def test_numbers_of_a_type_come_back(name):
    """Of scales of either sign, the largest of which has one sign only; of types with minima, without any."""
    integers, format = GGML[name].integers, quantize(weights(1, 256), mode=name).format
    numbers, groups = torch.tensor(NUMBERS.get(name, [*range(2**format.bits)])), 256 // format.group_size
    chance = torch.Generator().manual_seed(0)
    codes = torch.randint(len(numbers), (groups, format.group_size), generator=chance)
    scales = torch.randint(1, 2 ** (integers.bits - 1), (groups, 1), generator=chance)
    if integers.minima:
        codes = codes.maximum(torch.arange(groups)[:, None] % (len(numbers) - 1))
        codes[:, 0], scales[0] = len(numbers) - 1, 2**integers.bits - 1
    else:
        codes[:, 0], scales[0], scales[2::2] = 0, -integers.centre, -scales[2::2]
    weight = (scales * numbers[codes]).view(1, 256).float() / 256
    assert torch.equal(values(quantize(weight, mode=name)).float(), weight)


@pytest.mark.on("cpu")
@pytest.mark.parametrize("name", in_sweep(["q3_k", "q4_k", "iq4_xs"], ["q4_k"]))
def test_each_matrix_by_its_own_in_any_place(name, device, monkeypatch):
    weight, importance = weights(3, 24, 256), importance_of(3, 256)
    stack = quantize(weight, mode=name, importance=importance)
    monkeypatch.setattr("torch_moe_mps.quantization.formats.CHUNK", 256 * 7)
    monkeypatch.setattr("torch_moe_mps.quantization.formats.IN_SUPERBLOCKS", 256 * 7)
    for index in range(3):
        own = quantize(weight[index].to(device), mode=name, importance=importance[index].to(device))
        assert {tensor.device.type for tensor in own} == {torch.device(device).type}
        for whole, part in zip(stack, own.map(torch.Tensor.cpu), strict=True):
            assert torch.equal(whole.view(torch.uint8)[index], part.view(torch.uint8))


@pytest.mark.parametrize("name", EVERY)
def test_weights_of_every_kind(name):
    """Zeros, one number, one sign, little ones, a zero half, and more than float16 holds."""
    weight = weights(11, 256)
    weight[0], weight[1], weight[2] = 0.0, 0.5, -0.25
    weight[3], weight[4] = weight[3].abs() + 1, -weight[4].abs() - 1
    weight[5, :128] = 0.0
    weight[6, 5:] = 0.25
    weight[7] *= 1e-3
    weight[8] *= 1e-12
    weight[9] *= 1e30
    weight[10] *= 1e-38
    zero_at_first = torch.cat((torch.zeros(64), torch.ones(192)))
    for importance in (torch.ones(256), zero_at_first, importance_of(256)):
        decoded = values(quantize(weight, mode=name, importance=importance))
        relative = (decoded - weight).abs().sum(1) / weight.abs().sum(1).clamp(min=1e-30)
        assert (relative[:3] < 0.01).all() and (relative[3:8] < 0.45).all()
        assert decoded[9].isfinite().all() and decoded[[8, 10]].abs().max() <= 1e-6


def test_errors():
    with pytest.raises(ValueError, match="weight must be of a last dimension that is a multiple of 256"):
        quantize(torch.ones(4, 320), mode="q4_k")
    with pytest.raises(ValueError, match="bits must be 4 for mode q4_k, got 5"):
        quantize(torch.ones(4, 256), 5, mode="q4_k")
    with pytest.raises(ValueError, match="group_size must be 16 for mode q6_k, got 64"):
        quantize(torch.ones(4, 256), 6, 64, mode="q6_k")
    with pytest.raises(ValueError, match="importance must be finite and not negative"):
        quantize(torch.ones(4, 256), mode="q4_k", importance=-torch.ones(256))
