"""What the references on a CPU decode once and keep: the same bits, as long as a weight lives and stays."""

import gc
import os

import pytest
import torch
from support.quantized_layers import EVERY_FORMAT, each, random_matrix
from support.values import random

from torch_moe_mps.ops import OPERATORS, _decoded, _formats
from torch_moe_mps.ops._formats import QuantizedWeight
from torch_moe_mps.ops._samples import packet, sample_arguments
from torch_moe_mps.transformers.basics.state import state_of
from torch_moe_mps.transformers.modules.linears import QuantizedLinear
from torch_moe_mps.transformers.modules.rules import linear as joining

GATHER = "embedding_quantized"  # decodes the rows that it is asked for, which are few
QUANTIZED = [
    name
    for name in OPERATORS
    if any(argument.name.endswith("packed") for argument in packet(name).default._schema.arguments)
]
linear_quantized = torch.ops.moe_mps.linear_quantized


@pytest.fixture
def decodings(monkeypatch) -> list:
    """Grows by one for each time that a matrix is decoded; nothing is kept before."""
    times, own = [], _formats.dequantize_values

    def counted(*arguments):
        times.append(1)
        return own(*arguments)

    gc.collect()
    monkeypatch.setattr(_formats, "dequantize_values", counted)
    monkeypatch.setattr(_decoded, "memory", lambda: 10**9)
    return times


def matrix(format: str = "affine4_64", rows: int = 24, columns: int = 256) -> QuantizedWeight:
    weight = random_matrix(rows, columns, format, torch.float32, 0)
    return QuantizedWeight(*weight, _formats.Format.named(format)).map(torch.clone)


def product(weight: QuantizedWeight) -> torch.Tensor:
    x = random((3, weight.format.columns(weight.packed.shape[1])), torch.float32, 1)
    return linear_quantized(x, *weight, weight.format.name)


@pytest.mark.parametrize("name", QUANTIZED)
def test_every_operator_decodes_once(name, decodings, monkeypatch):
    arguments = sample_arguments(name, "cpu", torch.float32)
    first, again = packet(name)(**arguments), packet(name)(**arguments)
    assert torch.equal(first, again) and (len(decodings) > 0)
    count = len(decodings)
    packet(name)(**arguments)
    assert len(decodings) == count + (name == GATHER)
    monkeypatch.setattr(_decoded, "_takes", lambda nbytes: False)
    fresh = {
        key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in arguments.items()
    }
    assert torch.equal(packet(name)(**fresh), first)


@pytest.mark.parametrize("format", each(EVERY_FORMAT))
def test_the_bits_are_those_of_decoding_in_every_call(format, decodings, monkeypatch):
    weight = matrix(format)
    kept = [product(weight) for _ in range(2)]
    assert len(decodings) == 1
    monkeypatch.setattr(_decoded, "memory", lambda: 0)
    apart = weight.map(torch.clone)
    del weight
    assert torch.equal(product(apart), kept[0]) and torch.equal(kept[1], kept[0])


def test_what_is_kept_goes_with_the_weight(decodings):
    before = _decoded._bytes
    weight = matrix()
    product(weight)
    assert _decoded._bytes == before + 24 * 256 * 4
    view = weight.map(lambda tensor: tensor[3:])
    product(view)
    assert _decoded._bytes == before + (24 + 21) * 256 * 4
    del weight
    assert _decoded._bytes > before  # by the view
    codes = view.packed
    del view
    assert _decoded._bytes == before and len(codes) == 21  # without scales nothing reads them


@pytest.mark.parametrize("part", ["packed", "scales", "biases"])
@pytest.mark.parametrize("inference", [False, True])
def test_a_change_in_place_is_noticed(part, inference, decodings):
    with torch.inference_mode(inference):
        weight, other = matrix(), matrix()
        before = product(weight)
        changed = getattr(weight, part)
        changed.view(torch.int32)[5] += 1 << 16  # more than the rounding of a product
        getattr(other, part).copy_(changed)
        assert torch.equal(product(weight), product(other)) and not torch.equal(product(weight), before)
        assert len(decodings) == 3


@pytest.mark.parametrize("part", ["packed", "scales", "biases"])
@pytest.mark.parametrize("format", ["affine4_64", "q4_k"])
def test_what_is_written_through_data_is_noticed(part, format, decodings):
    """Which raises no version: any 256th of a tensor, and any element of a small one."""
    for rows in (600, 3):
        weight = matrix(format, rows, 512)
        tensor = getattr(weight, part)
        least = tensor.numel() // 64 + 1
        for start in (0, 1, tensor.numel() // 3, tensor.numel() - least):
            product(weight)
            version, count = tensor._version, len(decodings)
            bits = tensor.data.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize])
            bits.view(-1)[start : start + least] ^= 1
            assert tensor._version == version
            assert torch.equal(product(weight), product(weight.map(torch.clone)))
            assert len(decodings) == count + 2


@pytest.mark.parametrize("name", QUANTIZED)
def test_every_operator_notices_scales_written_through_data(name, decodings):
    arguments = sample_arguments(name, "cpu", torch.float32)
    packet(name)(**arguments)
    for argument, value in arguments.items():
        if argument.endswith("scales"):
            value.data.copy_(value.flip(-2))
    fresh = {
        key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in arguments.items()
    }
    assert torch.equal(packet(name)(**arguments), packet(name)(**fresh))


def test_a_loaded_state_dict_is_noticed_by_layers_that_are_joined(decodings):
    layers = [QuantizedLinear(matrix(), torch.float32) for _ in range(2)]
    assert joining.join(*layers)
    whole = state_of(layers[0]).joined
    x = random((1, 256), torch.float32, 1)
    first = linear_quantized(x, *whole.weights[:3], "affine4_64")
    layers[1].load_state_dict({name: tensor.flip(0) for name, tensor in layers[1].state_dict().items()})
    assert joining.join(*layers) and state_of(layers[0]).joined is whole
    second = linear_quantized(x, *whole.weights[:3], "affine4_64")
    assert torch.equal(second, torch.cat((first[:, :24], first[:, 24:].flip(1)), 1))


def test_other_memory_is_decoded_anew(decodings):
    layer = QuantizedLinear(matrix(), torch.float32)
    x = random((1, 256), torch.float32, 1)
    first = layer(x)
    layer.packed.data = layer.packed.flip(0)
    layer.scales.data, layer.biases.data = layer.scales.flip(0), layer.biases.flip(0)
    assert torch.equal(layer(x), first.flip(1)) and len(decodings) == 2


def test_other_scales_at_the_same_address_are_noticed(decodings):
    weight, memory = matrix(), bytearray(24 * 4 * 4)
    for factor in (1, 2):
        scales = torch.frombuffer(memory, dtype=torch.float32).view(24, 4)
        scales.numpy()[:] = factor * weight.scales.numpy()
        out = product(QuantizedWeight(weight.packed, scales, weight.biases, weight.format))
        expected = product(QuantizedWeight(weight.packed, scales.clone(), weight.biases, weight.format))
        assert torch.equal(out, expected)
        del scales


def test_no_more_than_allowed_is_kept(decodings, monkeypatch):
    allowed = _decoded._bytes + 1.5 * 24 * 256 * 4
    monkeypatch.setattr(_decoded, "memory", lambda: allowed)
    one, other = matrix(), matrix()
    for _ in range(3):
        product(one), product(other)
    assert len(decodings) == 1 + 3
    del one
    product(other), product(other)
    assert len(decodings) == 1 + 3 + 1


def test_a_quarter_of_what_is_free(monkeypatch):
    monkeypatch.setattr(_decoded, "free_memory", lambda: 4000)
    monkeypatch.setattr(_decoded, "_bytes", 0)
    monkeypatch.setattr(_decoded, "_quarter", 0)
    assert _decoded.memory() == 1000


def test_a_container_has_what_its_limit_leaves(tmp_path):
    for name, text in {"max": "1000\n", "current": "700\n", "stat": "anon 500\nfile 200\n"}.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert _decoded._free_of_group(tmp_path) == 500
    (tmp_path / "memory.max").write_text("max\n")
    assert _decoded._free_of_group(tmp_path) > 1 << 50


def test_what_inference_mode_decoded_is_read_beside_gradients(decodings):
    weight = matrix()
    with torch.inference_mode():
        expected = product(weight)
    x = random((3, 256), torch.float32, 1).requires_grad_()
    out = linear_quantized(x, *weight, "affine4_64")
    assert torch.equal(out, expected) and len(decodings) == 1


def test_free_memory_is_known_here():
    assert 1 << 20 < _decoded.free_memory() < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
