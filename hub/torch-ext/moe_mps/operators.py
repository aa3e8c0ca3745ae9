# SPDX-License-Identifier: BSD-3-Clause
"""Operators by name, behind the checks that their declarations make. Arguments are those of the schemas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._checks import ID_DTYPES, MAX_TOP_K, Check, dtype_name
from ._declared import Declared
from ._ops import add_op_namespace_prefix, ops
from ._summands import ExpertSum
from ._tables import DECLARED

_PLAIN = (Tensor, torch.nn.Parameter)  # other types may stand for tensors
MOST = 4096  # signatures of an operator that are remembered


def _of_routing(logits: Tensor, top_k: int, ids_dtype: str, **_: Any) -> tuple[Tensor, Tensor]:
    shape = (*logits.shape[:-1], top_k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=ID_DTYPES[ids_dtype])


def _of_residual_norm(residual: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    return residual.new_empty(residual.shape), residual.new_empty(residual.shape)


def _of_matrices(x: Tensor, weight: Tensor, topk_ids: Tensor, transposed: bool, **_: Any) -> Tensor:
    return x.new_empty((*topk_ids.shape, weight.shape[2 if transposed else 1]))


def _of_activation(x: Tensor, gated: bool, **_: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2 if gated else x.shape[-1]))


def _of_rope(q: Tensor, k: Tensor, **_: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.transpose(1, 2).shape) for x in (q, k))


# Results that a declaration does not have, by their shapes and dtypes.
_RESULTS: dict[str, Callable[..., Any]] = {
    "fused_moe_routing": _of_routing,
    "fused_residual_norm": _of_residual_norm,
    "expert_mm": _of_matrices,
    "expert_activation": _of_activation,
    "rope": _of_rope,
}


def operator(name: str) -> Callable[..., Any]:
    """The function of an operator. It raises a one-line ValueError for an argument that does not fit."""
    line, allowed, dependences = DECLARED[name]
    declared, overload = Declared(line, allowed, dependences), getattr(ops, name).default
    types = {each.name: str(each.type) for each in overload._schema.arguments}
    defaults = {
        each.name: each.default_value for each in overload._schema.arguments if each.has_default_value()
    }
    written = [argument for argument in types if argument.endswith("_")]
    good: set[tuple[Any, ...]] = set()  # dtypes and shapes that fit

    def checked(given: dict[str, Any]) -> Check:
        check = Check(name)
        check.values(types, given)
        declared.check(check, given)
        if "top_k" in given:
            most = min(check.sizes["E"], MAX_TOP_K)
            check.between("top_k", given["top_k"], 1, most, f", the smaller of E and {MAX_TOP_K}")
        if "shared_out" in given:
            ExpertSum(**{field: given[field] for field in ExpertSum._fields}).check(check)
        check.same_device(**{each: given[each] for each, kind in types.items() if "Tensor" in kind})
        return check

    @torch.library.register_fake(add_op_namespace_prefix(name))
    def fake(*args: Any, **kwargs: Any) -> Any:
        given = {**defaults, **dict(zip(types, args)), **kwargs}
        check = checked(given)
        if not overload._schema.returns:
            return None
        return _RESULTS[name](**given) if name in _RESULTS else declared.outputs(check, given)

    def call(*args: Any, **kwargs: Any) -> Any:
        if isinstance(kwargs.get("ids_dtype"), torch.dtype):
            kwargs["ids_dtype"] = dtype_name(kwargs["ids_dtype"])
        given = {**defaults, **dict(zip(types, args)), **kwargs}
        if given.keys() != types.keys() or len(args) > len(types):
            raise TypeError(f"moe_mps::{name}: arguments must be {', '.join(types)}")
        tensors = [each for each in given.values() if isinstance(each, Tensor)]
        if torch.compiler.is_compiling() or not all(type(each) in _PLAIN for each in tensors):
            # The fake operator checks.
            out = overload(**given)
            return given[written[0]] if out is None else out
        signature = tuple(
            (each.dtype, each.shape, each.device) if isinstance(each, Tensor) else each
            for each in given.values()
        )
        if signature not in good:
            checked(given)
            if len(good) >= MOST:
                good.clear()
            good.add(signature)
        if written:
            check = Check(name)
            for argument in written:
                if given[argument] is not None:
                    check.written(argument, given[argument])
            check.all_apart(written, given)
        out = overload(**given)
        return given[written[0]] if out is None else out

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
# What the layers call beside these.
rms_norm = operator("rms_norm")
rms_norm_gated = operator("rms_norm_gated")
moe_router = operator("moe_router")
expert_mm = operator("expert_mm")
expert_activation = operator("expert_activation")
rope = operator("rope")
causal_conv1d_update_ = operator("causal_conv1d_update_")
gated_delta_rule_ = operator("gated_delta_rule_")
