"""DBRX's experts: a child has w1, v1 and w2 of [E * F, H], of which an expert takes F rows.

    out[t] = sum over k of weights[t, k] * (act(x[t] @ w1[e].T) * (x[t] @ v1[e].T)) @ w2[e]

with e = ids[t, k]. The stacks are views [E, F, H] of these parameters: gate and up projections are apart.
Packed, they are one stack.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ....ops._activations import POINTWISE, Activation
from ....ops._checks import ACTIVATION_DTYPES, MAX_TOP_K
from ...basics.interface import ExpertsForm, Stack
from ...basics.report import Done
from ...modules.experts import experts_forward as interface_forward
from ...modules.stacked_experts import Sizes, beside_replica, of_ids, own_activation, shapes_below
from ...trials.draws import normal
from ...trials.forms import first_form

ops = torch.ops.moe_mps

_MATRICES = "w1", "v1", "w2"
_PATHS = tuple(f"mlp.{name}" for name in _MATRICES)
_STACKS = (
    ("gate_up_proj", Stack(_PATHS[:2], is_flat=True)),
    ("down_proj", Stack(_PATHS[2:], is_flat=True, is_transposed=True)),
)
_SIZES = "num_experts", "hidden_size", "ffn_hidden_size"
_SEQUENCES, _TOKENS, _SLOTS = 2, 3, 2  # sizes of a trial


def rewrite_experts(module: nn.Module) -> tuple[Callable, list[Done]] | None:
    """(forward, what runs) for such experts, else None."""
    sizes = sizes_of(module)
    if sizes is None or not first_form(module, (True,), _begin, sizes):
        return None
    return experts_forward, [Done("expert_mm", "expert_mm, own activation"), Done("moe_weighted_reduce")]


def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The forward of such experts: [B, T, H] -> [B, T, H]."""
    mlp = module.mlp
    w1, v1, w2 = (getattr(mlp, name) for name in _MATRICES)
    takes = (
        hidden_states.dtype in ACTIVATION_DTYPES
        and all(w.dtype == hidden_states.dtype and w.device == hidden_states.device for w in (w1, v1, w2))
        and top_k_index.shape[-1] <= MAX_TOP_K
    )
    if not takes:
        return NotImplemented
    shape = -1, module.ffn_hidden_size, module.hidden_size
    x = hidden_states.reshape(-1, module.hidden_size)
    gate, up = (ops.expert_mm(x, top_k_index, w.view(shape)) for w in (w1, v1))
    slots = ops.expert_mm(mlp.activation_fn(gate) * up, top_k_index, w2.view(shape), None, True)
    out: Tensor = ops.moe_weighted_reduce(slots, top_k_weights)
    return out.view(hidden_states.shape[0], -1, module.hidden_size)


def recognise_experts(module: nn.Module) -> ExpertsForm | None:
    """Form of such experts, for packed weights; None for any other module."""
    sizes = sizes_of(module)
    shapes = None if sizes is None else shapes_below(module, _PATHS)
    if sizes is None or shapes is None:
        return None
    methods = (("forward", packed_forward),)
    forms = [
        ExpertsForm(
            activation, False, False, False, sizes.experts, shapes, _STACKS, methods,
            act_fn="mlp.activation_fn",
        )
        for activation in (*map(Activation, POINTWISE), *own_activation(module))
    ]  # fmt: skip
    found: ExpertsForm | None = first_form(module, forms, _begin_stacks, sizes)
    return found


def packed_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The forward of such experts with the stacks of transformers' interface."""
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    out = interface_forward(self, rows, top_k_index, top_k_weights)
    return out.view(hidden_states.shape[0], -1, out.shape[-1])


def sizes_of(module: nn.Module) -> Sizes | None:
    """The sizes of such experts; None for any other module."""
    sizes: list[Any] = [vars(module).get(name) for name in _SIZES]
    shapes = shapes_below(module, _PATHS) if all(type(size) is int for size in sizes) else None
    if shapes is None:
        return None
    experts, hidden, inner = sizes
    fits = {*dict(shapes).values()} == {(experts * inner, hidden)}
    return Sizes(experts, 0, hidden, inner, 1, is_flat=True) if fits else None


def _begin(module: nn.Module, sizes: Sizes) -> Callable[[bool], bool]:
    return beside_replica(module, sizes, lambda _, *given: experts_forward(*given), inputs=_inputs)


def _begin_stacks(module: nn.Module, sizes: Sizes) -> Callable[[ExpertsForm], bool]:
    return beside_replica(module, sizes, _of_stacks, inputs=_inputs)


def _inputs(_: nn.Module, small: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    count = _SEQUENCES * _TOKENS
    ids = torch.stack([torch.randperm(small.experts - 1)[:_SLOTS] for _ in range(count)])  # one of no token
    return normal(_SEQUENCES, _TOKENS, small.hidden), ids, normal(count, _SLOTS)


def _of_stacks(form: ExpertsForm, replica: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    form = form._replace(experts=replica.num_experts)
    return of_ids(form, replica, x.flatten(0, 1), ids, weights).view(x.shape)
