"""How many layers each process has."""

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..macs import machine_memory, this_mac


class Machine(NamedTuple):
    """Resources of a process: bytes of memory, and GB/s; None if unknown."""

    memory: int | None
    bandwidth: float | None


def this_machine() -> Machine:
    try:
        mac = this_mac()
    except ValueError:
        names = os.sysconf_names
        known = "SC_PHYS_PAGES" in names and "SC_PAGE_SIZE" in names
        return Machine(machine_memory() if known else None, None)
    return Machine(mac.limit, mac.bandwidth)


def shares_of(layers: Sequence[int], ends: Sequence[int], machines: Sequence[Machine]) -> list[int]:
    """The number of layers of each process, in the order of the layers.

    Each takes time in proportion to its bytes and in inverse proportion to its bandwidth. Of the divisions
    that fit the memory of all, it is the one whose slowest process is fastest; if nothing fits, memory counts
    instead of time.

    Args:
        layers: bytes of each layer.
        ends: bytes of the embedding and of the output head, which the first and the last have.
        machines: of each process, the one with the first layers first.
    """
    speeds = [m.bandwidth for m in machines]
    known = [1.0 if None in speeds else float(s or 1) for s in speeds]
    capacities = [m.memory for m in machines]
    rooms = [float("inf") if None in capacities else float(c or 0) for c in capacities]
    best = _least(layers, ends, [1 / s for s in known], rooms)
    return best or _least(layers, ends, [1 / (r or 1) for r in rooms], [float("inf")] * len(rooms))


def shares_that_fit(
    model: Any, layers: Sequence[Any], size_of: Callable[[Any], int], weights: int, limits: Sequence[int]
) -> tuple[list[int], list[int], int]:
    """Shares of a model, which may be on the meta device, for Macs of unequal memory.

    Args:
        layers: the model's.
        size_of: gives the bytes of a module.
        weights: bytes of the whole model.
        limits: bytes that each Mac may use.

    Returns: the layers of each, the bytes of weights of each, and the free memory for caches of all layers
        when one Mac is full.

    Raises: ValueError for a model that has too few layers.
    """
    head = model.get_output_embeddings()
    if len(layers) < len(limits):
        raise ValueError(f"--macs must be at most the number of layers, {len(layers)}, got {len(limits)}")
    of_layers, of_head = [size_of(layer) for layer in layers], size_of(head)
    # The last Mac has the first layers and all beside layers and head; a head that is tied to the embedding
    # is on the first one, too.
    is_tied = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    first = weights - sum(of_layers) - (0 if is_tied else of_head)
    shares = shares_of(of_layers, [first, of_head], [Machine(limit, None) for limit in limits[::-1]])
    ends = [sum(shares[: i + 1]) for i in range(len(shares))]
    parts = [sum(of_layers[end - share : end]) for end, share in zip(ends, shares, strict=True)]
    parts[0], parts[-1] = parts[0] + first, parts[-1] + of_head
    rooms = [limit - part for limit, part in zip(limits[::-1], parts, strict=True)]
    room = min(room * len(layers) // share for room, share in zip(rooms, shares, strict=True))
    return shares[::-1], parts[::-1], room


def _least(
    layers: Sequence[int], ends: Sequence[int], costs: Sequence[float], rooms: Sequence[float]
) -> list[int]:
    """The division whose most expensive part is cheapest; empty if there is none within the rooms."""
    count, parts = len(layers), len(costs)
    sums = [0]
    for size in layers:
        sums.append(sums[-1] + size)
    before: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for part in range(parts):
        after: dict[int, tuple[float, list[int]]] = {}
        extra = (ends[0] if part == 0 else 0) + (ends[1] if part == parts - 1 else 0)
        for begin, (worst, shares) in before.items():
            for end in range(begin + 1, count - (parts - part - 1) + 1):
                size = sums[end] - sums[begin] + extra
                cost = max(worst, size * costs[part])
                if size <= rooms[part] and (end not in after or cost < after[end][0]):
                    after[end] = (cost, [*shares, end - begin])
        before = after
    return before.get(count, (0.0, []))[1]


def given_shares(shares: Any, size: int, layers: int) -> list[int]:
    """The shares that the caller passed, as a list.

    Raises: ValueError unless they are one positive number for each process and add up to `layers`.
    """
    whole = isinstance(shares, Sequence) and all(type(share) is int and share > 0 for share in shares)
    if not whole or len(shares) != size or sum(shares) != layers:
        expected = f"{size} numbers of layers that add up to {layers}"
        raise ValueError(f"moe_mps::from_pretrained: shares must be {expected}, got {shares!r}")
    return [*shares]
