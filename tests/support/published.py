"""Tiny folders of architectures with the names, and the config, that their makers publish."""

import functools
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

from support import tiny_models
from support.checkpoints import changed, drop_zero_experts

# Of Step-3.7-Flash: lists with an entry for each layer, the MTP layers' last.
_STEP = {
    "model_type": "step3p5",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_attention_groups": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "moe_num_experts": 8,
    "moe_top_k": 2,
    "moe_intermediate_size": 64,
    "share_expert_dim": 64,
    "moe_layers_enum": "1,2",
    "moe_router_scaling_factor": 3.0,
    "norm_expert_weight": True,
    "use_head_wise_attn_gate": True,
    "sliding_window": 5,
    "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "attention_other_setting": {
        "attention_type": "sliding_attention",
        "num_attention_heads": 8,
        "num_attention_groups": 2,
        "head_dim": 16,
        "true_head_dim": 16,
    },
    "rope_theta": [5e6, 1e4, 5e6, 1e4],
    "partial_rotary_factors": [0.5, 1.0, 0.5, 1.0],
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 2.0,
        "original_max_position_embeddings": 128,
        "low_freq_factor": 1.0,
        "high_freq_factor": 32.0,
    },
    "yarn_only_types": ["full_attention"],
    "swiglu_limits": [0.0, 0.0, 0.5, 0.0],
    "swiglu_limits_shared": [0.0, 0.0, 0.25, 0.0],
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
NAMES = {
    "step3p7": (
        "model.embed_tokens.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.1.moe.down_proj.weight",
        "model.layers.1.moe.gate.weight",
        "model.layers.1.moe.gate_proj.weight",
        "model.layers.1.moe.router_bias",
        "model.layers.1.moe.up_proj.weight",
        "model.layers.1.self_attn.g_proj.weight",
        "model.layers.1.share_expert.up_proj.weight",
        "model.layers.3.eh_proj.weight",
        "model.layers.3.self_attn.q_proj.weight",
        "model.layers.3.transformer.shared_head.norm.weight",
        "lm_head.weight",
        "vision_model.conv1.weight",
        "vit_large_projector.weight",
    ),
    "llama4": (
        "language_model.lm_head.weight",
        "language_model.model.embed_tokens.weight",
        "language_model.model.layers.1.feed_forward.experts.down_proj",
        "language_model.model.layers.1.feed_forward.experts.gate_up_proj",
        "language_model.model.layers.1.feed_forward.router.weight",
        "language_model.model.layers.1.feed_forward.shared_expert.gate_proj.weight",
        "language_model.model.layers.0.feed_forward.gate_proj.weight",
        "multi_modal_projector.linear_1.weight",
        "vision_model.class_embedding",
    ),
    "dbrx": (
        "lm_head.weight",
        "transformer.blocks.0.ffn.experts.mlp.v1",
        "transformer.blocks.0.ffn.experts.mlp.w1",
        "transformer.blocks.0.ffn.experts.mlp.w2",
        "transformer.blocks.0.ffn.router.layer.weight",
        "transformer.blocks.0.norm_attn_norm.attn.Wqkv.weight",
        "transformer.wte.weight",
    ),
    "jetmoe": (
        "model.embed_tokens.weight",
        "model.layers.0.mlp.bias",
        "model.layers.0.mlp.input_linear.weight",
        "model.layers.0.mlp.output_linear.weight",
        "model.layers.0.mlp.router.layer.weight",
        "model.layers.0.self_attention.experts.input_linear.weight",
        "model.layers.0.self_attention.experts.output_linear.weight",
        "model.layers.0.self_attention.kv_proj.weight",
    ),
    "longcat_flash": (
        "lm_head.weight",
        "model.embed_tokens.weight",
        "model.layers.0.mlp.experts.7.down_proj.weight",
        "model.layers.0.mlp.experts.7.gate_proj.weight",
        "model.layers.0.mlp.router.classifier.weight",
        "model.layers.0.mlp.router.e_score_correction_bias",
        "model.layers.0.mlps.1.up_proj.weight",
        "model.layers.0.self_attn.1.kv_a_proj_with_mqa.weight",
        "model.mtp.layers.0.eh_proj.weight",
    ),
}


def write(architecture: str, folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model of a published folder, which is written, as transformers' own code has it."""
    model = tiny_models.as_loaded(_MODELS[architecture](), dtype).eval()
    model.save_pretrained(folder)
    with changed(folder / "model.safetensors") as tensors:
        if architecture == "longcat_flash":
            tensors["model.mtp.layers.0.eh_proj.weight"] = torch.zeros(64, 128, dtype=dtype)
        if architecture == "step3p7":  # the last layer predicts a further token
            tensors["model.layers.3.eh_proj.weight"] = torch.zeros(64, 128, dtype=dtype)
            for norm in ("enorm", "hnorm", "transformer.shared_head.norm"):
                tensors[f"model.layers.3.{norm}.weight"] = torch.zeros(64, dtype=dtype)
            tensors["model.layers.3.transformer.shared_head.output.weight"] = torch.zeros(96, 64, dtype=dtype)
    if architecture == "longcat_flash":
        drop_zero_experts(folder / "model.safetensors", 8)
    if architecture == "step3p7":
        with changed(folder / "config.json") as config:
            config["text_config"] = _STEP | {"dtype": config["dtype"]}
        del model.model.language_model.layers[3]
        model.config.text_config.num_hidden_layers = 3
    return model


def _randomised(model: PreTrainedModel) -> PreTrainedModel:
    tiny_models.randomise(model, 0)
    return model


def _step() -> PreTrainedModel:
    """With the layer behind the last, too."""
    vision = tiny_models.build_config(transformers.Step3p7VisionConfig)
    text = _STEP | {"num_hidden_layers": 4, "num_nextn_predict_layers": 0}
    config = transformers.Step3p7Config(text_config=text, vision_config=vision.to_dict())
    torch.manual_seed(0)
    return _randomised(transformers.Step3p7ForConditionalGeneration(config))


def _llama4() -> PreTrainedModel:
    """With an MLP in every other layer, as Maverick."""
    with tiny_models.groups_of_32(), tiny_models.sizes(intermediate_size_mlp=64, vision_output_dim=64):
        text = tiny_models.build_config(transformers.Llama4TextConfig, interleave_moe_layer_step=2)
        config = tiny_models.build_config(transformers.Llama4Config, text_config=text)
        torch.manual_seed(0)
        return _randomised(transformers.Llama4ForConditionalGeneration(config))


def _tiny(architecture: str) -> PreTrainedModel:
    with tiny_models.groups_of_32():
        return tiny_models.tiny_model(architecture)


_MODELS = {"step3p7": _step, "llama4": _llama4}
_MODELS |= {name: functools.partial(_tiny, name) for name in ("longcat_flash", "dbrx", "jetmoe")}
