"""Attention over tiles of 4 and 2 bits, written anew: dense attention to numbers that NumPy has rounded."""

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface

from . import tiny_models
from .models import eager

TILE = 128
NAME = "oracle_of_tiles"
BITS = {4: (4, 4), "k4v2": (4, 2)}
# Sizes of tiny models whose heads tiles can hold; latents lie side by side.
LATENTS = {"kv_lora_rank": 32, "qk_rope_head_dim": 64, "head_dim": 64}
SIZES = {
    "deepseek_v3": LATENTS,
    "longcat_flash": LATENTS,
    "gemma4": {"sliding_window": 24, "head_dim": 32, "global_head_dim": 32},
}
# All layers of a model in tiles.
WIDE = {**SIZES, "gpt_oss": {"layer_types": ["full_attention", "full_attention"]}}


def tiny_model_of(architecture: str, sizes: dict = SIZES, **more):
    """A model with transformers' own code, and heads that tiles can hold."""
    sizes = {"head_dim": 32} | sizes.get(architecture, {}) | more
    return eager(tiny_models.tiny_model(architecture, **sizes))


def rounded_tile(tile: np.ndarray, bits: int, factors: bool, dtype: torch.dtype) -> np.ndarray:
    """[128, D] in float64, as its codes have it; scales, zero points and factors are rounded to `dtype`."""

    def stored(numbers: np.ndarray) -> np.ndarray:
        return torch.from_numpy(numbers).to(dtype).double().numpy()

    factor = np.ones((len(tile), 1))
    if factors:
        factor = stored(np.sqrt((tile**2).mean(1, keepdims=True)))
        factor[factor == 0] = 1.0
    even = tile / factor
    zero, most = stored(even.min(0)), 2**bits - 1
    scale = stored((even.max(0) - even.min(0)) / most)
    codes = np.divide(even - zero, scale, out=np.zeros_like(even), where=scale > 0)
    return (np.clip(np.rint(codes), 0, most) * scale + zero) * factor


def rounded(states: Tensor, bits: int, factors: bool) -> Tensor:
    """[B, H, S, D] in float64 with all whole tiles but the first one as their codes have them."""
    result = states.double().clone()
    for start in range(TILE, states.shape[2] - TILE + 1, TILE):
        for place in np.ndindex(*states.shape[:2]):
            tile = states[place][start : start + TILE].double().numpy()
            result[place][start : start + TILE] = torch.from_numpy(
                rounded_tile(tile, bits, factors, states.dtype)
            )
    return result


class Oracle:
    """An implementation of attention without a cache: each token reads what a cache of tiles has for it.

    Args:
        model: runs it from now on.
        monkeypatch: takes it back.
    """

    def __init__(self, model, bits, monkeypatch):
        self.bits = BITS[bits]
        monkeypatch.setitem(AttentionInterface._global_mapping, NAME, self.attend)
        for module in model.modules():
            if hasattr(module, "expand_kv"):
                monkeypatch.setattr(module, "expand_kv", self.note(module.expand_kv), raising=False)
        model.set_attn_implementation(NAME)
        self.latents = None

    def note(self, expand):
        """Notes the latents of a layer, which its attention rounds together."""

        def noting(latents, turning):
            self.latents = expand, latents, turning
            return expand(latents, turning)

        return noting

    def states(self, key, value):
        """What gives (keys, values) in float64 to the tokens of a tile, by its first token."""
        if self.latents is None:
            held = rounded(key, self.bits[0], False), rounded(value, self.bits[1], True)
            return lambda own: [mixed(*both, own) for both in zip((key, value), held, strict=True)]
        expand, latents, turning = self.latents
        together = torch.cat((latents, turning), -1)
        held, widths = rounded(together, self.bits[0], False), (latents.shape[3], turning.shape[3])
        return lambda own: [
            states.double() for states in expand(*mixed(together, held, own).to(key.dtype).split(widths, 3))
        ]

    def attend(self, module, query, key, value, mask, scaling=None, s_aux=None, sliding_window=None, **_):
        states, outs = self.states(key, value), []
        self.latents = None
        for own in range(0, query.shape[2], TILE):
            rows = torch.arange(own, min(own + TILE, query.shape[2]))
            keys, values = (
                part.repeat_interleave(query.shape[1] // part.shape[1], 1) for part in states(own)
            )
            scores = query[:, :, rows].double() @ keys.mT * (scaling or query.shape[3] ** -0.5)
            before = rows[:, None] - torch.arange(keys.shape[2])
            hidden = (before < 0) | (before >= (sliding_window or keys.shape[2]))
            scores = scores.masked_fill(hidden, -torch.inf)
            if s_aux is not None:
                sink = s_aux.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
                scores = torch.cat((scores, sink), -1)
            outs.append(scores.softmax(-1)[..., : keys.shape[2]] @ values)
        return torch.cat(outs, 2).transpose(1, 2).to(query.dtype), None


def mixed(states: Tensor, held: Tensor, own: int) -> Tensor:
    """What the tokens of the tile that begins with `own` read: all but this tile and tile 0 rounded."""
    return torch.cat((states[:, :, :TILE].double(), held[:, :, TILE:own], states[:, :, max(own, TILE) :]), 2)
