"""The same values in the memory layouts that callers pass."""

import torch
from torch import Tensor

LAYOUTS = ("contiguous", "offset", "rows", "strided", "transposed")


def lay(values: Tensor, layout: str, device: str) -> Tensor:
    """`values` on the device, in a layout; the memory between and around them is NaN or, for integers, -7."""
    values = values.to(device)
    if layout == "contiguous":
        return values
    if layout == "transposed":
        return values.transpose(0, -1).contiguous().transpose(0, -1)
    poison = float("nan") if values.dtype.is_floating_point else -7
    if layout == "rows":  # of wider ones, aligned as vectors
        storage = values.new_full((*values.shape[:-1], 8 + values.shape[-1]), poison)
        view = storage[..., 8:]
    elif layout == "offset":
        storage = values.new_full((values.numel() + 4,), poison)
        view = storage[3 : 3 + values.numel()].view(values.shape)
    else:
        storage = values.new_full((*values.shape[:-1], 2 * values.shape[-1]), poison)
        view = storage[..., 1::2]
    view.copy_(values)
    return view


def surroundings(view: Tensor) -> Tensor:
    """What a view leaves of its memory."""
    memory = view.as_strided((view.untyped_storage().nbytes() // view.element_size(),), (1,), 0).cpu()
    inside = torch.zeros(memory.shape, dtype=torch.bool)
    inside.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
    return memory[~inside]
