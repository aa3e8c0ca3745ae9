"""`fit NAME`: which Macs hold a model in which number of bits, and how fast it can be at most.

config.json is enough: a model on the meta device has the shapes of the weights and of the KV cache.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..macs import BANDWIDTHS, GIB, MEMORIES, Mac, this_mac, wired_limit
from ..ops._checks import Check
from ..ops.attention import CACHE_BITS
from ..quantization import Format
from ..transformers.checkpoints.recipe import recipe_of
from ..transformers.checkpoints.sizes import bytes_a_token, quantized_sizes, total_bytes
from ..transformers.checkpoints.source import Source
from ..transformers.checkpoints.targets import weights_of
from ..transformers.pipeline.shares import Machine, shares_of
from ..transformers.pipeline.stages import layers_of
from ..transformers.report import aligned
from .caches import KVCache, kv_cache
from .sources import LONGEST, context_of, folder_of, loading_options

BITS = (8, 6, 5, 4, 3, 2)
_DENSE = "16 bit"
_CHECK = Check("fit")


@dataclass
class Size:
    """A model in one format: its name, bytes of all weights, bytes of weights that a token reads.

    `quantized` has the bytes of each weight that is quantised.
    """

    name: str
    weights: int
    token: int
    quantized: Mapping[torch.Tensor, int]

    def of(self, module: nn.Module) -> int:
        return total_bytes(module, self.quantized)


def run(options: argparse.Namespace) -> None:
    """Raises: ValueError, OSError with one line that says what is wrong."""
    if options.context < 0:
        raise ValueError(f"--context must be at least 0 tokens, got {options.context}")
    mac = this_mac() if options.mac else None
    folder = folder_of(options.model, options.revision, weights=False)
    model = Source(folder, loading_options(options)).skeleton()
    if options.macs is not None:
        print(spread(model, options.group_size, options.macs, options.kv_bits))
    else:
        print(report(model, options.context, options.group_size, mac, options.kv_bits))


def report(model: Any, context: int, group_size: int, mac: Mac | None, kv_bits: int = 16) -> str:
    """The tables, for all Macs or for one."""
    sizes, cache = sizes_of(model, group_size), kv_cache(model, kv_bits)
    total = sum(p.numel() for p in model.parameters())
    lines = [f"{type(model).__name__}, {total / 1e9:.2f} billion weights"]
    if cache is None:
        lines.append("KV cache: unknown; the model's code does not run on shapes alone")
    else:
        per_thousand = f"{cache.token * 1000 / 1e9:.3f} GB for each 1,000 tokens of context"
        lines.append(f"KV cache{' in 8 bits' if kv_bits == CACHE_BITS else ''}: {per_thousand}")
        rest = cache.at(LONGEST) - cache.token * LONGEST
        if rest:
            lines.append(f"beside it, sliding windows and states take at most {rest / 1e9:.3f} GB")
    cells = [[f"{s.name}", f"{s.weights / 1e9:.1f}", f"{s.token / 1e9:.2f}"] for s in sizes]
    lines += ["", *aligned([["weights", "GB", "GB read for a token"], *cells], 1)]
    longest = context_of(model.config)
    limits = [(f"{gib} GB", wired_limit(gib)) for gib in MEMORIES]
    if mac is not None:
        limits = [(f"this Mac, {mac.memory // GIB} GB", mac.limit)]
    cells = [[name, f"{limit / 1e9:.1f}", *_contexts(sizes, cache, limit, longest)] for name, limit in limits]
    lines += ["", "Context that fits into what macOS lets the GPU have, in tokens, with room in the cache:"]
    lines += aligned([["Mac", "GPU's GB", *(s.name for s in sizes)], *cells], 1)
    chips = [(f"{name}, {gbs:.0f} GB/s", gbs) for name, gbs in BANDWIDTHS.items()]
    if mac is not None:
        known = mac.bandwidth
        chips = [] if known is None else [(f"{mac.chip}, {known:.0f} GB/s", known)]
    if not chips and mac is not None:
        return "\n".join([*lines, "", f"The memory bandwidth of the {mac.chip} is not known here."])
    cells = [[name, *(f"{bound(s, cache, context, gbs):.0f}" for s in sizes)] for name, gbs in chips]
    lines += [
        "",
        f"Upper bound of tokens/s at a context of {context:,} tokens. No measurement: nothing can be",
    ]
    lines += ["faster, because each token reads these weights and the KV cache; real speed is lower."]
    lines += aligned([["chip", *(s.name for s in sizes)], *cells], 1)
    return "\n".join(lines)


def spread(model: Any, group_size: int, macs: Sequence[int], kv_bits: int = 16) -> str:
    """The table for several Macs that share the layers; `macs` has the GB of each.

    Raises: ValueError for a model whose layers cannot be spread.
    """
    *_, layers = layers_of(model)
    if len(layers) < len(macs):
        raise ValueError(f"--macs must be at most the number of layers, {len(layers)}, got {len(macs)}")
    head, cache = model.get_output_embeddings(), kv_cache(model, kv_bits)
    limits = [wired_limit(gib) for gib in macs]
    longest = context_of(model.config)
    is_tied = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    cells = []
    for size in sizes_of(model, group_size):
        of_layers, of_head = [size.of(layer) for layer in layers], size.of(head)
        # The first has all but layers and head; a head that is tied to the embedding is on both.
        first = size.weights - sum(of_layers) - (0 if is_tied else of_head)
        shares = shares_of(of_layers, [first, of_head], [Machine(limit, None) for limit in limits])
        ends = [sum(shares[: i + 1]) for i in range(len(shares))]
        parts = [sum(of_layers[end - share : end]) for end, share in zip(ends, shares, strict=True)]
        parts[0], parts[-1] = parts[0] + first, parts[-1] + of_head
        rooms = [limit - part for limit, part in zip(limits, parts, strict=True)]
        context = "-" if min(rooms) < 0 else "fits"
        if cache is not None and min(rooms) >= 0:
            scaled = [room * len(layers) // share for room, share in zip(rooms, shares, strict=True)]
            context = f"{min(cache.tokens_in(room, longest) for room in scaled):,}"
        each = " + ".join(f"{part / 1e9:.1f}" for part in parts)
        cells.append([size.name, " + ".join(map(str, shares)), each, context])
    gpu = f"{limits[0] / 1e9:.1f} GB of each for the GPU"
    lines = [f"{type(model).__name__} on {len(macs)} Macs of {macs[0]} GB, {gpu} (docs/distributed.md)", ""]
    return "\n".join([*lines, *aligned([["weights", "layers", "GB", "context that fits"], *cells], 1)])


def bound(size: Size, cache: KVCache | None, context: int, bandwidth: float) -> float:
    """Tokens a second that a memory bandwidth in GB/s allows."""
    return bandwidth * 1e9 / (size.token + (cache.at(context) if cache else 0))


def sizes_of(model: nn.Module, group_size: int) -> list[Size]:
    """The dense model, and the model in each number of bits."""
    sizes = [Size(_DENSE, total_bytes(model), bytes_a_token(model), {})]
    for bits in BITS:
        format = Format(bits, group_size)
        targets = weights_of(model, recipe_of(format)).targets.values()
        for target in targets:
            target.check_columns(_CHECK)
        after = quantized_sizes(targets)
        sizes.append(Size(f"{bits} bit", total_bytes(model, after), bytes_a_token(model, after), after))
    return sizes


def _contexts(sizes: Sequence[Size], cache: KVCache | None, limit: int, longest: int) -> list[str]:
    """The longest context that fits together with the weights of each size, at most what the model reads."""
    cells = []
    for size in sizes:
        if size.weights > limit:
            cells.append("-")
        elif cache is None:
            cells.append("fits")
        else:
            cells.append(f"{cache.tokens_in(limit - size.weights, longest):,}")
    return cells
