"""Routers: modules that give logits, weights and ids, recognised by the operators that they run.

    logits = scale * linear(x, weight, bias)            in float32, or in the dtype of x
    weights, ids = moe_router(logits)

A router keeps its interface: its results have the dtypes that the model's code would give them.
"""

import functools
import inspect
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ....ops._checks import ACTIVATION_DTYPES
from ...basics.guards import is_observed
from ...basics.report import Done
from ...basics.state import STATE, Unsupported, original_class, state_of
from ...graphs.nodes import aten, is_call, tensor_of
from ...graphs.patterns import before_widening, linear_of, match, uncast
from ..traced import PATH, SIZES, Input, Sizes, Traced, everywhere, remembered, trace
from .selection import UNKNOWN, selection_of

ops = torch.ops.moe_mps

_DTYPES = frozenset(ACTIVATION_DTYPES)
# Shapes that routers are traced with, where they take sequences of tokens and where they take tokens.
_SHAPES: dict[int, tuple[Sizes, ...]] = {3: (SIZES[2], (1, 1)), 2: (SIZES[0], (1,))}
_HALF = torch.bfloat16  # dtype of hidden states in a trace, so that float32 in a result is the router's


class RouterFormula(NamedTuple):
    """Formula of a router. Results in the dtype of the hidden states have None in place of it.

    Attributes:
        inputs: the names of the arguments, the hidden states first.
        ranks: dimensions that hidden states may have; more than 2 become rows.
        in_float32: whether the matmul is, whatever dtypes the hidden states and the weight have.
        weight, bias: their names in the module.
        scale: multiplies the product.
        choice_bias: the name of an argument, or of a tensor in the module.
        options: of moe_router.
        logits, weights: the dtypes of these results.
        parts: the modules inside whose tensors are read.
    """

    inputs: tuple[str, ...]
    ranks: tuple[int, ...]
    in_float32: bool
    weight: str
    bias: str | None
    scale: float
    choice_bias: str | None
    options: dict[str, Any]
    logits: torch.dtype | None
    weights: torch.dtype | None
    parts: tuple[str, ...]


def router_forward(module: nn.Module, *args: Any, **named: Any) -> Any:
    """The forward of a rewritten router."""
    router: RouterFormula = module.__dict__[STATE].formula
    passed = _passed(module, router, args, named)
    if passed is None:
        return NotImplemented
    x, weight, choice_bias = passed
    x = x.reshape(-1, weight.shape[1]) if x.dim() > 2 else x
    bias = None if router.bias is None else attrgetter(router.bias)(module)
    if router.in_float32 and not x.dtype == weight.dtype == torch.float32:
        logits = ops.router_logits(x, weight, bias)
    else:
        logits = F.linear(x, weight, bias)
    if router.scale != 1.0:
        logits = logits * router.scale
    choice_bias = None if choice_bias is None else choice_bias.flatten()
    weights, ids = ops.moe_router(logits, correction_bias=choice_bias, **router.options)
    if logits.dtype != (router.logits or x.dtype):
        logits = logits.to(router.logits or x.dtype)
    return logits, weights.to(router.weights or x.dtype), ids.long()


def _passed(
    module: nn.Module, router: RouterFormula, args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[Tensor, Tensor, Any] | None:
    """Hidden states, weight and bias of the choice; None for calls that the router does not take."""
    if len(args) > len(router.inputs) or (named and named.keys() - {*router.inputs}):
        return None
    arguments = dict(zip(router.inputs, args, strict=False)) | named
    x: Any = arguments.get(router.inputs[0])
    name, weight = router.choice_bias, attrgetter(router.weight)(module)
    choice_bias = arguments.get(name) if name in router.inputs else name and attrgetter(name)(module)
    fits = (
        isinstance(x, Tensor)
        and _takes(router, x, weight)
        and (choice_bias is None) == (name is None)
        and not (router.parts and is_observed(*map(module.get_submodule, router.parts)))
    )
    return (x, weight, choice_bias) if fits else None


def _takes(router: RouterFormula, x: Tensor, weight: Tensor) -> bool:
    """True if a router has hidden states like these, with this weight."""
    return (
        x.dim() in router.ranks
        and x.device == weight.device
        and (router.in_float32 or x.dtype == weight.dtype)
        and {x.dtype, weight.dtype} <= _DTYPES
    )


def rewrite_router(module: nn.Module) -> tuple[Callable, list[Done]] | None:
    """(forward, what runs) for a router, else None.

    Raises Unsupported with the reason why moe_router does not compute what a router does.
    """
    router = None if _matrix(module) is None else router_of(module)
    if router is None:
        return None
    if isinstance(router, str):
        raise Unsupported(router)
    state_of(module).formula = router
    done = [Done("moe_router", f"moe_router ({router.options['scoring']})")]
    return router_forward, [*done, Done("router_logits")] if router.in_float32 else done


def _matrix(module: nn.Module) -> Tensor | None:
    """The only matrix of a module: a router has one row for each expert."""
    result = [
        parameter for parameter in module.parameters() if parameter.dim() == 2 and parameter.shape[0] > 1
    ]
    return result[0] if len(result) == 1 else None


@remembered
def router_of(module: nn.Module) -> RouterFormula | str | None:
    """Formula of a router, or why this file does not know it; None for a module that is no router."""
    matrix = _matrix(module)
    assert matrix is not None
    experts, width = matrix.shape
    _, *parameters = inspect.signature(original_class(module).forward).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind == parameter.POSITIONAL_OR_KEYWORD]

    def ask(weights: torch.dtype | None, sizes: Sizes, dtype: torch.dtype) -> RouterFormula | str | None:
        others = [Input((experts,), _HALF)] * (len(names) - 1)
        traced = trace(module, Input((*sizes, width), dtype), *others, weights=weights)
        if traced is None or not _is_routing(traced.result):
            return None
        try:
            return _router(traced, names)
        except Unsupported as unsupported:
            return str(unsupported)

    reason = None
    for weights in (_HALF, None):  # None for a router whose matrix is in float32 whatever the model is in
        found: dict[int, Any] = {
            rank: everywhere(functools.partial(ask, weights), shapes, (_HALF,))
            for rank, shapes in _SHAPES.items()
        }
        routers = {rank: router for rank, router in found.items() if isinstance(router, RouterFormula)}
        for router in routers.values():
            return router._replace(ranks=tuple(rank for rank in routers if routers[rank] == router))
        reason = next((reason for reason in found.values() if isinstance(reason, str)), reason)
    return reason


def _is_routing(result: Any) -> bool:
    """True if a module gives rows of logits, weights and ids."""
    if not isinstance(result, tuple) or len(result) != 3 or not all(isinstance(r, fx.Node) for r in result):
        return False
    return all(tensor_of(item).dim() == 2 for item in result) and tensor_of(result[2]).dtype == torch.int64


def _router(traced: Traced, names: list[str]) -> RouterFormula:
    """Formula of a recorded router. Raises Unsupported if this file does not know it."""
    inputs = dict(zip(traced.inputs, names, strict=True))
    first, weights, ids = traced.result
    selection = selection_of(weights, ids)
    product, scale, linear = _product(first, before_widening(selection.logits))
    in_float32 = _dtype(product) is not None

    def name_of(value: fx.Node | None) -> str | None:
        source = before_widening(value)
        name = source and (inputs.get(source) or source.meta.get(PATH))
        if source is not None and name is None:
            raise Unsupported(UNKNOWN)
        return name

    weight, bias, choice_bias = map(name_of, (linear[1], linear[2], selection.bias))
    is_own = uncast(linear[0]) is traced.inputs[0] and choice_bias != names[0]
    if weight is None or not is_own or tensor_of(linear[0]).dtype != tensor_of(linear[1]).dtype:
        raise Unsupported(UNKNOWN)
    names_of_three = [name for name in (weight, bias, choice_bias) if name]
    return RouterFormula(
        inputs=tuple(names),
        ranks=(),
        in_float32=in_float32,
        weight=weight,
        bias=bias,
        scale=scale,
        choice_bias=choice_bias,
        options=selection.options,
        logits=_dtype(first),
        weights=_dtype(weights),
        parts=tuple({name.rpartition(".")[0] for name in names_of_three} - {""}),
    )


def _product(first: fx.Node, logits: fx.Node) -> tuple[fx.Node, float, Any]:
    """The matmul of logits, its factor, and its (x, weight, bias); `first` are the logits."""
    scaled = match("PRODUCT * SCALE", logits) or {"PRODUCT": logits, "SCALE": 1.0}
    product, scale = scaled["PRODUCT"], scaled["SCALE"]
    linear = linear_of(product)
    is_first = first is logits or (is_call(first, aten._to_copy) and first.args[0] is logits)
    if linear is None or not is_first or not isinstance(scale, (int, float)):
        raise Unsupported(UNKNOWN)
    return product, scale, linear


def _dtype(value: fx.Node) -> torch.dtype | None:
    """dtype of a value, None if the hidden states have the same."""
    dtype = tensor_of(value).dtype
    return None if dtype == _HALF else dtype
