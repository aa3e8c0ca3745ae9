"""Layers of linear attention whose states lag behind: tokens are taken back without a copy of them.

A call of several tokens leaves the states as they were in front of these, and keeps the few numbers that each
of them adds: the next call takes in those that were right, in the kernels that read and write the states
anyway. A token alone is always right, and takes the states to where they are.
"""

from typing import Any

import torch
from torch import Tensor

from ...ops.linear_attention import MAX_PENDING, pending_width
from ..basics.pending import set_before, set_pending
from ..upstream.caches import LinearAttentionLayer
from .state import LayerState, copy_of_layer

_POSITIONS, _TOKENS, _COUNTS = "positions", "tokens", "counts"


class Lagging(LinearAttentionLayer):
    """A layer with a convolution and a recurrence, both behind by the same tokens.

    Attributes:
        plain: the class of transformers that it does the same as.
        pending: the inputs of both for the last tokens, and how many of them are right in each row.
    """

    plain = LinearAttentionLayer
    pending: dict[str, Tensor]

    def show_pending(self) -> None:
        """Lets whoever reads the states see what is pending behind them."""
        counts = self.pending[_COUNTS]
        set_pending(self._positions, self.pending[_POSITIONS], counts)
        set_pending(self._state, self.pending[_TOKENS], counts)

    def set_counts(self, counts: Tensor) -> None:
        self.pending[_COUNTS] = counts

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        return set_before(conv_states, self._positions)

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        if recurrent_states is not self._state:
            raise RuntimeError("torch_moe_mps: a state that lags behind is written in place alone")
        return recurrent_states

    @property
    def _positions(self) -> Tensor:
        return self.conv_states[0]

    @property
    def _state(self) -> Tensor:
        return self.recurrent_states[0]


def can_lag(layer: Any) -> bool:
    """Whether a layer has states of the kind that may lag behind."""
    if type(layer) is not LinearAttentionLayer or len(layer.conv_states) != 1:
        return False
    positions, state = layer.conv_states[0], layer.recurrent_states[0]
    if positions is None or state is None:
        return False
    return positions.dim() == 3 and state.dim() == 4 and state.dtype == torch.float32


def lagging(layer: Any) -> Lagging:
    """A layer like this one, whose states it shares, with nothing pending."""
    positions, state = layer.conv_states[0], layer.recurrent_states[0]
    rows, heads, *widths = state.shape
    pending = {
        _POSITIONS: positions.new_empty((*positions.shape[:2], MAX_PENDING)),
        _TOKENS: state.new_empty((rows, heads, MAX_PENDING, pending_width(*widths))),
        _COUNTS: torch.zeros(rows, 1, dtype=torch.int32, device=state.device),
    }
    made = copy_of_layer(layer, pending=pending)
    made.__class__ = Lagging
    return made


def settled(layer: Lagging, count: int) -> Any:
    """A plain layer with the states of one row, which it writes, behind so many of the tokens pending."""
    positions, state, pending = layer._positions, layer._state, layer.pending
    if count > 0:
        counts = torch.tensor([[count]], dtype=torch.int32).to(state.device)
        _, heads, key_width, value_width = state.shape
        none = positions.new_empty((1, 0, heads))
        keys, values = (none.new_empty((1, 0, heads, width)) for width in (key_width, value_width))
        torch.ops.moe_mps.linear_attention_(
            keys, keys, values, none, state, 1.0, pending_=pending[_TOKENS], counts=counts
        )
        channels = positions.shape[1]
        torch.ops.moe_mps.causal_conv1d_update_(
            positions.new_empty((1, 0, channels)),
            positions,
            positions.new_empty((channels, 1)),
            pending_=pending[_POSITIONS],
            counts=counts,
        )
    made = object.__new__(Lagging.plain)
    values_of_layer = LayerState(layer).values()
    del values_of_layer["pending"]
    LayerState(made).replace(values_of_layer)
    return made
