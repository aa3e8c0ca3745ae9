"""Small models: their configs, and the metadata and names that llama.cpp's converter publishes."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

Tensors = dict[str, Tensor]


class Published(NamedTuple):
    """An architecture.

    Attributes:
        model_type: of the config.
        config: hidden size -> entries of the config.
        keys: config -> metadata, beside those that all have.
        names: those that differ from the usual ones.
        split: (name in the layer, value, config) -> the file's tensors of it, or None for the usual one.
        around: type of the model with a vision tower that has it inside, and the tower's config.
    """

    model_type: str
    config: Callable[[int], dict[str, Any]]
    keys: Callable[[Any], dict[str, Any]] = lambda config: {}
    names: Mapping[str, str] = MappingProxyType({})
    split: Callable[[str, Tensor, Any], Tensors | None] = lambda name, value, config: None
    around: tuple[str, dict[str, Any]] | None = None


def _experts(hidden: int) -> dict[str, Any]:
    return {
        **{"moe_intermediate_size": 2 * hidden, "n_routed_experts": 4, "num_experts_per_tok": 2},
        **{"n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5},
        **{"n_group": 1, "topk_group": 1, "norm_topk_prob": True},
    }


def _expert_keys(config: Any) -> dict[str, Any]:
    return {
        **{"expert_count": config.n_routed_experts, "expert_shared_count": config.n_shared_experts},
        "expert_feed_forward_length": config.moe_intermediate_size,
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_weights_scale": float(config.routed_scaling_factor),
        **{"expert_weights_norm": config.norm_topk_prob, "expert_gating_func": 2},
    }


# Architecture of the file, and after a colon the case.
PUBLISHED: dict[str, Published] = {}

PUBLISHED["glm4moe"] = Published(
    "glm4_moe",
    lambda hidden: {
        **_experts(hidden),
        **{"head_dim": 32, "attention_bias": True, "use_qk_norm": True},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5},
    },
    lambda config: {
        **_expert_keys(config),
        **{"attention.key_length": config.head_dim, "attention.value_length": config.head_dim},
        **{"rope.dimension_count": config.head_dim // 2, "nextn_predict_layers": 0},
    },
    {"post_attention_layernorm": "post_attention_norm"},
)


def latents(name: str, value: Tensor, config: Any) -> Tensors | None:
    """Keys' and values' parts of kv_b_proj; those of the keys are transposed in each head."""
    if name != "self_attn.kv_b_proj.weight":
        return None
    heads = value.unflatten(0, (config.num_attention_heads, -1))
    keys, values = heads.split((config.qk_nope_head_dim, config.v_head_dim), 1)
    return {"attn_k_b.weight": keys.transpose(1, 2), "attn_v_b.weight": values}


LATENTS = {
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
}


def latent_config(hidden: int) -> dict[str, Any]:
    return {
        **_experts(hidden),
        **{"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32},
        **{"v_head_dim": 32, "num_key_value_heads": 4},
    }


def latent_keys(config: Any) -> dict[str, Any]:
    rank, rotary = config.kv_lora_rank, config.qk_rope_head_dim
    return {
        **_expert_keys(config),
        **{"attention.head_count_kv": 1, "attention.q_lora_rank": config.q_lora_rank},
        **{
            "attention.kv_lora_rank": rank,
            "attention.key_length": rank + rotary,
            "attention.value_length": rank,
        },
        "attention.key_length_mla": config.qk_nope_head_dim + rotary,
        **{"attention.value_length_mla": config.v_head_dim, "rope.dimension_count": rotary},
    }


PUBLISHED["deepseek2"] = Published(
    "deepseek_v3",
    lambda hidden: {
        **latent_config(hidden),
        "rope_parameters": {
            **{
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            },
            **{"mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 64},
        },
    },
    lambda config: {
        **latent_keys(config),
        **{
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 8.0,
            "rope.scaling.original_context_length": 64,
        },
        **{"rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0},
        "rope.scaling.yarn_log_multiplier": 0.1,
    },
    LATENTS,
    latents,
)
PUBLISHED["deepseek2:v2"] = Published(
    "deepseek_v2",
    lambda hidden: {**latent_config(hidden), "norm_topk_prob": False, "topk_method": "greedy"},
    lambda config: {**latent_keys(config), "expert_gating_func": 1, "expert_weights_norm": None},
    LATENTS,
    latents,
)
PUBLISHED["dots1"] = Published(
    "dots1",
    lambda hidden: {**_experts(hidden), "num_key_value_heads": 4, "sliding_window": None},
    _expert_keys,
)


def _qwen3_next(name: str, value: Tensor, config: Any) -> Tensors | None:
    if name.endswith("A_log"):
        return {"ssm_a": -value.exp()}
    if name.endswith("conv1d.weight"):
        return {"ssm_conv1d.weight": value[:, 0]}
    if name.endswith("norm.weight") and not name.startswith("linear_attn."):
        return {f"{NORMS[name.removesuffix('.weight')]}.weight": value + 1}
    if name.endswith("in_proj_qkvz.weight"):
        keys, key_width = config.linear_num_key_heads, config.linear_key_head_dim
        per_key = config.linear_num_value_heads // keys * config.linear_value_head_dim
        parts = value.unflatten(0, (keys, -1)).split((key_width, key_width, per_key, per_key), 1)
        queries, keys_, values, gates = (part.flatten(0, 1) for part in parts)
        return {"attn_qkv.weight": torch.cat((queries, keys_, values)), "attn_gate.weight": gates}
    if name == "mlp.shared_expert_gate.weight":
        return {"ffn_gate_inp_shexp.weight": value[0]}
    return None


NORMS = {
    **{"input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm"},
    **{"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "model.norm": "output_norm"},
}
PUBLISHED["qwen3next"] = Published(
    "qwen3_next",
    lambda hidden: {
        **{"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "head_dim": 32},
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32},
        **{
            "linear_value_head_dim": 32,
            "linear_conv_kernel_dim": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
        **{"moe_intermediate_size": 2 * hidden, "shared_expert_intermediate_size": 2 * hidden},
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    },
    lambda config: {
        **{"expert_count": 4, "expert_feed_forward_length": config.moe_intermediate_size},
        "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        **{"attention.key_length": 32, "attention.value_length": 32, "rope.dimension_count": 8},
        **{"ssm.conv_kernel": 4, "ssm.state_size": 32, "ssm.group_count": 2, "ssm.time_step_rank": 4},
        **{"ssm.inner_size": 128, "full_attention_interval": 2},
    },
    {
        **{
            "linear_attn.dt_bias": "ssm_dt.bias",
            "linear_attn.in_proj_ba": "ssm_ba",
            "linear_attn.norm": "ssm_norm",
        },
        "linear_attn.out_proj": "ssm_out",
        **{f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    },
    _qwen3_next,
)


def _state_spaces(name: str, value: Tensor, config: Any) -> Tensors | None:
    """Layers of Mamba-2: numbers of heads are columns, a norm has a row for each group."""
    stem = name.rpartition("mamba.")[2] if "mamba." in name else name.rpartition("mixer.")[2]
    if stem == "A_log":
        return {"ssm_a": -value.exp()[:, None]}
    if stem == "D":
        return {"ssm_d": value[:, None]}
    if stem == "dt_bias":
        return {"ssm_dt.bias": value}
    if stem == "conv1d.weight":
        return {"ssm_conv1d.weight": value[:, 0]}
    groups = getattr(config, "mamba_n_groups", None) or getattr(config, "n_groups", None)
    return {"ssm_norm.weight": value.view(groups, -1)} if stem == "norm.weight" and "m" in name[:2] else None


def _pairs(value: Tensor, heads: int) -> Tensor:
    """Rows of queries or keys as llama.cpp turns them: neighbours are a pair."""
    return value.view(heads, 2, -1, *value.shape[1:]).transpose(1, 2).reshape(value.shape)


def llama_rope(name: str, value: Tensor, config: Any) -> Tensors | None:
    for part, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
        if name.startswith(f"self_attn.{part}_proj."):
            return {f"attn_{part}.{name.rpartition('.')[2]}": _pairs(value, heads)}
    return None


def _granite(name: str, value: Tensor, config: Any) -> Tensors | None:
    suffix = "_shexp" if getattr(config, "num_local_experts", 0) else ""
    if name == "shared_mlp.input_linear.weight":
        gate, up = value.chunk(2)
        return {f"ffn_gate{suffix}.weight": gate, f"ffn_up{suffix}.weight": up}
    if name == "shared_mlp.output_linear.weight":
        return {f"ffn_down{suffix}.weight": value}
    if name.startswith("mamba."):
        return _state_spaces(name, value, config)
    return llama_rope(name, value, config)


def _granite_keys(config: Any) -> dict[str, Any]:
    return {
        **{"attention.scale": config.attention_multiplier, "embedding_scale": config.embedding_multiplier},
        **{"residual_scale": config.residual_multiplier, "logit_scale": config.logits_scaling},
        "expert_count": getattr(config, "num_local_experts", None),
        "expert_shared_feed_forward_length": getattr(config, "shared_intermediate_size", None) or None,
        "rope.dimension_count": config.hidden_size // config.num_attention_heads,
    }


GRANITE = {
    **{"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
    **{"logits_scaling": 2.0, "num_local_experts": 4, "num_experts_per_tok": 2},
}
GRANITE_NAMES = {
    "block_sparse_moe.router": "ffn_gate_inp",
    "block_sparse_moe.experts.down_proj": "ffn_down_exps.weight",
    "mamba.in_proj": "ssm_in",
    "mamba.out_proj": "ssm_out",
    "mamba.conv1d": "ssm_conv1d",
}
DENSE_GRANITE = {key: value for key, value in GRANITE.items() if "experts" not in key}
PUBLISHED["granite"] = Published("granite", lambda hidden: DENSE_GRANITE, _granite_keys, {}, _granite)
PUBLISHED["granitemoe"] = Published(
    "granitemoe", lambda hidden: GRANITE, _granite_keys, GRANITE_NAMES, _granite
)
PUBLISHED["granitemoe:shared"] = Published(
    "granitemoeshared",
    lambda hidden: {**GRANITE, "shared_intermediate_size": 2 * hidden},
    _granite_keys,
    GRANITE_NAMES,
    _granite,
)
MAMBA = {
    **{"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_d_conv": 4},
    **{"mamba_expand": 2, "layer_types": ["linear_attention", "full_attention"]},
}


def _mamba_keys(config: Any) -> dict[str, Any]:
    heads = getattr(config, "mamba_n_heads", None) or config.mamba_num_heads
    return {
        **{"ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2, "ssm.time_step_rank": heads},
        "ssm.inner_size": 2 * config.hidden_size,
    }


PUBLISHED["granitehybrid"] = Published(
    "granitemoehybrid",
    lambda hidden: {
        **GRANITE,
        **{**MAMBA, "mamba_n_heads": hidden // 16, "shared_intermediate_size": 2 * hidden},
    },
    lambda config: {
        **_granite_keys(config),
        **_mamba_keys(config),
        **{"attention.head_count_kv": [0, 2], "rope.scaling.finetuned": False},
    },
    GRANITE_NAMES,
    _granite,
)


def _nemotron(name: str, value: Tensor, config: Any) -> Tensors | None:
    return _state_spaces(name, value, config) if name.startswith("mixer.") else None


NEMOTRON_NAMES = {
    **{"model.embeddings": "token_embd", "model.norm_f": "output_norm", "norm": "attn_norm"},
    **{"mixer.in_proj": "ssm_in", "mixer.out_proj": "ssm_out", "mixer.conv1d": "ssm_conv1d"},
    **{f"mixer.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{"mixer.o_proj": "attn_output", "mixer.up_proj": "ffn_up", "mixer.down_proj": "ffn_down"},
    **{"mixer.gate": "ffn_gate_inp", "mixer.gate.e_score_correction_bias": "exp_probs_b.bias"},
    **{f"mixer.experts.{part}_proj": f"ffn_{part}_exps.weight" for part in ("up", "down")},
    **{f"mixer.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("up", "down")},
}


def _nemotron_config(hidden: int) -> dict[str, Any]:
    return {
        **{"head_dim": 32, "mamba_num_heads": hidden // 16, "mamba_head_dim": 32, "n_groups": 2},
        **{"ssm_state_size": 16, "conv_kernel": 4, "layer_norm_epsilon": 1e-5, "num_hidden_layers": None},
    }


def _nemotron_keys(config: Any) -> dict[str, Any]:
    types = config.layers_block_type
    inner = config.moe_intermediate_size if "moe" in types else config.intermediate_size
    return {
        **_mamba_keys(config),
        **{"attention.key_length": 32, "attention.value_length": 32, "block_count": len(types)},
        "attention.head_count_kv": [2 if each == "full_attention" else 0 for each in types],
        "feed_forward_length": [inner if each in ("moe", "mlp") else 0 for each in types],
        **{"attention.layer_norm_rms_epsilon": 1e-5, "attention.layer_norm_epsilon": 1e-5},
        "rope.dimension_count": 32,
    }


PUBLISHED["nemotron_h"] = Published(
    "nemotron_h",
    lambda hidden: {
        **_nemotron_config(hidden),
        "layers_block_type": ["linear_attention", "mlp", "full_attention"],
    },
    lambda config: {**_nemotron_keys(config), "expert_used_count": None},
    NEMOTRON_NAMES,
    _nemotron,
)
PUBLISHED["nemotron_h_moe"] = Published(
    "nemotron_h",
    lambda hidden: {
        **_nemotron_config(hidden),
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 2 * hidden},
        **{"moe_shared_expert_intermediate_size": hidden, "routed_scaling_factor": 2.5},
        "layers_block_type": ["linear_attention", "moe", "full_attention"],
    },
    lambda config: {
        **_nemotron_keys(config),
        **{"expert_count": 4, "expert_shared_count": 1, "expert_weights_norm": True, "expert_group_count": 1},
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
        "expert_weights_scale": 2.5,
    },
    NEMOTRON_NAMES,
    _nemotron,
)


def _llama4(name: str, value: Tensor, config: Any) -> Tensors | None:
    if name == "feed_forward.experts.gate_up_proj":
        gate, up = value.transpose(1, 2).chunk(2, 1)
        return {"ffn_gate_exps.weight": gate, "ffn_up_exps.weight": up}
    if name == "feed_forward.experts.down_proj":
        return {"ffn_down_exps.weight": value.transpose(1, 2)}
    return None


PUBLISHED["llama4"] = Published(
    "llama4_text",
    lambda hidden: {
        **{"intermediate_size": 2 * hidden, "intermediate_size_mlp": 3 * hidden, "num_hidden_layers": 4},
        **{"num_local_experts": 16, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "head_dim": 16},
    },
    lambda config: {
        **{"expert_count": 16, "interleave_moe_layer_step": 2, "leading_dense_block_count": 0},
        "expert_feed_forward_length": config.intermediate_size,
        **{"feed_forward_length": config.intermediate_size_mlp, "rope.dimension_count": 16},
        **{"attention.key_length": 16, "attention.value_length": 16},
    },
    {
        "feed_forward.router": "ffn_gate_inp",
        **{f"feed_forward.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
        **{f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    },
    _llama4,
)
PUBLISHED["ernie4_5"] = Published(
    "ernie4_5",
    lambda hidden: {"head_dim": 32, "use_bias": False},
    lambda config: {"attention.key_length": 32, "attention.value_length": 32},
)
PUBLISHED["ernie4_5-moe"] = Published(
    "ernie4_5_moe",
    lambda hidden: {
        **{
            "moe_intermediate_size": 2 * hidden,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_num_shared_experts": 1,
        },
        **{"moe_layer_start_index": 1, "moe_layer_end_index": 1, "moe_layer_interval": 1},
    },
    lambda config: {
        **{
            "expert_count": 4,
            "expert_used_count": 2,
            "expert_shared_count": 1,
            "interleave_moe_layer_step": 1,
        },
        **{"leading_dense_block_count": 1, "expert_feed_forward_length": config.moe_intermediate_size},
        "expert_shared_feed_forward_length": config.moe_intermediate_size,
    },
    {"mlp.gate.moe_statics.e_score_correction_bias": "exp_probs_b.bias"},
    lambda name, value, config: {"exp_probs_b.bias": value[0]} if name.endswith("correction_bias") else None,
)
PUBLISHED["hunyuan-dense"] = Published(
    "hunyuan_v1_dense",
    lambda hidden: {"head_dim": 32},
    lambda config: {"attention.key_length": 32, "attention.value_length": 32},
    {"self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm"},
)
PUBLISHED["hunyuan-moe"] = Published(
    "hunyuan_v1_moe",
    lambda hidden: {
        "intermediate_size": 2 * hidden,
        "num_experts": 4,
        "moe_topk": 2,
        "head_dim": hidden // 4,
    },
    lambda config: {
        **{"expert_count": 4, "expert_used_count": 2, "expert_shared_count": 1},
        "expert_feed_forward_length": config.intermediate_size,
        "expert_shared_feed_forward_length": config.intermediate_size,
    },
    {
        **{"self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm"},
        "mlp.gate.wg": "ffn_gate_inp",
        **{f"mlp.shared_mlp.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    },
)
PUBLISHED["olmoe"] = Published(
    "olmoe",
    lambda hidden: {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4},
    lambda config: {"expert_count": 4},
)


def _jamba(name: str, value: Tensor, config: Any) -> Tensors | None:
    if name == "mamba.A_log":
        return {"ssm_a": -value.exp()}
    return {"ssm_conv1d.weight": value[:, 0]} if name == "mamba.conv1d.weight" else None


PUBLISHED["jamba"] = Published(
    "jamba",
    lambda hidden: {
        **{"num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 2, "attn_layer_offset": 1},
        **{"expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 16, "mamba_dt_rank": 32},
        **{"num_hidden_layers": 4, "use_mamba_kernels": False},
    },
    lambda config: {
        **{"attention.head_count_kv": [0, 2, 0, 2], "expert_count": 4, "ssm.conv_kernel": 4},
        **{"ssm.inner_size": 2 * config.hidden_size, "ssm.state_size": 16, "ssm.time_step_rank": 32},
    },
    {
        **{f"mamba.{part}": f"ssm_{part[:-5]}" for part in ("in_proj", "x_proj", "dt_proj", "out_proj")},
        **{f"mamba.{part}_layernorm": f"ssm_{part}_norm" for part in ("dt", "b", "c")},
        **{"mamba.D": "ssm_d", "mamba.conv1d": "ssm_conv1d", "pre_ff_layernorm": "ffn_norm"},
        **{f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
        **{"feed_forward.router": "ffn_gate_inp", "feed_forward.experts.down_proj": "ffn_down_exps.weight"},
        "model.final_layernorm": "output_norm",
    },
    _jamba,
)
PUBLISHED["afmoe"] = Published(
    "afmoe",
    lambda hidden: {
        **{"moe_intermediate_size": 2 * hidden, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
        **{"num_shared_experts": 1, "num_dense_layers": 1, "route_scale": 1.5, "sliding_window": 8},
        **{"num_hidden_layers": 4, "mup_enabled": True},
    },
    lambda config: {
        **{"expert_count": 4, "expert_shared_count": 1, "leading_dense_block_count": 1},
        **{"expert_feed_forward_length": config.moe_intermediate_size, "expert_weights_norm": True},
        **{"expert_weights_scale": 1.5, "expert_gating_func": 2, "attention.sliding_window": 8},
        **{"attention.key_length": 16, "attention.value_length": 16, "rope.dimension_count": 16},
    },
    {
        **{"post_attention_layernorm": "post_attention_norm", "pre_mlp_layernorm": "ffn_norm"},
        **{"post_mlp_layernorm": "post_ffw_norm", "self_attn.gate_proj": "attn_gate"},
        **{"mlp.router.gate": "ffn_gate_inp", "mlp.expert_bias": "exp_probs_b.bias"},
    },
)
WINDOWS = ["sliding_attention", "full_attention"] * 2
PUBLISHED["exaone-moe"] = Published(
    "exaone_moe",
    lambda hidden: {
        **{"moe_intermediate_size": 2 * hidden, "num_experts": 4, "num_experts_per_tok": 2},
        **{"num_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5},
        **{"sliding_window": 8, "num_hidden_layers": 4, "layer_types": WINDOWS},
    },
    lambda config: {
        **{"expert_count": 4, "expert_shared_count": 1, "leading_dense_block_count": 1},
        **{"expert_feed_forward_length": config.moe_intermediate_size, "expert_weights_norm": True},
        "expert_shared_feed_forward_length": config.moe_intermediate_size,
        **{"expert_weights_scale": 2.5, "expert_gating_func": 2, "attention.sliding_window": 8},
        **{"attention.sliding_window_pattern": [True, False] * 2, "rope.scaling.type": "none"},
        "nextn_predict_layers": 0,
    },
)
PUBLISHED["exaone4"] = Published(
    "exaone4",
    lambda hidden: {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    names={"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"},
)
PUBLISHED["exaone4:windows"] = Published(
    "exaone4",
    lambda hidden: {"sliding_window": 8, "num_hidden_layers": 4, "layer_types": WINDOWS},
    lambda config: {
        **{"attention.sliding_window": 8, "attention.sliding_window_pattern": [True, False] * 2},
    },
    {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"},
)


def _lfm2_moe(name: str, value: Tensor, config: Any) -> Tensors | None:
    return {"shortconv.conv.weight": value[:, 0]} if name == "conv.conv.weight" else None


PUBLISHED["lfm2moe"] = Published(
    "lfm2_moe",
    lambda hidden: {
        **{"moe_intermediate_size": 2 * hidden, "num_experts": 4, "num_experts_per_tok": 2},
        **{"num_dense_layers": 1, "layer_types": ["conv", "full_attention"], "norm_eps": 1e-5},
        **{"tie_word_embeddings": True, "use_expert_bias": True, "conv_L_cache": 3},
    },
    lambda config: {
        **{"attention.head_count_kv": [0, 2], "expert_count": 4, "leading_dense_block_count": 1},
        **{"expert_feed_forward_length": config.moe_intermediate_size, "expert_gating_func": 2},
        **{"attention.layer_norm_rms_epsilon": 1e-5, "shortconv.l_cache": 3},
    },
    {
        **{"operator_norm": "attn_norm", "ffn_norm": "ffn_norm", "self_attn.out_proj": "attn_output"},
        **{"self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm"},
        **{"feed_forward.w1": "ffn_gate", "feed_forward.w2": "ffn_down", "feed_forward.w3": "ffn_up"},
        **{"feed_forward.gate": "ffn_gate_inp", "feed_forward.expert_bias": "exp_probs_b.bias"},
        **{
            "feed_forward.experts.down_proj": "ffn_down_exps.weight",
            "model.embedding_norm": "token_embd_norm",
        },
        **{"conv.in_proj": "shortconv.in_proj", "conv.out_proj": "shortconv.out_proj"},
    },
    _lfm2_moe,
)
POSTNORMS = {
    **{"post_attention_layernorm": "ffn_norm", "post_self_attn_layernorm": "post_attention_norm"},
    **{"post_mlp_layernorm": "post_ffw_norm", "mlp.gate_up_proj": "ffn_up"},
}
PUBLISHED["glm4"] = Published(
    "glm4",
    lambda hidden: {
        "head_dim": hidden // 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    lambda config: {"rope.dimension_count": config.head_dim // 2},
    POSTNORMS,
)
PUBLISHED["olmo2"] = Published(
    "olmo2",
    lambda hidden: {"num_key_value_heads": 4},
    names={"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"},
)
PUBLISHED["smollm3"] = Published("smollm3", lambda hidden: {"num_hidden_layers": 4}, split=llama_rope)
PUBLISHED["seed_oss"] = Published(
    "seed_oss",
    lambda hidden: {"head_dim": 32},
    lambda config: {"attention.key_length": 32, "attention.value_length": 32},
    {"post_attention_layernorm": "post_attention_norm"},
)
PUBLISHED["olmo"] = Published(
    "olmo",
    lambda hidden: {"clip_qkv": 1.0},
    lambda config: {"attention.layer_norm_epsilon": 1e-5, "attention.clamp_kqv": 1.0},
    split=llama_rope,
)
# Mixtral-8x7B, made small: 2 of 8 experts are chosen, four heads share their keys, experts are wide inside.
PUBLISHED["llama:mixtral"] = Published(
    "mixtral",
    lambda hidden: {
        **{"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 3 * hidden},
        **{"num_key_value_heads": 1, "head_dim": hidden // 4, "rms_norm_eps": 1e-5},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    lambda config: {"expert_count": 8, "rope.dimension_count": config.head_dim},
    split=llama_rope,
)
PUBLISHED["arcee"] = Published("arcee", lambda hidden: {}, split=llama_rope)
COHERE = {"tie_word_embeddings": True, "logit_scale": 0.25, "layer_norm_eps": 1e-5}
COHERE_KEYS = {"attention.layer_norm_epsilon": 1e-5, "logit_scale": 0.25, "rope.scaling.type": "none"}
PUBLISHED["command-r"] = Published("cohere", lambda hidden: COHERE, lambda config: COHERE_KEYS)
PUBLISHED["cohere2"] = Published(
    "cohere2",
    lambda hidden: {**COHERE, "num_hidden_layers": 4, "sliding_window": 8},
    lambda config: {
        **COHERE_KEYS,
        "attention.sliding_window": 8,
        "rope.dimension_count": config.hidden_size // 4,
    },
)

PUBLISHED["glm-dsa"] = Published(
    "glm_moe_dsa",
    lambda hidden: {
        **latent_config(hidden),
        **{"index_topk": 8, "index_head_dim": 64, "index_n_heads": 4, "rms_norm_eps": 1e-6},
    },
    lambda config: {
        **latent_keys(config),
        **{"attention.indexer.head_count": 4, "attention.indexer.key_length": 64},
        "attention.indexer.top_k": 8,
    },
    {
        **LATENTS,
        **{"self_attn.indexer.wq_b": "indexer.attn_q_b", "self_attn.indexer.wk": "indexer.attn_k"},
        **{"self_attn.indexer.k_norm": "indexer.k_norm", "self_attn.indexer.weights_proj": "indexer.proj"},
    },
    latents,
)


def _kimi_linear(name: str, value: Tensor, config: Any) -> Tensors | None:
    if name.endswith("A_log"):
        return {"ssm_a": -value.exp()}
    if name.endswith("conv1d.weight"):
        parts = zip("qkv", value.chunk(3), strict=True)
        return {f"ssm_conv1d_{part}.weight": each[None] for part, each in parts}
    return latents(name, value, config)


PUBLISHED["kimi-linear"] = Published(
    "kimi_linear",
    lambda hidden: {
        **{"moe_intermediate_size": 2 * hidden, "num_local_experts": 4, "num_experts_per_tok": 2},
        **{"n_shared_experts": 1, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32},
        **{"v_head_dim": 32, "num_key_value_heads": 4, "linear_head_dim": 32, "linear_num_heads": 4},
        "layer_types": ["linear_attention", "full_attention"],
    },
    lambda config: {
        **{"attention.head_count_kv": [0, 1], "ssm.conv_kernel": 4, "kda.head_dim": 32},
        **{"rope.dimension_count": 16, "attention.kv_lora_rank": 32, "attention.key_length": 48},
        **{"attention.value_length": 32, "attention.key_length_mla": 48, "attention.value_length_mla": 32},
        **{"expert_count": 4, "expert_shared_count": 1, "leading_dense_block_count": 1},
        "expert_feed_forward_length": config.moe_intermediate_size,
        **{"expert_weights_scale": float(config.routed_scaling_factor), "expert_gating_func": 2},
        "expert_weights_norm": True,
    },
    {
        **{"self_attn.forget_gate.dt_bias": "ssm_dt.bias", "self_attn.b_proj": "ssm_beta"},
        **{f"self_attn.forget_gate.f_{part}_proj": f"ssm_f_{part}" for part in "ab"},
        **{f"self_attn.g_{part}_proj": f"ssm_g_{part}" for part in "ab"},
        **{"self_attn.o_norm": "ssm_norm", **LATENTS},
    },
    _kimi_linear,
)
