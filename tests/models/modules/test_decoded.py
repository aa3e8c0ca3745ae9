"""Decoded values that layers cache on a CPU while they live and their weights stay, within a limit."""

import copy
import gc
import io
import threading
from functools import partial

import pytest
import torch
from support.decodings import decodings as decodings
from support.models import tiny
from support.quantized_layers import EVERY_FORMAT, each, random_matrix
from support.values import random

import torch_moe_mps
from torch_moe_mps.models.modules.linears import GroupedLinear, QuantizedLayer, QuantizedLinear
from torch_moe_mps.ops import _decoded
from torch_moe_mps.ops._formats import Format, QuantizedWeight

BYTES = 24 * 256 * 4
linear_quantized = torch.ops.moe_mps.linear_quantized


def matrix(format: str = "affine4_64", seed: int = 0) -> QuantizedWeight:
    weight = QuantizedWeight(*random_matrix(24, 256, format, torch.float32, seed), Format.named(format))
    return weight.map(torch.clone)


def linear(format: str = "affine4_64", seed: int = 0) -> QuantizedLinear:
    return QuantizedLinear(matrix(format, seed), torch.float32).requires_grad_(False)


def model_of(architecture: str):
    model = tiny(architecture)
    torch_moe_mps.accelerate(model, bits=4, group_size=32)
    return model


def input_of(layer) -> torch.Tensor:
    shape = (2, layer.n_groups, 256) if isinstance(layer, GroupedLinear) else (2, 256)
    return random(shape, torch.float32, 1)


def parts_of(architecture: str, path: str):
    """A layer of a tiny model, and what it is called with."""
    layer, given = model_of(architecture).get_submodule(path), []
    x = random((5, 64), torch.float32, 1)
    if path.endswith("experts"):
        given = [torch.arange(10).view(5, 2) % layer.num_experts, torch.full((5, 2), 0.5)]
    return layer, x, *given


# {owner of a cache: the layer and its arguments}
OWNERS = {
    "linear": lambda: (linear(), input_of(linear())),
    "groups": lambda: (grouped := GroupedLinear(matrix(), torch.float32, 3), input_of(grouped)),
    "experts": partial(parts_of, "qwen3_moe", "model.layers.0.mlp.experts"),
    "experts in steps": partial(parts_of, "nemotron_h", "model.layers.1.mixer.experts"),
    "mlp": partial(parts_of, "llama", "model.layers.0.mlp"),
}


def other_state(layer) -> dict[str, torch.Tensor]:
    return {name: tensor.flip(-2) for name, tensor in layer.state_dict().items()}


def write(layer) -> None:
    for name, tensor in other_state(layer).items():
        layer.get_parameter_or_buffer(name).copy_(tensor)


def tensors_of(layer) -> list[torch.Tensor]:
    return [*layer.parameters(), *layer.buffers()]


def assign_data(layer) -> None:
    for tensor in tensors_of(layer):
        if tensor.dim() > 1:
            tensor.data = tensor.data.flip(-2)


def write_one(layer) -> None:
    next(tensor for tensor in tensors_of(layer) if tensor.is_floating_point() and tensor.dim() > 1).mul_(2)


def write_in_inference_mode(layer) -> None:
    with torch.inference_mode():
        write_one(layer)


CHANGES = {
    "load_state_dict": lambda layer: layer.load_state_dict(other_state(layer)),
    "load_state_dict(assign=True)": lambda layer: layer.load_state_dict(other_state(layer), assign=True),
    "to": lambda layer: layer.to(torch.bfloat16).float(),
    "written": write_one,
    "written in inference mode": write_in_inference_mode,
    "data replaced": assign_data,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("owner", OWNERS)
@torch.no_grad()
def test_a_layer_decodes_once_until_its_weights_change(owner, change, decodings):
    layer, *given = OWNERS[owner]()
    before = layer(*given)
    count = len(decodings)
    assert torch.equal(layer(*given), before) and len(decodings) == count > 0
    CHANGES[change](layer)
    after = layer(*given)
    assert len(decodings) == 2 * count and not torch.equal(after, before)
    assert torch.equal(after, copy.deepcopy(layer)(*given))


@pytest.mark.parametrize("format", each(EVERY_FORMAT))
def test_the_bits_are_those_of_the_operator(format, decodings):
    layer = linear(format)
    x = input_of(layer)
    expected = linear_quantized(x, *layer.weights()[:3], format=format)
    assert torch.equal(layer(x), expected) and torch.equal(layer(x), expected) and len(decodings) == 2


def test_values_are_freed_with_the_layer(decodings):
    before = _decoded._bytes
    layer = linear()
    weights = layer.weights()
    layer(input_of(layer))
    assert _decoded._bytes == before + BYTES
    del layer
    assert _decoded._bytes == before and len(weights[0]) == 24


@pytest.mark.parametrize("change", ["to", "load_state_dict(assign=True)"])
def test_values_are_freed_with_the_memory_of_the_weights(change, decodings):
    before, layer = _decoded._bytes, linear()
    layer(input_of(layer))
    assert _decoded._bytes == before + BYTES
    if change == "to":
        layer.to("meta")
    else:
        layer.load_state_dict(other_state(layer), assign=True)
    assert _decoded._bytes == before


def saved(layer) -> bytes:
    file = io.BytesIO()
    torch.save(layer, file)
    return file.getvalue()


def test_copies_and_pickles_have_no_values(decodings):
    layer = linear()
    files = [saved(layer)]
    expected = layer(input_of(layer))
    held, count = _decoded._bytes, len(decodings)
    files.append(saved(layer))
    others = [copy.deepcopy(layer), torch.load(io.BytesIO(files[1]), weights_only=False)]
    assert len(files[0]) == len(files[1]) and _decoded._bytes == held
    for number, other in enumerate(others, 1):
        assert torch.equal(other(input_of(other)), expected) and len(decodings) == count + number


def test_no_more_than_allowed_is_cached(decodings, monkeypatch):
    allowed = _decoded._bytes + 1.5 * BYTES
    monkeypatch.setattr(_decoded, "memory", lambda: allowed)
    one, other = linear(), linear()
    for _ in range(3):
        one(input_of(one)), other(input_of(other))
    assert len(decodings) == 1 + 3
    del one
    other(input_of(other)), other(input_of(other))
    assert len(decodings) == 1 + 3 + 1


@pytest.mark.parametrize("allowed", [0, 10**9])
def test_a_large_matrix_is_decoded_whole_if_it_may_be_cached(allowed, decodings, monkeypatch):
    monkeypatch.setattr(_decoded, "memory", lambda: allowed)
    monkeypatch.setattr(_decoded, "VALUES_AT_ONCE", 10 * 256)
    layer = linear()
    expected = input_of(layer).double() @ layer.weight[:].double().T
    del decodings[:]
    for _ in range(2):
        torch.testing.assert_close(layer(input_of(layer)).double(), expected, rtol=0, atol=1e-5)
    assert decodings == [(10, 32), (10, 32), (4, 32)] * (2 if allowed == 0 else 1)


def test_weights_made_in_inference_mode_are_decoded_in_each_call(decodings):
    """torch counts no writes to them."""
    with torch.inference_mode():
        layer = linear()
        layer(input_of(layer)), layer(input_of(layer))
        assert len(decodings) == 2
        layer.scales[3] *= 2
        assert torch.equal(layer(input_of(layer)), copy.deepcopy(layer)(input_of(layer)))


def test_values_decoded_in_inference_mode_are_read_beside_gradients(decodings):
    layer, x = linear(), random((3, 256), torch.float32, 1)
    with torch.inference_mode():
        expected = layer(x)
    out = layer(x.requires_grad_())
    assert torch.equal(out, expected) and len(decodings) == 1
    out.sum().backward()
    torch.testing.assert_close(x.grad, layer.weight[:].sum(0).expand(3, -1))


def test_only_the_operators_of_the_layer_read_its_cache(decodings):
    """Not those with other weights inside its call, of another thread, or behind it."""
    layer, other = linear(), linear(seed=1)
    x, weights, others = input_of(layer), layer.weights()[:3], other.weights()[:3]
    held = _decoded._bytes

    def product():
        return linear_quantized(x, *weights, format="affine4_64")

    def call():
        for _ in range(2):
            linear_quantized(x, *others, format="affine4_64")
        assert _decoded._bytes == held and len(decodings) == 2
        product()
        thread = threading.Thread(target=product)
        thread.start(), thread.join()
        _decoded.with_decoded_weights(product, other, *others)
        assert len(decodings) == 5
        return product()

    _decoded.with_decoded_weights(call, layer, *weights)
    assert len(decodings) == 5
    product()
    assert len(decodings) == 6


def test_some_rows_of_each_head_are_rows_of_the_layer(decodings):
    layer, x = linear(), random((1, 1, 4, 256), torch.float32, 1)
    rows = [tensor.view(4, 6, -1)[:, :2] for tensor in layer.weights()[:3]]
    expected = torch.einsum("bthc,hrc->bthr", x.double(), layer.weight[:].double().view(4, 6, 256)[:, :2])
    del decodings[:]
    for _ in range(2):
        product = partial(torch.ops.moe_mps._heads_quantized, x, *rows, "affine4_64")
        out = _decoded.with_decoded_weights(product, layer, *layer.weights()[:3])
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
    assert len(decodings) == 1


@pytest.mark.parametrize("owner", ["linear", "experts", "mlp"])
@torch.no_grad()
def test_a_compiled_layer_reads_what_is_written_through_data(owner, decodings):
    layer, *given = OWNERS[owner]()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*given), layer(*given))
    for tensor in tensors_of(layer):
        if tensor.is_floating_point():
            tensor.data *= 2
    torch.testing.assert_close(compiled(*given), copy.deepcopy(layer)(*given))


def test_an_exported_layer_has_the_operator():
    layer = linear()
    program = torch.export.export(layer, (input_of(layer),))
    called = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert called == [linear_quantized.default]
    assert torch.equal(program.module()(input_of(layer)), layer(input_of(layer)))


def test_transforms_of_torch_see_the_layer():
    layer = linear()
    doubled = {"scales": 2 * layer.scales, "biases": 2 * layer.biases}
    out = torch.func.functional_call(layer, doubled, input_of(layer))
    torch.testing.assert_close(out, 2 * layer(input_of(layer)))


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "gpt_oss", "deepseek_v3"])
@torch.no_grad()
def test_a_token_decodes_no_matrix(architecture, decodings):
    """After a prompt that has met all experts: only the row of the embedding, where that is quantised."""
    model = model_of(architecture)
    ids = torch.randint(0, model.config.vocab_size, (1, 96), generator=torch.Generator().manual_seed(0))
    cache = model(ids, use_cache=True).past_key_values
    assert len(decodings) > len([m for m in model.modules() if isinstance(m, QuantizedLayer)]) / 2
    model(ids[:, :1], past_key_values=cache)
    del decodings[:]
    model(ids[:, 1:2], past_key_values=cache)
    assert all(rows == 1 for rows, _ in decodings) and len(decodings) <= 1


def test_caches_end_with_a_model(decodings):
    gc.collect()
    before, model = _decoded._bytes, model_of("qwen3_moe")
    with torch.no_grad():
        model(torch.arange(9)[None])
    assert _decoded._bytes > before
    del model
    gc.collect()
    assert _decoded._bytes == before
