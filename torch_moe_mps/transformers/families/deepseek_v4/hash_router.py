"""Routers whose choice a table has for each token, recognised by what they run."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ....ops._checks import ACTIVATION_DTYPES, ID_DTYPES
from ....ops.routing import OF_EACH
from ...basics.report import Done
from ...basics.state import STATE, Unsupported, original_class, state_of
from ...graphs.nodes import tensor_of
from ...graphs.patterns import Bound, linear_of, match, uncast
from ...modules.rules.router import SEQUENCES, is_routing
from ...modules.rules.selection import SCORES, UNKNOWN, before_scaling, rows_of
from ...modules.traced import Input, Sizes, everywhere, path_of, remembered, trace

ops = torch.ops.moe_mps

_HALF = torch.bfloat16  # of hidden states in a trace, so that float32 in a result is the router's


class HashRouter(NamedTuple):
    """Formula of a router of hidden states and tokens.

    Attributes:
        inputs: the names of the two.
        weight, table: the names of a parameter and a buffer.
        options: of moe_hash_router.
        weights: the dtype of its second result; None for that of the hidden states.
    """

    inputs: tuple[str, str]
    weight: str
    table: str
    options: dict[str, Any]
    weights: torch.dtype | None


def hash_router_forward(module: nn.Module, *args: Any, **named: Any) -> Any:
    """The forward of a rewritten router: logits, weights and ids."""
    router: HashRouter = module.__dict__[STATE].formula
    given: dict[str, Any] = dict(zip(router.inputs, args, strict=False)) | named
    is_bound = len(args) + len(named) == 2 and given.keys() == {*router.inputs}
    tensors: Any = [module._parameters[router.weight], module._buffers[router.table]]
    tensors += [given[name] if is_bound else None for name in router.inputs]
    weight, table, x, tokens = tensors
    fits = (
        all(isinstance(each, Tensor) for each in tensors)
        and x.dtype == weight.dtype
        and x.dtype in ACTIVATION_DTYPES
        and {tokens.dtype, table.dtype} <= {*ID_DTYPES}
        and x.device == tokens.device == weight.device == table.device
        and x.shape[:-1] == tokens.shape
    )
    if not fits:
        return original_class(module).forward(module, *args, **named)
    x = x.reshape(-1, x.shape[-1])
    weights, ids = ops.moe_hash_router(x, weight, table, tokens.reshape(-1), **router.options)
    return F.linear(x, weight), weights.to(router.weights or x.dtype), ids.long()


def rewrite_hash_router(module: nn.Module) -> tuple[Callable, list[Done]] | None:
    """(forward, what it runs) for a router whose choice a table has, else None."""
    tables = [each for each in module._buffers.values() if each is not None and each.dim() == 2]
    matrices = [each for each in module._parameters.values() if each is not None and each.dim() == 2]
    if len(tables) != 1 or len(matrices) != 1 or tables[0].dtype not in ID_DTYPES:
        return None
    router = hash_router_of(module)
    if router is None:
        return None
    state_of(module).formula = router
    return hash_router_forward, [Done("moe_hash_router", f"moe_hash_router ({router.options['scoring']})")]


@remembered
def hash_router_of(module: nn.Module) -> HashRouter | None:
    _, *parameters = inspect.signature(original_class(module).forward).parameters.values()
    names = [each.name for each in parameters if each.kind == each.POSITIONAL_OR_KEYWORD]
    (matrix,) = (each for each in module._parameters.values() if each is not None and each.dim() == 2)
    if len(names) != 2:
        return None
    return everywhere(functools.partial(_traced, module, names, matrix.shape[1]), SEQUENCES, (_HALF,))


def _traced(
    module: nn.Module, names: list[str], width: int, sizes: Sizes, dtype: torch.dtype
) -> HashRouter | None:
    hidden, tokens = Input((*sizes, width), dtype), Input(sizes, torch.int64)
    traced = trace(module, hidden, tokens, weights=_HALF)
    if traced is None or not is_routing(traced.result):
        return None
    first, weights, ids = traced.result
    try:
        found, options = _lookup_of(weights, ids)
    except Unsupported:
        return None
    linear = linear_of(found["LOGITS"])
    x, chosen = traced.inputs
    weight, table = (path_of(linear[1]) if linear else None), path_of(found["TABLE"])
    is_plain = linear is not None and linear[2] is None and uncast(linear[0]) is x
    if not is_plain or uncast(first) is not uncast(found["LOGITS"]) or uncast(found["TOKENS"]) is not chosen:
        return None
    if weight not in module._parameters or table not in module._buffers:
        return None
    if tensor_of(found["LOGITS"]).dtype != _HALF:
        return None
    dtype = tensor_of(weights).dtype
    return HashRouter((names[0], names[1]), weight, table, options, None if dtype == _HALF else dtype)


def _lookup_of(weights: fx.Node, ids: fx.Node) -> tuple[Bound, dict[str, Any]]:
    """LOGITS, TABLE and TOKENS of which moe_hash_router makes these results, and its options.

    Raises Unsupported if they are none.
    """
    table = match("index(TABLE, [TOKENS])", ids)
    chosen, options = before_scaling(weights)
    found = match("gather(FROM, -1, IDS)", rows_of(chosen))
    options["sum_eps"] = options.pop("norm_eps", 0.0)
    if table and found and uncast(found["IDS"]) is uncast(ids) and not options.pop("norm_min", 0.0):
        for name in OF_EACH:
            scored = match(SCORES[name], found["FROM"])
            if scored is not None:
                return table | {"LOGITS": scored["L"]}, {"scoring": name, **options}
    raise Unsupported(UNKNOWN)
