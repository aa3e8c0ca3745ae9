"""GLM with sparse attention: keys of its config in MLX's checkpoints."""

from typing import Any

from .. import MLX_KEYS


def older_keys(config: dict[str, Any]) -> dict[str, Any]:
    return {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}


MLX_KEYS["glm_moe_dsa"] = ((), older_keys)
