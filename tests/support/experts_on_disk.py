"""Small files of experts, and their tensors."""

from collections.abc import Sequence
from pathlib import Path

import torch

from torch_moe_mps.disk.file import Layer, written

EXPERTS, LAYERS = 8, 3
# Of one expert: their sizes are no multiples of a page, and a block is several reads with PIECE = 1000.
SHAPES = {"codes": ("int32", (12, 40)), "scales": ("bfloat16", (12, 5)), "kinds": ("uint8", (7,))}

# A Qwen4 with a table of pairs of tokens, in four tensors.
NGRAMS = {
    "eos_token_id": 2,
    "ple_layer_ids": [1],
    "ngram_vocab_size_base": 50,
    "heads_per_ngram": 1,
    "split_ngram_parts": 4,
}


def layers(count: int = LAYERS, experts: int = EXPERTS) -> list[Layer]:
    return [Layer(f"layers.{number}.experts", experts, SHAPES, ("codes",)) for number in range(count)]


def draw(seed: int = 0, count: int = LAYERS, experts: int = EXPERTS) -> list[dict[str, torch.Tensor]]:
    """Random bytes as tensors [experts, ...] of each layer."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for layer in layers(count, experts):
        own = {}
        for name, (dtype, shape) in layer.tensors.items():
            size = torch.empty(experts, *shape, dtype=getattr(torch, dtype)).nbytes
            drawn = torch.randint(256, (size,), dtype=torch.uint8, generator=generator)
            own[name] = drawn.view(getattr(torch, dtype)).view(experts, *shape)
        result.append(own)
    return result


def write(
    path: Path, key: str = "key", seed: int = 0, sources: Sequence[str] = ()
) -> list[dict[str, torch.Tensor]]:
    """Writes a file. Returns: its tensors."""
    tensors = draw(seed)
    with written(path, key, layers(), sources) as new:
        for number in [*new.left]:
            new.add(number, tensors[number])
    return tensors


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True for equal bytes: random ones are NaN at times."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
