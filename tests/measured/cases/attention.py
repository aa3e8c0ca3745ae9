"""The cases of attention: new tokens over a cache of any length, and prompts."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .experts import Case, ops
from .formats import DTYPES, too_far

GROUP = 64  # of quantised keys and values


@dataclass
class Attention(Case):
    """The last `tokens` of `keys` positions, each query head over its head of keys."""

    group: ClassVar[str] = "attention"
    heads: int
    key_heads: int
    tokens: int
    keys: int
    width: int
    value_width: int
    dtype: str
    bits: int = 16
    gated: bool = False
    latent: bool = False  # values are the first columns of the keys

    @property
    def name(self) -> str:
        sizes = f"{self.heads}/{self.key_heads} of {self.width}/{self.value_width}"
        others = " kv8" * (self.bits == 8) + " gated" * self.gated + " latents" * self.latent
        return f"attention {sizes} T {self.tokens} S {self.keys} {self.dtype}{others}"

    def weights(self, values):
        dtype, tensors = DTYPES[self.dtype], {}
        for name in self.held:
            width = self.width if name == "k" else self.value_width
            shape = (1, self.key_heads, self.keys)
            if self.bits == 16:
                tensors[name] = values.normal(*shape, width, dtype=dtype)
                continue
            tensors[name] = values.integers(
                *shape, width // 4, dtype=torch.int32, low=-(2**31), high=2**31 - 1
            )
            groups = (*shape, width // GROUP)
            tensors[f"{name}_scales"] = values.uniform(*groups, dtype=dtype, low=0.01, high=0.02)
            tensors[f"{name}_zeros"] = values.uniform(*groups, dtype=dtype, low=-2.5, high=-1.5)
        return tensors

    def inputs(self, values):
        dtype = DTYPES[self.dtype]
        q = values.normal(1, self.heads, self.tokens, self.width, dtype=dtype)
        given, of_heads = {"q": q}, (1, self.tokens, self.heads)
        if self.gated:
            given["gate"] = values.normal(*of_heads, self.value_width, dtype=dtype)
        return given

    def call(self, t):
        others = {name: tensor for name, tensor in t.items() if name not in "qkv"}
        v = t["k"][..., : self.value_width] if self.latent else t["v"]
        attention = ops()._cached_attention if self.gated else ops().cached_attention
        return attention(t["q"], t["k"], v, scale=self.scale, **others)

    @property
    def held(self) -> str:
        return "k" if self.latent else "kv"

    @property
    def scale(self) -> float:
        return self.width**-0.5

    def wrong(self, before, after):
        return too_far(after["result0"].transpose(1, 2), self.expected(before), self.dtype)

    def expected(self, t: dict[str, Tensor]) -> Tensor:
        """[1, Hq, T, Dv] in float64, the scores of one head at a time."""
        k, v = self._states(t, "k"), self._states(t, "v")
        out = torch.empty(1, self.heads, self.tokens, self.value_width, dtype=torch.float64, device=k.device)
        seen = torch.ones(self.tokens, self.keys, dtype=torch.bool, device=k.device)
        hidden = ~seen.tril(self.keys - self.tokens)
        for head in range(self.heads):
            of_head = head // (self.heads // self.key_heads)
            scores = t["q"][:, head].double() @ k[:, of_head].mT * self.scale
            out[:, head] = scores.masked_fill_(hidden, -torch.inf).softmax(-1) @ v[:, of_head]
        return out * t["gate"].transpose(1, 2).double().sigmoid() if self.gated else out

    def bytes_moved(self, t, part=""):
        out = self.heads * self.tokens * self.value_width * DTYPES[self.dtype].itemsize
        parts = ("", "_scales", "_zeros") if self.bits == 8 else ("",)
        others = ["gate"] * self.gated
        names = ["q", *others, *(name + part for name in self.held for part in parts)]
        return out + sum(t[name].nbytes for name in names)

    def _states(self, t: dict[str, Tensor], name: str) -> Tensor:
        if self.latent and name == "v":
            return t["k"][..., : self.value_width].double()
        if self.bits == 16:
            return t[name].double()
        codes = t[name].view(torch.uint8).unflatten(-1, (-1, GROUP)).double()
        scales, biases = (t[f"{name}_{part}"].double().unsqueeze(-1) for part in ("scales", "zeros"))
        return (codes * scales + biases).flatten(-2)


TILE = 128  # tokens


@dataclass
class TiledAttention(Attention):
    """Keys and values in tiles of so many bits; those of the first and the last 128 tokens are dense."""

    group: ClassVar[str] = "attention"
    has_float_matrices: ClassVar[bool] = True  # scales are in the queries, factors in the probabilities
    k_bits: int = 4
    v_bits: int = 4

    @property
    def name(self) -> str:
        return f"{super().name} k{self.k_bits}v{self.v_bits}"

    def weights(self, values):
        dtype, tensors = DTYPES[self.dtype], {}
        for name, width, bits in (("k", self.width, self.k_bits), ("v", self.value_width, self.v_bits)):
            tensors[f"{name}_dense"] = values.normal(1, self.key_heads, 2 * TILE, width, dtype=dtype)
            shape = (1, self.key_heads, self.keys // TILE)
            words = TILE * width * bits // 32
            codes = values.integers(*shape, words, dtype=torch.int32, low=-(2**31), high=2**31 - 1)
            numbers = [values.uniform(*shape, width, dtype=dtype, low=0.8 / 2**bits, high=1.6 / 2**bits)]
            numbers.append(values.uniform(*shape, width, dtype=dtype, low=-0.7, high=-0.5))
            if name == "v":
                numbers.append(values.uniform(*shape, TILE, dtype=dtype, low=0.5, high=1.5))
            tensors[f"{name}_tiles"] = torch.cat((codes, *(n.view(torch.int32) for n in numbers)), -1)
        return tensors

    def call(self, t):
        bits = {"k_bits": self.k_bits, "v_bits": self.v_bits}
        return ops()._tiled_attention(**t, **bits, position=self.keys - self.tokens, scale=self.scale)

    def bytes_moved(self, t, part=""):
        out = self.heads * self.tokens * self.value_width * DTYPES[self.dtype].itemsize
        return out + sum(tensor.nbytes for tensor in t.values())

    def _states(self, t: dict[str, Tensor], name: str) -> Tensor:
        width, bits = (self.width, self.k_bits) if name == "k" else (self.value_width, self.v_bits)
        dense, tiles = t[f"{name}_dense"].double(), t[f"{name}_tiles"][:, :, 1:-1]
        words = TILE * width * bits // 32
        shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=tiles.device)
        codes = (tiles[..., :words, None] >> shifts & 2**bits - 1).double()
        numbers = tiles[..., words:].contiguous().view(DTYPES[self.dtype]).double()
        scales, zeros, factors = numbers.split((width, width, numbers.shape[-1] - 2 * width), -1)
        x = codes.reshape(*tiles.shape[:3], TILE, width) * scales.unsqueeze(-2) + zeros.unsqueeze(-2)
        x = x * factors.unsqueeze(-1) if name == "v" else x
        return torch.cat((dense[:, :, :TILE], x.flatten(2, 3), dense[:, :, TILE:]), 2)


# Heads, heads of keys, width of keys and of values
MODELS = {
    "Qwen3-30B-A3B": (32, 4, 128, 128),
    "gpt-oss": (64, 8, 64, 64),
    "Gemma 4": (16, 2, 512, 512),
    "DeepSeek-V3": (128, 128, 192, 128),
}
LATENTS = {"GLM-4.7-Flash": 20, "DeepSeek-V3": 128}  # heads over latents of 512 and a rotated part of 64


def attention_cases() -> list[Case]:
    cases: list[Case] = []
    for heads, key_heads, width, value_width in MODELS.values():
        sizes = (width, value_width, "bf16")
        cases += [Attention(heads, key_heads, t, s, *sizes) for t, s in ((1, 1024), (1, 4096), (1, 32768))]
        cases.append(Attention(heads, key_heads, 4, 4096, *sizes))
        cases.append(Attention(heads, key_heads, 1, 32768, *sizes, 8))
        if key_heads < heads:
            cases += [TiledAttention(heads, key_heads, 1, 32768, *sizes, v_bits=bits) for bits in (4, 2)]
        cases.append(Attention(heads, key_heads, 1, 4096, *sizes, gated=True))
        cases.append(Attention(heads, key_heads, 2048, 2048, *sizes))
    for heads in LATENTS.values():
        sizes = (576, 512, "bf16")
        cases += [Attention(heads, 1, 1, s, *sizes, latent=True) for s in (1024, 4096, 32768)]
        cases.append(Attention(heads, 1, 4, 4096, *sizes, latent=True))
    return cases


def sanitizer_attention() -> list[Case]:
    """Small cases of every kernel."""
    widths = ((64, 64), (128, 128), (256, 256), (576, 512))
    cases = [SmallAttention(4, 1, t, 300, *width, "f32") for width in widths for t in (1, 3)]
    cases += [SmallAttention(2, 1, t, 300, 128, 128, "f16", 8) for t in (1, 12)]
    cases += [SmallTiles(4, 1, t, 512, *width, "f32") for width in widths[:3] for t in (1, 12)]
    return [*cases, *(SmallAttention(4, 1, t, 300, 64, 64, "f16", gated=True) for t in (1, 40))]


class SmallAttention(Attention):
    group: ClassVar[str] = "sanitize"


class SmallTiles(TiledAttention):
    group: ClassVar[str] = "sanitize"
