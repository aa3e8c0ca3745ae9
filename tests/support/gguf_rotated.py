"""Small models whose rotary embeddings are scaled by factors, as llama.cpp's converter publishes them."""

from typing import Any

import torch
from torch import Tensor

from support.gguf_published import Published, Tensors, llama_rope

ROTATED: dict[str, Published] = {}


def _longrope(original: int, count: int, **further: Any) -> dict[str, Any]:
    """Entries of a config with factors for texts up to a length, and for longer ones."""
    short, long = ([start + 0.25 * number for number in range(count)] for start in (1.0, 2.0))
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": original,
        "attention_factor": 1.25,
        **further,
    }


def _longrope_keys(config: Any) -> dict[str, Any]:
    return {
        "rope.scaling.original_context_length": config.rope_parameters["original_max_position_embeddings"],
        "rope.scaling.attn_factor": 1.25,
    }


def _longrope_tensors(name: str, value: Tensor, config: Any) -> Tensors | None:
    if name != "model.norm.weight" or config.rope_parameters["rope_type"] != "longrope":
        return None
    factors = {kind: torch.tensor(config.rope_parameters[f"{kind}_factor"]) for kind in ("long", "short")}
    return {
        "output_norm.weight": value,
        **{f"rope_factors_{kind}.weight": each for kind, each in factors.items()},
    }


def _phi3(original: int) -> Published:
    return Published(
        "phi3",
        lambda hidden: {
            "original_max_position_embeddings": original,
            "rope_parameters": _longrope(original, hidden // 4 * 3 // 4 // 2, partial_rotary_factor=0.75),
        },
        lambda config: {
            **_longrope_keys(config),
            **{"rope.dimension_count": config.hidden_size // 4 * 3 // 4, "attention.sliding_window": 0},
        },
        {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
        _longrope_tensors,
    )


# llama.cpp takes the long factors if its context, of 256 tokens here, is longer than the original one.
ROTATED["phi3:short"] = _phi3(512)
ROTATED["phi3:long"] = _phi3(8)
ROTATED["phi3:window"] = Published(
    "phi3",
    lambda hidden: {
        "sliding_window": 64,
        "original_max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 1.0,
        },
    },
    lambda config: {
        **{"rope.dimension_count": config.hidden_size // 4, "attention.sliding_window": 64},
        "rope.scaling.original_context_length": 512,
    },
    {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
)
ROTATED["phimoe"] = Published(
    "phimoe",
    lambda hidden: {
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 2 * hidden},
        **{"attention_bias": True, "lm_head_bias": True},
        "rope_parameters": _longrope(512, hidden // 8, short_mscale=1.25, long_mscale=1.25),
    },
    lambda config: {
        **_longrope_keys(config),
        **{"rope.dimension_count": config.hidden_size // 4, "expert_count": 4},
    },
    {"mlp.router": "ffn_gate_inp"},
    _longrope_tensors,
)
ROTATED["mistral3"] = Published(
    "ministral3",
    lambda hidden: {
        "head_dim": 32,
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "beta_fast": 32.0},
            **{"beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5},
            "original_max_position_embeddings": 8,
        },
    },
    lambda config: {
        **{"rope.scaling.type": "yarn", "rope.scaling.factor": 16.0, "rope.dimension_count": 32},
        **{"rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0},
        **{"rope.scaling.yarn_log_multiplier": 1.0, "rope.scaling.original_context_length": 8},
        **{"attention.key_length": 32, "attention.value_length": 32, "attention.temperature_scale": 0.5},
    },
    split=llama_rope,
)
