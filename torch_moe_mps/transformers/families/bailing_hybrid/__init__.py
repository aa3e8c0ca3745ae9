"""Bailing hybrid: keys of its config and names in MLX's checkpoints."""

from typing import Any

from .. import MLX_KEYS, MLX_NAMES


def older_keys(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["BailingMoeV3ForCausalLM"],
        "layer_group_size": config["full_attention_interval"],
        "moe_shared_expert_intermediate_size": config["moe_intermediate_size"] * config["num_shared_experts"],
        "n_group": config["num_expert_group"],
        "num_experts_per_tok": config["num_experts_per_token"],
        "q_lora_rank": None,
    }


MLX_KEYS["bailing_hybrid"] = (
    ("num_experts_per_token", "num_expert_group", "full_attention_interval"),
    older_keys,
)
MLX_NAMES["bailing_hybrid"] = {
    "renamed_linear": {".attention.dense.": ".attention.o_proj."},
    "halves": True,
}
