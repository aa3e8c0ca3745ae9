"""Deferred state updates: the uncommitted tokens of an operator, and the count of accepted ones."""

from typing import Any

import torch

from ._sample import Sample

MAX_PENDING = 8  # tokens that a state is behind
PENDING = "counts only with pending_"  # how the two arguments depend on each other


def check_keep(check, pending_, keep):
    if keep and pending_ is None:
        check.fail("keep", "False without pending_", keep)
    if keep:
        (tokens,), room = check.dims("T"), pending_.shape[2]
        if room < tokens:
            check.fail("pending_", f"of T = {tokens} tokens or more", room)


def counts(s: Sample) -> dict[str, Any]:
    """Argument `counts` of a sample call: three tokens of the first row, none of the second."""
    return {"counts": torch.tensor([[3], [0]], dtype=torch.int32, device=s.device)}
