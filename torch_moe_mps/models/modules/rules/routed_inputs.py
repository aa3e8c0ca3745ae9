"""Blocks whose experts take rows for each expert, and whose routing weights multiply the input.

    scores, ids = the top k of scoring(linear(x, W))
    out = sum over k of experts[ids](x * scores) + shared(x)

The model's code computes each expert on each token, on zeros if a token did not choose it.
"""

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...basics.experts import Experts
from ...basics.interface import experts_in, is_quantized
from ...basics.report import Done
from ...basics.state import STATE, original_class, state_of
from ...trials.forms import first_form
from ..experts import described, experts_forward
from ..stacked_experts import beside_replica, dense_shapes, sizes_of, tried_form

ops = torch.ops.moe_mps

_SCORINGS = "sigmoid", "softmax"


class RoutedInputs(NamedTuple):
    """Form of such a block.

    Attributes:
        experts, router, shared: names of the modules inside; None without a shared expert.
        top_k, scoring: of the router.
        gives_logits: whether the result is the sum and the logits.
        keeps_shape: whether the sum has the shape of the input; else it is [T, H].
    """

    experts: str
    router: str
    shared: str | None
    top_k: int
    scoring: str
    gives_logits: bool
    keeps_shape: bool


def rewrite_routed_inputs(module: nn.Module) -> tuple[Callable, list[Done]] | None:
    """(forward, what runs) for such a block, else None."""
    children = {name: child for name, child in module._modules.items() if child is not None}
    known = {name: each for name, child in children.items() if (each := experts_in(child)) is not None}
    rows = [name for name, each in known.items() if each.takes_rows]
    if len(rows) != 1 or len(inspect.signature(original_class(module).forward).parameters) != 2:
        return None
    experts, form = children[rows[0]], known[rows[0]]
    sizes = sizes_of(dense_shapes(experts), form.projections[0], form.is_transposed)
    if sizes is None:
        return None
    router = "weight", (sizes.experts, sizes.hidden)
    routers = [name for name, child in children.items() if router in dense_shapes(child)]
    shared = [name for name in children if name not in (*rows, *routers)]
    if len(routers) != 1 or len(shared) > 1:
        return None
    numbers = tuple(sorted(_numbers(module, sizes.experts) | _numbers(children[routers[0]], sizes.experts)))
    options = itertools.product(numbers, _SCORINGS, (True, False), (False, True))
    forms = [RoutedInputs(rows[0], routers[0], next(iter(shared), None), *each) for each in options]
    found = first_form(module, forms, _begin, sizes, form.eager, max(numbers, default=0))
    if found is None:
        return None
    state_of(module).formula = found
    return routed_inputs_forward, [
        Done("moe_router", f"moe_router ({found.scoring})"),
        *described(experts),
    ]


def _numbers(module: nn.Module, experts: int) -> set[int]:
    """Attributes that may be the number of chosen experts."""
    return {value for value in vars(module).values() if type(value) is int and 1 <= value < experts}


def _begin(module: nn.Module, sizes: Any, eager: Experts, most: int) -> Callable[[RoutedInputs], bool]:
    def ours(found: RoutedInputs, replica: nn.Module, x: Tensor) -> Any:
        experts: Any = getattr(replica, found.experts)
        form = eager._replace(number=len(experts.down_proj))
        return _computed(replica, found, x, functools.partial(tried_form, form, experts))

    return beside_replica(module, sizes, ours, min(most + 1, 6))


def _computed(module: Any, form: RoutedInputs, x: Tensor, experts: Callable[..., Tensor]) -> Any:
    """The result of a block of this form: the sum of the experts, or the sum and the router's logits."""
    shape, x = x.shape, x.reshape(-1, x.shape[-1])
    router = getattr(module, form.router)
    logits = F.linear(x, router.weight, router.bias)
    scores, ids = ops.moe_router(logits, form.top_k, scoring=form.scoring, norm_topk_prob=False)
    rows = (x.unsqueeze(1) * scores.to(x.dtype).unsqueeze(-1)).view(-1, x.shape[1])
    ids = ids.view(-1, 1)
    out = experts(rows, ids, torch.ones_like(ids, dtype=x.dtype))
    if form.top_k > 1:
        out = out.view(-1, form.top_k, x.shape[1]).sum(1)
    if form.shared is not None:
        out = getattr(module, form.shared)(x) + out
    out = out.view(shape) if form.keeps_shape else out
    return (out, logits) if form.gives_logits else out


def routed_inputs_forward(module: nn.Module, x: Tensor) -> Any:
    """The forward of such a block."""
    form: RoutedInputs = module.__dict__[STATE].formula
    experts: Any = getattr(module, form.experts)
    router: Any = getattr(module, form.router)
    takes = is_quantized(experts) or x.dtype == experts.down_proj.dtype
    if not takes or x.dtype != router.weight.dtype:
        return NotImplemented
    return _computed(module, form, x, lambda *given: experts_forward(experts, *given))
