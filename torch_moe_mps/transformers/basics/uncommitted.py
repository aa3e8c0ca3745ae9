"""Leads the modules that update a state to its uncommitted tokens, which `caches.deferred_states` defines.

A state has the inputs of these tokens beside it, as an attribute. Tokens that are convolved know the state in
front of them, which a model's own code would join with them.
"""

from typing import Any

from torch import Tensor

# The attribute of a state: its inputs, and how many tokens of each row are accepted; and one of tokens: the
# state in front of them.
_UNCOMMITTED, _BEFORE = "_moe_mps_uncommitted", "_moe_mps_before"


def set_uncommitted(state: Tensor, inputs: Tensor, counts: Tensor) -> None:
    """Notes the uncommitted tokens behind a state."""
    setattr(state, _UNCOMMITTED, (inputs, counts))


def uncommitted_of(state: Tensor, tokens: int) -> dict[str, Any]:
    """The arguments of an operator for a state and so many tokens; none if its update is not deferred.

    One token is always accepted: it updates the state.
    """
    inputs, counts = getattr(state, _UNCOMMITTED, (None, None))
    return {} if inputs is None else {"pending_": inputs, "counts": counts, "keep": bool(tokens > 1)}


def set_before(tokens: Tensor, state: Tensor) -> Tensor:
    """Tokens that know the state in front of them."""
    setattr(tokens, _BEFORE, state)
    return tokens


def state_before(tokens: Tensor) -> Tensor | None:
    """The state in front of tokens, where they know one."""
    return getattr(tokens, _BEFORE, None)
