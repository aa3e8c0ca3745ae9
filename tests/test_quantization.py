"""Quantising: bit for bit what MLX writes, checkpoints with MXFP4 blocks, and models in place."""

import copy
import pickle

import expecttest
import numpy as np
import pytest
import torch
from oracles_experts import dequantise
from safetensors.torch import load_file, save_file
from test_quantized import FORMATS, NAMES
from tiny_models import tiny_model
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from torch_moe_mps import quantization
from torch_moe_mps.quantization import (
    Format,
    QuantizationReport,
    QuantizedProjection,
    QuantizedWeight,
    dequantize,
    empty_quantized_module,
    experts_of,
    quantize,
    quantize_experts,
    quantize_module,
    relative_error,
    repack_mxfp4_blocks,
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BITS_OF = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def bits_of(tensor):
    return tensor.view(BITS_OF[tensor.element_size()])


def to_mlx(mx, tensor):
    if tensor.dtype == torch.bfloat16:
        return mx.array(tensor.view(torch.int16).numpy()).view(mx.bfloat16)
    return mx.array(tensor.numpy())


def from_mlx(mx, array):
    if array.dtype == mx.bfloat16:
        return torch.from_numpy(np.array(array.view(mx.int16))).view(torch.bfloat16)
    if array.dtype == mx.uint32:
        return torch.from_numpy(np.array(array).view(np.int32)).view(torch.uint32)
    return torch.from_numpy(np.array(array))


def awkward_weights(dtype):
    """Odd counts of experts and rows; zero, constant, one-signed, tiny and huge groups, and ties."""
    weight = torch.randn(3, 17, 256, generator=torch.Generator().manual_seed(0))
    weight[0, 0] = 0
    weight[0, 1], weight[0, 2] = 1.5, -0.3
    weight[0, 3], weight[0, 4] = weight[0, 3].abs(), -weight[0, 4].abs()
    weight[0, 5] *= 1e-6
    weight[0, 6] = weight[0, 6].clamp(-2, 2) * 3e4
    weight[0, 7] = torch.randint(-24, 25, (256,), generator=torch.Generator().manual_seed(1)) * 0.25
    weight[0, 8] *= 1e-9
    weight[0, 9, ::7] = 40
    weight[0, 10] = torch.where(weight[0, 10] > 0, 1.0, -1.0)
    weight[1] *= torch.exp2(torch.arange(17.0) - 12)[:, None]
    if dtype != torch.float16:
        weight[0, 11] *= 1e30
        weight[0, 12] *= 1e-30
    return weight.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS, ids=NAMES)
def test_bit_for_bit_as_mlx(format, dtype):
    mx = pytest.importorskip("mlx.core")
    bits, group_size, mode = format
    weight = awkward_weights(dtype)
    ours = quantize(weight, *format)
    with mx.stream(mx.cpu):
        theirs = mx.quantize(to_mlx(mx, weight), group_size=group_size, bits=bits, mode=mode)
        back = mx.dequantize(*theirs, group_size=group_size, bits=bits, mode=mode)
        theirs, back = [from_mlx(mx, array) for array in theirs], from_mlx(mx, back)
    assert ours.packed.dtype == torch.uint32 and (ours.biases is None) == (mode == "mxfp4")
    for mine, other in zip(ours, theirs, strict=False):
        assert mine.shape == other.shape and mine.dtype == other.dtype
        assert torch.equal(bits_of(mine), bits_of(other))
    result = dequantize(*ours, *format)
    assert result.dtype == back.dtype and torch.equal(bits_of(result), bits_of(back))
    assert torch.equal(dequantize(ours.packed.view(torch.int32), *ours[1:], *format), result)


@pytest.mark.parametrize("format", FORMATS, ids=NAMES)
def test_the_nearest_value_is_chosen(format):
    """No code of the same group is nearer; a dequantised weight is that of the format's definition."""
    weight = torch.randn(2, 5, 256, generator=torch.Generator().manual_seed(3))
    quantized = quantize(weight, *format)
    values = dequantise(*quantized, *format[:2])
    assert np.allclose(
        dequantize(*quantized, *format, dtype=torch.float32).numpy(), values, rtol=0, atol=1e-6
    )
    error = abs(weight.numpy() - values)
    for code in range(2 ** format[0]):
        filled = QuantizedWeight(torch.full_like(quantized.packed.view(torch.uint8), code), *quantized[1:])
        if format[0] == 4:
            filled = QuantizedWeight(filled.packed * 17, *quantized[1:])
        other = dequantise(filled.packed.view(torch.int32), *quantized[1:], *format[:2])
        assert (error <= abs(weight.numpy() - other) + 1e-6).all()
    expected = error.mean() / weight.abs().mean().item()
    assert relative_error(weight, quantized, Format(*format)) == pytest.approx(expected, rel=1e-4)


def test_views_and_pieces(monkeypatch):
    """Transposed and sliced stacks give what their copies give, however the work is cut."""
    stack = torch.randn(3, 64, 40, generator=torch.Generator().manual_seed(4)).mT[:, 1:, :]
    for format in (FORMATS[0], FORMATS[-1]):
        whole = quantize(stack.contiguous(), *format)
        monkeypatch.setattr(quantization, "CHUNK", 200)
        for mine, other in zip(quantize(stack, *format), whole, strict=True):
            assert mine is other or torch.equal(bits_of(mine), bits_of(other))
        error = relative_error(stack, whole, Format(*format))
        monkeypatch.undo()
        assert error == pytest.approx(relative_error(stack, whole, Format(*format)), rel=1e-5)
        single = quantize(stack[1], *format)
        assert torch.equal(bits_of(single.packed), bits_of(whole.packed[1]))
    assert quantize(torch.zeros(2, 0, 32), 4, 32).packed.shape == (2, 0, 4)


def test_the_device_does_not_matter(device):
    weight = torch.randn(2, 64, 5, generator=torch.Generator().manual_seed(7), dtype=torch.bfloat16).mT
    for format in (FORMATS[0], FORMATS[-1]):
        expected, quantized = quantize(weight, *format), quantize(weight.to(device), *format)
        for here, there in zip(expected, quantized, strict=True):
            if here is not None:
                assert there.device.type == device
                assert torch.equal(bits_of(here), bits_of(there).cpu())
        dense = dequantize(*quantized, *format)
        assert dense.device.type == device and torch.equal(dense.cpu(), dequantize(*expected, *format))
        errors = (
            relative_error(weight, expected, Format(*format)),
            relative_error(weight.to(device), quantized, Format(*format)),
        )
        assert errors[0] == errors[1]


def test_the_default_dtype_does_not_matter():
    weight = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(6))
    x, ids = torch.ones(1, 64), torch.zeros(1, 1, dtype=torch.int32)
    for format in (FORMATS[0], FORMATS[-1]):
        results = []
        for dtype in (torch.float32, torch.float16):
            torch.set_default_dtype(dtype)
            try:
                quantized = quantize(weight, *format)
                out = torch.ops.moe_mps.expert_qmm(x, *quantized, ids, *format)
                results.append(
                    [t for t in (*quantized, dequantize(*quantized, *format), out) if t is not None]
                )
            finally:
                torch.set_default_dtype(torch.float32)
        for one, other in zip(*results, strict=True):
            assert torch.equal(bits_of(one), bits_of(other))


def test_mxfp4_below_the_smallest_scale():
    """A group under 6 * 2^-127 keeps that scale; it does not wrap around."""
    weight = torch.full((1, 32), 2.0**-128)
    packed, scales, _ = quantize(weight, 4, 32, "mxfp4")
    assert scales.item() == 0
    assert (dequantize(packed, scales, None, 4, 32, "mxfp4", torch.float32) == 2.0**-128).all()


def test_mxfp4_blocks_of_gpt_oss():
    """The bytes of a checkpoint, reinterpreted; transformers' own dequantisation says what they mean."""
    generator = torch.Generator().manual_seed(5)
    blocks = torch.randint(256, (3, 10, 4, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(110, 140, (3, 10, 4), generator=generator, dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales).mT
    quantized = repack_mxfp4_blocks(blocks, scales)
    assert quantized.packed.data_ptr() == blocks.data_ptr()
    assert torch.equal(dequantize(*quantized, 4, 32, "mxfp4"), expected)
    for other in (blocks.flip(0).flip(0).transpose(0, 1).contiguous().transpose(0, 1), shifted(blocks)):
        assert torch.equal(bits_of(repack_mxfp4_blocks(other, scales).packed), bits_of(quantized.packed))


def shifted(tensor):
    """The same values at an address that is no multiple of 4."""
    storage = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)
    return storage.copy_(tensor)


def test_errors():
    ones = torch.ones(2, 64)
    packed, scales, biases = quantize(ones, 4, 32)
    blocks = torch.zeros(2, 3, 16, dtype=torch.uint8)
    cases = {
        "quantize: bits must be 4 or 8 for mode affine, got 2": lambda: quantize(ones, 2),
        "quantize: group_size must be 32 for mode mxfp4, got 64": lambda: quantize(ones, 4, 64, "mxfp4"),
        "quantize: bits must be 4 or 8 for mode affine, got '4'": lambda: quantize(ones, "4"),
        "quantize: bits must be 4 or 8 for mode affine, got 4.0": lambda: quantize(ones, 4.0),
        "quantize: group_size must be 32 or 64 or 128 for mode affine, got 64.0": lambda: quantize(
            ones, 4, 64.0
        ),
        "quantize: mode must be one of affine, mxfp4, got 'nf4'": lambda: quantize(ones, 4, 64, "nf4"),
        "quantize: weight must be float32 or float16 or bfloat16, got int32": lambda: quantize(ones.int()),
        "quantize: weight must be 2-D or 3-D, got 1-D of shape (64,)": lambda: quantize(ones[0]),
        "quantize: weight must be of a last dimension that is a multiple of 64, got (2, 33)": lambda: (
            quantize(ones[:, :33])
        ),
        "dequantize: packed must be uint32 or int32, got float32": lambda: dequantize(ones, scales, biases),
        "dequantize: scales must be of shape [..., C / group_size] = (2, 1), got (2, 2)": lambda: dequantize(
            packed, scales, biases
        ),
        "dequantize: biases must be a tensor for mode affine, got None": lambda: dequantize(
            packed, scales, None, 4, 32
        ),
        "dequantize: scales must be uint8, got float32": lambda: dequantize(
            packed, scales, None, 4, 32, "mxfp4"
        ),
        "repack_mxfp4_blocks: blocks must be of shape [..., R, C / 32, 16] = (2, 4, 16), got (2, 3, 16)": (
            lambda: repack_mxfp4_blocks(blocks, torch.zeros(2, 4, dtype=torch.uint8))
        ),
        "repack_mxfp4_blocks: blocks must be uint8, got float32": lambda: repack_mxfp4_blocks(
            blocks.float(), torch.zeros(2, 3, dtype=torch.uint8)
        ),
    }
    for message, call in cases.items():
        with pytest.raises(ValueError) as error:
            call()
        assert str(error.value) == f"moe_mps::{message}"
    for bad in (torch.nan, torch.inf, -torch.inf):
        for format in (FORMATS[0], FORMATS[-1]):
            weight = torch.ones(3, 128)
            weight[1, 77] = bad
            with pytest.raises(ValueError, match="moe_mps::quantize: weight must be finite"):
                quantize(weight, *format)


def test_the_default_group_goes_with_the_mode():
    weight = torch.randn(2, 64, generator=torch.Generator().manual_seed(8))
    assert (Format().group_size, Format(mode="mxfp4").group_size) == (64, 32)
    for given, full in (((8,), (8, 64, "affine")), ((4, None, "mxfp4"), (4, 32, "mxfp4"))):
        quantized = quantize(weight, *given)
        assert quantized.scales.shape == (2, 64 // full[1])
        assert torch.equal(dequantize(*quantized, *given), dequantize(*quantized, *full))


# Models


def small(architecture, **overrides):
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 32}
    return tiny_model(architecture, **(sizes | overrides))


def dequantised_twin(model, quantized):
    """The dense model with the values of the quantised one, for the model's own code."""
    for name, module in experts_of(quantized).items():
        dense = model.get_submodule(name)
        for projection in quantization.projections(dense):
            parts = [getattr(module, f"{projection}_{part}", None) for part in QuantizedWeight._fields]
            values = dequantize(*parts, **module.quantization.to_dict(), dtype=torch.float32)
            getattr(dense, projection).data = values.mT.contiguous() if module.is_transposed else values
    return model


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss", "mixtral", "nemotron_h"])
@pytest.mark.parametrize("format", [FORMATS[0], FORMATS[3], FORMATS[-1]], ids=[NAMES[i] for i in (0, 3, -1)])
def test_models(architecture, format):
    """The logits are those of the model's own code on the dequantised weights."""
    model = small(architecture)
    quantized = copy.deepcopy(model)
    report = quantize_experts(quantized, *format, progress=False)
    names = experts_of(model)
    assert set(report.modules) == set(names) and names and not report.skipped
    for name, entries in report.modules.items():
        module = quantized.get_submodule(name)
        assert module.quantization == Format(*format)
        assert {entry.projection for entry in entries} == set(quantization.projections(module))
        assert all(0 < entry.error < 0.2 for entry in entries)
        assert sum(entry.dense_bytes for entry in entries) > 3 * sum(
            entry.quantized_bytes for entry in entries
        )
        suffixes = tuple(f"_{part}" for part in QuantizedWeight._fields)
        stored = [value for key, value in module.named_parameters() if key.endswith(suffixes)]
        assert len(stored) >= 4 and not any(parameter.requires_grad for parameter in stored)
    twin = dequantised_twin(model, quantized)
    tokens = torch.arange(1, 9).view(1, 8)
    with torch.no_grad():
        torch.testing.assert_close(quantized(tokens).logits, twin(tokens).logits, rtol=1e-4, atol=1e-5)
        generated = quantized.generate(tokens, max_new_tokens=8, do_sample=False)
    assert torch.equal(generated, twin.generate(tokens, max_new_tokens=8, do_sample=False))


class TestReport(expecttest.TestCase):
    def test_table(self):
        """Equal layers share a line."""
        entries = [QuantizedProjection("gate_up_proj", 0.1, 3 << 20, 1 << 20)]
        entries += [QuantizedProjection("down_proj", 0.09, 2 << 20, 1 << 19)]
        other = [entries[0]._replace(error=0.2), entries[1]]
        report = QuantizationReport(
            Format(4, 32),
            {"layers.0.experts": entries, "layers.11.experts": other},
            {f"layers.{i}.experts": "already mxfp4" for i in (3, 4)},
        )
        assert (report.dense_bytes, report.quantized_bytes) == (10 << 20, 3 << 20)
        self.assertExpectedInline(
            str(report),
            """\
parameter                      n  mean error  largest    before    after
layers.*.experts.gate_up_proj  2      0.1500   0.2000   6.0 MiB  2.0 MiB
layers.*.experts.down_proj     2      0.0900   0.0900   4.0 MiB  1.0 MiB
all, int4 group 32             4      0.1200   0.2000  10.0 MiB  3.0 MiB
layers.*.experts (2): left as it is, already mxfp4""",
        )
        report.modules.clear()
        self.assertExpectedInline(str(report), """layers.*.experts (2): left as it is, already mxfp4""")
        self.assertExpectedInline(
            str(quantize_experts(torch.nn.Linear(2, 2))),
            """No experts with transformers' experts interface found; nothing is quantised.""",
        )


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])
def test_models_on_a_device(device, architecture, monkeypatch):
    """The same bits as on the CPU, and the allocator's cache is given back after every layer."""
    released = []
    monkeypatch.setattr(torch.mps, "empty_cache", lambda: released.append(None))
    model = small(architecture)
    expected = copy.deepcopy(model)
    quantize_experts(expected, 4, 32, progress=False)
    report = quantize_experts(model.to(device), 4, 32, progress=False)
    assert len(released) == (len(report.modules) if device == "mps" else 0)
    state = expected.state_dict()
    for name, tensor in model.state_dict().items():
        assert tensor.device.type == device and torch.equal(bits_of(tensor.cpu()), bits_of(state[name]))


def test_a_second_time_leaves_them_alone():
    model = small("qwen3_moe")
    quantize_experts(model, 4, 32, progress=False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = quantize_experts(model, 8, 32, progress=False)
    assert not report.modules and set(report.skipped.values()) == {"already int4 group 32"}
    assert all(
        torch.equal(bits_of(tensor), bits_of(before[name])) for name, tensor in model.state_dict().items()
    )


def test_what_does_not_fit_changes_nothing():
    """The second layer's weights are no multiple of a group: the first stays dense too."""
    model = small("qwen3_moe", moe_intermediate_size=48)
    before = model.state_dict()
    with pytest.raises(
        ValueError, match=r"experts.down_proj must be of an input dimension that is a multiple of"
    ):
        quantize_experts(model, 4, 32, progress=False)
    assert list(model.state_dict()) == list(before)
    with pytest.raises(ValueError, match="moe_mps::quantize: bits must be 4 or 8"):
        quantize_experts(model, 5, progress=False)
    with torch.device("meta"):
        offloaded = small("qwen3_moe")
    with pytest.raises(ValueError, match="must be loaded and not offloaded"):
        quantize_experts(offloaded, 4, 32, progress=False)


@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_change_nothing(mode, bad):
    model = small("qwen3_moe")
    last = model.model.layers[1].mlp.experts
    with torch.no_grad():
        last.down_proj[3, 2, 1] = bad
    with pytest.raises(
        ValueError, match=r"model.layers.1.mlp.experts.down_proj must be finite, got NaN, inf or"
    ):
        quantize_experts(model, 4, 32, mode, progress=False)
    assert not any("packed" in name for name in model.state_dict())
    assert not hasattr(model.config, "quantization_config")


def test_want_of_memory_leaves_a_model_that_runs_and_saves(monkeypatch, tmp_path):
    model = small("qwen3_moe")
    tokens, errors = torch.arange(1, 9).view(1, 8), iter([0.1, 0.1, 0.1])

    def fourth_time_fails(*_):
        if (error := next(errors, None)) is None:
            raise MemoryError
        return error

    monkeypatch.setattr(quantization, "relative_error", fourth_time_fails)
    with pytest.raises(MemoryError):
        quantize_experts(model, 4, 32, progress=False)
    assert [hasattr(module, "quantization") for module in experts_of(model).values()] == [True, False]
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("parameters", [["gate_up_proj"], ["gate_up_proj", "down_proj"]], ids=len)
def test_an_adapter_on_the_experts_is_an_error(parameters):
    peft = pytest.importorskip("peft")
    targets = [f"mlp.experts.{name}" for name in parameters]
    config = peft.LoraConfig(r=2, target_parameters=targets, init_lora_weights=False)
    adapted = peft.get_peft_model(small("qwen3_moe"), config).eval()
    tokens = torch.arange(1, 9).view(1, 8)
    with torch.no_grad():
        expected = adapted(input_ids=tokens).logits
        with pytest.raises(
            ValueError, match=r"a PEFT adapter is on \S+layers.0.mlp.experts\S*; merge_and_unload"
        ):
            quantize_experts(adapted, 4, 32, progress=False)
        assert torch.equal(adapted(input_ids=tokens).logits, expected)
        merged = adapted.merge_and_unload()
        assert len(quantize_experts(merged, 4, 32, progress=False).modules) == 2


def test_distributed_weights_are_an_error(tmp_path):
    from torch import distributed
    from torch.distributed.tensor import distribute_tensor

    model = small("qwen3_moe")
    module = model.model.layers[1].mlp.experts
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = distributed.init_device_mesh("cpu", (1,))
        module.down_proj = torch.nn.Parameter(distribute_tensor(module.down_proj.detach(), mesh))
        message = (
            r"layers.1.mlp.experts.down_proj must be a plain tensor, without expert parallelism, got DTensor"
        )
        with pytest.raises(ValueError, match=message):
            quantize_experts(model, 4, 32, progress=False)
    finally:
        distributed.destroy_process_group()
    assert not any("packed" in name for name in model.state_dict())


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])
def test_state_dict_round_trip(architecture, tmp_path):
    """Through safetensors into a module prepared on the meta device, and through pickle."""
    for format in (Format(4, 32), Format(4, 32, "mxfp4")):
        module = next(iter(experts_of(small(architecture)).values()))
        with torch.device("meta"):
            empty = next(iter(experts_of(small(architecture)).values()))
        empty_quantized_module(empty, format)
        quantize_module(module, format)
        save_file(module.state_dict(), tmp_path / "module.safetensors")
        loaded = load_file(tmp_path / "module.safetensors")
        empty.load_state_dict(loaded, strict=True, assign=True)
        again = pickle.loads(pickle.dumps(module))
        for other in (empty, again):
            assert other.quantization == format
            for name, tensor in module.state_dict().items():
                assert torch.equal(bits_of(other.state_dict()[name]), bits_of(tensor))


class LiveBytes(TorchDispatchMode):
    """The memory of all tensors that are alive, after each operation."""

    def __init__(self, tensors):
        super().__init__()
        self.storages, self.peak = {}, 0
        self.watch(tensors)

    def watch(self, tensors):
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.now())

    def now(self):
        self.storages = {key: entry for key, entry in self.storages.items() if not entry[0].expired()}
        return sum(size for _, size in self.storages.values())

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.watch(leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))
        return out


def test_peak_memory_while_quantising(monkeypatch):
    """Under the dense model plus one layer, counting every tensor that is alive."""
    monkeypatch.setattr(quantization, "CHUNK", 4096)
    model = small("qwen3_moe", num_hidden_layers=4, hidden_size=128, moe_intermediate_size=64)
    dense = sum(parameter.nbytes for parameter in model.parameters())
    layer = sum(parameter.nbytes for parameter in next(iter(experts_of(model).values())).parameters())
    with LiveBytes([*model.parameters(), *model.buffers()]) as live:
        started = live.now()
        report = quantize_experts(model, 4, 64, progress=False)
        ended = live.now()
    assert report.dense_bytes == 4 * layer and started >= dense
    assert live.peak < started + layer
    assert ended == started - report.dense_bytes + report.quantized_bytes


def test_progress_bar(capsys):
    quantize_experts(small("qwen3_moe"), 4, 32)
    assert "Quantising experts" in capsys.readouterr().err
