"""DBRX's experts: a child has w1, v1 and w2 of [E * F, H]; an expert takes F rows of each.

    out[t] = sum over k of weights[t, k] * (act(x[t] @ w1[e].T) * (x[t] @ v1[e].T)) @ w2[e]

with e = ids[t, k]. The stacks are views [E, F, H] of these parameters: gate and up projections are apart.
Packed, they are one stack.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ....ops._activations import POINTWISE, Activation
from ....ops._checks import MAX_TOP_K
from ...basics.experts import Experts, recognised
from ...basics.stacks import Stack
from ...modules.experts import combined, operator_call
from ...modules.stacked_experts import (
    Sizes,
    beside_replica,
    shapes_below,
    tried_form,
)
from ...trials.draws import normal
from ...trials.forms import first_form

_MATRICES = "w1", "v1", "w2"
_PATHS = tuple(f"mlp.{name}" for name in _MATRICES)
_STACKS = (
    ("gate_up_proj", Stack(_PATHS[:2], is_flat=True)),
    ("down_proj", Stack(_PATHS[2:], is_flat=True, is_transposed=True)),
)
_SIZES = "num_experts", "hidden_size", "ffn_hidden_size"
_SEQUENCES, _TOKENS, _TOP_K = 2, 3, 2  # sizes of a trial


def recognise_experts(module: nn.Module) -> Experts | None:
    """The experts of such a module; None for any other module."""
    sizes = sizes_of(module)
    shapes = None if sizes is None else shapes_below(module, _PATHS)
    if sizes is None or shapes is None:
        return None
    about: dict[str, Any] = {"methods": (("forward", with_forward),), "act_fn": "mlp.activation_fn"}
    forms = [
        recognised(activation, _STACKS, sizes.experts, shapes, **about)
        for activation in (*map(Activation, POINTWISE), None)
    ]
    found: Experts | None = first_form(module, forms, _begin, sizes)
    return found


def with_forward(own: Callable) -> Callable:
    """The forward of such experts: [B, T, H] -> [B, T, H]."""

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
        call = operator_call(self, hidden_states, top_k_weights, top_k_index.shape[-1] <= MAX_TOP_K)
        if call is None:
            return own(self, hidden_states, top_k_index, top_k_weights)
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        out = combined(self, rows, top_k_index, top_k_weights, call)
        return out.view(hidden_states.shape[0], -1, out.shape[-1])

    return forward


def sizes_of(module: nn.Module) -> Sizes | None:
    """The sizes of such experts; None for any other module."""
    sizes: list[Any] = [vars(module).get(name) for name in _SIZES]
    shapes = shapes_below(module, _PATHS) if all(type(size) is int for size in sizes) else None
    if shapes is None:
        return None
    experts, hidden, inner = sizes
    fits = {*dict(shapes).values()} == {(experts * inner, hidden)}
    return Sizes(experts, 0, hidden, inner, 1, is_flat=True) if fits else None


def _begin(module: nn.Module, sizes: Sizes) -> Callable[[Experts], bool]:
    return beside_replica(module, sizes, _tried, inputs=_inputs)


def _inputs(_: nn.Module, small: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    count = _SEQUENCES * _TOKENS
    ids = torch.stack([torch.randperm(small.experts - 1)[:_TOP_K] for _ in range(count)])  # one of no token
    return normal(_SEQUENCES, _TOKENS, small.hidden), ids, normal(count, _TOP_K)


def _tried(form: Experts, replica: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    form = form._replace(number=replica.num_experts)
    return tried_form(form, replica, x.flatten(0, 1), ids, weights).view(x.shape)
