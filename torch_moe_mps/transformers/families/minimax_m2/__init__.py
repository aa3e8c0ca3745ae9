"""MiniMax M2: keys of its config in MLX's checkpoints."""

from typing import Any

from .. import MLX_KEYS


def older_keys(config: dict[str, Any]) -> dict[str, Any]:
    rotary = int(config["head_dim"] * config.get("partial_rotary_factor", 1.0))
    return {"rotary_dim": rotary, "shared_intermediate_size": 0}


MLX_KEYS["minimax_m2"] = (("head_dim", "rope_parameters"), older_keys)
