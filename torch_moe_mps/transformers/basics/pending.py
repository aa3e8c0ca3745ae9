"""States that are behind: the tokens of a call are pending until the next one is told how many are right.

Such a state has the inputs of these tokens beside it. Tokens that are convolved know the state in front of
them, which a model's own code would join with them.
"""

from typing import Any

from torch import Tensor

# The attribute of a state: its inputs, and how many tokens of each row are right; and one of tokens: the
# state in front of them.
_PENDING, _BEFORE = "_moe_mps_pending", "_moe_mps_before"


def set_pending(state: Tensor, inputs: Tensor, counts: Tensor) -> None:
    """Notes the uncommitted tokens behind a state."""
    setattr(state, _PENDING, (inputs, counts))


def pending_of(state: Tensor, tokens: int) -> dict[str, Any]:
    """The arguments of an operator for a state and so many tokens; none for a state that is never behind.

    One token is right: it takes the state to where it is.
    """
    inputs, counts = getattr(state, _PENDING, (None, None))
    return {} if inputs is None else {"pending_": inputs, "counts": counts, "keep": bool(tokens > 1)}


def set_before(tokens: Tensor, state: Tensor) -> Tensor:
    """Tokens that know the state in front of them."""
    setattr(tokens, _BEFORE, state)
    return tokens


def state_before(tokens: Tensor) -> Tensor | None:
    """The state in front of tokens, where they know one."""
    return getattr(tokens, _BEFORE, None)
