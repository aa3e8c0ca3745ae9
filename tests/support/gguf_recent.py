"""Small models of architectures of late 2025 and 2026, of gpt-oss and of DBRX, as llama.cpp's converter
publishes them."""

from typing import Any

from torch import Tensor

from support.gguf_published import (
    LATENTS,
    NORMS,
    WINDOWS,
    Published,
    Tensors,
    latent_config,
    latent_keys,
    latents,
)

RECENT: dict[str, Published] = {}


def _by_type(full: tuple[float, float], sliding: tuple[float, float]) -> dict[str, Any]:
    """rope_parameters of two types of layers: a base, and the share of a head that turns."""
    return {
        f"{kind}_attention": {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": share}
        for kind, (theta, share) in (("full", full), ("sliding", sliding))
    }


def _mimo2(window: int, scale: float | None) -> Published:
    """transformers counts the token itself, besides those of the window."""
    return Published(
        "mimo_v2_flash",
        lambda hidden: {
            **{"moe_intermediate_size": 2 * hidden, "n_routed_experts": 4, "num_experts_per_tok": 2},
            **{"num_hidden_layers": 4, "layer_types": WINDOWS[::-1], "num_key_value_heads": 1},
            **{"head_dim": 48, "v_head_dim": 32, "sliding_window": window + 1, "rms_norm_eps": 1e-5},
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "attention_value_scale": 0.707 if scale is None else scale,
            "rope_parameters": _by_type((5e6, 1 / 3), (1e4, 1 / 3)),
        },
        lambda config: {
            **{"attention.head_count_kv": [1, 2, 1, 2], "attention.sliding_window_pattern": [0, 1, 0, 1]},
            **{"attention.key_length": 48, "attention.value_length": 32, "rope.dimension_count": 16},
            **{"rope.freq_base": 5e6, "rope.freq_base_swa": 1e4, "attention.sliding_window": window},
            **{"expert_count": 4, "expert_feed_forward_length": config.moe_intermediate_size},
            **{"expert_gating_func": 2, "expert_weights_norm": True, "attention.value_scale": scale},
        },
        {"self_attn.sinks": "attn_sinks.weight"},
    )


RECENT["mimo2"] = _mimo2(64, 0.6)
RECENT["mimo2:window"] = _mimo2(8, 0.6)
RECENT["mimo2:first"] = _mimo2(64, None)
RECENT["mistral4"] = Published(
    "mistral4",
    lambda hidden: {
        **latent_config(hidden),
        **{"first_k_dense_replace": 0, "intermediate_size": hidden},
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "beta_fast": 32.0},
            **{"beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5},
            **{"original_max_position_embeddings": 8, "partial_rotary_factor": 1 / 3},
        },
    },
    lambda config: {
        **latent_keys(config),
        **{"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "expert_gating_func": 1},
        **{"rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0},
        **{"rope.scaling.yarn_log_multiplier": 0.1, "rope.scaling.original_context_length": 8},
        **{"attention.temperature_scale": 0.5, "attention.temperature_length": 8},
    },
    LATENTS,
    latents,
)


def _qwen3_vl(kind: str, experts: bool) -> Published:
    """Of text alone; the tower that is written around it is not in the file."""
    tower = {
        **{"depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4},
        **{"out_hidden_size": 64, "num_position_embeddings": 16, "deepstack_visual_indexes": [1]},
    }
    return Published(
        f"{kind}_text",
        lambda hidden: {
            **(
                {"moe_intermediate_size": 2 * hidden, "num_experts": 4, "num_experts_per_tok": 2}
                if experts
                else {}
            ),
            "head_dim": 32,
            "rope_parameters": {
                **{"rope_type": "default", "rope_theta": 5e6},
                **{"mrope_section": [6, 5, 5], "mrope_interleaved": True},
            },
        },
        lambda config: {
            "expert_count": 4 if experts else None,
            "expert_feed_forward_length": config.moe_intermediate_size if experts else None,
            **{"attention.key_length": 32, "attention.value_length": 32, "n_deepstack_layers": 1},
            "rope.dimension_sections": [6, 5, 5, 0],
        },
        around=(kind, tower),
    )


RECENT["qwen3vl"] = _qwen3_vl("qwen3_vl", False)
RECENT["qwen3vlmoe"] = _qwen3_vl("qwen3_vl_moe", True)


def _plus_one(name: str, value: Tensor, config: Any) -> Tensors | None:
    """Norms of classes that add one to their weights."""
    names = NORMS | {"post_attention_layernorm": "ffn_norm"}
    return {f"{names[name[:-7]]}.weight": value + 1} if name[:-7] in names else None


RECENT["step35"] = Published(
    "step3p5",
    lambda hidden: {
        **{"moe_intermediate_size": 2 * hidden, "n_routed_experts": 4, "num_experts_per_tok": 2},
        **{"num_hidden_layers": 4, "layer_types": WINDOWS[::-1], "num_sliding_attention_heads": 6},
        **{"head_dim": 32, "share_expert_dim": hidden, "moe_router_scaling_factor": 3.0},
        **{"sliding_window": 8, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
        **{"swiglu_limits": [0.0, 0.0, 0.0, 0.5], "swiglu_limits_shared": [0.0, 0.0, 0.25, 0.0]},
        "rope_parameters": _by_type((5e6, 0.5), (1e4, 1.0)),
    },
    lambda config: {
        **{"attention.head_count": [4, 6, 4, 6], "attention.head_count_kv": [2, 2, 2, 2]},
        **{"attention.sliding_window": 8, "attention.sliding_window_pattern": [False, True, False, True]},
        **{"attention.key_length": 32, "attention.value_length": 32, "rope.dimension_count": 32},
        **{"rope.freq_base": 5e6, "rope.freq_base_swa": 1e4, "leading_dense_block_count": 1},
        **{"expert_count": 4, "expert_feed_forward_length": config.moe_intermediate_size},
        "expert_shared_feed_forward_length": config.share_expert_dim,
        **{"expert_weights_scale": 3.0, "expert_weights_norm": True, "moe_every_n_layers": 1},
        **{"swiglu_clamp_exp": config.swiglu_limits, "swiglu_clamp_shexp": config.swiglu_limits_shared},
    },
    {"self_attn.g_proj": "attn_gate"},
    _plus_one,
    (
        "step3p7",
        {
            **{"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28},
            "mlp_ratio": 1.0,
        },
    ),
)


def _gpt_oss(name: str, value: Tensor, config: Any) -> Tensors | None:
    """Matrices of experts are transposed in the class, and outputs of gate and up alternate."""
    of_experts = name.removeprefix("mlp.experts.")
    if of_experts in ("gate_up_proj", "gate_up_proj_bias"):
        kind = "bias" if value.dim() == 2 else "weight"
        rows = value if value.dim() == 2 else value.transpose(1, 2)
        return {f"ffn_{part}_exps.{kind}": rows[:, start::2] for part, start in (("gate", 0), ("up", 1))}
    if of_experts == "down_proj":
        return {"ffn_down_exps.weight": value.transpose(1, 2)}
    return {"ffn_down_exps.bias": value} if of_experts == "down_proj_bias" else None


def _gpt_oss_scaled(factor: float) -> Published:
    return Published(
        "gpt_oss",
        lambda hidden: {
            **{"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
            "intermediate_size": 2 * hidden,
            "rope_parameters": {
                **{"rope_type": "yarn", "rope_theta": 150000.0, "factor": factor, "beta_fast": 32.0},
                **{"beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 4096},
            },
        },
        lambda config: {
            **{"expert_count": 4, "expert_feed_forward_length": config.intermediate_size},
            **{"attention.key_length": 32, "attention.value_length": 32, "attention.sliding_window": 8},
            **{"rope.scaling.type": "yarn", "rope.scaling.factor": factor},
            "rope.scaling.original_context_length": 4096,
        },
        {
            **{"self_attn.sinks": "attn_sinks.weight", "mlp.router": "ffn_gate_inp"},
            "post_attention_layernorm": "post_attention_norm",
        },
        _gpt_oss,
    )


RECENT["gpt-oss"] = _gpt_oss_scaled(32.0)
RECENT["gpt-oss:not scaled"] = _gpt_oss_scaled(1.0)


def _dbrx(name: str, value: Tensor, config: Any) -> Tensors | None:
    """Experts one below the other; the matrix of the outputs is transposed."""
    owner, _, part = name.rpartition(".mlp.")
    if owner != "ffn.experts":
        return None
    each = value.view(config.ffn_config.moe_num_experts, -1, value.shape[-1])
    names = {"w1": "gate", "v1": "up", "w2": "down"}
    return {f"ffn_{names[part]}_exps.weight": each.transpose(1, 2) if part == "w2" else each}


RECENT["dbrx"] = Published(
    "dbrx",
    lambda hidden: {
        **{"d_model": hidden, "n_heads": 4, "n_layers": 2, "max_seq_len": 512},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.0, "rope_theta": 5e5},
        "ffn_config": {"ffn_hidden_size": 2 * hidden, "moe_num_experts": 4, "moe_top_k": 2},
    },
    lambda config: {
        **{"expert_count": 4, "expert_used_count": 2, "attention.clamp_kqv": 1.0, "rope.freq_base": 5e5},
        **{"feed_forward_length": config.ffn_config.ffn_hidden_size, "attention.head_count_kv": 2},
        "attention.layer_norm_epsilon": 1e-5,
    },
    {
        **{"transformer.wte": "token_embd", "transformer.norm_f": "output_norm"},
        **{"norm_attn_norm.norm_1": "attn_norm", "norm_attn_norm.norm_2": "attn_output_norm"},
        **{"norm_attn_norm.attn.Wqkv": "attn_qkv", "norm_attn_norm.attn.out_proj": "attn_output"},
        "ffn.router.layer": "ffn_gate_inp",
    },
    _dbrx,
)
