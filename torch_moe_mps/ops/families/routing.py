"""Routers: from logits to the experts of each token and their weights, and the sorting of pairs by expert.

Selection is defined for every input. NaN counts as the lowest float32, +-inf as the highest and lowest; the
larger value wins and ties go to the lower expert id. So ids are distinct and in range, and weights finite.
If only a monotone score lies between logits and choice, the logits themselves are compared: they are exact,
where rounded or saturated scores would tie.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._checks import FLOAT32_MAX, ID_DTYPES, MAX_EXPERTS, MAX_TOP_K, NAMED_DTYPES, Check, wide, widened
from .._registry import DtypeName, operator
from .._sample import Calls, Changes
from .norms import InputNorm, normed

SCORINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: torch.softmax(logits, -1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: torch.nn.functional.softplus(logits).sqrt(),
    "softmax_after_topk": lambda logits: logits,
}
GROUP_SCORES = ("top2_sum", "max")
# Rows and columns of the tiles that the grids of moe_compute_ids_tpe count.
PAIRS_PER_TILE = 32
ROWS_PER_TILE = 64


def _finite(x: Tensor) -> Tensor:
    """x in float32 or float64 with NaN and the infinities replaced by the finite values they count as."""
    return torch.nan_to_num(wide(x), nan=-FLOAT32_MAX, posinf=FLOAT32_MAX, neginf=-FLOAT32_MAX)


def _select(choice: Tensor, count: int) -> Tensor:
    """The ids of the `count` largest values of each row, descending, ties to the lower id, as int64."""
    return choice.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _divide_by_sum(topk_weights: Tensor, eps: float = 0.0, minimum: float = 0.0) -> Tensor:
    """weights / max(sum + eps, minimum); a denominator of 0 counts as 1."""
    total = topk_weights.sum(-1, keepdim=True) + eps
    if minimum > 0.0:
        total = total.clamp(min=minimum)
    return topk_weights / torch.where(total == 0.0, 1.0, total)


def _group_scores(choice: Tensor, num_groups: int, kind: str) -> Tensor:
    grouped = choice.unflatten(-1, (num_groups, -1))
    return grouped.amax(-1) if kind == "max" else _finite(grouped.topk(2, dim=-1).values.sum(-1))


def _mask_groups(
    compared: Tensor, group_scores: Tensor, top_groups: int, masked_score: float | None
) -> Tensor:
    """`compared`, outside of the best groups set to `masked_score` (None: below everything)."""
    chosen = torch.zeros_like(group_scores, dtype=torch.bool)
    chosen.scatter_(-1, _select(group_scores, top_groups), True)
    fill = float("-inf") if masked_score is None else masked_score
    grouped = compared.unflatten(-1, (group_scores.shape[-1], -1))
    return grouped.masked_fill(~chosen.unsqueeze(-1), fill).flatten(-2)


# moe_router


def _check_top_k(check: Check, top_k: int, **_: Any) -> None:
    check.between("top_k", top_k, 1, min(check.sizes["E"], MAX_TOP_K), f", the smaller of E and {MAX_TOP_K}")


# Weights and ids.
SELECTED = "[..., top_k]:float32 [..., top_k]:ids_dtype"


def _check_router(check, top_k, num_groups, top_groups, group_score, masked_score, **_):
    """The numbers of a router of E experts."""
    _check_top_k(check, top_k)
    num_experts = check.sizes["E"]
    check.between("num_groups", num_groups, 1, num_experts)
    if num_experts % num_groups:
        check.fail("num_groups", f"a divisor of the {num_experts} experts", num_groups)
    group_size = num_experts // num_groups
    if num_groups > 1 and group_score == "top2_sum" and group_size < 2:
        check.fail(
            "num_groups", f"at most {num_experts // 2}, for 2 experts a group with top2_sum", num_groups
        )
    check.between("top_groups", top_groups, 1, num_groups)
    if masked_score is None and top_k > top_groups * group_size:
        check.fail("top_k", f"at most {top_groups * group_size}, the experts in top_groups groups", top_k)


class Router(NamedTuple):
    """Arguments of the optional router of an operator with logits, as of moe_router."""

    logits: Tensor | None = None
    top_k: int = 1
    scoring: str = "softmax"
    correction_bias: Tensor | None = None
    num_groups: int = 1
    top_groups: int = 1
    group_score: str = "top2_sum"
    masked_score: float | None = None
    bias_on_logits: bool = False
    norm_topk_prob: bool = False
    sum_eps: float = 1e-20
    sum_min: float = 0.0
    scaling_factor: float = 1.0
    per_expert_scale: Tensor | None = None

    def check(self, check: Check) -> None:
        if self.logits is not None:
            return _check_router(check, **self._asdict())
        for name, value in self._asdict().items():
            default = self._field_defaults[name]
            if value is not default and (isinstance(value, Tensor) or value != default):
                check.fail(
                    name, f"{default!r} without logits", repr(value) if isinstance(value, str) else value
                )


@operator(
    f"logits[..., E<={MAX_EXPERTS}] correction_bias[E] per_expert_scale[E] -> {SELECTED}",
    _check_router,
    allowed={
        **{"scoring": SCORINGS, "group_score": GROUP_SCORES, "sum_eps": 0.0, "sum_min": 0.0},
        "ids_dtype": ID_DTYPES,
    },
    public="routers of any model",
)
def moe_router(
    logits: Tensor,
    top_k: int,
    *,
    scoring: str,
    correction_bias: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    group_score: str = "top2_sum",
    masked_score: float | None = None,
    bias_on_logits: bool = False,
    norm_topk_prob: bool,
    sum_eps: float = 1e-20,
    sum_min: float = 0.0,
    scaling_factor: float = 1.0,
    per_expert_scale: Tensor | None = None,
    ids_dtype: DtypeName = "int32",
) -> tuple[Tensor, Tensor]:
    """Top-k experts of each token and their weights, for every scoring that the models use.

        scores   = scoring(logits)             softmax | sigmoid | sqrtsoftplus, over all E
        choice   = scores + correction_bias    logits + it with bias_on_logits or softmax_after_topk
        choice of experts outside the top_groups best of num_groups groups = masked_score
        topk_ids = the top_k largest choices, descending, ties to the lower id
        w        = scores[topk_ids]            softmax(logits[topk_ids]) with softmax_after_topk
        w        = w / max(sum(w) + sum_eps, sum_min)      with norm_topk_prob
        w        = w * scaling_factor * per_expert_scale[topk_ids]

    Args:
        logits: [..., E], float32, float16 or bfloat16. NaN counts as the lowest float32, +-inf as highest and
            lowest.
        top_k: experts per token, 1 to min(E, 64); E is at most 1024.
        scoring: "softmax", "sigmoid", "sqrtsoftplus" (the root of softplus) or "softmax_after_topk".
        correction_bias: [E], any of the three dtypes; enters the choice, not the weights (DeepSeek-V3).
        num_groups: the experts form this many groups of consecutive ids; 1 is no groups.
        top_groups: groups among whose experts the choice is made, ties to the lower group.
        group_score: "top2_sum", the sum of a group's two largest choices (DeepSeek-V3), or "max"
            (DeepSeek-V2).
        masked_score: the choice value of experts outside of these groups; None excludes them. Some models put
            0.0, with which an expert of another group wins over a choice below 0.
        bias_on_logits: choose by logits + correction_bias instead of scores + correction_bias.
        norm_topk_prob: divide the weights by their sum.
        sum_eps, sum_min: added to that sum, then its lower bound. A denominator of 0 counts as 1.
        scaling_factor: multiplies the weights.
        per_expert_scale: [E], any of the three dtypes; multiplies the weights by expert.
        ids_dtype: of topk_ids, torch.int32 or torch.int64; or its name, "int32" or "int64".

    Without a correction_bias and a masked_score the logits themselves are compared: they order as the
    scores do.

    Returns: topk_weights [..., top_k] float32 and topk_ids [..., top_k] in `ids_dtype`, in descending order
        of choice.

    Raises: ValueError for a dtype, shape, count, name or device that does not fit.

    Stands for the router of the source kernel moe_router_topk_softmax_f32, generalised;
    docs/operators.md has the differences.

    Example:
        >>> logits = torch.tensor([[1.0, 3.0, 3.0, 0.0]])
        >>> ops.moe_router(logits, 2, scoring="softmax", norm_topk_prob=True, scaling_factor=4.0)
        (tensor([[2., 2.]]), tensor([[1, 2]], dtype=torch.int32))
    """
    x = _finite(logits)
    scores = SCORINGS[scoring](x)
    choice = x if bias_on_logits or scoring == "softmax_after_topk" else scores
    if correction_bias is not None:
        choice = _finite(choice + wide(correction_bias))
    # Without a bias the choice is monotone in the logits.
    compared = x if correction_bias is None and masked_score is None else choice
    if num_groups > 1:
        group_scores = _group_scores(compared if group_score == "max" else choice, num_groups, group_score)
        compared = _mask_groups(compared, group_scores, top_groups, masked_score)
    topk_ids = _select(compared, top_k)
    topk_weights = scores.gather(-1, topk_ids)
    if scoring == "softmax_after_topk":
        topk_weights = torch.softmax(topk_weights, -1)
    if norm_topk_prob:
        topk_weights = _divide_by_sum(topk_weights, sum_eps, sum_min)
    if scaling_factor != 1.0:
        topk_weights = topk_weights * scaling_factor
    if per_expert_scale is not None:
        topk_weights = topk_weights * wide(per_expert_scale)[topk_ids]
    return topk_weights, topk_ids.to(ID_DTYPES[ids_dtype])


# The named routers of the sources


@operator(
    f"logits[..., E<={MAX_EXPERTS}] -> {SELECTED}",
    _check_top_k,
    allowed={"ids_dtype": ID_DTYPES},
    public="covers a source kernel",
)
def moe_router_topk_softmax(
    logits: Tensor, top_k: int, *, norm_topk_prob: bool, ids_dtype: DtypeName = "int32"
) -> tuple[Tensor, Tensor]:
    """Top-k experts and their weights by softmax over all; with norm_topk_prob the weights sum to 1.

    Logits are compared, not probabilities, which saturate: of eight logits, 0 at id 2, -200 at 6, -250 at 1
    and -300 elsewhere, the best three are [2, 6, 1].

    Args:
        logits: [..., E], float32, float16 or bfloat16. NaN counts as the lowest float32, +-inf as highest and
            lowest.
        top_k: experts per token, 1 to min(E, 64); E is at most 1024.
        norm_topk_prob: make the weights of a token sum to 1.
        ids_dtype: of topk_ids, torch.int32 or torch.int64; or its name, "int32" or "int64".

    Returns: topk_weights [..., top_k] float32, descending, and topk_ids [..., top_k] in `ids_dtype`; ties go
        to the lower id.

    Raises: ValueError for a dtype, shape or count that does not fit.

    In models, `moe_router` replaces it, which has the options of every model.

    Stands for the source kernel moe_router_topk_softmax_f32; docs/operators.md has the differences.

    Example:
        >>> ops.moe_router_topk_softmax(torch.tensor([[1.0, 3.0, 3.0, 0.0]]), top_k=2, norm_topk_prob=True)
        (tensor([[0.5000, 0.5000]]), tensor([[1, 2]], dtype=torch.int32))
    """
    return moe_router(
        logits, top_k, scoring="softmax", norm_topk_prob=norm_topk_prob, sum_eps=0.0, ids_dtype=ids_dtype
    )


def _scaled_softmax_of_selected(
    logits: Tensor, per_expert_scale: Tensor, top_k: int, ids_dtype: DtypeName
) -> tuple[Tensor, Tensor]:
    x = _finite(logits)
    topk_ids = _select(x, top_k)
    topk_weights = torch.softmax(x.gather(-1, topk_ids), -1) * wide(per_expert_scale)[topk_ids]
    return topk_weights, topk_ids.to(ID_DTYPES[ids_dtype])


@operator(
    f"logits[..., E<={MAX_EXPERTS}] per_expert_scale[E] -> {SELECTED}",
    _check_top_k,
    allowed={"ids_dtype": ID_DTYPES},
    public="covers a source kernel",
)
def fused_moe_routing(
    logits: Tensor, per_expert_scale: Tensor, top_k: int, *, ids_dtype: DtypeName = "int32"
) -> tuple[Tensor, Tensor]:
    """Top-k experts and their softmax weights, which sum to 1, times per_expert_scale[id].

    Probabilities over all experts, divided by the sum of the selected, are the softmax over the selected
    logits. After the scale there is no second renormalisation. Logits are compared, not probabilities.

    Args:
        logits: [..., E], float32, float16 or bfloat16. NaN counts as the lowest float32, +-inf as the highest
            and lowest.
        per_expert_scale: [E], any of the three dtypes.
        top_k: experts per token, 1 to min(E, 64); E is at most 1024.
        ids_dtype: of topk_ids, torch.int32 or torch.int64; or its name, "int32" or "int64".

    Returns: topk_weights [..., top_k] float32 and topk_ids [..., top_k] in `ids_dtype`, in descending order
        of the logits; ties go to the lower id.

    Raises: ValueError for a dtype, shape, count or device that does not fit.

    In models, `moe_router` with scoring="softmax_after_topk" replaces it.

    Stands for the source kernels fused_moe_routing_f32 (one token) and fused_moe_routing_batch_f32;
    docs/operators.md has the differences.

    Example:
        >>> logits, scale = torch.tensor([1.0, 3.0, 3.0, 0.0]), torch.tensor([1.0, 2.0, 4.0, 1.0])
        >>> ops.fused_moe_routing(logits, scale, top_k=2)
        (tensor([1., 2.]), tensor([1, 2], dtype=torch.int32))
    """
    return _scaled_softmax_of_selected(logits, per_expert_scale, top_k, ids_dtype)


def _meta_router_logits(check, x, weight, dtype, factor, **_):
    if not abs(factor) <= FLOAT32_MAX:
        check.fail("factor", "a finite number", factor)
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=NAMED_DTYPES[dtype])


@operator(
    "x[..., H] weight[E, H] bias[E] norm_weight[H]",
    _meta_router_logits,
    public="the matmul of a router in float32",
)
def router_logits(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    *,
    norm_eps: float = 1e-6,
    norm_weight_offset: float = 0.0,
    dtype: DtypeName = "float32",
    factor: float = 1.0,
) -> Tensor:
    """Router logits factor * norm(x) @ weight^T + bias, summed in float32 without float32 copies.

    On mps, our kernel runs up to 32 tokens. For more, PyTorch's matmul of float32 copies is faster.

    Args:
        x: [..., H], float32, float16 or bfloat16.
        weight: [E, H], any of the three dtypes.
        bias: [E], any of the three dtypes, or None.
        norm_weight: [H], any of the three dtypes. With it norm(x) is rms(x) * (norm_weight +
            norm_weight_offset), not rounded for up to 32 tokens on mps; without it x.
        norm_eps, norm_weight_offset: of the norm, as of rms_norm.
        dtype: of the result: torch.float32, torch.float16 or torch.bfloat16.
        factor: of the product.

    Returns: [..., E] in `dtype`.

    Raises: ValueError for a dtype, shape or device that does not fit.

    Example:
        >>> weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        >>> ops.router_logits(torch.tensor([[1.0, 2.0]]), weight, factor=2.0).tolist()
        [[2.0, 4.0, 6.0]]
    """
    rows = InputNorm(norm_weight, norm_eps, norm_weight_offset).applied_to(x)
    rows, weight = widened(rows, weight)
    shift = None if bias is None else bias.to(rows.dtype)
    return torch.nn.functional.linear(rows * factor, weight, shift).to(NAMED_DTYPES[dtype])


@operator(
    f"x[..., H] weight[E<={MAX_EXPERTS}, H] norm_weight[H] per_expert_scale[E] -> {SELECTED}",
    _check_top_k,
    allowed={"ids_dtype": ID_DTYPES},
    public="covers a source kernel",
)
def moe_gate(
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor,
    per_expert_scale: Tensor,
    top_k: int,
    *,
    norm_eps: float,
    renormalize_after_scale: bool,
    ids_dtype: DtypeName = "int32",
) -> tuple[Tensor, Tensor]:
    """Top-k experts and weights of a whole gate: RMSNorm, router matmul, softmax over them, per-expert scale.

        logits   = (rms(x) * norm_weight) @ weight^T      rms(x) = x * rsqrt(mean(x^2) + norm_eps)
        topk_ids = the top_k largest logits, descending, ties to the lower id
        w        = softmax(logits[topk_ids]) * per_expert_scale[topk_ids]
        w        = w / sum(w)           with renormalize_after_scale; a sum of 0 counts as 1

    Args:
        x: [..., H], float32, float16 or bfloat16. The normed values stay in float32, they are not rounded.
        weight: [E, H], any of the three dtypes; E is at most 1024.
        norm_weight: [H], any of the three dtypes. Gemma 4's is its router scale times H^-0.5.
        per_expert_scale: [E], any of the three dtypes.
        top_k: experts per token, 1 to min(E, 64).
        norm_eps: added to the mean of squares.
        renormalize_after_scale: the source kernel divides by the sum again, Gemma 4 does not.
        ids_dtype: of topk_ids, torch.int32 or torch.int64; or its name, "int32" or "int64".

    Returns: topk_weights [..., top_k] float32 and topk_ids [..., top_k] in `ids_dtype`. NaN logits count as
        the lowest float32.

    Raises: ValueError for a dtype, shape, count or device that does not fit.

    Stands for the source kernel moe_gate; docs/operators.md has the differences.

    Example:
        >>> weight, ones = torch.tensor([[1.0, 0.0], [2.0, 2.0], [3.0, 1.0]]), torch.ones(3)
        >>> gate = torch.tensor([[2.0, 2.0]]), weight, ones[:2], ones
        >>> topk_weights, topk_ids = ops.moe_gate(*gate, 2, norm_eps=0.0, renormalize_after_scale=False)
        >>> topk_weights.tolist(), topk_ids.tolist()
        ([[0.5, 0.5]], [[1, 2]])
    """
    rows, weight = widened(normed(x, norm_weight, norm_eps), weight)
    logits = rows @ weight.T
    topk_weights, topk_ids = _scaled_softmax_of_selected(logits, per_expert_scale, top_k, ids_dtype)
    return (_divide_by_sum(topk_weights) if renormalize_after_scale else topk_weights), topk_ids


# Sorting the pairs p = t * K + k by expert


def _sort_pairs(topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """The pairs in stable order by expert, the expert of each (E for sentinels), where each expert begins."""
    flat = topk_ids.flatten().long()
    experts = torch.where((flat < 0) | (flat >= num_experts), num_experts, flat)
    experts, order = experts.sort(stable=True)
    offsets = torch.searchsorted(experts, torch.arange(num_experts + 1, device=topk_ids.device))
    return order, experts, offsets


def _meta_bucket(check, topk_ids, num_experts):
    return tuple(topk_ids.new_empty(n, dtype=torch.int32) for n in (topk_ids.numel(), num_experts + 1))


@operator(
    "topk_ids[..., K]:id",
    _meta_bucket,
    allowed={"num_experts": range(1, MAX_EXPERTS + 1)},
    public="pairs by expert, for kernels and adapters",
)
def moe_bucket(topk_ids: Tensor, *, num_experts: int) -> tuple[Tensor, Tensor]:
    """Pairs p = t * K + k sorted by expert, and each expert's offset: a compressed moe_compute_ids_tpe.

    Expert e's pairs are pair_order[offsets[e] : offsets[e + 1]]. Pairs whose id lies outside [0, num_experts)
    follow behind offsets[num_experts], ascending.

    Args:
        topk_ids: [..., K] int32 or int64; t counts the tokens of all leading dimensions, T of them.
        num_experts: E, 1 to 1024.

    Returns: pair_order [T * K] int32 and offsets [E + 1] int32.

    Raises: ValueError for a dtype, shape or count that does not fit.

    In models with adapters on experts, `expert_lora` takes its pairs.

    Stands for the source kernel moe_compute_ids_tpe_f32, in compressed form;
    docs/operators.md has the differences.

    Example:
        >>> pair_order, offsets = ops.moe_bucket(torch.tensor([[1, 0], [1, 2]]), num_experts=3)
        >>> pair_order.tolist(), offsets.tolist()
        ([1, 0, 2, 3], [0, 1, 3, 4])
    """
    order, _, offsets = _sort_pairs(topk_ids, num_experts)
    return order.int(), offsets.int()


@operator(
    "topk_ids[..., K]:id -> [num_experts]:int32 [num_experts, ...*K]:int32 [3]:int32 [3]:int32",
    allowed={
        "num_experts": range(1, MAX_EXPERTS + 1),
        **dict.fromkeys(("gate_up_rows", "down_rows"), range(1, 2**31)),
    },
    public="covers a source kernel",
)
def moe_compute_ids_tpe(
    topk_ids: Tensor, *, num_experts: int, gate_up_rows: int, down_rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pairs p = t * K + k of each expert, their counts, and the indirect-dispatch grids of two matmuls.

    Args:
        topk_ids: [..., K] int32 or int64; t counts the tokens of all leading dimensions, T of them. Ids
            outside [0, num_experts) are in no list.
        num_experts: E, 1 to 1024.
        gate_up_rows, down_rows: rows of an expert's gate/up and down matrices.

    Returns, all int32:
        tpe: [E], the number of pairs of each expert.
        ids_by_expert: [E, T * K], the pairs of each expert ascending, then -1.
        gate_up_args, down_args: [3], the grids (max(1, ceil(max(tpe) / 32)), ceil(rows / 64), E).

    Raises: ValueError for a dtype, shape or count that does not fit.

    The grids are of a GEMM with a threadgroup for 32 pairs and 64 rows of an expert, which a kernel of the
    caller's dispatches indirectly, without waiting for the counts on the host.

    In models, `moe_bucket` sorts the pairs, and prefill kernels take its offsets instead of grids.

    Stands for the source kernel moe_compute_ids_tpe_f32;
    docs/operators.md has the differences.

    Example:
        >>> topk_ids = torch.tensor([[1, 0], [1, 2]])
        >>> sizes = {"num_experts": 3, "gate_up_rows": 128, "down_rows": 64}
        >>> tpe, ids_by_expert, gate_up_args, _ = ops.moe_compute_ids_tpe(topk_ids, **sizes)
        >>> tpe.tolist(), ids_by_expert[1].tolist(), gate_up_args.tolist()
        ([1, 2, 1], [0, 2, -1, -1], [1, 2, 3])
    """
    order, experts, offsets = _sort_pairs(topk_ids, num_experts)
    tpe = offsets.diff()
    places = torch.arange(experts.numel(), device=topk_ids.device) - offsets[experts]
    ids_by_expert = topk_ids.new_full((num_experts, experts.numel()), -1, dtype=torch.int32)
    routed = slice(int(offsets[-1]))
    ids_by_expert[experts[routed], places[routed]] = order[routed].int()
    tiles = ((tpe.max() + PAIRS_PER_TILE - 1) // PAIRS_PER_TILE).clamp(min=1)
    gate_up_args, down_args = (_grid(tiles, rows, num_experts) for rows in (gate_up_rows, down_rows))
    return tpe.int(), ids_by_expert, gate_up_args, down_args


def _grid(tiles: Tensor, rows: int, num_experts: int) -> Tensor:
    """The threadgroups of a matmul: tiles of pairs, tiles of rows, experts."""
    fixed = tiles.new_tensor([-(-rows // ROWS_PER_TILE), num_experts])
    return torch.cat([tiles.reshape(1), fixed]).int()


CALLS: Calls = {
    "moe_router": lambda s: {"top_k": s.K, "norm_topk_prob": True, "scoring": "softmax"},
    "moe_router_topk_softmax": lambda s: {"top_k": s.K, "norm_topk_prob": True},
    "fused_moe_routing": lambda s: {"top_k": s.K},
    "router_logits": lambda s: {"bias": s.values(s.E)},
    "moe_gate": lambda s: {
        **{"per_expert_scale": s.values(s.E).abs(), "top_k": s.K},
        **{"norm_eps": 1e-6, "renormalize_after_scale": True},
    },
    "moe_bucket": lambda s: {"topk_ids": s.topk_ids, "num_experts": s.E},
    "moe_compute_ids_tpe": lambda s: {
        **{"topk_ids": s.topk_ids, "num_experts": s.E, "gate_up_rows": 2 * s.I, "down_rows": s.H}
    },
}
CHANGES: Changes = {
    "router_logits": lambda s: [
        {"x": s.strided, "bias": None},
        {**s.norm, "dtype": "bfloat16", "factor": 0.5},
    ],
    "moe_router": lambda s: [
        s.of("correction_bias[E] per_expert_scale[E]:float32", scoring="sigmoid", num_groups=4, top_groups=2),
        {"scoring": "softmax_after_topk", "logits": s.values(s.E, s.T).t(), "norm_topk_prob": False},
        *({"logits": s.values(s.T, experts)} for experts in (100, 200, 300, 600)),
    ],
    "fused_moe_routing": lambda s: [{"logits": s.values(s.E)}],
    "moe_gate": lambda s: [{"renormalize_after_scale": False}],
    "moe_bucket": lambda s: [
        {"topk_ids": torch.zeros(0, s.K, dtype=torch.int64, device=s.device)},
        {"topk_ids": s.topk_ids.long()},
    ],
    "moe_compute_ids_tpe": lambda s: [{"topk_ids": s.topk_ids.long()}],
}
