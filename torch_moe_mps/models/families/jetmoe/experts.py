"""Blocks of two stacks of experts after a router that groups rows by expert.

    weights, ids = softmax of the top k of router.layer(x)
    MLP:        out = sum over k of weights * output_linear[ids](act(gate) * up) + bias
    attention:  map(x) = input_linear[ids](x)
                reduce(y) = sum over k of weights * output_linear[ids](y) + bias

The router's own code asks the device call many rows each expert has. Blocks are recognised by a trial.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ....ops._activations import POINTWISE, Activation
from ....ops._checks import MAX_TOP_K
from ...basics.experts import Experts, recognised
from ...basics.guards import is_observed
from ...basics.report import Done
from ...basics.stacks import Stack
from ...modules.experts import combined, multiplied, operator_call, runs_eager
from ...modules.stacked_experts import (
    Sizes,
    beside_replica,
    own_activation,
    shapes_below,
    tried_form,
)
from ...trials.draws import eager, normal
from ...trials.forms import first_form

ops = torch.ops.moe_mps

_PATHS = "input_linear.weight", "output_linear.weight"
_SHAPE = 2, 3  # the shape of a trial's tokens
_ROUTER = Done("moe_router", "moe_router (softmax_after_topk)")


class Chosen(NamedTuple):
    """Routing weights [T, K] in float32 and ids [T, K], in place of the own code's rows grouped by expert."""

    weights: Tensor
    ids: Tensor


def recognise_mlp_experts(module: nn.Module) -> Experts | None:
    """The experts of such an MLP; None for any other module."""
    if (sizes := _sizes(module, 2)) is None:
        return None
    methods = (("forward", with_forward),)
    activations = *map(Activation, POINTWISE), *own_activation(module)
    forms = [_experts(module, "gate_up_proj", methods, "activation", each) for each in activations]
    found: Experts | None = first_form(module, forms, _begin_mlp, sizes)
    return found


def recognise_attention_experts(module: nn.Module) -> Experts | None:
    """The experts of the projections of such an attention; None for any other module."""
    sizes = _sizes(module, 1) if hasattr(type(module), "map") and hasattr(type(module), "reduce") else None
    if sizes is None:
        return None
    form = _experts(module, "up_proj", (("map", with_map), ("reduce", with_reduce)))
    found: Experts | None = first_form(module, [form], _begin_attention, sizes)
    return found


def _experts(
    module: nn.Module, first: str, methods: tuple, act_fn: str = "", activation: Activation | None = None
) -> Experts:
    shapes = shapes_below(module, ("bias", *_PATHS))
    assert shapes is not None
    count = dict(shapes)[_PATHS[0]][0]
    stacks = tuple((name, Stack((path,))) for name, path in zip((first, "down_proj"), _PATHS, strict=True))
    heard = "router", "router.layer"
    return recognised(
        activation, stacks, count, shapes, methods=methods, act_fn=act_fn, runs=(_ROUTER,), heard=heard
    )


def _sizes(module: Any, halves: int) -> Sizes | None:
    """Sizes of the two stacks of a block, None for any other module."""
    router = module._modules.get("router")
    is_routed = type(getattr(router, "top_k", None)) is int and hasattr(router, "layer")
    shapes = shapes_below(module, ("bias", *_PATHS)) if is_routed else None
    first, second = (() if shapes is None else dict(shapes)[path] for path in _PATHS)
    if len(second) != 3:
        return None
    experts, hidden, inner = second
    fits = first == (experts, halves * inner, hidden) and router.top_k <= min(experts, MAX_TOP_K)
    return Sizes(experts, 0, hidden, inner, halves) if fits else None


def _begin_mlp(module: nn.Module, sizes: Sizes) -> Callable[[Experts], bool]:
    def ours(form: Experts, replica: nn.Module, x: Tensor) -> Tensor:
        return _mlp(replica, x, partial(tried_form, form, replica))

    return beside_replica(module, sizes, ours, _least(module, sizes))


def _begin_attention(module: nn.Module, sizes: Sizes) -> Callable[[Experts], bool]:
    def ours(
        form: Experts, replica: nn.Module, x: Tensor, expert_out: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        multiply = partial(form.multiply, replica)
        query, logits, chosen = _map(replica, x, multiply)
        return query, logits, _reduce(replica, expert_out, chosen, multiply)

    return beside_replica(module, sizes, ours, _least(module, sizes), _inputs, _both_eager)


def _least(module: Any, sizes: Sizes) -> int:
    """Number of experts that a replica has at least."""
    return min(sizes.experts, module.router.top_k + 1)


def _inputs(replica: Any, small: Sizes) -> tuple[Tensor, Tensor]:
    """Inputs of `map` and of `reduce`."""
    return normal(*_SHAPE, small.hidden), normal(*_SHAPE, replica.router.top_k, small.inner)


def _both_eager(replica: Any, x: Tensor, expert_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    query, logits, topology = eager(replica.map)(x)
    return query, logits, eager(replica.reduce)(expert_out, topology)


# --- what runs


def with_forward(own: Callable) -> Callable:
    """The forward of such an MLP."""

    def forward(self: Any, layer_input: Tensor) -> Tensor:
        if (call := operator_call(self, layer_input)) is None:
            return own(self, layer_input)
        return _mlp(self, layer_input, partial(combined, self, call=call))

    return forward


def with_map(own: Callable) -> Callable:
    """The `map` of such projections of an attention."""

    def map(self: Any, layer_input: Tensor) -> Any:
        if operator_call(self, layer_input) is None:
            return own(self, layer_input)
        return _map(self, layer_input, partial(multiplied, self))

    return map


def with_reduce(own: Callable) -> Callable:
    """The `reduce` of such projections of an attention, for what their `map` has chosen."""

    def reduce(self: Any, layer_input: Tensor, topo_info: Any) -> Any:
        if not isinstance(topo_info, Chosen):
            return own(self, layer_input, topo_info)
        if operator_call(self, layer_input) is not None:
            return _reduce(self, layer_input, topo_info, partial(multiplied, self))
        weights, ids = topo_info  # mapped by operators: only the rows need a gradient, or have another dtype
        ids, order = ids.flatten().sort()
        sizes = ids.bincount(minlength=self.num_experts).tolist()
        gates = weights.flatten()[order].to(layer_input.dtype)
        return own(self, layer_input, (order, order // weights.shape[1], gates, sizes))

    return reduce


def _mlp(module: Any, x: Tensor, combine: Callable[..., Tensor]) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    _, chosen = _routed(module.router, rows)
    return combine(rows, chosen.ids, chosen.weights).view(x.shape) + module.bias


def _map(module: Any, x: Tensor, multiply: Callable[..., Tensor]) -> tuple[Tensor, Tensor, Chosen]:
    rows = x.reshape(-1, x.shape[-1])
    logits, chosen = _routed(module.router, rows)
    query = multiply("up_proj", rows, chosen.ids)
    return query.view(*x.shape[:-1], *query.shape[1:]), logits.float(), chosen


def _reduce(module: Any, expert_out: Tensor, chosen: Chosen, multiply: Callable[..., Tensor]) -> Tensor:
    rows = multiply("down_proj", expert_out.reshape(-1, *expert_out.shape[2:]), chosen.ids)
    out = ops.moe_weighted_reduce(rows, chosen.weights)
    return out.view(*expert_out.shape[:2], rows.shape[-1]) + module.bias


def _routed(router: Any, rows: Tensor) -> tuple[Tensor, Chosen]:
    """Logits of rows, and what they choose; a router that a hook sees runs its own code."""
    if is_observed(router):
        return _routed_by_itself(router, rows)
    logits = router.layer(rows)
    if runs_eager(router, rows):
        best, ids = logits.float().topk(router.top_k, 1)
        return logits, Chosen(best.softmax(1), ids)
    weights, ids = ops.moe_router(logits, router.top_k, scoring="softmax_after_topk", norm_topk_prob=False)
    return logits, Chosen(weights, ids)


def _routed_by_itself(router: Any, rows: Tensor) -> tuple[Tensor, Chosen]:
    """`_routed` by the router's own forward, and whatever hooks make of its result."""
    order, _, gates, sizes, logits = router(rows)
    every = torch.arange(len(sizes), device=rows.device)
    of_rows = every.repeat_interleave(torch.tensor(sizes, device=rows.device))
    ids = torch.empty_like(order).index_copy(0, order, of_rows).view(len(rows), -1)
    weights = torch.empty_like(gates).index_copy(0, order, gates).view(ids.shape)
    return logits, Chosen(weights.float(), ids)
