"""Checkpoints that other libraries quantised: the same codes, and the values of their own arithmetic."""

import copy
import itertools
import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import tiny_models
from support.checkpoints import changed
from support.models import assert_close, output, prompt, stored
from support.other_libraries import (
    E4M3,
    TURNED,
    AutoRound,
    Awq,
    CompressedTensors,
    Fp4,
    Fp8,
    Gptq,
    Int8,
    Library,
    together,
    weights,
    write,
)
from support.sweep import in_sweep, rows_in_sweep

import torch_moe_mps
from torch_moe_mps.checkpoints.own.config import QuantizationConfig
from torch_moe_mps.checkpoints.source import Source
from torch_moe_mps.checkpoints.third_party.layouts import Matrix, alike
from torch_moe_mps.checkpoints.third_party.schemes import Scheme, Schemes
from torch_moe_mps.commands import main
from torch_moe_mps.models.basics.interface import formats_of
from torch_moe_mps.models.modules.linears import formats_in
from torch_moe_mps.quantization import Format


class Positive(Gptq):
    """Of matrices without a negative value: all zero points are 0, which is stored as the largest code."""

    def __call__(self, weight):
        return super().__call__(weight.abs())


class ZeroBlocks(Fp8):
    """Of matrices whose first block has the scale 0."""

    def __call__(self, weight):
        tensors, values = super().__call__(weight)
        (high, wide), tensors[self.part][0, 0] = self.block, 0
        values[:high, :wide] = 0
        return tensors, values


# {name: (writer, format, whether the values are the library's to the bit)}
CASES = {
    "int4": (CompressedTensors(), "affine4_32", True),
    "int4 asymmetric": (CompressedTensors(symmetric=False, group=64), "affine4_64", False),
    "int4 of channels": (CompressedTensors(group=0), "affine4_64", True),
    "int8": (CompressedTensors(bits=8), "affine8_32", True),
    "int8 of channels": (Int8(), "affine8_64", True),
    "int3": (CompressedTensors(bits=3), "affine3_32", True),
    "awq": (Awq(), "affine4_32", False),
    "gptq": (Gptq(), "affine4_32", True),
    "gptq asymmetric": (Gptq(symmetric=False, bits=8), "affine8_32", False),
    "gptq of zero points 0": (Positive(symmetric=False), "affine4_32", True),
    "gptq v2": (Gptq(version=2, group=64), "affine4_64", True),
    "mxfp4": (Fp4("compressed-tensors", 32), "mxfp4", True),
    "nvfp4": (Fp4("compressed-tensors", 16, 2.0**-12), "nvfp4_global", True),
    "nvfp4 of modelopt": (Fp4("modelopt", 16, 2.0**-12), "nvfp4_global", True),
    "fp8 of rows": (Fp8("compressed-tensors", "weight_scale", "row", False), "fp8_32", True),
    "fp8 of all": (Fp8("compressed-tensors", "weight_scale", None, True), "mxfp8", True),
    "fp8 of modelopt": (Fp8("modelopt", "weight_scale", "row", True), "mxfp8", True),
    "fp8 of blocks": (Fp8("fp8", "weight_scale_inv", (128, 128), False), "fp8_32", True),
    "fp8 with a zero": (ZeroBlocks("fp8", "weight_scale_inv", (32, 32), True), "fp8_32", True),
    "fp8 of blocks by powers": (Fp8("fp8", "weight_scale_inv", (32, 32), True), "mxfp8", True),
    "auto-round": (AutoRound("auto_gptq", Gptq()), "affine4_32", True),
    "auto-round of gptqmodel": (AutoRound("gptqmodel", Gptq(version=2, bits=8)), "affine8_32", True),
    "auto-round of awq": (AutoRound("auto_awq", Awq()), "affine4_32", False),
}


@pytest.mark.parametrize("name", in_sweep(CASES, [*[*CASES][::6], "auto-round"]))
def test_values_are_those_of_the_library(name, tmp_path):
    writer, format, exact = CASES[name]
    expected = write(tmp_path, writer)
    model = torch_moe_mps.from_pretrained(tmp_path, dtype=torch.float32)
    formats = {str(f) for module in model.modules() for f in formats_in(module).values()}
    assert formats == {format}
    errors = [entry.error for entries in model.hf_quantizer.report.modules.values() for entry in entries]
    assert len(errors) > 5 and all((error == 0) == exact for error in errors)
    assert_close(output(model, prompt()), output(expected, prompt()), 1e-5 if exact else 0.02)
    for weight, values in weights(model, expected):
        if exact:
            assert torch.equal(weight, values)
        else:
            assert_close(weight, values, 0.03)


# Keys and values have a latent of 1.25 or, in DeepSeek-V3, 4.5 blocks with the rotated part. REAL has all of
# its sizes but the width and the numbers of layers, heads and experts.
SMALL = {"kv_lora_rank": 128, "qk_rope_head_dim": 32, "head_dim": 32, "hidden_size": 160}
REAL = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
REAL |= {"q_lora_rank": 1536, "hidden_size": 896, "moe_intermediate_size": 2048, "intermediate_size": 18432}


@pytest.mark.slow("loads a model in four ways")
@pytest.mark.parametrize(
    ("sizes", "bits"), rows_in_sweep([(SMALL, 4), (SMALL, 8), (REAL, 4), (REAL, 8)], [(SMALL, 4)])
)
def test_deepseek_of_partial_blocks_becomes_fewer_bits(sizes, bits, tmp_path):
    """In each way as quantising the dense model of the same values."""
    writer = Fp8("fp8", "weight_scale_inv", (128, 128), False)
    dense = write(tmp_path / "fp8", writer, "deepseek_v3", num_hidden_layers=2, **sizes)
    expected, how = copy.deepcopy(dense), {"bits": bits, "group_size": 32}
    torch_moe_mps.accelerate(expected, **how)
    convert = ["convert", tmp_path / "fp8", tmp_path / "new", "--bits", bits, "--group-size", 32]
    assert main([*map(str, convert), "--dtype", "float32"]) == 0
    load, config = torch_moe_mps.from_pretrained, QuantizationConfig(**how)
    for model in (
        torch_moe_mps.from_pretrained(tmp_path / "fp8", dtype=torch.float32, **how),
        load(tmp_path / "fp8", dtype=torch.float32, quantization_config=config),
        load(tmp_path / "new", dtype=torch.float32),
    ):
        state = model.state_dict()
        assert state.keys() == expected.state_dict().keys()
        assert all(torch.equal(tensor, state[name]) for name, tensor in expected.state_dict().items())
    twin = tiny_models.dense_twin(dense, model)
    assert_close(output(model, prompt()), output(twin, prompt()), 1e-5)


def test_packed_integers_are_refused_before_anything_is_read(tmp_path, capsys):
    """By convert before its plan is printed; and 8-bit floats that are not as the config says."""
    write(tmp_path / "int4", CASES["int4"][0])
    write(tmp_path / "fp8", CASES["fp8 of blocks"][0])
    change(tmp_path / "fp8", "weight_scale_inv", lambda t: torch.cat((t, t)))
    for name, message in (
        ("int4", "bits must be left out, or those of the checkpoint, which has affine4_32: quantise the den"),
        ("fp8", r"weight_scale_inv must be of shape \(\d+, \d+\), got"),
    ):
        capsys.readouterr()
        assert main(["convert", str(tmp_path / name), str(tmp_path / "new"), "--bits", "2"]) == 1
        out, err = capsys.readouterr()
        assert re.search(message, err) and err.count("\n") == 1 and not out


def test_a_recipe_decides_over_8_bit_floats(tmp_path):
    """What it keeps is dense; what has its format already keeps its bits."""
    expected = write(tmp_path, CASES["fp8 of blocks by powers"][0])
    recipe = {"keep": ["o_proj"], "overrides": {"experts.down_proj": 4}}
    model = torch_moe_mps.from_pretrained(tmp_path, mode="mxfp8", dtype=torch.float32, **recipe)
    layer, other = model.model.layers[0], expected.model.layers[0]
    assert torch.equal(layer.self_attn.o_proj.weight, other.self_attn.o_proj.weight)
    assert str(formats_of(layer.mlp.experts)["down_proj"]) == "affine4_64"
    values = {weight.shape: torch.equal(weight, values) for weight, values in weights(model, expected)}
    assert values[expected.model.layers[0].self_attn.q_proj.weight.shape]


@pytest.mark.parametrize(
    "name", in_sweep(("gptq asymmetric", "nvfp4", "fp8 of blocks"), ("gptq asymmetric", "nvfp4"))
)
def test_what_fits_is_what_loading_gives(name, tmp_path):
    """With the files; their config alone does not tell."""
    write(tmp_path, CASES[name][0])
    model = torch_moe_mps.from_pretrained(tmp_path, dtype=torch.bfloat16)
    sizes = []
    for _ in range(2):
        assert main(["fit", str(tmp_path), "--group-size", "32", "--json", str(tmp_path / "x.json")]) == 0
        written = json.loads((tmp_path / "x.json").read_text())["sizes"]
        sizes.append({size["name"]: size["bytes"] for size in written})
        for file in tmp_path.glob("*.safetensors"):
            file.unlink()
    assert sizes[0].pop("as it is") == sum(tensor.nbytes for tensor in stored(model))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("name", in_sweep(("int4", "gptq asymmetric"), ("gptq asymmetric",)))
def test_mps_gets_the_codes_of_the_cpu(name, simulated, tmp_path):
    """With the same words as on the CPU."""
    write(tmp_path, CASES[name][0])
    model, other = (
        torch_moe_mps.from_pretrained(tmp_path, dtype=torch.float32, device_map=place)
        for place in ("cpu", "mps")
    )
    state = other.state_dict()
    assert all(state[name].device.type == "mps" for name in state)
    assert all(torch.equal(tensor, state[name].cpu()) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("order", [False, True])
def test_columns_must_be_in_the_order_of_their_groups(order, tmp_path):
    """GPTQ's act-order is refused, by what is stored and not by what the config says."""
    write(tmp_path, Gptq(order=order))
    with changed(tmp_path / "config.json") as config:
        config["quantization_config"]["desc_act"] = True
    if not order:
        assert torch_moe_mps.from_pretrained(tmp_path).hf_quantizer.report.modules
        return
    with pytest.raises(
        ValueError, match="g_idx must be of 32 columns of each group, in their order, got oth"
    ):
        torch_moe_mps.from_pretrained(tmp_path)


def test_matrices_of_one_parameter_have_one_format():
    """Those whose format rests on their values take the one for any where they differ."""
    few, many, other, least = (Matrix((), lambda *_: None, Format(bits, 32)) for bits in (4, 8, 8, 3))
    small = few._replace(again=lambda: other)
    assert alike("w", [few, few]) == [few, few] and alike("w", [small, small]) == [small, small]
    assert alike("w", [small, many]) == [other, many]
    for matrices, got in (
        ([many, few], "affine4_32 and affine8_32"),
        ([small, least], "affine3_32 and affine8_32"),
    ):
        with pytest.raises(ValueError, match=f"w must be made of matrices in one format, got {got}$"):
            alike("w", matrices)


PEOPLE_HAVE = (
    *("deepseek_v3", "qwen3_next", "gpt_oss", "llama4"),
    *("glm4_moe", "mixtral", "kimi_linear", "qwen3"),
)


@pytest.mark.parametrize("architecture", in_sweep(PEOPLE_HAVE, PEOPLE_HAVE[:1]))
def test_models_that_people_have(architecture, tmp_path):
    """What cannot be quantised here, such as a weight that code reads, is dequantised."""
    expected = write(tmp_path, CASES["int4"][0], architecture)
    model = torch_moe_mps.from_pretrained(tmp_path, dtype=torch.float32)
    found = [torch.equal(*pair) for pair in weights(model, expected)]
    assert len(found) > 8 and all(found)
    assert_close(output(model, prompt()), output(expected, prompt()), 1e-5)


def stack(folder, architecture="qwen3_moe") -> None:
    tensors = together(load_file(folder / "model.safetensors"), architecture)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


STACKED = (
    *("int4", "int4 asymmetric", "mxfp4", "nvfp4 of modelopt"),
    *("fp8 of rows", "fp8 of blocks by powers"),
)


@pytest.mark.parametrize("name", in_sweep(STACKED, ("int4 asymmetric", "nvfp4 of modelopt")))
def test_experts_may_be_stacked(name, tmp_path):
    """The same codes, formats and values as of experts that are modules."""
    writer, format, _ = CASES[name]
    write(tmp_path, writer)
    apart = torch_moe_mps.from_pretrained(tmp_path, dtype=torch.float32)
    stack(tmp_path)
    model = torch_moe_mps.from_pretrained(tmp_path, dtype=torch.float32)
    assert {str(f) for module in model.modules() for f in formats_in(module).values()} == {format}
    state = model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in apart.state_dict().items())
    errors = [
        [entry.error for entries in each.hf_quantizer.report.modules.values() for entry in entries]
        for each in (model, apart)
    ]
    assert sorted(errors[0]) == pytest.approx(sorted(errors[1]))


@pytest.mark.parametrize("architecture", TURNED)
@pytest.mark.parametrize(
    ("writer", "format"),
    [
        (Fp8("modelopt", "weight_scale", 2.0**-8, True), "mxfp8"),
        (Fp8("modelopt", "weight_scale", "row", True), "mxfp8"),
        (Fp4("modelopt", 16, 2.0**-12), "nvfp4_global"),
    ],
)
def test_stacks_may_be_turned(architecture, writer, format, tmp_path):
    """As ModelOpt writes them, codes and scales alike; Llama 4's experts become dense."""
    expected = write(tmp_path, writer, architecture)
    stack(tmp_path, architecture)
    model = torch_moe_mps.from_pretrained(tmp_path, dtype=torch.float32)
    assert {str(f) for module in model.modules() for f in formats_in(module).values()} == {format}
    found = [torch.equal(*pair) for pair in weights(model, expected)]
    assert len(found) > 8 and all(found)
    assert_close(output(model, prompt()), output(expected, prompt()), 1e-5)


def test_a_file_beside_the_config_says_that_modelopt_wrote_it(tmp_path):
    """As older versions did: FP8 codes would pass for values."""
    expected = write(tmp_path, Fp8("modelopt", "weight_scale", "row", True))
    with changed(tmp_path / "config.json") as config:
        del config["quantization_config"]
    stored = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(stored))
    model = torch_moe_mps.from_pretrained(tmp_path, dtype=torch.float32)
    assert all(torch.equal(*pair) for pair in weights(model, expected))
    assert_close(output(model, prompt()), output(expected, prompt()), 1e-5)


def test_experts_without_the_interface_keep_their_codes(tmp_path):
    """Llama 4's, two matrices in two layers."""
    expected = write(tmp_path, CASES["fp8 of rows"][0], "llama4")
    model = torch_moe_mps.from_pretrained(tmp_path, dtype=torch.float32)
    experts = [name for name in model.state_dict() if ".experts." in name]
    assert sum(name.endswith("_packed") for name in experts) == 4 and not set(experts) & {
        *dict(expected.named_parameters())
    }
    assert_close(output(model, prompt()), output(expected, prompt()), 1e-5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("int4", "_packed must be of .experts, rows, columns., with scales along columns, got experts"),
        ("fp8 of all", r" must be of shape \(128, 64\), got \(64, 128\)"),
    ],
)
def test_rejects_other_stacks_of_turned_experts(name, message, tmp_path):
    """What no library writes: their codes would pass for values."""
    write(tmp_path, CASES[name][0], "gpt_oss")
    stack(tmp_path, "qwen3_moe")
    with pytest.raises(ValueError, match=rf"^moe_mps::load: \S+_proj\S*{message}"):
        torch_moe_mps.from_pretrained(tmp_path)


def test_scales_of_one_expert_may_be_powers_of_two(tmp_path):
    """Its matrix alone would be mxfp8; all matrices of a parameter have one format."""
    one, other = Fp8("fp8", "weight_scale_inv", None, True), Fp8("fp8", "weight_scale_inv", None, False)
    writers = itertools.cycle([one, other, other])

    class Either:
        config = one.config

        def of(self, name):
            return next(writers)

    expected = write(tmp_path, Either())
    model = torch_moe_mps.from_pretrained(tmp_path, dtype=torch.float32)
    assert str(formats_in(model.model.layers[0].mlp.experts)["gate_up_proj"]) == "fp8_32"
    assert all(torch.equal(*pair) for pair in weights(model, expected))


@pytest.mark.parametrize("block", [(96, 96), (64, 96), (24, 32)])
def test_blocks_have_the_size_in_the_config(block, tmp_path):
    """Which no shape tells: the last ones may be smaller."""
    expected = write(
        tmp_path, Fp8("fp8", "weight_scale_inv", block, False), num_hidden_layers=1, hidden_size=192
    )
    model = torch_moe_mps.from_pretrained(tmp_path, dtype=torch.float32)
    assert all(torch.equal(*pair) for pair in weights(model, expected))


def test_the_last_group_may_be_smaller(tmp_path):
    """Groups of 128 columns of 192: the second has 64, and not both 96."""
    expected = write(tmp_path, CompressedTensors(group=128), num_hidden_layers=1, hidden_size=192)
    model = torch_moe_mps.from_pretrained(tmp_path, dtype=torch.float32)
    assert "affine4_64" in {str(f) for module in model.modules() for f in formats_in(module).values()}
    assert all(torch.equal(*pair) for pair in weights(model, expected))


@pytest.mark.parametrize(
    ("block", "shapes"),
    [
        ((None, None), {(1, 1), (), (1,)}),
        ((1, None), {(8, 1), (8,)}),
        ((1, 5), {(8, 4)}),
        ((4, 8), {(2, 2), (2, 1, 2, 1)}),
    ],
)
def test_scales_have_the_shapes_that_libraries_write(block, shapes):
    """Of 8 rows and 16 columns: one for all, one for each row, each group of a row, and each block."""
    assert {*Scheme("fp8", 8, block).scales(8, 16).shapes} == shapes


def test_recipes_may_be_mixed(tmp_path):
    """What is dense in the checkpoint stays so, unless bits are asked for."""
    attention, others = CompressedTensors(bits=8), CompressedTensors(group=64)

    class Mixed:
        config = others.config | {
            "config_groups": {
                "a": attention.config["config_groups"]["group_0"] | {"targets": ["re:.*self_attn.*"]},
                "b": others.config["config_groups"]["group_0"] | {"targets": ["re:.*mlp.*"]},
            },
            "ignore": ["re:.*o_proj", "lm_head"],
        }

        def of(self, name):
            return attention if "self_attn" in name else others

    expected = write(tmp_path, Mixed(), only=lambda name: "o_proj" not in name, intermediate_size=128)
    model = torch_moe_mps.from_pretrained(tmp_path, dtype=torch.float32)
    found = {str(f) for module in model.modules() for f in formats_in(module).values()}
    assert found == {"affine8_32", "affine4_64"}
    assert isinstance(model.model.layers[0].self_attn.o_proj.weight, torch.nn.Parameter)
    assert_close(output(model, prompt()), output(expected, prompt()), 1e-5)
    model = torch_moe_mps.from_pretrained(tmp_path, bits=8, group_size=32, dtype=torch.float32)
    assert {str(f) for f in formats_in(model.model.layers[0].self_attn.o_proj).values()} == {"affine8_32"}


OF_A_MISSING_PACKAGE = ("int4 asymmetric", "awq", "gptq", "fp8 of modelopt", "auto-round of awq")


@pytest.mark.parametrize("name", in_sweep(OF_A_MISSING_PACKAGE, ("awq",)))
def test_what_is_saved_is_in_our_layout(name, tmp_path):
    expected = write(tmp_path / "theirs", CASES[name][0])
    model = torch_moe_mps.from_pretrained(tmp_path / "theirs", dtype=torch.float32)
    assert_close(output(model, prompt()), output(expected, prompt()), 0.02)
    model.save_pretrained(tmp_path / "ours")
    again = torch_moe_mps.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    assert_close(output(again, prompt()), output(model, prompt()), 0.0)


def test_layers_of_auto_round_have_their_own_bits(tmp_path):
    """By a name, which goes before a pattern; those of 16 bits are dense."""
    usual = AutoRound("auto_gptq", Gptq())

    class Mixed:
        config = usual.config | {
            "extra_config": {
                ".*self_attn.*": {"bits": 8},
                "model.layers.0.self_attn.q_proj": {"bits": 3, "group_size": 64},
                "model.layers.1.self_attn.o_proj": {"bits": 16, "data_type": "float"},
            }
        }

        def of(self, name):
            if name == "model.layers.0.self_attn.q_proj.weight":
                return AutoRound("auto_gptq", Gptq(bits=3, group=64))
            return AutoRound("auto_gptq", Gptq(bits=8)) if "self_attn" in name else usual

    expected = write(tmp_path, Mixed(), only=lambda name: name != "model.layers.1.self_attn.o_proj.weight")
    model = torch_moe_mps.from_pretrained(tmp_path, dtype=torch.float32)
    own = [model.model.layers[n].self_attn for n in range(2)]
    found = [{*map(str, formats_in(m).values())} for m in (own[0].q_proj, own[1].q_proj, own[1].o_proj)]
    assert found == [{"affine3_64"}, {"affine8_32"}, set()]
    assert all(torch.equal(*pair) for pair in weights(model, expected))


@pytest.mark.parametrize("to", in_sweep(("moe_mps", "mlx"), ("mlx",)))
def test_convert_keeps_the_codes(to, tmp_path, capsys):
    expected = write(tmp_path / "theirs", CASES["int4"][0])
    assert main(["convert", str(tmp_path / "theirs"), str(tmp_path / "ours"), "--to", to]) == 0
    model = torch_moe_mps.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    assert sum(torch.equal(*pair) for pair in weights(model, expected)) == 12  # head and embedding are new
    assert_close(output(model, prompt()), output(expected, prompt()), 0.5)


def change(folder, part: str, function) -> None:
    """Of the first matrix that has such a tensor; None takes it away."""
    with changed(folder / "model.safetensors") as tensors:
        name = next(name for name in tensors if "layers" in name and name.endswith(f"proj.{part}"))
        if (tensor := function(tensors.pop(name))) is not None:
            tensors[name] = tensor


@pytest.mark.parametrize(
    ("name", "part", "function", "message"),
    [
        ("int4", "weight_scale", lambda t: None, "weight_scale must be in the checkpoint, got no such"),
        (
            "int4", "weight_scale", lambda t: t.repeat(1, 2),
            r"weight_scale must be of shape \((\d+), 2\), got \(\1, 4\)$",
        ),
        (
            "int4", "weight_packed", lambda t: t[:, :7].contiguous(),
            r"weight_packed must be of shape \((\d+), 8\), got \(\1, 7\)$",
        ),
        ("awq", "qweight", lambda t: t.T.contiguous(), r"qweight must be of shape \(64, \d+\), got"),
        (
            "mxfp4", "weight_scale", lambda t: t[:, :1].contiguous(),
            r"weight_scale must be of shape \((\d+), 2\), got \(\1, 1\)$",
        ),
        ("fp8 of all", "weight_scale", lambda t: None, "weight_scale must be in the checkpoint"),
        (
            "fp8 of rows", "weight", lambda t: torch.full(t.shape, 127, dtype=torch.uint8).view(E4M3),
            " must be finite, got NaN",
        ),
        *[
            ("nvfp4", "weight_global_scale", lambda t, value=value: torch.full_like(t, value),
             rf"weight_global_scale must be between 2\^-100 and 2\^100, got {value:g}$")
            for value in (torch.inf, 1e-38)
        ],
        (
            "nvfp4", "weight_scale", lambda t: torch.full(t.shape, 127, dtype=torch.uint8).view(E4M3),
            "weight_scale must be finite, got NaN",
        ),
        (
            "nvfp4 of modelopt", "weight_scale_2", lambda t: t * 0,
            r"weight_scale_2 must be between 2\^-100 and 2\^100, got 0$",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line(name, part, function, message, tmp_path):
    write(tmp_path, CASES[name][0])
    change(tmp_path, part, function)
    with pytest.raises(ValueError, match=rf"^moe_mps::load: \S+?{message}") as error:
        torch_moe_mps.from_pretrained(tmp_path)
    assert "\n" not in str(error.value)


# {what wrote it: the quantisation in a config}
CONFIGS = {name: writer.config for name, (writer, *_) in CASES.items()} | {
    "rotated": {
        **CASES["int4"][0].config,
        "transform_config": {"config_groups": {"R1": {"apply": [{"location": "weight_input"}]}}},
    },
    "gptq of layers": {
        "quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False,
        "dynamic": {"-:a": {}, "+:b": {"bits": 8}}, "checkpoint_format": "gptq",
    },
    "modelopt of layers": {
        "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {"a": {"quant_algo": "NVFP4", "group_size": 16}},
    },
    "mxfp4 of gpt-oss": {"quant_method": "mxfp4", "modules_to_not_convert": ["a"]},
    "mlx": {"bits": 4, "group_size": 32, "a": {"bits": 8, "group_size": 32}, "b": False},
    "ours": {"library": "torch_moe_mps", "modules": {"a": "affine4_32"}, "ordered": ["a"], "absent": ["b"]},
}  # fmt: skip


def places(stored, path=()):
    """Paths of all values in a JSON value, itself first."""
    yield path
    items = (
        stored.items() if isinstance(stored, dict) else enumerate(stored if isinstance(stored, list) else ())
    )
    for key, value in items:
        yield from places(value, (*path, key))


@pytest.mark.parametrize("name", in_sweep(CONFIGS, ("rotated", "gptq of layers", "mlx", "ours")))
def test_rejects_values_of_other_kinds_in_the_quantization(name, tmp_path):
    """Every value of a config in turn, where JSON may have any."""
    for place in places(CONFIGS[name]):
        for value in ([], {}, [1], {"a": 1}, 4, "x", None):
            config = {"model_type": "qwen3_moe", "quantization": copy.deepcopy(CONFIGS[name])}
            inside, path = config, ("quantization", *place)
            for key in path[:-1]:
                inside = inside[key]
            inside[path[-1]] = value
            (tmp_path / "config.json").write_text(json.dumps(config))
            try:
                stored = Source(str(tmp_path), {}).quantization(None) or {}
                QuantizationConfig(**stored)
                if "other" in stored:
                    Schemes(stored["other"])
            except ValueError as error:
                assert "\n" not in str(error), (path, value)


# {scheme: (group, format, the largest difference of weights)}
SCHEMES = {
    "W4A16": (32, "affine4_32", 0),
    "W4A16_ASYM": (32, "affine4_32", 0.004),
    "W8A16": (32, "affine8_32", 0),
    "W8A8": (None, "affine8_64", 0),
    "FP8": (None, "fp8_32", 0),
    "FP8_DYNAMIC": (None, "fp8_32", 0),
    "FP8_BLOCK": (None, "fp8_32", 0),
    "NVFP4A16": (None, "nvfp4_global", 2e-7),  # scales and products are rounded to float32
    "MXFP4A16": (None, "mxfp4", 0),
    "MXFP8A16": (None, "mxfp8", 0),
}


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        (
            "gptq",
            {"checkpoint_format": "gptq_p"},
            "checkpoint_format of .* must be gptq or gptq_v2, got gptq_p",
        ),
        (
            "awq",
            {"version": "GEMV"},
            "version of the quantization_config must be gemm or exllama or ipex, got gemv",
        ),
        (
            "int4",
            {"transform_config": {"config_groups": {"R4": {"apply": [{"location": "input"}]}}}},
            "transform_config must be of weights alone in the quantization_config, got input",
        ),
        (
            "auto-round",
            {"packing_format": "auto_round:llm_compressor"},
            "packing_format of .* must be auto_round:auto_gptq or .*, got auto_round:llm_compressor$",
        ),
        ("auto-round", {"data_type": "mx_int"}, "data_type of .* must be int, got mx_int$"),
        ("auto-round", {"act_bits": 8}, "act_bits of .* must be None or 16 or 32, got 8$"),
        ("auto-round", {"rotation_config": {"a": 1}}, "rotation_config of .* must be absent, got rotations"),
        ("auto-round of awq", {"bits": 8}, "bits of .* must be 4, got 8$"),
        (
            "int8 of channels",
            None,
            r"\S+.pre_quant_scale must be absent beside weight and weight_scale, got one of shape \(64,\)$",
        ),
    ],
)
def test_rejects_layouts_that_would_pass_for_others(name, config, message, tmp_path):
    """Codes in another order, and factors of the inputs, as of ModelOpt's smoothing."""
    write(tmp_path, CASES[name][0])
    if config is None:
        tensors = load_file(tmp_path / "model.safetensors")
        tensors["model.layers.0.self_attn.q_proj.pre_quant_scale"] = torch.ones(64)
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    else:
        with changed(tmp_path / "config.json") as stored:
            stored["quantization_config"] |= config
    with pytest.raises(ValueError, match=f"^moe_mps::load: {message}"):
        torch_moe_mps.from_pretrained(tmp_path)


@pytest.mark.parametrize("scheme", in_sweep(SCHEMES, ("FP8_BLOCK",)))
def test_checkpoints_that_compressed_tensors_writes(scheme, tmp_path):
    """With targets and what it ignores as regular expressions."""
    group, format, bound = SCHEMES[scheme]
    expected = write(tmp_path, Library(scheme, group))
    model = torch_moe_mps.from_pretrained(tmp_path, dtype=torch.float32)
    found = {str(f) for module in model.modules() for f in formats_in(module).values()}
    assert format in found <= {format, "mxfp8"}  # the scale of a matrix may be a power of two
    for weight, values in weights(model, expected):
        assert_close(weight, values, bound)
    # A router may choose another expert where weights are not the same.
    assert_close(output(model, prompt()), output(expected, prompt()), 0.3 if bound > 1e-6 else 1e-5)
