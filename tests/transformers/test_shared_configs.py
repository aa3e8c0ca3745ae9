"""Models that share a config object: what is done to one does not show in the other.

That the other one stays dense, and is saved so, is an invariant of test_any_order.py.
"""

import json

import pytest
import torch
import transformers
from support.models import assert_close, output, prompt, tiny

import torch_moe_mps

transformers.logging.set_verbosity_error()


@pytest.fixture
def pair():
    """Two models with one config object and different weights."""
    first = tiny("qwen3_moe")
    second = type(first)(first.config).eval()
    second.set_experts_implementation("eager")
    assert first.config is second.config
    return first, second


def is_saved_as_quantized(folder) -> bool:
    return "quantization_config" in json.loads((folder / "config.json").read_text())


def loaded_from(folder, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def test_all_modules_of_a_quantised_model_share_its_own_config(pair):
    first, second = pair
    torch_moe_mps.quantize_experts(first, 4, 32)
    assert first.config is first.model.config is first.model.layers[0].self_attn.config
    first.set_attn_implementation("eager")
    assert first.model.layers[1].self_attn.config._attn_implementation == "eager"
    assert second.config._attn_implementation != "eager"


@pytest.mark.parametrize("layers", [1, 2])
def test_dense_experts_put_into_a_quantised_model(pair, layers, tmp_path):
    first, second = pair
    torch_moe_mps.quantize_experts(first, 4, 32)
    for layer in range(layers):
        first.model.layers[layer].mlp.experts = second.model.layers[layer].mlp.experts
    first.save_pretrained(tmp_path)
    assert is_saved_as_quantized(tmp_path) == (layers == 1)
    assert_close(output(loaded_from(tmp_path), prompt()), output(first, prompt()), 1e-5)


def test_quantising_is_interrupted_before_the_config_says_so(pair, monkeypatch, tmp_path):
    first, _ = pair

    def interrupt(model):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("torch_moe_mps.transformers.checkpoints.quantize.keep_when_saving", interrupt)
        torch_moe_mps.quantize_experts(first, 4, 32)
    first.save_pretrained(tmp_path)
    assert_close(output(loaded_from(tmp_path), prompt()), output(first, prompt()), 1e-5)


def test_dense_weights_under_a_quantised_config_are_refused(pair, tmp_path):
    first, _ = pair
    first.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    torch_moe_mps.quantize_experts(first, 4, 32)
    stored["quantization_config"] = first.config.quantization_config.to_dict()
    (tmp_path / "config.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match=r"experts\.gate_up_proj_packed must be in the checkpoint, got no"):
        loaded_from(tmp_path)


def test_loading_with_the_config_of_a_quantised_model(pair, tmp_path):
    first, _ = pair
    torch_moe_mps.quantize_experts(first, 4, 32)
    first.save_pretrained(tmp_path)
    loaded = loaded_from(tmp_path, config=first.config)
    assert_close(output(loaded, prompt()), output(first, prompt()), 1e-5)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_restoring_both_models_restores_the_config(pair, order):
    for model in pair:
        torch_moe_mps.accelerate(model)
    assert pair[0].config._experts_implementation == "moe_mps"
    for index in order:
        torch_moe_mps.restore(pair[index])
    assert pair[0].config._experts_implementation == "eager"


def test_an_implementation_that_the_user_chose_comes_back(pair):
    first, second = pair
    second.set_experts_implementation("moe_mps")
    torch_moe_mps.accelerate(first)
    torch_moe_mps.restore(first)
    assert second.config._experts_implementation == "moe_mps"
    assert torch.isfinite(output(second, prompt())).all()
