"""The loader of transformers: hooks of quantizers, converters of names and weights, and what is saved."""

import json
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file
from support import tiny_models
from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    ConversionOps,
    WeightConverter,
    build_glob_alternation,
    revert_weight_conversion,
)
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    AutoHfQuantizer,
    AutoQuantizationConfig,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

NAME = "moe_mps_probe"


class Config(QuantizationConfigMixin):
    def __init__(self, **others):
        super().__init__(quant_method=NAME)


class Doubles(ConversionOps):
    """Is given each parameter that the quantizer asks for, and gives back twice its values."""

    def __init__(self, seen):
        self.seen = seen

    def __deepcopy__(self, memo):
        return self

    def convert(self, input_dict, *args, **kwargs):
        self.seen.append((sorted(input_dict), kwargs.keys()))
        return {
            name: 2 * (value[0] if isinstance(value, list) else value) for name, value in input_dict.items()
        }


class Quantizer(HfQuantizer):
    seen: ClassVar[list] = []
    converted: ClassVar[list] = []

    def update_device_map(self, device_map):
        self.seen.append("device_map")
        return device_map

    def update_dtype(self, dtype):
        self.seen.append("dtype")
        return dtype

    def _process_model_before_weight_loading(self, model, **kwargs):
        assert next(model.parameters()).device.type == "meta" and kwargs["checkpoint_files"]
        self.seen.append("before")

    def _process_model_after_weight_loading(self, model, **kwargs):
        assert next(model.parameters()).device.type != "meta"
        self.seen.append("after")

    def param_needs_quantization(self, model, param_name, **kwargs):
        return param_name.endswith("q_proj.weight")

    def get_quantize_ops(self):
        return Doubles(self.converted)

    def update_weight_conversions(self, weight_conversions, model):
        self.seen.append("conversions")
        return weight_conversions

    def is_serializable(self):
        return True

    is_trainable = True


@pytest.fixture
def registered():
    register_quantization_config(NAME)(Config)
    register_quantizer(NAME)(Quantizer)
    Quantizer.seen, Quantizer.converted = [], []
    yield Quantizer
    del AUTO_QUANTIZER_MAPPING[NAME], AUTO_QUANTIZATION_CONFIG_MAPPING[NAME]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("dense")
    tiny_models.other_model("cwm").save_pretrained(path)
    return path


def test_hooks_are_called_in_order(registered, folder):
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=Config())
    assert [step for step in registered.seen if step in ("before", "conversions", "after")] == [
        "before",
        "conversions",
        "after",
    ]
    assert {"device_map", "dtype"} <= {*registered.seen}
    assert type(model.hf_quantizer) is Quantizer and model.hf_quantizer.pre_quantized is False
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(model.get_parameter(name), 2 * stored[name])
    assert len(registered.converted) == 2 and all(
        "full_layer_name" in keys for _, keys in registered.converted
    )


def test_a_method_is_recognised_by_static_methods_of_two_classes(monkeypatch):
    """Which can be replaced by others that take the dictionary of the config alone."""
    seen = []
    monkeypatch.setattr(
        AutoHfQuantizer, "supports_quant_method", staticmethod(lambda d: seen.append(d) or True)
    )
    assert AutoHfQuantizer.supports_quant_method({}) and seen == [{}]
    with pytest.raises(ValueError, match="Unknown quantization type"):
        AutoQuantizationConfig.from_dict({"quant_method": "no such"})


def test_an_unknown_method_is_ignored_and_none_is_an_error():
    assert AutoHfQuantizer.supports_quant_method({"quant_method": "no such"}) is False
    with pytest.raises(ValueError, match="quant_method"):
        AutoHfQuantizer.supports_quant_method({})


def test_dtypes_that_are_kept_lie_in_a_plan_of_patterns():
    plan = tiny_models.other_model("cwm")._get_dtype_plan(torch.float16)
    assert isinstance(plan, dict)
    names, _, _ = build_glob_alternation(["lm_head", "layers.*.mlp"])
    assert names.search("model.layers.3.mlp.up_proj") and not names.search("model.norm")


def test_experts_are_converted_from_a_module_each(tmp_path):
    model = tiny_models.tiny_model("qwen3_moe")
    (gate_up, *_) = [
        each
        for each in get_model_conversion_mapping(model)
        if isinstance(each, WeightConverter) and "gate_up_proj" in str(each.target_patterns)
    ]
    assert all(isinstance(operation, ConversionOps) for operation in gate_up.operations)
    state = revert_weight_conversion(model, dict(model.state_dict()))
    assert state["model.layers.0.mlp.experts.3.up_proj.weight"].shape == (24, 32)
    model.save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == {*state}


def test_saving_writes_the_config_that_the_model_has(tmp_path):
    model = tiny_models.other_model("cwm")
    model.config.quantization_config = Config()
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["quantization_config"]["quant_method"] == NAME
