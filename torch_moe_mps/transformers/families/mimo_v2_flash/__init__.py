"""MiMo-V2-Flash: keys of its config in MLX's checkpoints."""

from typing import Any

from .. import MLX_KEYS


def older_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Raises: ValueError for a config of transformers 5, which does not write all that mlx-lm reads."""
    if "swa_head_dim" not in config:
        expected = "that of the original checkpoint, with swa_head_dim and others that mlx-lm reads"
        raise ValueError(f"moe_mps::save_mlx: the config must be {expected}, got one of transformers 5")
    return {}


MLX_KEYS["mimo_v2_flash"] = ((), older_keys)
