"""What attention that sees all keys takes: our operator, and MLX's kernel, whose tiles torch's has on MPS.

A batch that is padded to a part of its keys has the same number of queries: ours reads keys up to the range
of its row, MLX's all of them and a mask.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from simulator.apple.facts import Gpu
from simulator.apple.model import Measurement
from simulator.apple.recorder import Recorder, measure

from ..cases.mlx_attention import steel_attention
from . import mlx

SHOWN = 0.75  # of the keys of a padded row
ALL_KEYS = torch.iinfo(torch.int32).max  # a look-ahead


@dataclass(frozen=True)
class Encoder:
    """Attention of a text: heads of one width for queries, keys and values, in bfloat16."""

    model: str
    heads: int
    width: int

    def ours(self, tokens: int, shown: int) -> Measurement:
        sizes = 1, self.heads, tokens, self.width
        q, k, v = (torch.empty(sizes, dtype=torch.bfloat16, device="mps") for _ in "qkv")
        key_range = None if shown == tokens else torch.tensor([[0, shown]], dtype=torch.int32, device="mps")
        options = {"lookahead": ALL_KEYS, "key_range": key_range}
        (one,) = measure(lambda: torch.ops.moe_mps.attention(q, k, v, self.width**-0.5, **options))
        return one

    def mlx(self, tokens: int, masked: bool) -> Measurement:
        arrays = {name: mlx.array("bf16", 1, self.heads, tokens, self.width) for name in "qkvo"}
        if masked:
            arrays["mask"] = np.ones((tokens, tokens), np.uint8)
        return mlx.run(steel_attention(self.heads, tokens, self.width, masked), arrays, Recorder())


ENCODERS = (Encoder("MiniLM", 12, 32), Encoder("BERT, ModernBERT", 12, 64))
TOKENS = 512  # with fewer, dispatches are under the 50 us that are predicted


def table(gpus: list[Gpu]) -> Iterator[str]:
    """The lines of a table in Markdown; predicted times, and ours over MLX's."""
    yield "| model | heads | tokens | keys shown | chip | ours, us | MLX, us | ours / MLX |"
    yield "| --- | --- | ---: | ---: | --- | ---: | ---: | ---: |"
    for encoder in ENCODERS:
        for shown in (TOKENS, int(SHOWN * TOKENS)):
            both = encoder.ours(TOKENS, shown), encoder.mlx(TOKENS, shown < TOKENS)
            heads = f"{encoder.heads} of {encoder.width}"
            for gpu in gpus:
                own, other = (one.bounds(gpu).predicted_us for one in both)
                times = f"{own:.0f} | {other:.0f} | {own / other:.2f}"
                yield f"| {encoder.model} | {heads} | {TOKENS} | {shown} | {gpu.name} | {times} |"
