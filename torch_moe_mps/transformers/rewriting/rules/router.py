"""Routers: the formulas that `moe_router` computes, as one table, and their place in a router's program.

A router keeps its interface: the logits are computed by its own code, the selection by the operator, and the
results are cast to what the model's code would give (weights in its dtype, ids as int64).
"""

import ast
import functools
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ....ops._checks import MAX_EXPERTS, MAX_TOP_K
from ...interface import is_experts
from ...report import Done
from ..program.building import code
from ..program.formulas import Node, Reader, casts_to_float32, evaluate, is_number, is_pure, named
from ..program.patterns import match
from ..program.programs import Program, Unsupported, copied, name_of, names_in
from ..runtime import called

ops = torch.ops.moe_mps

_SCORES = {"softmax": "softmax(L)", "sigmoid": "sigmoid(L)", "sqrtsoftplus": "sqrtsoftplus(L)"}
# Score of a group, and what experts outside of the best groups count as.
_GROUPS = {
    "top2_sum": "sum(topk(grouped({choice}, G), 2)[0])",
    "max": "amax(grouped({choice}, G))",
}
_MASKED = "masked_fill({choice}, not_(scatter_(zeros_like({score}), topk({score}, T)[1], 1)), FILL)"


# The formula of the ids, those that the weights may have, and the operator's arguments for them.
Selection: TypeAlias = tuple[str, tuple[str, ...], dict[str, Any]]


def _table() -> Iterator[Selection]:
    for scoring, scores in _SCORES.items():
        for choice in (scores, f"{scores} + B"):
            chosen: list[tuple[str, dict[str, Any]]] = [(choice, {"scoring": scoring})]
            for group, score in _GROUPS.items():
                masked = _MASKED.format(choice=choice, score=score.format(choice=choice))
                chosen.append((masked, {"scoring": scoring, "group_score": group}))
            for best, arguments in chosen:
                weights = (f"gather({scores}, topk({best}, K)[1])", f"topk({best}, K)[0]")
                yield f"topk({best}, K)[1]", weights if choice is scores else weights[:1], arguments
    after = ("softmax(topk(L, K)[0])", "softmax(gather(L, topk(L, K)[1]))")
    yield "topk(L, K)[1]", after, {"scoring": "softmax_after_topk"}
    yield "topk(L, K)[1]", ("sigmoid(topk(L, K)[0])",), {"scoring": "sigmoid"}
    by_logits = ("sigmoid(gather(L, topk(L + B, K)[1]))", "gather(sigmoid(L), topk(L + B, K)[1])")
    yield "topk(L + B, K)[1]", by_logits, {"scoring": "sigmoid", "bias_on_logits": True}


SELECTIONS = tuple(_table())
# What follows the selected scores, outermost first: a factor, then the division by the sum.
_FACTORS = ("W * SCALE", "W / DIVISOR")
_NORMALISATIONS = ("W / sum(W)", "W / (sum(W) + EPS)", "W / clamp(sum(W), MIN)", "W / clamp_min(sum(W), MIN)")


def _selection(module: nn.Module, weights: Node, ids: Node) -> tuple[str, ast.expr]:
    """The scoring behind a router's results, and the call of `route` that gives them.

    Raises Unsupported with the reason why there is none.
    """
    scored, factor = _beneath(module, _FACTORS, weights.peel())
    scored, divisor = _beneath(module, _NORMALISATIONS, scored)
    bound, arguments = _selected(scored, ids)
    options = {name: repr(value) for name, value in arguments.items()}
    options |= _bias_and_groups(module, bound, arguments["scoring"])
    options["norm_topk_prob"] = str(divisor is not None)
    if divisor is not None:
        options["norm_eps"] = "EPS" if "EPS" in divisor else "0.0"
        options |= {"norm_min": "MIN"} if "MIN" in divisor else {}
    if factor is not None:
        options["scaling_factor"] = "SCALE" if "SCALE" in factor else "1.0 / DIVISOR"
    nodes = bound | (factor or {}) | (divisor or {}) | {"L": named(bound["L"])}
    dtype = "None" if casts_to_float32(weights.peel(), nodes["L"]) else "L.dtype"
    given = "".join(f", {name}={value}" for name, value in sorted(options.items()))
    call = ast.parse(f"route(L, K, {dtype}{given})", mode="eval").body
    sources = {name: nodes[name].source for name in names_in(call) if name in nodes}
    if None in sources.values():
        raise Unsupported("its formula is spread over several modules")
    return arguments["scoring"], code(call, **sources)


def _selected(weights: Node, ids: Node) -> tuple[dict[str, Node], dict[str, Any]]:
    """What the names in the formulas of a selection stand for, and its arguments."""
    for form, forms, arguments in SELECTIONS:
        bound = match(form, ids)
        for each in forms if bound else ():
            if found := match(each, weights, bound):
                return found, arguments
    raise Unsupported("its formula is not one of moe_router's")


def _beneath(module: nn.Module, forms: Iterable[str], weights: Node) -> tuple[Node, dict[str, Node] | None]:
    """W of the form that weights have, and the form's numbers; the weights if they have none."""
    for form in forms:
        numbers = match(form, weights) or {}
        inner = numbers.pop("W", None)
        if inner is not None and all(is_number(number, module) for number in numbers.values()):
            return inner.peel(), numbers
    return weights, None


def _bias_and_groups(module: nn.Module, bound: dict[str, Node], scoring: str) -> dict[str, str]:
    """The operator's arguments for them. Raises Unsupported with the reason why it cannot be used."""
    options = {}
    top_k = evaluate(bound["K"], module)
    if not isinstance(top_k, int) or not 1 <= top_k <= MAX_TOP_K:
        raise Unsupported(f"top_k is {top_k}, beyond what moe_router takes")
    weight = getattr(module, "weight", None)
    num_experts = weight.shape[0] if isinstance(weight, Tensor) else 0
    if num_experts > MAX_EXPERTS:
        raise Unsupported(f"it has {num_experts} experts, beyond what moe_router takes")
    if "B" in bound:
        bias = evaluate(bound["B"].peel(), module)
        if bound["B"].source is None or (bias is not None and not isinstance(bias, Tensor)):
            raise Unsupported("its selection bias is not a tensor")
        options["bias"] = "B"
    if "G" in bound:
        groups, top_groups = evaluate(bound["G"], module), evaluate(bound["T"], module)
        if not isinstance(groups, int) or not isinstance(top_groups, int):
            raise Unsupported("its groups are not attributes of the module")
        size = num_experts // groups
        if num_experts and top_k > top_groups * size:
            raise Unsupported(f"it chooses {top_k} experts from {top_groups} of {groups} groups of {size}")
        options |= {"num_groups": "G", "top_groups": "T"}
        fill = evaluate(bound["FILL"].peel(), module)
        if fill not in (0.0, float("-inf")):
            raise Unsupported(f"experts outside of the chosen groups count as {fill}")
        # A softmax is above 0, so 0 excludes as -inf does.
        if fill == 0.0 and ("B" in bound or scoring != "softmax"):
            options["masked_score"] = "0.0"
    return options


@called
def route(logits: Tensor, top_k: int, dtype: torch.dtype | None, **arguments: Any) -> tuple[Tensor, Tensor]:
    """moe_router, with weights in `dtype` (None: float32) and ids in int64 as models have them."""
    weights, ids = ops.moe_router(logits, top_k, **arguments)
    return weights if dtype is None else weights.to(dtype), ids.long()


def select_by_operator(program: Program) -> None:
    """Rewrites a router; a program that is none, or that other rules have rewritten, stays."""
    if program.rewrites or any(map(is_experts, program.module.modules())):
        return
    try:
        _replace_selection(program)
    except Unsupported as unsupported:
        program.reason = str(unsupported)


def _replace_selection(program: Program) -> None:
    """Puts moe_router into a router's program. Raises Unsupported with the reason why it cannot."""
    result = program.follow(program.result)
    if not isinstance(result, ast.Tuple) or len(result.elts) < 3:
        raise Unsupported("it does not return logits, weights and ids")
    reader = Reader(program)
    scoring, call = _selection(program.module, *map(reader.read, result.elts[1:3]))
    statement = program.assign("routed", call)
    program.statements.append(statement)
    routed = [code(f"{name_of(statement)}[{index}]") for index in range(2)]
    result.elts[1:3] = map(functools.partial(_with_casts, program), result.elts[1:3], routed)
    program.drop_unused(is_pure)
    read = filter(None, map(program.defined_by, names_in(statement.value)))
    if any(program.mutates_between(each, statement) for each in read):
        raise Unsupported("it changes in place what its formula reads")
    program.rewrites.append(Done("moe_router", f"moe_router ({scoring})"))


def _with_casts(program: Program, value: ast.expr, new: ast.expr) -> ast.expr:
    """`new` behind the casts that the model's code applies to a value."""
    cast = copied(program.follow(value))
    if Reader(program).read(cast).op != "cast":
        return new
    cast.func.value = _with_casts(program, cast.func.value, new)
    return cast
