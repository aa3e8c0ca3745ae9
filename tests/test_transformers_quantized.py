"""Models with quantised experts: generation, checkpoints, gpt-oss's MXFP4 blocks."""

import copy
import json

import pytest
import safetensors.torch
import tiny_models
import torch
import transformers
from test_transformers import operators_of
from test_transformers_families import assert_close, eager, generate, output, prompt

import torch_moe_mps
from torch_moe_mps.quantization import quantize
from torch_moe_mps.transformers.experts import is_experts

transformers.logging.set_verbosity_error()

FORMATS = [(4, 32, "affine"), (8, 32, "affine"), (4, 32, "mxfp4")]
ARCHITECTURES = ["qwen3_moe", "gpt_oss", "deepseek_v3", "nemotron_h"]


def tiny(architecture: str):
    with tiny_models.groups_of_32():
        return eager(tiny_models.tiny_model(architecture))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_logits_and_generation(architecture, form):
    model = tiny(architecture)
    dense = copy.deepcopy(model)
    report = torch_moe_mps.accelerate(model, *form)
    errors = [entry.error for entries in report.quantization.modules.values() for entry in entries]
    assert errors and all(0.0 < error < 0.2 for error in errors)
    ids = prompt()
    assert "moe_experts_quantized" in operators_of(lambda: output(model, ids))
    tiny_models.dense_twin(dense, model)
    assert_close(output(model, ids), output(dense, ids), 1e-5)
    assert torch.equal(generate(model, ids), generate(dense, ids))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_checkpoint_round_trip(architecture, form, tmp_path):
    model = tiny(architecture)
    torch_moe_mps.accelerate(model, *form)
    expected = output(model, prompt())
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert stored["quant_method"] == "moe_mps" and stored["mode"] == form[2] and stored["modules"]
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert all(
        parameter.dtype == model.get_parameter(name).dtype for name, parameter in loaded.named_parameters()
    )
    assert "moe_experts_quantized" in operators_of(lambda: output(loaded.eval(), prompt()))
    assert_close(output(loaded.eval(), prompt()), expected, 1e-5)
    torch_moe_mps.accelerate(loaded)
    assert_close(output(loaded, prompt()), expected, 1e-5)


def test_quantise_while_loading(tmp_path):
    model = tiny("qwen3_moe")
    model.save_pretrained(tmp_path)
    config = torch_moe_mps.transformers.saving.ExpertsQuantizationConfig(bits=8, group_size=32)
    loaded = type(model).from_pretrained(tmp_path, quantization_config=config).eval()
    torch_moe_mps.accelerate(model, 8, 32)
    torch_moe_mps.restore(model)
    assert_close(output(loaded, prompt()), output(model, prompt()), 1e-6)


def write_mxfp4_checkpoint(model, folder) -> None:
    """A checkpoint with blocks and scales, as gpt-oss has them."""
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        packed, scales, _ = quantize(tensors.pop(name).mT.contiguous(), 4, 32, "mxfp4")
        tensors[f"{name}_blocks"] = packed.view(torch.uint8).reshape(*scales.shape, 16)
        tensors[f"{name}_scales"] = scales
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))


def test_mxfp4_blocks_are_never_dequantised(tmp_path):
    model = tiny("gpt_oss")
    write_mxfp4_checkpoint(model, tmp_path)
    loaded = torch_moe_mps.from_pretrained(str(tmp_path))
    expected = output(tiny_models.dense_twin(model, loaded), prompt())
    for module in filter(is_experts, loaded.modules()):
        assert module.gate_up_proj_packed.dtype in (torch.uint32, torch.int32) and not hasattr(
            module, "gate_up_proj"
        )
    assert "moe_experts_quantized" in operators_of(lambda: output(loaded, prompt()))
    assert_close(output(loaded, prompt()), expected, 1e-5)
    loaded.save_pretrained(tmp_path / "again")
    again = torch_moe_mps.from_pretrained(str(tmp_path / "again"))
    assert torch.equal(output(again, prompt()), output(loaded, prompt()))


@pytest.mark.parametrize("trained", ["", "layers.1.mlp.gate.weight"])
def test_gradients_through_quantised_experts_are_an_error(trained):
    """Of everything, or of the last routing weights alone."""
    model = tiny("qwen3_moe")
    torch_moe_mps.accelerate(model, 4, 32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.is_floating_point() and name.endswith(trained))
    with pytest.raises(NotImplementedError, match="Qwen3MoeExperts has quantised experts, without gradients"):
        model(input_ids=prompt())


def test_bad_group_size_changes_nothing():
    model = tiny_models.tiny_model("qwen3_moe")  # 32 and 24 columns
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with pytest.raises(ValueError, match="must be of an input dimension that is a multiple of group_size 64"):
        torch_moe_mps.accelerate(model, 4, 64)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert operators_of(lambda: output(model, prompt())) == {}


def test_restore_keeps_quantised_experts_running():
    """Dense first, quantised then: what the dense experts ran on is not set for the quantised ones."""
    model = tiny("qwen2_moe")
    torch_moe_mps.accelerate(model)
    torch_moe_mps.accelerate(model, 4, 32)
    expected = output(model, prompt())
    torch_moe_mps.restore(model)
    assert model.config._experts_implementation == "eager"
    assert operators_of(lambda: output(model, prompt())) == {"moe_experts_quantized": 2}
    assert_close(output(model, prompt()), expected, 1e-5)
    torch_moe_mps.accelerate(model)
    assert_close(output(model, prompt()), expected, 1e-5)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_other_implementations_leave_quantised_experts_running(implementation):
    """Set for the model, or for another model with the same config."""
    model = tiny("qwen2_moe")
    torch_moe_mps.accelerate(model, 4, 32)
    expected = output(model, prompt())
    sibling = type(model)(model.config)
    for other in (model, sibling):
        other.set_experts_implementation(implementation)
        assert_close(output(model, prompt()), expected, 1e-5)
        assert_close(output(copy.deepcopy(model), prompt()), expected, 1e-5)
