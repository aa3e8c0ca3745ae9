"""Rows of several weights in one buffer; the weights become views of it.

No weight is there twice. Rules join the layers of an MLP when a model is accelerated; a captured token asks
for the layers that read one input. Whoever saves, moves or writes a parameter has a view.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

WEIGHTS = ("packed", "scales", "biases", "bias")  # tensors of a quantised linear layer


def may_join(parts: list[Tensor | None]) -> bool:
    """Whether weights may lie in one memory: those that already share one with others stay in it."""
    present = [part for part in parts if part is not None]
    own = [part.untyped_storage().nbytes() == part.nbytes for part in present]
    alike = len({part.dtype for part in present}) < 2 and len({*map(id, present)}) == len(present)
    return alike and (all(own) or (len(present) == len(parts) and _lie_together(present)))


def _lie_together(parts: Sequence[Tensor]) -> bool:
    memory, place = parts[0].untyped_storage().data_ptr(), parts[0].storage_offset()
    for part in parts:
        if part.untyped_storage().data_ptr() != memory or part.storage_offset() != place:
            return False
        place += part.numel()
    return True


def joined_rows(parts: Sequence[Tensor | None], rows: list[int]) -> Tensor | None:
    """The rows of all parts, which become views of them; zeros for a bias that is not there."""
    present = [part for part in parts if part is not None]
    if not present:
        return None
    first, width = present[0], present[0].shape[1:]
    if len(present) == len(parts) and _lie_together(present):
        return first.detach().as_strided((sum(rows), *width), first.stride(), first.storage_offset())
    with torch.inference_mode(False), torch.no_grad():
        whole = first.new_zeros((sum(rows), *width))
        for part, view in zip(parts, whole.split(rows), strict=True):
            if part is not None:
                part.data = view.copy_(part)
    return whole
