"""An operator is a function of its arguments: the references on a CPU decode weights in every call."""

import os

import pytest
import torch
from support.decodings import decodings as decodings
from support.quantized_layers import random_matrix
from support.values import random

from torch_moe_mps.ops import OPERATORS, _decoded
from torch_moe_mps.ops._samples import packet, sample_arguments

QUANTIZED = [
    name
    for name in OPERATORS
    if any(argument.name.endswith("packed") for argument in packet(name).default._schema.arguments)
]


def copies(arguments: dict) -> dict:
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in arguments.items()
    }


@pytest.mark.parametrize("name", QUANTIZED)
def test_every_operator_reads_what_is_written_through_data(name, decodings):
    """torch counts no such write, here of a single row of the scales."""
    arguments = sample_arguments(name, "cpu", torch.float32)
    before = packet(name)(**arguments)
    count, held = len(decodings), _decoded._bytes
    for argument, value in arguments.items():
        if argument.endswith("scales"):
            value.data.view(-1, *value.shape[-2:])[:, 3] *= 2
    now, again = packet(name)(**arguments), packet(name)(**arguments)
    assert torch.equal(now, again) and len(decodings) == 3 * count > 0 and _decoded._bytes == held
    assert torch.equal(now, packet(name)(**copies(arguments))) and not torch.equal(now, before)


def test_one_scale_is_read_again(decodings):
    weight, x = random_matrix(600, 512, "affine4_64", torch.float32, 0), random((2, 512), torch.float32, 1)
    packed, scales, _ = weight
    before = torch.ops.moe_mps.linear_quantized(x, *weight, format="affine4_64")
    codes = (packed.view(torch.int32)[12:13, 32:40, None] >> 4 * torch.arange(8)) & 15  # of group 4 of row 12
    added = (codes.view(-1).double() * scales[12, 4].double()) @ x[:, 256:320].double().T
    scales.data.view(-1)[100] *= 2
    difference = torch.ops.moe_mps.linear_quantized(x, *weight, format="affine4_64") - before
    assert torch.allclose(difference[:, 12].double(), added, atol=1e-4) and added.abs().min() > 1e-2
    assert difference[:, :12].abs().max() == difference[:, 13:].abs().max() == 0


def test_cached_values_do_not_follow_the_default_dtype(decodings, monkeypatch):
    """Values of a matrix that is decoded in parts."""
    monkeypatch.setattr(_decoded, "VALUES_AT_ONCE", 1024)
    weight, x = random_matrix(96, 64, "affine4_64", torch.float32, 0), random((3, 64), torch.float32, 1)
    expected = torch.ops.moe_mps.linear_quantized(x, *weight, format="affine4_64")
    layer = torch.nn.Module()
    for default in (torch.float16, torch.float64, torch.float32):
        torch.set_default_dtype(default)
        try:
            found = _decoded.with_decoded_weights(
                lambda: torch.ops.moe_mps.linear_quantized(x, *weight, format="affine4_64"), layer, *weight
            )
        finally:
            torch.set_default_dtype(torch.float32)
        torch.testing.assert_close(found, expected)


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


def test_free_memory_is_known_here():
    assert 1 << 20 < _decoded.free_memory() < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
