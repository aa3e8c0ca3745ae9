"""Comparison of two computations on random numbers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .draws import Void, current, require_finite
from .memory import note_error

TOLERANCE = 1e-4  # between the logits of two models, times the largest


def tried(function: Callable, *arguments: Any, **options: Any) -> Any:
    """The result of a function of the model; None if it raises, as for arguments that it does not know.

    The seed of its random numbers is fixed, per draw.
    """
    draw = current()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            # Not those of devices, whose state would stay.
            torch.default_generator.manual_seed(0 if draw is None else draw.number)
            return function(*arguments, **options)
    except (torch.AcceleratorError, Void):  # the GPU has failed; the draw shows nothing
        raise
    except Exception as error:  # it is not ours: any error may come of it
        note_error(error)
        return None


def agrees(a: object, b: object, rtol: float = 1e-5) -> bool:
    """True if two results are tensors that are equal up to rounding, or as many of them; None is in both.

    Sums round as their largest parts do, so values near 0 may differ by as much of the largest value.

    Args:
        b: the result of eager code. Raises: Void if it is not finite, within a draw.
    """
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(
            x is y is None or agrees(x, y, rtol) for x, y in zip(a, b, strict=True)
        )
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return False
    if a.shape != b.shape or a.dtype != b.dtype or not b.is_floating_point():
        return False
    require_finite(b)
    values = b[b.isfinite()].abs()
    largest = max(1.0, values.max().item()) if values.numel() else 1.0
    return torch.allclose(a, b, rtol, 1e-5 * largest)
