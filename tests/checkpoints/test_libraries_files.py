"""Files that AutoAWQ, GPTQModel, ModelOpt, AutoRound and llm-compressor write themselves.

tests/sweep.txt names them, and what their imports miss: they ask for another torch and transformers.
"""

import copy
import importlib
import json
import types

import pytest
import torch
import transformers
from support import tiny_models
from support.models import assert_close, prompt
from support.other_libraries import Awq, Gptq, tiny, weights
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import torch_moe_mps
from torch_moe_mps.models.modules.linears import formats_in

pytestmark = pytest.mark.sweep


def library(name: str):
    try:
        return importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"{name.partition('.')[0]} cannot be imported: {error}")


def linear(values: torch.Tensor) -> torch.nn.Linear:
    made = torch.nn.Linear(*reversed(values.shape), bias=False)
    made.weight.data = values
    return made


def test_our_awq_is_that_of_autoawq():
    gemm, packing = library("awq.modules.linear.gemm"), library("awq.utils.packing_utils")
    writer, weight = Awq(), torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    made, values = writer(weight)
    _, scales, zeros, _ = writer.integers(weight, torch.float16)
    theirs = gemm.WQLinear_GEMM.from_linear(linear(values), 4, 32, False, scales.float().T, zeros.T)
    assert all(torch.equal(getattr(theirs, name), tensor) for name, tensor in made.items())
    stored = (made["qweight"], made["qzeros"], made["scales"].float())
    assert torch.equal(packing.dequantize_gemm(*stored, 4, 32).T, values)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (4, False), (8, False), (3, False), (2, False)])
def test_our_gptq_is_that_of_gptqmodel(version, bits, symmetric, monkeypatch):
    """With zero points of 0, and columns in an order."""
    monkeypatch.setenv("GPTQMODEL_DISABLE_PACK_EXT", "1")  # which would be compiled
    theirs = library("gptqmodel.nn_modules.qlinear.torch").TorchLinear
    dequant = library("gptqmodel.utils.model_dequant")
    torch.manual_seed(0)
    weight = torch.randn(64, 96)
    weight[:, :32].abs_()
    writer = Gptq(version, bits=bits, symmetric=symmetric)
    made, values = writer(weight)
    _, scales, zeros, _ = writer.integers(weight, torch.float16)
    assert symmetric or not zeros.min()
    packed = theirs(bits=bits, group_size=32, sym=symmetric, desc_act=False, in_features=96, out_features=64)
    packed.pack(linear(values), scales.float(), zeros.float(), made["g_idx"])
    if version == 1:
        packed.qzeros = dequant._revert_gptq_v1_qzeros_correction(packed.qzeros, bits)
    assert all(torch.equal(getattr(packed, name), tensor) for name, tensor in made.items())


@pytest.mark.parametrize(
    ("architecture", "scheme", "format", "bound"),
    [
        ("qwen3_moe", "NVFP4", "nvfp4_global", 0.2),
        ("qwen3_moe", "MXFP4", "mxfp4", 0.3),
        ("qwen3_moe", "MXFP8", "mxfp8", 0.07),
        ("gpt_oss", "NVFP4", "nvfp4_global", 0.2),
        ("gpt_oss", "FP8", "fp8_32", 0.05),
        ("llama4", "NVFP4", "nvfp4_global", 0.2),
        ("llama4", "FP8", "fp8_32", 0.05),
    ],
)
def test_checkpoints_of_modelopt(architecture, scheme, format, bound, tmp_path, monkeypatch):
    """Within the error of the scheme of what it quantised: its own arithmetic for most schemes needs CUDA."""
    # Its calls leave transformers' function there, where it hides what this package registers.
    monkeypatch.setattr(ALL_ATTENTION_FUNCTIONS, "_local_mapping", {**ALL_ATTENTION_FUNCTIONS._local_mapping})
    modelopt, export = library("modelopt.torch.quantization"), library("modelopt.torch.export")
    with tiny_models.groups_of_32():
        model = tiny(architecture).to(torch.bfloat16)
    model.config.architectures = [type(model).__name__]
    dense = copy.deepcopy(model).float()
    config = getattr(modelopt, f"{scheme}_DEFAULT_CFG")
    export.export_hf_checkpoint(
        modelopt.quantize(model, config, lambda model: model(prompt())), export_dir=tmp_path
    )
    read = torch_moe_mps.from_pretrained(tmp_path, dtype=torch.float32)
    assert format in {str(f) for module in read.modules() for f in formats_in(module).values()}
    pairs = [*weights(read, dense)]
    stacks = {n: p for n, p in dense.named_parameters() if p.dim() == 3}
    pairs += [(p, stacks[name]) for name, p in read.named_parameters() if name in stacks]  # dense here, too
    assert len(pairs) > 8
    for ours, theirs in pairs:
        assert_close(ours, theirs, bound)


def test_a_checkpoint_of_auto_round(tmp_path, monkeypatch):
    """Its weights are those that it rounded, to the bit; the router, which it leaves, is dense."""
    auto_round = library("auto_round")
    monkeypatch.chdir(tmp_path)  # where it makes folders of its own
    with tiny_models.groups_of_32():
        tiny("qwen3_moe").to(torch.bfloat16).save_pretrained("dense")
    model = transformers.AutoModelForCausalLM.from_pretrained("dense")
    how = {"iters": 0, "disable_opt_rtn": True, "group_size": 32, "device_map": "cpu"}
    rounding = auto_round.AutoRound(model, tokenizer=object(), scheme="W4A16", **how)
    values = {name: m.weight for name, m in rounding.quantize()[0].named_modules() if hasattr(m, "weight")}
    values = {name: weight.detach().clone() for name, weight in values.items()}
    rounding.save_quantized("written", format="auto_round")
    config = json.loads((tmp_path / "written/config.json").read_text())
    assert config["quantization_config"]["packing_format"] == "auto_round:auto_gptq"
    read = torch_moe_mps.from_pretrained("written", dtype=torch.float32)

    class Expected:
        def get_submodule(self, name):
            if name in values:
                return types.SimpleNamespace(weight=values[name])
            each = [[values[f"{name}.{e}.{p}_proj"] for p in ("gate", "up", "down")] for e in range(8)]
            gate_up = torch.stack([torch.cat(own[:2]) for own in each])
            return types.SimpleNamespace(
                gate_up_proj=gate_up, down_proj=torch.stack([own[2] for own in each])
            )

    found = [torch.equal(ours.bfloat16(), theirs) for ours, theirs in weights(read, Expected())]
    assert len(found) == 12 and all(found), found


def test_gpt_oss_of_llm_compressor(tmp_path):
    """Which makes modules of its experts, with biases; the weights are those of compressed-tensors."""
    library("llmcompressor")
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from llmcompressor import oneshot
    from llmcompressor.modeling.moe.linearize import linearize_moe
    from llmcompressor.modifiers.quantization import QuantizationModifier

    with tiny_models.groups_of_32():
        tiny("gpt_oss").to(torch.bfloat16).save_pretrained(tmp_path / "dense")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    linearize_moe(model)
    scheme = preset_name_to_scheme("W4A16", ["Linear"])
    scheme.weights.group_size = 32
    recipe = QuantizationModifier(config_groups={"g": scheme}, ignore=["lm_head", "re:.*router.*"])
    oneshot(model=model, recipe=recipe, pipeline="datafree")
    values = {
        name: fake_quantize(m.weight, m.weight_scale, None, scheme.weights)
        for name, m in model.named_modules()
        if hasattr(m, "weight_scale")
    }
    model.save_pretrained(tmp_path / "written", save_compressed=True)
    read = torch_moe_mps.from_pretrained(tmp_path / "written", dtype=torch.float32)

    class Expected:
        def get_submodule(self, name):
            if name in values:
                return types.SimpleNamespace(weight=values[name])
            each = [{p: values[f"{name}.{e}.{p}_proj"] for p in ("gate", "up", "down")} for e in range(8)]
            rows = [torch.stack((one["gate"], one["up"]), 1).flatten(0, 1) for one in each]
            down = torch.stack([one["down"] for one in each])
            return types.SimpleNamespace(gate_up_proj=torch.stack(rows).mT, down_proj=down.mT)

    found = [torch.equal(ours.bfloat16(), theirs) for ours, theirs in weights(read, Expected())]
    assert len(found) == 12 and all(found)
