"""Granite hybrid: keys of its config in MLX's checkpoints."""

from typing import Any

from .. import MLX_KEYS


def older_keys(config: dict[str, Any]) -> dict[str, Any]:
    kinds = {"linear_attention": "mamba", "full_attention": "attention"}
    return {"layer_types": [kinds.get(kind, kind) for kind in config["layer_types"]]}


MLX_KEYS["granitemoehybrid"] = (("layer_types",), older_keys)
