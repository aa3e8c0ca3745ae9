"""Laguna: names of its parameters in MLX's checkpoints."""

from .. import MLX_NAMES

_CORRECTION = "e_score_correction_bias"
MLX_NAMES["laguna"] = {
    "renamed": {
        f".mlp.experts.{_CORRECTION}": f".mlp.gate.{_CORRECTION}",
        ".mlp.gate.weight": ".mlp.gate.proj.weight",
    }
}
