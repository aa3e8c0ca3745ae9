"""Kimi Linear: keys of its config and names in MLX's checkpoints."""

from typing import Any

from .. import MLX_KEYS, MLX_NAMES


def older_keys(config: dict[str, Any]) -> dict[str, Any]:
    kinds = list(enumerate(config["layer_types"], 1))
    return {
        "linear_attn_config": {
            "full_attn_layers": [number for number, kind in kinds if kind == "full_attention"],
            "kda_layers": [number for number, kind in kinds if kind != "full_attention"],
            "head_dim": config["linear_head_dim"],
            "num_heads": config["linear_num_heads"],
            "short_conv_kernel_size": config["linear_conv_kernel_dim"],
        },
        "first_k_dense_replace": config["mlp_layer_types"].count("dense"),
        "mla_use_nope": True,
        "rope_theta": 10000.0,
    }


MLX_KEYS["kimi_linear"] = (("layer_types", "mlp_layer_types", "linear_head_dim"), older_keys)
_CORRECTION = "e_score_correction_bias"
MLX_NAMES["kimi_linear"] = {
    "renamed": {
        ".block_sparse_moe.": ".mlp.",
        f".mlp.gate.{_CORRECTION}": f".mlp.{_CORRECTION}",
        "_conv1d.": "_conv.conv.",
    },
    "halves": True,
}
