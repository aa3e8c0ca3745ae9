"""Tiny random models of every architecture with experts in transformers, from its real config class."""

import contextlib
import functools
import importlib
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from torch_moe_mps.models.basics.interface import formats_of, is_experts, is_quantized, is_transposed
from torch_moe_mps.models.modules.linears import QuantizedLayer
from torch_moe_mps.quantization import Format, QuantizedWeight, dequantize

# Models without experts that docs/models.md lists.
DENSE_ARCHITECTURES = (
    "apertus", "arcee", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3", "glm",
    "glm4", "granite", "hunyuan_v1_dense", "lfm2", "llama", "ministral", "mistral", "nemotron",
    "olmo", "olmo2", "olmo3", "phi", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3", "stablelm",
    "starcoder2",
)  # fmt: skip
# Attributes of configs, set where a config has them. Sizes are odd where the architecture allows.
SIZES = {
    "vocab_size": 97,
    "unpadded_vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "share_expert_dim": 24,
    "expert_ffn_hidden_size": 24,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "top_k_experts": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "moe_layer_start_index": 1,
    "max_position_embeddings": 256,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "mlp_layer_types": ["dense", "sparse"],
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 32,
    "audio_hidden_size": 32,
    "projection_intermediate_size": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "use_cache": True,
}
# What single architectures need besides, by model type (of the text config, if there is one).
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"]}
EXTRA: dict[str, dict] = {
    "bailing_hybrid": HYBRID,
    "deepseek_v4": {
        "mlp_layer_types": ["hash_moe", "moe"],
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
        "compress_rates": {"heavily_compressed_attention": 3, "compressed_sparse_attention": 2},
        "index_topk": 3,
        "index_n_heads": 16,  # with few, entries have equal scores
        "index_head_dim": 32,
        "o_groups": 2,
        "o_lora_rank": 64,
        "sliding_window": 5,
    },
    "diffusion_gemma_text": {"layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 8},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [64, 32],
        "head_dim": 8,
        "mlp_layer_types": ["sparse", "sparse"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
    },
    "gemma3_text": SLIDING,
    "olmo3": SLIDING,
    "flint": {"mlp_only_layers": [0]},
    "glm4v_moe_text": {
        "head_dim": 8,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [1, 1, 0],
            "partial_rotary_factor": 0.5,
        },
    },
    "glm5_next_text": {"qk_rope_head_dim": 0, "head_dim": 0, "indexer_types": ["full", "full"]} | HYBRID,
    "hy_v4_vl_text": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
    },
    "inkling2_text": {"n_layers_per_attn_res_block": 1},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "index_n_heads": 2,
        "index_head_dim": 8,
    },
    "dbrx": {  # its class declares no rope_theta, and its attention reads one
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 1, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 8, "moe_top_k": 2},
        "d_model": 64,
        "n_heads": 2,  # of a width that is held in 8 bits
        "n_layers": 2,
    },
    "llama4_text": {"num_experts_per_tok": 1, "interleave_moe_layer_step": 1},
    "longcat_flash": {"zero_expert_num": 3},
    "mistral4": {"head_dim": 16},
    "gemma4_text": {
        "enable_moe_block": True,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 97,
        "layer_types": ["sliding_attention", "full_attention"],
        "global_head_dim": 8,
        "num_kv_shared_layers": 0,
    },
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
    },
    "kimi_linear": HYBRID,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "nemotron3_5_transcribe_word_timestamp": {"blank_token_id": 96},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "qwen3_5_moe_text": HYBRID,
    "qwen3_next": HYBRID,
    "nemotron_h": {
        "layers_block_type": ["attention", "moe"],
        "n_groups": 2,
        "moe_shared_expert_intermediate_size": 40,
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 8,  # with few heads all scores of many pools are 0, and which comes first is open
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "hc_lowrank": 32,
    }
    | HYBRID,
    "step3p5": {
        "mlp_layer_types": ["sparse", "sparse"],
        "sliding_window": 5,
        "moe_router_scaling_factor": 3.0,
        "swiglu_limits": [None, 0.5],
        "swiglu_limits_shared": [0.0, 0.25],
    }
    | SLIDING,
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
    "granitemoehybrid": HYBRID,
    "bamba": {"attn_layer_indices": [1]},
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "ssm_in_multiplier": 1.5,
        "ssm_multipliers": [0.5, 2.0, 0.7, 1.3, 1.1],
    },
    "gemma3n_text": SLIDING
    | {
        "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": [0.0, 0.0],
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 97,
    },
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1},
    "qwen3_5_text": HYBRID,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "lsh"],
        "axial_pos_shape": [8, 32],
        "axial_pos_embds_dim": [16, 16],
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"]},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"]},
}
# Layers with states, of architectures whose small models have none.
WITH_STATES: dict[str, dict] = {
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "nemotron_h": {"layers_block_type": ["mamba", "attention"]},
}
# Parts of the small dense Gemma 4: a table of each layer, and layers that read the keys of others.
SMALL_GEMMA4 = {
    "enable_moe_block": False,
    "hidden_size_per_layer_input": 32,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
}
# Sizes of older causal models, which have other names for them.
SIZES_OF_OTHERS = {
    "is_decoder": True,
    "d_model": 32,
    "n_embd": 32,
    "dim": 32,
    "emb_dim": 32,
    "n_layer": 2,
    "n_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
    "n_head": 4,
    "n_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "n_inner": 48,
    "dff": 48,
    "ffn_dim": 48,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "ffn_hidden_size": 48,
    "hidden_dim": 48,
    "rotary_dim": 4,
    "n_ctx": 256,
    "n_positions": 256,
    "max_target_positions": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "decoder_start_token_id": 1,
    "eos_token_id": 2,
}


# Where the class that generates is not the one with the experts to be tested.
MODEL_CLASSES = {
    "diffusion_gemma": "DiffusionGemmaEncoderTextModel",
    "muse_spark": "MuseSparkTextModel",
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerTextModel",
}


@functools.cache
def modelling_files() -> dict[str, str]:
    """{package: text} of the modelling files that use the decorator, in order; none is imported."""
    files = sorted(Path(transformers.models.__path__[0]).glob("*/modeling_*.py"))
    texts = {file.stem.removeprefix("modeling_"): file.read_text() for file in files}
    return {package: text for package, text in texts.items() if "\n@use_experts_implementation" in text}


def count_experts_classes() -> int:
    """How many classes have experts with an implementation to choose, as their decorator says."""
    return sum(text.count("\n@use_experts_implementation") for text in modelling_files().values())


def architectures() -> list[str]:
    """The model packages that these classes belong to."""
    return [*modelling_files()]


def other_causal() -> list[str]:
    """Causal models of transformers that are neither in the table with experts nor in that of dense ones."""
    return [
        name
        for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if name not in {*architectures(), *DENSE_ARCHITECTURES}
    ]


def modelling(architecture: str) -> ModuleType:
    return importlib.import_module(f"transformers.models.{architecture}.modeling_{architecture}")


def model_class(architecture: str) -> type[PreTrainedModel]:
    """The class of an architecture to run: the one that generates, else one that has outputs of its own."""
    module = modelling(architecture)
    classes = [
        cls
        for cls in vars(module).values()
        if inspect.isclass(cls) and issubclass(cls, PreTrainedModel) and cls.__module__ == module.__name__
    ]
    if architecture in MODEL_CLASSES:
        return getattr(module, MODEL_CLASSES[architecture])
    suffixes = ("ForCausalLM", "ForConditionalGeneration", "ForTokenClassification", "Model", "Backbone")
    for suffix in suffixes:
        for cls in classes:
            if cls.__name__.endswith(suffix):
                return cls
    raise LookupError(f"{architecture} has no model class")


def _can_be_set(config, name: str) -> bool:
    """Whether a config takes a value: some have properties that only read, or that refuse any."""
    if not isinstance(getattr(type(config), name, None), property):
        return True
    try:
        setattr(config, name, getattr(config, name))
    except (AttributeError, NotImplementedError):
        return False
    return True


def build_config(cls, **overrides):
    """A config of a class with the tiny sizes in it and in its parts."""
    default = cls()
    names = dir(default)
    values = {name: value for name, value in SIZES.items() if name in names and _can_be_set(default, name)}
    if "kv_lora_rank" in names:  # latent attention has a key for each query head
        values["num_key_value_heads"] = values["num_attention_heads"]
    extra = EXTRA.get(default.model_type, {})
    for name, part in cls.sub_configs.items():
        part = type(getattr(default, name, None)) if part.__name__ == "AutoConfig" else part
        if name not in extra and getattr(default, name, None) is not None:
            values[name] = build_config(part)
    return cls(**(values | extra | overrides))


def tiny_config(architecture: str, **overrides):
    return build_config(model_class(architecture).config_class, **overrides)


def tiny_model(
    architecture: str, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides
) -> PreTrainedModel:
    """A model in evaluation mode with random weights, biases and buffers included."""
    config = tiny_config(architecture, **overrides)
    torch.manual_seed(seed)
    model = model_class(architecture)(config)
    randomise(model, seed)
    return as_loaded(model, dtype).eval()


def as_loaded(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """`model` in a dtype, but for what from_pretrained keeps in float32."""
    model.to(dtype)
    kept = model._get_dtype_plan(dtype)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if any(re.search(pattern, name) for pattern in kept):
            tensor.data = tensor.float()
    return model


def other_model(architecture: str, others: Mapping[str, int] = {}, **overrides: object) -> PreTrainedModel:
    """A causal model that `other_causal` names, with random weights in float32.

    `others` are sizes in place of SIZES_OF_OTHERS, `overrides` are for its config.
    """
    with sizes(**SIZES_OF_OTHERS | others):
        config = build_config(CONFIG_MAPPING[architecture], **overrides)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    randomise(model, 0)
    return model


@contextlib.contextmanager
def sizes(**values: int):
    """Other sizes for the configs that are built inside the block."""
    before = SIZES.copy()
    SIZES.update(values)
    try:
        yield
    finally:
        SIZES.clear()
        SIZES.update(before)


def groups_of_32():
    """Sizes at which the experts can be quantised."""
    names = (
        "hidden_size",
        "intermediate_size",
        "moe_intermediate_size",
        "out_hidden_size",
        "audio_hidden_size",
        "moe_hidden_size",
        "share_expert_dim",
        "expert_ffn_hidden_size",
        "ffn_hidden_size",
    )
    return sizes(mamba_d_head=32, **dict.fromkeys(names, 64))


def quantized_parameters(module: nn.Module) -> dict[str, tuple[list, Format]]:
    """{dense parameter: (packed, scales, biases), format} of what is quantised in a module itself."""
    if isinstance(module, QuantizedLayer):
        return {"weight": ([module.packed, module.scales, module.biases], module.format)}
    forms = formats_of(module) if is_quantized(module) else {}
    parts = ("packed", "scales", "biases")
    return {p: ([getattr(module, f"{p}_{part}", None) for part in parts], form) for p, form in forms.items()}


def is_turned(module: nn.Module) -> bool:
    """Whether a module has experts whose dense stacks are [E, input, output]."""
    return is_experts(module) and is_transposed(module)


@torch.no_grad()
def dense_twin(dense: nn.Module, quantized: nn.Module) -> nn.Module:
    """The dense model with the values that the quantised one's weights stand for: the oracle."""
    for name, module in quantized.named_modules():
        values_of = {
            parameter: dequantize(QuantizedWeight(*tensors, form), torch.float32)
            for parameter, (tensors, form) in quantized_parameters(module).items()
        }
        if "gate_up_proj" in values_of and "up_proj" in values_of:  # its gate is apart from its up projection
            gate = values_of["gate_up_proj"]
            values_of["gate_up_proj"] = torch.cat((gate, values_of.pop("up_proj")), 1)
        for parameter, values in values_of.items():
            for weight, part in own_weights(dense.get_submodule(name), parameter, values):
                weight[: len(part)].copy_(part.mT if is_turned(module) else part)
    return dense


def own_weights(module: nn.Module, parameter: str, values: torch.Tensor) -> list[tuple]:
    """(a parameter as its class has it, its values) of a stack of matrices [E, output, input]."""
    own = module._modules
    if "input_linear" in own:  # JetMoE
        return [(own["output_linear" if parameter == "down_proj" else "input_linear"].weight, values)]
    if hasattr(own.get("mlp"), "w1"):  # DBRX
        if parameter == "down_proj":
            return [(own["mlp"].w2, values.mT.flatten(0, 1))]
        gate, up = values.chunk(2, 1)
        return [(own["mlp"].w1, gate.flatten(0, 1)), (own["mlp"].v1, up.flatten(0, 1))]
    return [(getattr(module, parameter), values)]


@torch.no_grad()
def randomise(model: nn.Module, seed: int) -> None:
    """Weights of a spread that keeps activations alive and routers decided; norms near one, biases small."""
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in sorted(model.named_parameters()):
        if parameter.dim() >= 2:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
        else:
            parameter.add_(torch.empty_like(parameter).uniform_(-0.1, 0.1, generator=generator))
    for name, buffer in sorted(model.named_buffers()):
        if "bias" in name and buffer.dtype.is_floating_point:
            buffer.uniform_(-0.2, 0.2, generator=generator)
