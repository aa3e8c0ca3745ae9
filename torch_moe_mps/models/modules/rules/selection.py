"""The selection of experts, as the routers of models write it: which arguments of moe_router it is."""

from typing import Any, NamedTuple

from torch import fx

from ....ops._checks import MAX_EXPERTS, MAX_TOP_K
from ...basics.state import Unsupported
from ...graphs.nodes import aten, is_call, tensor_of
from ...graphs.patterns import Bound, match, uncast
from ...graphs.tracing import ITEM

UNKNOWN = "its formula is not one of moe_router's"
_IDS = "item(topk(CHOICE, K, -1, True, ORDER), 1)"
_SCORES = {"softmax": "_softmax(L, -1, False)", "sigmoid": "sigmoid(L)", "sqrtsoftplus": "sqrt(softplus(L))"}
_OF_CHOSEN = {"softmax": "softmax_after_topk", "sigmoid": "sigmoid"}  # scorings of the chosen logits alone
_OF_GROUPS = {
    "sum(item(topk(GROUPS, 2, -1, True, ORDER), 0), [-1])": "top2_sum",
    "item(max(GROUPS, -1), 0)": "max",
    "amax(GROUPS, [-1])": "max",
}
_MASKED = "masked_fill(CHOICE, bitwise_not(MASK), FILL)"
_MASK = "expand(scatter(ZEROS, -1, item(topk(SCORES, T, -1, True, ORDER), 1), 1), SIZES)"
# Steps behind the chosen scores, outermost first: a factor, then the division by the sum.
_FACTORS = ("W * SCALE", "W / DIVISOR")
_SUM = "sum(W, [-1], True)"
_DIVISIONS = (f"W / {_SUM}", f"W / ({_SUM} + EPS)", f"W / clamp({_SUM}, MIN)", f"W / clamp_min({_SUM}, MIN)")


class Selection(NamedTuple):
    """weights, ids = moe_router(logits, ..., **options)."""

    logits: fx.Node
    bias: fx.Node | None
    options: dict[str, Any]


def selection_of(weights: fx.Node, ids: fx.Node) -> Selection:
    """The selection with these results. Raises Unsupported with the reason why it is none of moe_router's."""
    matched = match(_IDS, ids)
    if matched is None:
        raise Unsupported(UNKNOWN)
    choice, groups = _before_groups(matched["CHOICE"])
    choice, bias = _before_bias(choice)
    chosen, options = _before_scaling(weights)
    logits, scoring = _scored(chosen, choice, bias, ids)
    options = {"top_k": matched["K"], **scoring, **groups, **options}
    _check(options, tensor_of(logits).shape[-1])
    if bias is None and not groups:  # the logits order as the scores do
        del options["bias_on_logits"]
    is_above_0 = bias is None and options["scoring"] == "softmax"  # so that 0 excludes as -inf does
    if options.get("masked_score") == float("-inf") or is_above_0:
        options.pop("masked_score", None)
    return Selection(logits, bias, options)


def _before_scaling(weights: fx.Node) -> tuple[fx.Node, dict[str, Any]]:
    """The chosen scores before they are divided by their sum and multiplied, and the options for that."""
    options: dict[str, Any] = {}
    if (factor := _with_numbers(_FACTORS, weights)) is not None:
        weights = factor["W"]
        options["scaling_factor"] = factor["SCALE"] if "SCALE" in factor else 1.0 / factor["DIVISOR"]
    division = _with_numbers(_DIVISIONS, weights)
    options["norm_topk_prob"] = division is not None
    if division is not None:
        weights = division["W"]
        options["sum_eps"] = division.get("EPS", 0.0)
        options["sum_min"] = division.get("MIN", 0.0)
    return weights, options


def _with_numbers(forms: tuple[str, ...], value: fx.Node) -> Bound | None:
    """Names bound by the first form that fits, if all but W are numbers."""
    for form in forms:
        result = match(form, value) or {}
        numbers = [item for name, item in result.items() if name != "W"]
        if result and all(isinstance(number, (int, float)) for number in numbers):
            return result
    return None


def _before_groups(choice: fx.Node) -> tuple[fx.Node, dict[str, Any]]:
    """Scores that choose, before experts outside of the best groups are masked, and the options for that."""
    masked = match(_MASKED, choice)
    if masked is None:
        return choice, {}
    wide = uncast(masked["MASK"])
    wide = uncast(wide.args[0]) if is_call(wide, aten.clone) else wide
    mask = match(_MASK, wide) or {}
    for form, group_score in _OF_GROUPS.items():
        groups = (match(form, mask.get("SCORES")) or {}).get("GROUPS")
        if groups is None or uncast(groups) is not uncast(masked["CHOICE"]):
            continue
        if not is_call(mask["ZEROS"], aten.zeros_like, aten.zeros, aten.new_zeros):
            continue
        _, count, size = tensor_of(groups).shape
        if (*tensor_of(wide).shape[1:], tensor_of(wide.args[0]).shape[-1]) != (count, size, 1):
            continue
        options = {"num_groups": count, "top_groups": mask["T"], "group_score": group_score}
        return masked["CHOICE"], options | {"masked_score": masked["FILL"]}
    raise Unsupported(UNKNOWN)


def _before_bias(choice: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    result = match("A + B", choice) or {}
    for name, value in result.items():
        other = result["A" if name == "B" else "B"]
        bias = uncast(value)
        if isinstance(bias, fx.Node) and bias.op in ("get_attr", "placeholder"):
            return other, bias
    return choice, None


def _scored(chosen: Any, choice: Any, bias: Any, ids: fx.Node) -> tuple[fx.Node, dict[str, Any]]:
    """The logits behind the chosen scores, and the scoring."""
    ids_node = _rows_of(ids)

    def source(value: Any) -> Any:
        """Source of the selected values: the scores that select, or the gathered ones."""
        value = _rows_of(value)
        if value.target is ITEM:
            return choice if bias is None and value.args == (ids_node.args[0], 0) else None
        result = match("gather(FROM, -1, IDS)", value)
        return result["FROM"] if result and uncast(result["IDS"]) is ids_node else None

    for name, form in _SCORES.items():
        scores = source(chosen)
        matched = match(form, scores)
        if matched and _rows_of(choice) in (_rows_of(scores), _rows_of(matched["L"])):
            return matched["L"], {"scoring": name, "bias_on_logits": _rows_of(choice) is not _rows_of(scores)}
        matched = match(form, chosen)
        logits = source(matched["L"]) if matched and name in _OF_CHOSEN else None
        if logits is not None and _rows_of(choice) is _rows_of(logits):
            return logits, {"scoring": _OF_CHOSEN[name], "bias_on_logits": True}
    raise Unsupported(UNKNOWN)


def _rows_of(value: fx.Node) -> fx.Node:
    """The call behind casts and other shapes that gives rows of values."""
    node: fx.Node = uncast(value)
    if not isinstance(node, fx.Node) or tensor_of(node).dim() != 2:
        raise Unsupported(UNKNOWN)
    return node


def _check(options: dict[str, Any], num_experts: int) -> None:
    """Raises Unsupported with the reason why moe_router does not take these options."""
    top_k, groups = options["top_k"], options.get("num_groups", 1)
    if not isinstance(top_k, int) or not 1 <= top_k <= MAX_TOP_K:
        raise Unsupported(f"top_k is {top_k}, beyond what moe_router takes")
    if num_experts > MAX_EXPERTS:
        raise Unsupported(f"it has {num_experts} experts, beyond what moe_router takes")
    size, top_groups = num_experts // groups, options.get("top_groups", 1)
    if top_k > top_groups * size:
        raise Unsupported(f"it chooses {top_k} experts from {top_groups} of {groups} groups of {size}")
    fill = options.get("masked_score", 0.0)
    if fill not in (0.0, float("-inf")):
        raise Unsupported(f"experts outside of the chosen groups count as {fill}")
