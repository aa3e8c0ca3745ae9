"""Checkpoints with one thing changed: refused in a line that names it, or the logits are the same."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor


class Change(NamedTuple):
    """`apply` changes tensors, and the config or keys beside them; an error contains `name`."""

    label: str
    name: str
    apply: Callable[[dict[str, Any], dict[str, Any]], Any]


def assert_declared(
    changes: Iterable[Change],
    logits: Callable[[Change], Tensor],
    expected: Tensor,
    tolerance: float,
    least: int,
) -> None:
    """Asserts it of at least so many changes; `logits` are those of the checkpoint with one of them."""
    found = {change.label: _fault(change, logits, expected, tolerance) for change in changes}
    wrong = [f"{label}: {what}" for label, what in found.items() if what is not None]
    assert not wrong, "\n".join(wrong)
    assert len(found) >= least


def _fault(
    change: Change, logits: Callable[[Change], Tensor], expected: Tensor, tolerance: float
) -> str | None:
    try:
        found = logits(change)
    except ValueError as error:
        if "\n" in str(error):
            return f"several lines: {str(error)[:100]!r}"
        return None if change.name in str(error) else f"{change.name} is not named: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:100]!r}"
    difference = float((found - expected).abs().max() / expected.abs().max())
    return None if difference < tolerance else f"silently wrong, by {difference:.2g}"
