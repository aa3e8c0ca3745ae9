"""Operators by name, behind the checks that their declarations make. Arguments are those of the schemas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._checks import Check
from ._declared import Declared
from ._ops import ops
from ._tables import DECLARED


def operator(name: str) -> Callable[..., Any]:
    """The function of an operator. It raises a one-line ValueError for an argument that does not fit."""
    line, allowed, dependences = DECLARED[name]
    declared, overload = Declared(line, allowed, dependences), getattr(ops, name).default
    arguments = overload._schema.arguments
    names = [argument.name for argument in arguments]
    defaults = {each.name: each.default_value for each in arguments if each.has_default_value()}

    def call(*args: Any, **kwargs: Any) -> Any:
        given = {**defaults, **dict(zip(names, args)), **kwargs}
        if given.keys() != set(names) or len(args) > len(names):
            raise TypeError(f"moe_mps::{name}: arguments must be {', '.join(names)}")
        check = Check(name)
        for argument in arguments:
            if given[argument.name] is None and str(argument.type) == "Tensor":
                check.fail(argument.name, "a tensor", None)
        declared.check(check, given)
        if "top_k" in given:
            check.between("top_k", given["top_k"], 1, min(check.sizes["E"], 64), ", the smaller of E and 64")
        tensors = {each.name: given[each.name] for each in arguments if "Tensor" in str(each.type)}
        check.same_device(**tensors)
        return overload(**given)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"{overload._schema}".partition("::")[2]
    return call


silu_mul_stacked = operator("silu_mul_stacked")
weighted_sum_stacked = operator("weighted_sum_stacked")
weighted_sum_residual_stacked_ = operator("weighted_sum_residual_stacked_")
weighted_sum_residual_norm_stacked_ = operator("weighted_sum_residual_norm_stacked_")
moe_weighted_reduce = operator("moe_weighted_reduce")
fused_norm_add = operator("fused_norm_add")
fused_norm_add_scalar = operator("fused_norm_add_scalar")
fused_residual_norm = operator("fused_residual_norm")
fused_residual_norm_scalar = operator("fused_residual_norm_scalar")
fused_moe_routing = operator("fused_moe_routing")
moe_router_topk_softmax = operator("moe_router_topk_softmax")
moe_gate = operator("moe_gate")
moe_compute_ids_tpe = operator("moe_compute_ids_tpe")
