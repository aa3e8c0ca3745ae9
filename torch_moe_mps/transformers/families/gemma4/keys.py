"""Gemma 4 in MLX's checkpoints: sizes of its layers of full attention."""

from typing import Any

NEEDED = ("head_dim", "per_layer_config")


def older_keys(config: dict[str, Any]) -> dict[str, Any]:
    sizes = {name: size for layer in config["per_layer_config"].values() for name, size in layer.items()}
    return {
        "global_head_dim": sizes.get("head_dim", config["head_dim"]),
        "num_global_key_value_heads": sizes.get("num_key_value_heads"),
    }
