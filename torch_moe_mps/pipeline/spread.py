"""Several Macs before anybody has them: which layers of a model each would have, and the context that fits.

Importing this costs nothing: --help must not wait for torch.
"""

import argparse
from collections.abc import Callable, Iterable, Sequence
from typing import Any


def macs_of(text: str) -> list[int]:
    """The GB of each Mac, of an option such as 2x64 or 64+128."""
    macs: list[int] = []
    for part in text.split("+"):
        count, _, memory = part.rpartition("x")
        if not ((count or "1").isdecimal() and memory.isdecimal() and int(memory) > 0):
            raise argparse.ArgumentTypeError(
                f"must be Macs as in 2x64 or 64+128, with the GB of each, got {text!r}"
            )
        macs += [int(memory)] * int(count or 1)
    if len(macs) < 2:
        raise argparse.ArgumentTypeError(f"must be 2 Macs or more, as in 2x64 or 64+128, got {text!r}")
    return macs


def spread(
    model: Any,
    sizes: Sequence[Any],
    macs: Sequence[int],
    prompt: int,
    context_in: Callable[[int], Any],
    in_words: Callable[[Any], str],
) -> tuple[str, dict[str, Any]]:
    """The table for several Macs that share the layers, and its numbers.

    Args:
        sizes: of the model in each format: `name`, `weights`, and `of` a module.
        macs: the GB of each.
        prompt: bytes that a prompt takes on each.
        context_in: gives the context that fits into so many bytes, and `in_words` says it.

    Raises: ValueError for a model whose layers cannot be spread.
    """
    from ..macs import wired_limit
    from ..transformers.basics.report import aligned
    from .loop import find_loop
    from .shares import shares_that_fit

    limits = [wired_limit(gib) - prompt for gib in macs]
    layers = model.get_submodule(find_loop(model).layers)
    rows: list[dict[str, Any]] = []
    for size in sizes:
        shares, parts, room = shares_that_fit(model, layers, size.of, size.weights, limits)
        rows.append({"name": size.name, "layers": shares, "bytes": parts, "context": context_in(room)})
    cells = [
        [row["name"], _sum(row["layers"]), _in_gb(row["bytes"]), in_words(row["context"])] for row in rows
    ]
    gpu = _in_gb(map(wired_limit, macs))
    lines = [
        f"{type(model).__name__} on Macs of {_sum(macs)} GB, {gpu} GB for the GPU (docs/distributed.md)",
        f"a prompt takes at most {prompt / 1e9:.3f} GB of it on each",
        "",
    ]
    table = aligned([["weights", "layers", "GB", "context that fits"], *cells], 1)
    return "\n".join([*lines, *table]), {"macs": [*macs], "spread": rows}


def _sum(parts: Iterable[object]) -> str:
    return " + ".join(map(str, parts))


def _in_gb(sizes: Iterable[int]) -> str:
    return _sum(f"{size / 1e9:.1f}" for size in sizes)
