"""Models larger than memory, as `fit` shows them: experts that stay on the disk."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from .._text import aligned
from ..checkpoints.quantize.sizes import large_tables, memory_for_slots, room_for_experts, share_of_token
from ..transformers import experts_of

# Share of the experts that is in memory -> share of a token's experts that is found there: owners' figures
# for Qwen3-30B-A3B with a least recently used cache a layer. Those of gpt-oss-120b and of Qwen3.8 are near.
HITS = ((0.0, 0.0), (0.06, 0.37), (0.19, 0.74), (0.38, 0.89), (0.64, 0.96), (1.0, 1.0))
DISK = 7e9  # bytes a second, of a Mac's SSD
LAYER = 0.15e-3  # seconds of a layer beside reading
_REACHED = 0.75  # part of the bandwidth of memory


class Residency(NamedTuple):
    """A model whose experts are in part on the disk.

    Attributes:
        memory: bytes for --experts-memory.
        resident, hits: shares of the experts, in slots.
        read: bytes for a token that neither slots nor the page cache have.
        bound: tokens/s, at most.
    """

    memory: int
    resident: float
    hits: float
    read: float
    bound: float

    def cells(self) -> list[str]:
        memory, read = f"{self.memory / 1e9:.0f}GB", f"{self.read / 1e6:,.0f}"
        return [memory, f"{self.resident:.0%}", f"{self.hits:.0%}", read, f"{self.bound:.1f}"]


def hits_of(resident: float) -> float:
    """Share of a token's experts that is expected in memory, where a share of all experts is."""
    for (below, low), (above, high) in pairwise(HITS):
        if resident <= above:
            return low + (high - low) * (resident - below) / (above - below)
    return 1.0


def residency(model: Any, size: Any, limit: int, bandwidth: float | None) -> Residency | None:
    """Residency of a model in the GPU's memory; None if it fits, or if its weights beside the experts do not.

    Args:
        size: of `fit`: weights, token and of(module), in bytes.
        bandwidth: of the memory in GB/s, if known.
    """
    experts = experts_of(model)
    layers = [size.of(module) for module in experts.values()]
    if not layers:
        return None
    tables, total = sum(large_tables(model, limit, size.quantized).values()), sum(layers)
    room = room_for_experts(model, size.weights, total, tables, limit)
    if room is None:
        return None
    one, staging = next(iter(experts.values())), 2 * max(layers)
    of_token = total * share_of_token(one)
    least = min(total, staging + math.ceil(of_token))
    memory = memory_for_slots(total, room, least)
    if memory < least:
        return None

    def share(nbytes: int) -> float:
        return 1.0 if nbytes == total else (nbytes - staging) / total

    read = (1 - hits_of(share(room))) * of_token
    of_memory = 0.0 if bandwidth is None else size.token / (_REACHED * bandwidth * 1e9)
    seconds = read / DISK + of_memory + LAYER * len(layers)
    return Residency(memory, share(memory), hits_of(share(memory)), read, 1 / seconds)


def table(
    model: Any, sizes: Sequence[Any], limits: Sequence[tuple[str, int]], bandwidth: float | None
) -> tuple[list[str], dict[str, Any]]:
    """Lines for each Mac and format in which a model is larger than memory, and the numbers in them."""
    found = {
        (name, size.name): estimate
        for name, limit in limits
        for size in sizes
        if (estimate := residency(model, size, limit, bandwidth)) is not None
    }
    if not found:
        return [], {}
    head = ["Mac", "weights", "--experts-memory", "in memory", "hits", "MB read for a token", "tokens/s"]
    rows = [[*names, *estimate.cells()] for names, estimate in found.items()]
    lines = ["", "Larger than memory, with experts on the disk (docs/memory.md). Hits are as"]
    lines += ["others measured them for Qwen3-30B-A3B. Read is what the page cache beside"]
    lines += ["--experts-memory does not hold, either; tokens/s are an upper bound, of a disk"]
    lines += [f"with {DISK / 1e9:.0f} GB/s:"]
    numbers = [{"mac": mac, "weights": size, **estimate._asdict()} for (mac, size), estimate in found.items()]
    return [*lines, *aligned([head, *rows], 2)], {"on_disk": numbers}
