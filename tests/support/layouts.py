"""The same values in the memory layouts that callers pass."""

from torch import Tensor

LAYOUTS = ("contiguous", "offset", "strided", "transposed")


def lay(values: Tensor, layout: str, device: str) -> Tensor:
    """`values` on the device, in a layout; the memory between and around them is NaN or, for integers, -7."""
    values = values.to(device)
    if layout == "contiguous":
        return values
    if layout == "transposed":
        return values.transpose(0, -1).contiguous().transpose(0, -1)
    poison = float("nan") if values.dtype.is_floating_point else -7
    if layout == "offset":
        storage = values.new_full((values.numel() + 4,), poison)
        view = storage[3 : 3 + values.numel()].view(values.shape)
    else:
        storage = values.new_full((*values.shape[:-1], 2 * values.shape[-1]), poison)
        view = storage[..., 1::2]
    view.copy_(values)
    return view
