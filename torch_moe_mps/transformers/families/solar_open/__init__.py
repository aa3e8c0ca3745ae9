"""Solar Open: keys of its config in MLX's checkpoints."""

from typing import Any

from .. import MLX_KEYS


def older_keys(config: dict[str, Any]) -> dict[str, Any]:
    return {"intermediate_size": config["moe_intermediate_size"], "first_k_dense_replace": 0}


MLX_KEYS["solar_open"] = (("moe_intermediate_size",), older_keys)
