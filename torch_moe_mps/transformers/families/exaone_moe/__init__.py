"""EXAONE MoE: keys of its config and names in MLX's checkpoints."""

from typing import Any

from .. import MLX_KEYS, MLX_NAMES


def older_keys(config: dict[str, Any]) -> dict[str, Any]:
    return {"is_moe_layer": [kind == "sparse" for kind in config["mlp_layer_types"]]}


MLX_KEYS["exaone_moe"] = (("mlp_layer_types",), older_keys)
_CORRECTION = "e_score_correction_bias"
MLX_NAMES["exaone_moe"] = {"renamed": {f".mlp.{_CORRECTION}": f".mlp.gate.{_CORRECTION}"}}
