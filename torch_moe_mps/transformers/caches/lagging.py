"""Layers of linear attention whose states lag behind: tokens are taken back without a copy of them.

A call of several tokens leaves the states as they were in front of these, and keeps the few numbers that each
of them adds: the next call takes in those that were right, in the kernels that read and write the states
anyway. A token alone is always right, and takes the states to where they are.
"""

import functools
from collections.abc import Iterable
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops.linear_attention import MAX_PENDING, pending_width
from ..basics.pending import set_before, set_pending
from ..upstream.caches import LinearAttentionLayer
from .state import LayerState, copy_of_layer

_POSITIONS = "positions"  # the kind of the states of convolutions
_COUNTS = "counts"  # the name of how many tokens are right, beside those of the states


class Kind(NamedTuple):
    """How a recurrent state takes its tokens in, and how it lies in the cache.

    Attributes:
        delta: as the delta rule.
        is_wide: it has a decay for each row.
        is_transposed: it is held as [B, heads, values, keys].
    """

    delta: bool = True
    is_wide: bool = False
    is_transposed: bool = False

    def of_operator(self, state: Tensor) -> Tensor:
        """[B, heads, keys, values], as the operator takes it."""
        return state.mT if self.is_transposed else state


KINDS = (Kind(), Kind(is_wide=True), Kind(delta=False, is_transposed=True), Kind(delta=False))


class Lagging(LinearAttentionLayer):
    """A layer with convolutions, a recurrence or both, all behind by the same tokens.

    Attributes:
        settled_class: the class of the layer where nothing is pending.
        kind: of its recurrent state.
        pending: inputs of each state for the last tokens, and how many of these are right in each row.
    """

    settled_class: Any
    kind: Kind
    pending: dict[Any, Tensor]

    def show_pending(self) -> None:
        """Lets whoever reads the states see what is pending behind them."""
        counts = self.pending[_COUNTS]
        for name, state in states_of(self).items():
            set_pending(state, self.pending[name], counts)

    def set_counts(self, counts: Tensor) -> None:
        self.pending[_COUNTS] = counts

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        positions = self.conv_states[state_idx]
        assert positions is not None
        return set_before(conv_states, positions)

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        if recurrent_states is not self.recurrent_states[state_idx]:
            raise RuntimeError("torch_moe_mps: a state that lags behind is written in place alone")
        return recurrent_states


@functools.cache
def _lagging_class(plain: type, kind: Kind) -> type:
    # transformers registers a class under its _layer_type for all models, so this one must have none.
    own = {"_layer_type": None, "settled_class": plain, "kind": kind}
    return type(f"Lagging{plain.__name__}", (Lagging, plain), own)


def states_of(layer: Any) -> dict[tuple[str, int], Tensor]:
    """The states of a layer of linear attention."""
    both = {_POSITIONS: layer.conv_states, "tokens": layer.recurrent_states}
    return {(kind, n): s for kind, held in both.items() for n, s in held.items() if s is not None}


def can_lag(layer: Any) -> bool:
    """Whether a layer has states of the kind that may lag behind."""
    if not isinstance(layer, LinearAttentionLayer) or isinstance(layer, Lagging):
        return False
    states = states_of(layer)
    return bool(states) and all(
        state.dim() == 3
        if kind == _POSITIONS
        else state.dim() == 2 or (state.dim(), state.dtype) == (4, torch.float32)
        for (kind, _), state in states.items()
    )


def lagging(layer: Any, kind: Kind) -> Lagging:
    """A layer like this one, whose states it shares, with nothing pending."""
    states = states_of(layer)
    pending: dict[Any, Tensor] = {name: s.new_empty(_pending_shape(s, kind)) for name, s in states.items()}
    state = next(iter(states.values()))
    pending[_COUNTS] = torch.zeros(len(state), 1, dtype=torch.int32, device=state.device)
    made = copy_of_layer(layer, pending=pending)
    cls: Any = type(layer)
    made.__class__ = _lagging_class(cls, kind)
    return made


def _pending_shape(state: Tensor, kind: Kind) -> tuple[int, ...]:
    if state.dim() < 4:
        return (*state.shape[:2], MAX_PENDING)
    rows, heads, key_width, value_width = kind.of_operator(state).shape
    return rows, heads, MAX_PENDING, pending_width(key_width, value_width, kind.is_wide)


def bytes_beside(layer: Any, kinds: Iterable[Kind] = KINDS) -> int:
    """The most bytes that guesses take beside the states of a layer: for what is pending, or for a copy.

    Args:
        kinds: that the layer may be of, where its states lag.
    """
    if not isinstance(layer, LinearAttentionLayer):
        return 0
    states, kinds = states_of(layer).values(), [*kinds]
    if not kinds or not can_lag(layer):
        return sum(state.nbytes for state in states)
    return sum(max(prod(_pending_shape(s, kind)) for kind in kinds) * s.element_size() for s in states)


def settled(layer: Lagging, count: int) -> Any:
    """A plain layer with the states of one row, which it writes, behind so many of the tokens pending."""
    if count > 0:
        counts = torch.tensor([[count]], dtype=torch.int32)
        for name, state in states_of(layer).items():
            pending = layer.pending[name]
            if state.dim() == 2:
                state.copy_(pending[..., count - 1])
                continue
            take_in = _take_in_positions if state.dim() == 3 else _take_in_tokens
            take_in(layer.kind, state, {"pending_": pending, "counts": counts.to(state.device)})
    made = object.__new__(layer.settled_class)
    values = LayerState(layer).values()
    del values["pending"]
    LayerState(made).replace(values)
    return made


def _take_in_tokens(kind: Kind, state: Tensor, pending: dict[str, Any]) -> None:
    state = kind.of_operator(state)
    _, heads, key_width, value_width = state.shape
    none = state.new_empty((1, 0, heads))
    keys, values = (state.new_empty((1, 0, heads, width)) for width in (key_width, value_width))
    decay = keys if kind.is_wide else none
    torch.ops.moe_mps.linear_attention_(keys, keys, values, decay, state, 1.0, delta=kind.delta, **pending)


def _take_in_positions(kind: Kind, state: Tensor, pending: dict[str, Any]) -> None:
    channels = state.shape[1]
    none, weight = state.new_empty((1, 0, channels)), state.new_empty((channels, 1))
    torch.ops.moe_mps.causal_conv1d_update_(none, state, weight, **pending)
