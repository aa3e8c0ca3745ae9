"""Floats of other libraries: NVFP4 and FP8 keep their codes, and 8-bit floats may become fewer bits."""

import functools
import itertools

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.models import assert_close, output, prompt
from support.other_libraries import FP4, Fp4, Fp8, Library, weights, write
from support.sweep import in_sweep

import torch_moe_mps
from torch_moe_mps.checkpoints.quantize.weights import quantized_names
from torch_moe_mps.commands import main
from torch_moe_mps.models.modules.linears import formats_in
from torch_moe_mps.quantization import Format, QuantizedWeight


class Factors:
    """NVFP4 with another factor for each matrix."""

    def __init__(self, method):
        self._factors = (0.0001 * 1.1**number for number in itertools.count())
        self._writer = functools.partial(Fp4, method, 16)
        self.config = self._writer(1.0).config

    def of(self, name):
        return self._writer(next(self._factors))


def nvfp4_values(folder):
    """{matrix: float64 values of the checkpoint}, by the definition of the library that wrote it."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(".weight_scale")]:
        module = name.removesuffix(".weight_scale")
        divides = f"{module}.weight_packed" in tensors
        octets = tensors[f"{module}.{'weight_packed' if divides else 'weight'}"]
        codes = torch.stack((octets & 15, octets >> 4), -1).flatten(-2)
        factor = tensors[f"{module}.{'weight_global_scale' if divides else 'weight_scale_2'}"].double()
        scales = tensors[name].double() / factor if divides else tensors[name].double() * factor
        yield module, FP4.double()[codes.int()] * scales.repeat_interleave(16, 1)


@pytest.mark.parametrize("method", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("place", ["cpu", "mps"])
def test_nvfp4_has_a_factor_for_each_matrix(method, place, simulated, tmp_path):
    """Also where gate and up are joined: 4.5 bits a weight, the values in float64 and their logits."""
    expected = write(tmp_path, Factors(method), num_hidden_layers=1)
    values = dict(nvfp4_values(tmp_path))
    model = torch_moe_mps.from_pretrained(tmp_path, dtype=torch.float32, device_map=place)
    layer = model.model.layers[0]
    stacks = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
    for parameter, parts in stacks.items():
        weight = QuantizedWeight(
            *(getattr(layer.mlp.experts, name, None) for name in quantized_names(parameter)),
            Format.named("nvfp4_global"),
        ).map(torch.Tensor.cpu)
        for expert in range(len(weight.packed)):
            names = [f"model.layers.0.mlp.experts.{expert}.{part}" for part in parts]
            wanted = torch.cat([values.pop(name) for name in names])
            assert ((weight.values(expert) - wanted).abs() <= 2.0**-22 * wanted.abs()).all()
        rows, columns = weight.packed.shape[1], weight.format.columns(weight.packed.shape[2])
        assert weight.nbytes * 8 == len(weight.packed) * rows * (4.5 * columns + 32)
    for name, wanted in values.items():
        weight = QuantizedWeight(*model.get_submodule(name).weights()[:3], Format.named("nvfp4_global"))
        own = weight.map(torch.Tensor.cpu).values(slice(None))
        assert ((own - wanted).abs() <= 2.0**-22 * wanted.abs()).all()
    assert_close(output(model, prompt().to(place)).cpu(), output(expected, prompt()), 1e-5)


@pytest.mark.parametrize(
    ("writer", "group"),
    [
        (Fp8("compressed-tensors", "weight_scale", "row", False), 128),
        (Fp8("fp8", "weight_scale_inv", (128, 128), False), 128),
        (Fp8("fp8", "weight_scale_inv", (64, 64), False), 32),
    ],
)
def test_fp8_keeps_its_codes(writer, group, tmp_path):
    """With a float32 scale for each 128 columns, or 32 where blocks are smaller: 8.25 or 9 bits a weight."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 1}
    expected = write(tmp_path, writer, **sizes)
    model = torch_moe_mps.from_pretrained(tmp_path, dtype=torch.float32)
    experts = model.model.layers[0].mlp.experts
    assert {*map(str, formats_in(experts).values())} == {f"fp8_{group}"}
    dense = expected.model.layers[0].mlp.experts
    for parameter in ("gate_up_proj", "down_proj"):
        bits = 8 * sum(getattr(experts, name).nbytes for name in quantized_names(parameter)[:2])
        assert bits == getattr(dense, parameter).numel() * (8 + 32 / group)
    assert all(torch.equal(*pair) for pair in weights(model, expected))
    assert_close(output(model, prompt()), output(expected, prompt()), 1e-5)


# {what has 8-bit floats: (writer, bits)}
FLOATS = {
    "blocks": (Fp8("fp8", "weight_scale_inv", (128, 128), False), 4),
    "blocks in 8 bits": (Fp8("fp8", "weight_scale_inv", (128, 128), False), 8),
    "blocks by powers": (Fp8("fp8", "weight_scale_inv", (32, 32), True), 2),
    "all": (Fp8("fp8", "weight_scale_inv", None, False), 3),
    "compressed-tensors, rows": (Fp8("compressed-tensors", "weight_scale", "row", False), 8),
    "compressed-tensors, all": (Fp8("compressed-tensors", "weight_scale", None, True), 4),
    "compressed-tensors, blocks": (Library("FP8_BLOCK"), 4),
    "compressed-tensors, mxfp8": (Library("MXFP8A16"), 5),
    "modelopt, all": (Fp8("modelopt", "weight_scale", None, False), 4),
    "modelopt, rows": (Fp8("modelopt", "weight_scale", "row", True), 6),
    "DeepSeek-V4's names": (Fp8("fp8", "scale", (128, 128), False), 4),
    "Mistral's names": (Fp8("fp8", "qscale_weight", None, False), 4),
}
# Sizes that blocks of 128 do not divide, in rows and columns: two blocks of 160 are no two halves.
PARTIAL = {"hidden_size": 160, "moe_intermediate_size": 224, "intermediate_size": 160, "num_hidden_layers": 1}
FEW = ("blocks", "compressed-tensors, rows", "modelopt, all")


@pytest.mark.parametrize("name", in_sweep(FLOATS, FEW))
def test_8_bit_floats_become_fewer_bits(name, tmp_path):
    """Their values rounded by MLX."""
    import mlx.core as mx

    writer, bits = FLOATS[name]
    expected = write(tmp_path, writer, **PARTIAL)
    model = torch_moe_mps.from_pretrained(tmp_path, bits=bits, group_size=32, dtype=torch.float32)
    assert all(formats_in(module) for module in (model.lm_head, model.model.layers[0].mlp.experts))
    formats = [format for module in model.modules() for format in formats_in(module).values()]
    assert bits in {format.bits for format in formats}
    for format, (weight, values) in zip(formats, weights(model, expected), strict=True):
        parts = mx.quantize(mx.array(values.detach().numpy()), 32, format.bits)
        assert torch.equal(weight, torch.tensor(np.array(mx.dequantize(*parts, 32, format.bits))))


def test_8_bit_floats_of_this_package_become_fewer_bits(tmp_path):
    """As those of the library whose codes it saved."""
    write(tmp_path / "theirs", FLOATS["blocks"][0])
    how = {"dtype": torch.float32, "bits": 4, "group_size": 32}
    expected = torch_moe_mps.from_pretrained(tmp_path / "theirs", **how).state_dict()
    torch_moe_mps.from_pretrained(tmp_path / "theirs", dtype=torch.float32).save_pretrained(tmp_path / "ours")
    state = torch_moe_mps.from_pretrained(tmp_path / "ours", **how).state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in expected.items())


class Mixed:
    """ModelOpt's FP8 in attention, and NVFP4 in experts."""

    attention, experts = Fp8("modelopt", "weight_scale", None, False), Fp4("modelopt", 16, 0.0003)
    config = attention.config | {
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {
            f"model.layers.{layer}.{part}": entry
            for layer in range(2)
            for part, entry in (
                ("self_attn", {"quant_algo": "FP8"}),
                ("mlp", {"quant_algo": "NVFP4", "group_size": 16}),
            )
        },
    }

    def of(self, name):
        return self.attention if "self_attn" in name else self.experts


def test_floats_of_4_bits_are_not_quantised_again(tmp_path):
    """FP8 beside them is; fewer bits than 4 are refused in a line."""
    write(tmp_path, Mixed())
    model = torch_moe_mps.from_pretrained(tmp_path, bits=4, group_size=32, dtype=torch.float32)
    layer = model.model.layers[0]
    assert {*map(str, formats_in(layer.self_attn.o_proj).values())} == {"affine4_32"}
    assert {*map(str, formats_in(layer.mlp.experts).values())} == {"nvfp4_global"}
    message = "bits must be left out, or those of the checkpoint, which has nvfp4_global: quantise the dense"
    with pytest.raises(ValueError, match=f"^moe_mps::quantize: {message}") as error:
        torch_moe_mps.from_pretrained(tmp_path, bits=3, group_size=32)
    assert "\n" not in str(error.value)


def test_mlx_has_no_such_formats(tmp_path, capsys):
    """In its layout, FP8 needs bits; NVFP4 with a factor is refused in a line."""
    write(tmp_path / "fp8", FLOATS["modelopt, all"][0], num_hidden_layers=1)
    write(tmp_path / "nvfp4", Factors("modelopt"), num_hidden_layers=1)
    for name, has in (("fp8", "fp8_32"), ("nvfp4", "nvfp4_global")):
        assert main(["convert", str(tmp_path / name), str(tmp_path / "new"), "--to", "mlx"]) == 1
        assert (
            f"--to mlx needs --bits, and a --mode of MLX's, which does not have {has}"
            in capsys.readouterr().err
        )
    convert = ["convert", tmp_path / "fp8", tmp_path / "new", "--to", "mlx", "--bits", 8, "--group-size", 32]
    assert main([*map(str, convert)]) == 0
