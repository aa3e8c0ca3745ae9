"""LFM2 MoE: names of its parameters in MLX's checkpoints."""

from .. import MLX_NAMES

# The matrices of an MLP, which the original checkpoints number.
_NUMBERED = {
    f".feed_forward.w{number}.weight": f".feed_forward.{name}_proj.weight"
    for number, name in enumerate(("gate", "down", "up"), 1)
}
MLX_NAMES["lfm2_moe"] = {"experts": "feed_forward.switch_mlp", "renamed": _NUMBERED}
