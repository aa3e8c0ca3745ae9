"""Blocks of two stacks of experts behind a router that groups rows by expert.

    weights, ids = softmax of the top k of router.layer(x)
    MLP:        out = sum over k of weights * output_linear[ids](act(gate) * up) + bias
    attention:  map(x) = input_linear[ids](x)
                reduce(y) = sum over k of weights * output_linear[ids](y) + bias

The router's own code asks the device how many rows each expert has. Blocks are recognised by a trial.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ....ops._activations import POINTWISE, Activation
from ....ops._checks import ACTIVATION_DTYPES, MAX_TOP_K
from ....ops.families.experts import _moe_experts
from ...basics.guards import holds, is_observed
from ...basics.interface import ExpertsForm, Stack
from ...basics.report import Done
from ...basics.state import NOTHING, STATE, state_of, with_methods
from ...modules.experts import activation_arguments, experts_forward, multiplied, require_heard, runs_eager
from ...modules.stacked_experts import Sizes, beside_replica, own_activation, shapes_below
from ...trials.draws import eager, normal
from ...trials.forms import first_form

ops = torch.ops.moe_mps

_STACKS = "input_linear", "output_linear"
_PATHS = tuple(f"{name}.weight" for name in _STACKS)
_SHAPE = 2, 3  # the shape of a trial's tokens
_OWN = ()  # in place of the fields of an activation: the module's own
_ROUTER = Done("moe_router", "moe_router (softmax_after_topk)")


class Chosen(NamedTuple):
    """Routing weights [T, K] in float32 and ids [T, K], in place of the own code's rows grouped by expert."""

    weights: Tensor
    ids: Tensor


def rewrite_mlp_experts(module: nn.Module) -> tuple[Callable, list[Done]] | None:
    """(forward, what runs) for an MLP of such experts, else None."""
    sizes = _sizes(module, 2)
    forms = [tuple(Activation(name)) for name in POINTWISE]
    found = None if sizes is None else first_form(module, forms, _begin_mlp, sizes)
    if found is None:
        return None
    state_of(module).formula = found
    return mlp_forward, [Done("_moe_experts", f"moe_experts ({found[0]})"), _ROUTER]


def rewrite_attention_experts(module: nn.Module) -> tuple[Callable, list[Done]] | None:
    """(forward, what runs) for the projections of such an attention, else None. No forward calls them."""
    sizes = _sizes(module, 1) if hasattr(type(module), "map") and hasattr(type(module), "reduce") else None
    if sizes is None or not first_form(module, (True,), _begin_attention, sizes):
        return None
    return no_forward, [Done("expert_mm"), Done("moe_weighted_reduce"), _ROUTER]


def recognise_mlp_experts(module: nn.Module) -> ExpertsForm | None:
    """Form of an MLP of such experts, for packed weights; None for any other module."""
    sizes = _sizes(module, 2)
    forms = [tuple(Activation(name)) for name in POINTWISE] + [_OWN] * len(own_activation(module))
    found = None if sizes is None else first_form(module, forms, _begin_mlp, sizes)
    if found is None:
        return None
    methods = (("forward", packed_forward),)
    activation = None if found == _OWN else Activation(*found)
    return _form(module, activation, "gate_up_proj", methods)._replace(act_fn="activation")


def recognise_attention_experts(module: nn.Module) -> ExpertsForm | None:
    """Form of the projections of such an attention, for packed weights; None for any other module."""
    sizes = _sizes(module, 1) if hasattr(type(module), "map") and hasattr(type(module), "reduce") else None
    if sizes is None or not first_form(module, (True,), _begin_attention, sizes):
        return None
    return _form(module, None, "up_proj", (("map", packed_map), ("reduce", packed_reduce)))


def _form(module: Any, activation: Activation | None, first: str, methods: tuple) -> ExpertsForm:
    shapes = shapes_below(module, ("bias", *_PATHS))
    assert shapes is not None
    experts = dict(shapes)[_PATHS[0]][0]
    stacks = tuple((name, Stack((path,))) for name, path in zip((first, "down_proj"), _PATHS, strict=True))
    runs, heard = (_ROUTER,), ("router", "router.layer")
    return ExpertsForm(activation, False, False, False, experts, shapes, stacks, methods, runs, heard=heard)


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


def _begin_mlp(module: nn.Module, sizes: Sizes) -> Callable[[tuple], bool]:
    return beside_replica(module, sizes, _mlp, _experts(module, sizes))


def _begin_attention(module: nn.Module, sizes: Sizes) -> Callable[[bool], bool]:
    return beside_replica(module, sizes, _both, _experts(module, sizes), _inputs, _both_eager)


def _experts(module: Any, sizes: Sizes) -> int:
    return min(sizes.experts, module.router.top_k + 1)


def _inputs(replica: Any, small: Sizes) -> tuple[Tensor, Tensor]:
    """Inputs of `map` and of `reduce`."""
    return normal(*_SHAPE, small.hidden), normal(*_SHAPE, replica.router.top_k, small.inner)


def _both(_: bool, replica: nn.Module, x: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    query, logits, chosen = _map(replica, x)
    return query, logits, _reduce(replica, slots, chosen)


def _both_eager(replica: Any, x: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    query, logits, topology = eager(replica.map)(x)
    return query, logits, eager(replica.reduce)(slots, topology)


# --- what runs


def _route(module: Any, x: Tensor) -> tuple[Tensor, Chosen]:
    """Logits of rows, and what they choose."""
    logits = module.router.layer(x)
    weights, ids = ops.moe_router(
        logits, module.router.top_k, scoring="softmax_after_topk", norm_topk_prob=False
    )
    return logits, Chosen(weights, ids)


def _mlp(activation: tuple, module: Any, x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    _, chosen = _route(module, rows)
    first, second = module.input_linear.weight, module.output_linear.weight
    if activation == _OWN:
        gate, up = ops.expert_mm(rows, chosen.ids, first).chunk(2, -1)
        slots = ops.expert_mm(module.activation(gate) * up, chosen.ids, second)
        out = ops.moe_weighted_reduce(slots, chosen.weights)
    else:
        out = _moe_experts(rows, *chosen, first, second, **activation_arguments(activation))
    return out.view(x.shape) + module.bias


def _map(module: Any, x: Tensor) -> tuple[Tensor, Tensor, Chosen]:
    rows = x.reshape(-1, x.shape[-1])
    logits, chosen = _route(module, rows)
    query = ops.expert_mm(rows, chosen.ids, module.input_linear.weight)
    return query.view(*x.shape[:-1], *query.shape[1:]), logits.float(), chosen


def _reduce(module: Any, slots: Tensor, chosen: Chosen) -> Tensor:
    rows = ops.expert_mm(slots.reshape(-1, *slots.shape[2:]), chosen.ids, module.output_linear.weight)
    return ops.moe_weighted_reduce(rows, chosen.weights).view(*slots.shape[:2], rows.shape[-1]) + module.bias


def _takes(module: Any, x: Tensor, rank: int = 3) -> bool:
    """True if the operators take these inputs."""
    parts = [module._modules[name] for name in _STACKS]
    dtypes = {x.dtype, *(part.weight.dtype for part in parts)}
    devices = {x.device, *(part.weight.device for part in parts)}
    return x.dim() == rank and len(dtypes) == len(devices) == 1 and x.dtype in ACTIVATION_DTYPES


def mlp_forward(module: nn.Module, layer_input: Tensor) -> Any:
    """The forward of an MLP of such experts."""
    if not _takes(module, layer_input):
        return NotImplemented
    return _mlp(module.__dict__[STATE].formula, module, layer_input)


def _runs(module: nn.Module, x: Tensor, rank: int) -> bool:
    """True if the operators compute a call of a method."""
    guards = module.__dict__.get(STATE, NOTHING).guards
    return guards is not None and holds(module) and not runs_eager(module, x) and _takes(module, x, rank)


def _mapped(own: Callable) -> Callable:
    def map(self: nn.Module, layer_input: Tensor) -> Any:
        return _map(self, layer_input) if _runs(self, layer_input, 3) else own(self, layer_input)

    return map


def _reduced(own: Callable) -> Callable:
    def reduce(self: Any, layer_input: Tensor, topo_info: Any) -> Any:
        if not isinstance(topo_info, Chosen):
            return own(self, layer_input, topo_info)
        if _runs(self, layer_input, 4):
            return _reduce(self, layer_input, topo_info)
        weights, ids = topo_info  # mapped by operators: only the rows need a gradient, or have another dtype
        ids, order = ids.flatten().sort()
        sizes = ids.bincount(minlength=self.num_experts).tolist()
        gates = weights.flatten()[order].to(layer_input.dtype)
        return own(self, layer_input, (order, order // weights.shape[1], gates, sizes))

    return reduce


@with_methods(map=_mapped, reduce=_reduced)
def no_forward(module: nn.Module, layer_input: Tensor) -> Any:
    """The forward of attention's projections: the own one, which raises an error."""
    return NotImplemented


# --- what runs with the stacks of transformers' interface


def _routed(module: Any, rows: Tensor) -> tuple[Tensor, Chosen]:
    """Logits of rows, and what they choose; a router that a hook sees runs its own code."""
    router = module.router
    if is_observed(router):
        return _routed_by_itself(router, rows)
    if not torch.is_grad_enabled():
        return _route(module, rows)
    logits = router.layer(rows)
    best, ids = logits.float().topk(router.top_k, 1)
    return logits, Chosen(best.softmax(1), ids)


def _routed_by_itself(router: Any, rows: Tensor) -> tuple[Tensor, Chosen]:
    """`_routed` by the router's own forward, and whatever hooks make of its result."""
    order, _, gates, sizes, logits = router(rows)
    every = torch.arange(len(sizes), device=rows.device)
    of_rows = every.repeat_interleave(torch.tensor(sizes, device=rows.device))
    ids = torch.empty_like(order).index_copy(0, order, of_rows).view(len(rows), -1)
    weights = torch.empty_like(gates).index_copy(0, order, gates).view(ids.shape)
    return logits, Chosen(weights.float(), ids)


def packed_forward(self: Any, layer_input: Tensor) -> Tensor:
    """The forward of such an MLP."""
    rows = layer_input.reshape(-1, layer_input.shape[-1])
    require_heard(self)
    _, chosen = _routed(self, rows)
    return experts_forward(self, rows, chosen.ids, chosen.weights).view(layer_input.shape) + self.bias


def packed_map(self: Any, layer_input: Tensor) -> tuple[Tensor, Tensor, Chosen]:
    """The `map` of such projections of an attention."""
    rows = layer_input.reshape(-1, layer_input.shape[-1])
    require_heard(self)
    logits, chosen = _routed(self, rows)
    query = multiplied(self, "up_proj", rows, chosen.ids)
    return query.view(*layer_input.shape[:-1], *query.shape[1:]), logits.float(), chosen


def packed_reduce(self: Any, layer_input: Tensor, topo_info: Chosen) -> Tensor:
    """The `reduce` of such projections of an attention."""
    slots = layer_input.reshape(-1, *layer_input.shape[2:])
    rows = multiplied(self, "down_proj", slots, topo_info.ids)
    out = ops.moe_weighted_reduce(rows, topo_info.weights)
    return out.view(*layer_input.shape[:2], rows.shape[-1]) + self.bias
