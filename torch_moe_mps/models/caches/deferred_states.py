"""Deferred state updates: draft tokens are taken back from recurrent states without a copy of these.

A recurrent state cannot forget a token, and a copy in front of each verification step would read and write it
once more. So a call of several tokens does not update the states. It keeps the few numbers that each of its
tokens adds to a state, and the next call updates the states with the accepted tokens, in the kernels that
read and write the states anyway.

Invariant: between two calls, a layer has for each sequence

- its states behind all committed tokens,
- `uncommitted`: the inputs of the last call's tokens, at most MAX_PENDING, in a form for each kind of state,
- a count: how many of these tokens, from the first on, are accepted.

The next call reads its states as `update(state, uncommitted[:count])`. A call of several tokens writes this
state, and its own inputs in place of the old ones (`keep` of the operators); a call of one token, which is
always accepted, writes the state behind that token, and the count is 0 then. To reject tokens is to lower the
count, which moves nothing.

Where it stands: the operators `causal_conv1d_update_`, `_gated_delta_rule_` and `selective_scan_`
take `pending_` (the uncommitted inputs), `counts` and `keep`. `basics.tensors` leads modules from a state
to its arguments. `BatchedCache` sets the counts. `transformers.deferrable` tries which layers of a model
may defer. `committed` gives a sequence's states for a cache of its own, as prefixes are cached.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops._pending import MAX_PENDING
from ...ops.families.gated_delta_rule import pending_width
from ...ops.families.selective_scan import selective_pending_shape
from ..basics.tensors import notes_on
from ..upstream.models import LinearAttentionLayer
from .declared import STATE, DeclaredLayer, declaration_of
from .state import LayerState, copy_of_layer

ops = torch.ops.moe_mps
_POSITIONS = "positions"  # the kind of the states of convolutions
_COUNTS = "counts"  # the name of how many tokens are right, beside those of the states


class StateKind(NamedTuple):
    """Kind of a recurrent state: its update by tokens and its place in the cache.

    Attributes:
        delta: as the delta rule.
        is_wide: it has a decay for each row.
        is_transposed: it is held as [B, heads, values, keys].
    """

    delta: bool = True
    is_wide: bool = False
    is_transposed: bool = False

    def of(self, module: Any) -> "StateKind":
        """This kind for the states of a module."""
        return self

    def fits(self, state: Tensor) -> bool:
        return state.dim() == 4 and state.dtype == torch.float32

    def uncommitted_shape(self, state: Tensor) -> tuple[int, ...]:
        rows, heads, key_width, value_width = self._of_operator(state).shape
        return rows, heads, MAX_PENDING, pending_width(key_width, value_width, self.is_wide)

    def commit(self, state: Tensor, uncommitted: Tensor, count: int) -> None:
        """Takes so many of the uncommitted tokens into the state of one sequence."""
        state = self._of_operator(state)
        _, heads, key_width, value_width = state.shape
        none = state.new_empty((1, 0, heads))
        keys, values = (state.new_empty((1, 0, heads, width)) for width in (key_width, value_width))
        options: dict[str, Any] = {"beta": none, **_counted(uncommitted, count)}
        decay: Tensor | None = keys if self.is_wide else none
        if not self.delta:
            decay = None
            options |= {"decay_form": "times_beta", "A_log": state.new_zeros(heads)}
        ops._gated_delta_rule_(keys, keys, values, decay, state, scale=1.0, **options)

    def _of_operator(self, state: Tensor) -> Tensor:
        """[B, heads, keys, values], as the operator takes it."""
        return state.mT if self.is_transposed else state


@dataclass(frozen=True, eq=False)
class Selective:
    """The same for Mamba-1, whose channels have states with a decay of their own for each.

    Attributes:
        rates: logarithms of these decays for a step of 1, as the module has them.
    """

    rates: Tensor | None = None

    def of(self, module: Any) -> "Selective":
        return Selective(module.A_log)

    def fits(self, state: Tensor) -> bool:
        return state.dim() == 3 and state.dtype == torch.float32

    def uncommitted_shape(self, state: Tensor) -> tuple[int, ...]:
        rows, channels, states = state.shape
        groups, width = selective_pending_shape(channels, states)
        return rows, groups, MAX_PENDING, width

    def commit(self, state: Tensor, uncommitted: Tensor, count: int) -> None:
        _, channels, states = state.shape
        x, b = (state.new_empty((1, 0, size)) for size in (channels, states))
        ops.selective_scan_(x, x, b, b, state, self.rates, **_counted(uncommitted, count))


AnyKind = StateKind | Selective
KINDS: tuple[AnyKind, ...] = (
    StateKind(),
    StateKind(is_wide=True),
    StateKind(delta=False, is_transposed=True),
    StateKind(delta=False),
    Selective(),
)


class DeferredLayer(LinearAttentionLayer):
    """A layer with convolutions, a recurrence or both, all behind the same tokens.

    Attributes:
        committed_class: the class of the layer without uncommitted tokens.
        uncommitted: inputs of each state for the last tokens, and how many of these are right in each row.
    """

    committed_class: Any
    uncommitted: dict[Any, Tensor]

    def show_uncommitted(self) -> None:
        """Lets whoever reads the states see the uncommitted tokens behind them."""
        counts = self.uncommitted[_COUNTS]
        for name, state in states_of(self).items():
            notes_on(state).uncommitted = self.uncommitted[name], counts

    def set_counts(self, counts: Tensor) -> None:
        self.uncommitted[_COUNTS] = counts

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        positions = self.conv_states[state_idx]
        assert positions is not None
        notes_on(conv_states).before = positions
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        if recurrent_states is not self.recurrent_states[state_idx]:
            raise RuntimeError(
                "torch_moe_mps: a recurrent state with uncommitted draft tokens must be written in place, "
                'got another tensor: generate without draft tokens (speculative=None, "--speculative none")'
            )
        return recurrent_states


@functools.cache
def _deferred_class(plain: type) -> type:
    """The class of layers like `plain` whose state updates are deferred."""
    # transformers registers a class under its _layer_type for all models, so this one must have none.
    declaration, base = DeclaredLayer(mappings={"uncommitted": STATE}), declaration_of(plain)
    assert base is not None
    attributes = {"_layer_type": None, "committed_class": plain, "declared": base.with_more(declaration)}
    return type(f"Deferred{plain.__name__}", (DeferredLayer, plain), attributes)


def states_of(layer: Any) -> dict[tuple[str, int], Tensor]:
    """The states of a layer of linear attention."""
    both = {_POSITIONS: layer.conv_states, "tokens": layer.recurrent_states}
    return {(kind, n): s for kind, states in both.items() for n, s in states.items() if s is not None}


def _defers(layer: Any) -> bool:
    declaration = declaration_of(type(layer))
    return declaration is not None and declaration.defers


def can_defer(layer: Any) -> bool:
    """True if a layer has states of the kind whose update may be deferred."""
    if not _defers(layer) or isinstance(layer, DeferredLayer):
        return False
    states = states_of(layer)
    return bool(states) and all(
        state.dim() == 3 if kind == _POSITIONS else any(each.fits(state) for each in KINDS)
        for (kind, _), state in states.items()
    )


def deferred(layer: Any, kind: AnyKind) -> DeferredLayer:
    """A layer like this one, whose states it shares, without uncommitted tokens.

    Args:
        kind: of its recurrent states.
    """
    states = states_of(layer)
    uncommitted: dict[Any, Tensor] = {
        name: s.new_empty(_uncommitted_shape(name, s, kind)) for name, s in states.items()
    }
    state = next(iter(states.values()))
    uncommitted[_COUNTS] = torch.zeros(len(state), 1, dtype=torch.int32, device=state.device)
    deferred_layer = copy_of_layer(layer, uncommitted=uncommitted)
    cls: Any = type(layer)
    deferred_layer.__class__ = _deferred_class(cls)
    return deferred_layer


def _uncommitted_shape(name: tuple[str, int], state: Tensor, kind: AnyKind) -> tuple[int, ...]:
    is_of_positions = name[0] == _POSITIONS
    return (*state.shape[:2], MAX_PENDING) if is_of_positions else kind.uncommitted_shape(state)


def bytes_beside(layer: Any, kinds: Iterable[AnyKind] = KINDS) -> int:
    """The most bytes that drafts take beside the states of a layer: for uncommitted tokens, or for a copy.

    Args:
        kinds: that the layer may be of, where they are deferred.
    """
    if not _defers(layer):
        return 0
    states, kinds = states_of(layer), [*kinds]
    if not kinds or not can_defer(layer):
        return sum(state.nbytes for state in states.values())
    beside = 0
    for name, state in states.items():
        fitting = [kind for kind in kinds if name[0] == _POSITIONS or kind.fits(state)] or kinds
        beside += max(prod(_uncommitted_shape(name, state, kind)) for kind in fitting) * state.element_size()
    return beside


def committed(layer: DeferredLayer, count: int, kind: AnyKind) -> Any:
    """A plain layer with the states of one sequence, which it writes, after so many uncommitted tokens.

    Args:
        kind: of its recurrent states.
    """
    if count > 0:
        for name, state in states_of(layer).items():
            commit = _commit_positions if name[0] == _POSITIONS else kind.commit
            commit(state, layer.uncommitted[name], count)
    plain_layer = object.__new__(layer.committed_class)
    values = LayerState(layer).values()
    del values["uncommitted"]
    LayerState(plain_layer).replace(values)
    return plain_layer


def _counted(uncommitted: Tensor, count: int) -> dict[str, Tensor]:
    """Arguments of an operator that takes so many tokens into the state of one sequence."""
    return {
        "pending_": uncommitted,
        "counts": torch.tensor([[count]], dtype=torch.int32).to(uncommitted.device),
    }


def _commit_positions(state: Tensor, uncommitted: Tensor, count: int) -> None:
    channels = state.shape[1]
    none, weight = state.new_empty((1, 0, channels)), state.new_empty((channels, 1))
    ops.causal_conv1d_update_(none, state, weight, **_counted(uncommitted, count))
