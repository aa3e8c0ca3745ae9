"""Names that the package imports from libraries whose inner modules may change with any release.

The list is read from the package's source, so that it has all of them; none of our code runs.
"""

import ast
import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator

import pytest
from support.processes import REPOSITORY

LIBRARIES = ("transformers", "peft", "trl", "gguf")
ANY_IMPORT = re.compile(rf"^\s*(from|import) ({'|'.join(LIBRARIES)})\b", re.MULTILINE)
# Methods that are called, replaced or set by name, and arguments that are given to them.
PRIVATE = {
    "transformers:GenerationMixin._sample": ("input_ids", "logits_processor", "generation_config"),
    "transformers:GenerationMixin._update_model_kwargs_for_generation": ("outputs", "model_kwargs"),
    "transformers:GenerationMixin._get_candidate_generator": ("generation_config", "logits_processor"),
    "transformers:GenerationMixin._get_logits_processor": ("generation_config", "input_ids_seq_length"),
    "transformers:GenerationMixin._prepare_generated_length": ("generation_config", "input_ids_length"),
    "transformers:GenerationMixin._prepare_generation_config": ("generation_config",),
    "transformers:GenerationMixin._prepare_special_tokens": ("generation_config",),
    "transformers:GenerationMixin._supports_default_dynamic_cache": (),
    "transformers:GenerationMixin._validate_generated_length": ("generation_config", "input_ids_length"),
    "transformers:GenerationMixin.prepare_inputs_for_generation": ("input_ids", "attention_mask"),
    "transformers:PreTrainedModel._from_config": ("config",),
    "transformers:PreTrainedModel._get_dtype_plan": ("dtype",),
    "transformers:PreTrainedModel._load_pretrained_model": ("model", "state_dict", "checkpoint_files"),
    "transformers:PreTrainedModel.save_pretrained": ("save_directory",),
    "transformers:PreTrainedModel.set_experts_implementation": (),
    "transformers:PreTrainedConfig.get_text_config": ("decoder",),
    "transformers:PreTrainedConfig.get_config_dict": (),
    "transformers.modeling_layers:MtpModel.get_mtp_weights_regex": (),
    "transformers.quantizers.base:HfQuantizer._process_model_before_weight_loading": ("model",),
    "transformers.quantizers.base:HfQuantizer._process_model_after_weight_loading": ("model",),
    "transformers.quantizers.base:HfQuantizer.update_device_map": ("device_map",),
    "transformers.quantizers.base:HfQuantizer.update_dtype": ("dtype",),
    "transformers.quantizers.auto:AutoHfQuantizer.supports_quant_method": ("quantization_config_dict",),
    "transformers.core_model_loading:ConversionOps.convert": ("input_dict",),
    "transformers.utils.output_capturing:_active_collector.get": (),
    "peft.tuners.lora.model:LoraModel._create_new_module": ("lora_config", "adapter_name", "target"),
    "peft.tuners.tuners_utils:BaseTuner._inject_parameters": ("peft_config", "model"),
    "peft.tuners.tuners_utils:_maybe_include_all_linear_layers": ("peft_config", "model"),
    "trl.trainer.utils:_ChunkedLogProbFunction.apply": (),
    "gguf:get_tensor_name_map": (),
    "gguf:GGUFReader": ("path",),
}


def imported() -> Iterator[tuple[str, str]]:
    """(module, name) of each import of these libraries in the package, a name of "" for the module itself."""
    for path in sorted((REPOSITORY / "torch_moe_mps").rglob("*.py")):
        source = path.read_text()
        if not ANY_IMPORT.search(source):  # parsing the others would take a second of every run
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                yield from ((node.module or "", alias.name) for alias in node.names)
            elif isinstance(node, ast.Import):
                yield from ((alias.name, "") for alias in node.names)


IMPORTED = sorted({(module, name) for module, name in imported() if module.partition(".")[0] in LIBRARIES})


def found(module: str):
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        pytest.skip(f"{module} is not installed")
    return importlib.import_module(module)


@pytest.mark.parametrize(("module", "name"), IMPORTED, ids=[f"{m}:{n}" for m, n in IMPORTED])
def test_an_imported_name_exists(module, name):
    owner = found(module)
    assert not name or hasattr(owner, name) or importlib.util.find_spec(f"{module}.{name}") is not None


@pytest.mark.parametrize("name", PRIVATE)
def test_a_method_takes_its_arguments(name):
    module, _, path = name.partition(":")
    value = found(module)
    for part in path.split("."):
        value = getattr(value, part)
    if not PRIVATE[name]:
        assert callable(value)
        return
    assert {*PRIVATE[name]} <= inspect.signature(value).parameters.keys()
