"""Routers: the formulas that `moe_router` computes, as one table, and their place in a router's program.

A router keeps its interface: the logits are computed by its own code, the selection by the operator, and the
results are cast to what the model's code would give (weights in its dtype, ids as int64).
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ....ops._checks import MAX_EXPERTS, MAX_TOP_K
from ...experts import may_be_fused, normed
from ...interface import is_experts
from ..program.building import add_option, helper, item
from ..program.formulas import Node, Reader, casts_to_float32, evaluate, is_number, named
from ..program.patterns import match
from ..program.programs import Program, Unsupported, name_of
from ..program.straightening import straighten
from ..runtime import called
from .options import NORM, RAW, forward_of

ops = torch.ops.moe_mps

_SCORES = {"softmax": "softmax(L)", "sigmoid": "sigmoid(L)", "sqrtsoftplus": "sqrtsoftplus(L)"}
# Score of a group, and what experts outside of the best groups count as.
_GROUPS = {
    "top2_sum": "sum(topk(grouped({choice}, G), 2)[0])",
    "max": "amax(grouped({choice}, G))",
}
_MASKED = "masked_fill({choice}, not_(scatter_(zeros_like({score}), topk({score}, T)[1], 1)), FILL)"


@dataclass(frozen=True)
class Selection:
    """A way to choose experts: the formulas of ids and weights, and the operator's arguments for them."""

    ids: str
    weights: tuple[str, ...]
    arguments: Mapping[str, Any]


def _table() -> Iterator[Selection]:
    for scoring, scores in _SCORES.items():
        for bias in ("", " + B"):
            choice = scores + bias
            plain = (f"gather({scores}, topk({choice}, K)[1])", f"topk({choice}, K)[0]")
            yield Selection(f"topk({choice}, K)[1]", plain[: 1 if bias else 2], {"scoring": scoring})
            for name, form in _GROUPS.items():
                masked = _MASKED.format(choice=choice, score=form.format(choice=choice))
                weights = (f"gather({scores}, topk({masked}, K)[1])", f"topk({masked}, K)[0]")
                arguments = {"scoring": scoring, "group_score": name}
                yield Selection(f"topk({masked}, K)[1]", weights[: 1 if bias else 2], arguments)
    after = ("softmax(topk(L, K)[0])", "softmax(gather(L, topk(L, K)[1]))")
    yield Selection("topk(L, K)[1]", after, {"scoring": "softmax_after_topk"})
    yield Selection("topk(L, K)[1]", ("sigmoid(topk(L, K)[0])",), {"scoring": "sigmoid"})
    by_logits = ("sigmoid(gather(L, topk(L + B, K)[1]))", "gather(sigmoid(L), topk(L + B, K)[1])")
    yield Selection("topk(L + B, K)[1]", by_logits, {"scoring": "sigmoid", "bias_on_logits": True})


SELECTIONS = tuple(_table())
# What follows the selected scores, outermost first: a factor, then the division by the sum.
_FACTORS = ("W * SCALE", "W / DIVISOR")
_NORMALISATIONS = ("W / sum(W)", "W / (sum(W) + EPS)", "W / clamp(sum(W), MIN)", "W / clamp_min(sum(W), MIN)")


# Arguments of moe_router by name: expressions of the program, None for a value that it has no expression of.
Arguments: TypeAlias = dict[str, ast.expr | None]


@dataclass
class RouterFormula:
    """A router's selection as arguments of moe_router: expressions of the program, by name.

    `in_float32`: the model computes the weights in float32, else in the dtype of the logits.
    """

    logits: ast.expr
    top_k: ast.expr
    scoring: str
    in_float32: bool
    arguments: dict[str, ast.expr]


def router_formula(module: nn.Module, weights: Node, ids: Node) -> RouterFormula | str:
    """The formula behind a router's results, or the reason why it has none here."""
    arguments: Arguments = {}
    scored = _peel_factors(module, weights.peel(), arguments)
    for selection in SELECTIONS:
        bound = match(selection.ids, ids)
        found = bound and next(filter(None, (match(w, scored, bound) for w in selection.weights)), None)
        if not found:
            continue
        arguments |= {name: ast.Constant(value) for name, value in selection.arguments.items()}
        reason = _complete(module, found, selection.arguments["scoring"], arguments)
        if reason is not None:
            return reason
        scores = named(found["L"])
        logits, top_k = scores.source, found["K"].source
        known = {name: value for name, value in arguments.items() if value is not None}
        if logits is None or top_k is None or len(known) < len(arguments):
            return "its formula is spread over several modules"
        in_float32 = casts_to_float32(weights.peel(), scores)
        return RouterFormula(logits, top_k, selection.arguments["scoring"], in_float32, known)
    return "its formula is not one of moe_router's"


def _peel_factors(module: nn.Module, weights: Node, arguments: Arguments) -> Node:
    """Strips scaling and normalisation off the weights and notes them as arguments."""
    arguments["norm_topk_prob"] = ast.Constant(False)
    for form in _FACTORS:
        bound = match(form, weights)
        for name in ("SCALE", "DIVISOR"):
            if bound and name in bound and is_number(bound[name], module):
                factor = bound[name].source
                if factor is not None and name == "DIVISOR":
                    factor = ast.BinOp(ast.Constant(1.0), ast.Div(), factor)
                arguments["scaling_factor"] = factor
                weights = bound["W"].peel()
                break
    for form in _NORMALISATIONS:
        bound = match(form, weights)
        limits = {name: bound[name] for name in ("EPS", "MIN") if bound and name in bound}
        if bound and all(is_number(limit, module) for limit in limits.values()):
            arguments["norm_topk_prob"] = ast.Constant(True)
            arguments["norm_eps"] = limits["EPS"].source if "EPS" in limits else ast.Constant(0.0)
            if "MIN" in limits:
                arguments["norm_min"] = limits["MIN"].source
            return bound["W"].peel()
    return weights


def _complete(module: nn.Module, bound: dict[str, Node], scoring: str, arguments: Arguments) -> str | None:
    """Adds bias and groups; the reason why the operator cannot be used, if there is one."""
    top_k = evaluate(bound["K"], module)
    if not isinstance(top_k, int) or not 1 <= top_k <= MAX_TOP_K:
        return f"top_k is {top_k}, beyond what moe_router takes"
    weight = getattr(module, "weight", None)
    num_experts = weight.shape[0] if isinstance(weight, Tensor) else 0
    if num_experts > MAX_EXPERTS:
        return f"it has {num_experts} experts, beyond what moe_router takes"
    if "B" in bound:
        bias = evaluate(bound["B"].peel(), module)
        if bound["B"].source is None or (bias is not None and not isinstance(bias, Tensor)):
            return "its selection bias is not a tensor"
        arguments["bias"] = bound["B"].source
    if "G" in bound:
        groups, top_groups = evaluate(bound["G"], module), evaluate(bound["T"], module)
        if not isinstance(groups, int) or not isinstance(top_groups, int):
            return "its groups are not attributes of the module"
        if num_experts and top_k > top_groups * (num_experts // groups):
            return (
                f"it chooses {top_k} experts from {top_groups} of {groups} groups of {num_experts // groups}"
            )
        arguments["num_groups"], arguments["top_groups"] = bound["G"].source, bound["T"].source
        fill = evaluate(bound["FILL"].peel(), module)
        if fill not in (0.0, float("-inf")):
            return f"experts outside of the chosen groups count as {fill}"
        # A softmax is above 0, so 0 excludes as -inf does.
        if fill == 0.0 and ("B" in bound or scoring != "softmax"):
            arguments["masked_score"] = ast.Constant(0.0)
    return None


@called
def route(
    logits: Tensor, top_k: int, dtype: torch.dtype | None, raw: bool, **arguments: Any
) -> tuple[Tensor, Tensor]:
    """moe_router; unless `raw`, weights in `dtype` (None: float32) and ids in int64 as models have them."""
    weights, ids = ops.moe_router(logits, top_k, **arguments)
    if raw:
        return weights, ids
    return weights if dtype is None else weights.to(dtype), ids.long()


def is_replaceable(router: nn.Module) -> bool:
    """Whether `replace_selection` will rewrite a router."""
    try:
        return replace_selection(straighten(router)) is None
    except Unsupported:
        return False


def select_by_operator(program: Program) -> None:
    """Rewrites a router; a program that is none, or that other rules have rewritten, stays."""
    if not program.rewrites and not any(map(is_experts, program.module.modules())):
        program.reason = replace_selection(program)


def replace_selection(program: Program) -> str | None:
    """Puts moe_router into a router's program; the reason why not, if it cannot."""
    result = program.follow(program.result)
    if not isinstance(result, ast.Tuple) or len(result.elts) < 3:
        return "it does not return logits, weights and ids"
    reader = Reader(program)
    formula = router_formula(program.module, reader.read(result.elts[1]), reader.read(result.elts[2]))
    if isinstance(formula, str):
        return formula
    statements = [_before_casts(program, result, index) for index in (1, 2)]
    order = list(program.every())
    first = min(statements, key=order.index)
    returns_early = len(result.elts) == 3 and _is_known_before(program, result.elts[0], first)
    raw = ast.Name(RAW, ast.Load()) if returns_early else ast.Constant(False)
    routed = program.assign("routed", _route_call(formula, raw))
    program.insert(first, routed)
    if returns_early:
        add_option(program, RAW, False)
        results = [result.elts[0], *(item(name_of(routed), index) for index in (0, 1))]
        early = ast.Return(ast.Tuple(results, ast.Load()))  # without the casts that follow
        program.insert(first, ast.If(ast.Name(RAW, ast.Load()), [early], []))
    for index, statement in enumerate(statements):
        program.replace(statement, item(name_of(routed), index))
    program.rewrites.append(f"moe_router ({formula.scoring})")
    return None


def _route_call(formula: RouterFormula, raw: ast.expr) -> ast.Call:
    float32 = ast.Constant(None)
    dtype = float32 if formula.in_float32 else ast.Attribute(formula.logits, "dtype", ast.Load())
    arguments = dict(sorted(formula.arguments.items()))
    return helper("route", formula.logits, formula.top_k, dtype, raw, **arguments)


def _is_known_before(program: Program, value: ast.expr, statement: ast.stmt) -> bool:
    """Whether the statements in front of one have computed a value."""
    found = program.defined_by(value.id) if isinstance(value, ast.Name) else None
    every = list(program.every())
    return found is not None and every.index(found) < every.index(statement)


@called
def routed(
    experts: nn.Module,
    unseen: bool,
    router: nn.Module,
    x: Tensor,
    *args: Any,
    moe_mps_norm: dict[str, Any] | None = None,
    **kwargs: Any,
) -> tuple:
    """router(norm(x), ...), without casts where it is rewritten and only our operators see the results.

    `unseen`: nothing but the experts reads them.
    """
    forward, options = forward_of(router)
    if forward is None:
        return router(normed(moe_mps_norm, x), *args, **kwargs)
    if unseen and RAW in options and may_be_fused(experts):
        kwargs[RAW] = True
    if NORM in options:
        kwargs[NORM] = moe_mps_norm
    else:
        x = normed(moe_mps_norm, x)
    return forward(router, x, *args, **kwargs)


def _before_casts(program: Program, result: ast.Tuple, index: int) -> ast.Assign:
    """The statement of the result's value in front of the casts that the model's code applies to it."""
    value = result.elts[index]
    method: ast.Attribute | None = None  # that casts the value
    owner: ast.Assign | None = None
    while True:
        name = program.last_name(value)
        found = None if name is None else program.defined_by(name)
        owner, definition = (owner, value) if found is None else (found, program.definitions[name_of(found)])
        if not isinstance(definition, ast.Call) or not isinstance(definition.func, ast.Attribute):
            break
        if Reader(program).read(definition).op != "cast":
            break
        method, value = definition.func, definition.func.value
    if found is not None:
        return found
    statement = program.assign("value", value)
    if owner is None:
        program.statements.append(statement)
    else:
        program.insert(owner, statement)
    held = ast.Name(name_of(statement), ast.Load())
    if method is None:
        result.elts[index] = held
    else:
        method.value = held
    return statement
