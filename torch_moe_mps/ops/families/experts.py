"""The experts of a Mixture-of-Experts layer: matmuls whose weight matrix is chosen per row by the router.

T tokens, H hidden, E experts, K of them per token, I intermediate size. Pair p = t * K + k:
token t, its k-th expert.
"""

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from .._activations import Activation
from .._checks import MAX_EXPERTS, MAX_TOP_K, Like, options_in, wide, wide_dtype
from .._registry import Backward, door, operator
from .._sample import Calls, Changes
from .combine import ADDED, ExpertSum
from .norms import InputNorm

# How many pairs the reference computes at a time: this bounds its intermediate results, so that they stay in
# the cache. T 512, K 8, E 32, H 2048, bfloat16: one thread 214 ms, undivided 252 ms; two threads 57 ms, 58
# ms with 1024 pairs, 70 ms with 128.
PAIRS_AT_ONCE = 512


# The choice of experts, and the tensors around the experts.
IDS = f"topk_ids[..., K<={MAX_TOP_K}]:id"
ROUTED = f"{IDS} topk_weights[..., K]"
NO_SHARED = "shared_out not beside has_identity"
AROUND = f"x[..., H] {ROUTED} norm_weight[H] {ADDED.format('x')}"


class Groups(NamedTuple):
    """Pairs in ascending order of expert: `counts[i]` of them belong to `experts[i]`, ascending within it.

    Pairs whose id lies outside [0, E) are in none.
    """

    experts: list[int]
    counts: list[int]
    pairs: Tensor

    def chunks(self, size: int) -> Iterator["Groups"]:
        """Groups of at most `size` pairs, together these; an expert is cut only if it has more pairs."""
        experts: list[int] = []
        counts: list[int] = []
        first = filled = 0
        for expert, count in zip(self.experts, self.counts, strict=True):
            while count > 0:
                if filled > 0 and filled + count > size:
                    yield Groups(experts, counts, self.pairs[first : first + filled])
                    experts, counts, first, filled = [], [], first + filled, 0
                taken = min(count, size)
                experts.append(expert)
                counts.append(taken)
                count, filled = count - taken, filled + taken
        if filled > 0:
            yield Groups(experts, counts, self.pairs[first : first + filled])


def group_by_expert(topk_ids: Tensor, num_experts: int) -> Groups:
    experts = topk_ids.reshape(-1).tolist()  # Python has sorted few numbers before torch begins
    pairs = [pair for pair, expert in enumerate(experts) if 0 <= expert < num_experts]
    pairs.sort(key=experts.__getitem__)
    counts = Counter(map(experts.__getitem__, pairs))
    return Groups(
        [*counts], [*counts.values()], torch.tensor(pairs, dtype=torch.int64, device=topk_ids.device)
    )


def add_bias(rows: Tensor, groups: Groups, topk_ids: Tensor, bias: Tensor | None) -> Tensor:
    """rows + the bias of their experts, in float32; `rows` itself without a bias."""
    return rows if bias is None else rows + wide(bias[topk_ids.reshape(-1)[groups.pairs]])


class Product(NamedTuple):
    """Multiplies rows by the matrices [C, columns] of their experts.

    `in_float32`: products are not rounded, for rows and matrices of any dtype.
    """

    matrix: Callable[[int], Tensor]
    columns: int
    in_float32: bool = False

    def __call__(self, rows: Tensor, groups: Groups) -> Tensor:
        """[n, columns]; `rows` in the order of the groups.

        One product for each chosen expert: as fast as torch.nn.functional.grouped_mm (within 3 % at E 128,
        H 1024, N 1024, bfloat16, T 1 to 512), but for every dtype, stride and alignment.
        """
        rows = wide(rows) if self.in_float32 else rows
        out = rows.new_empty(rows.shape[0], self.columns)
        parts = zip(groups.experts, rows.split(groups.counts), out.split(groups.counts), strict=True)
        for expert, part, result in parts:
            torch.mm(part, self.matrix(expert).to(part.dtype), out=result)
        return out

    def of(self, row: Tensor, expert: int) -> Tensor:
        """[1, C] -> [1, columns]"""
        row = wide(row) if self.in_float32 else row
        return torch.mm(row, self.matrix(expert).to(row.dtype))


def is_per_token(x: Tensor | Like, topk_ids: Tensor | Like) -> bool:
    """True for x [..., H], False for x [..., K, H], beside topk_ids [..., K]."""
    return len(x.shape) == len(topk_ids.shape)


def _rows_of(pairs: Tensor, x: Tensor, topk_ids: Tensor) -> Tensor:
    """The rows of `x` that pairs multiply."""
    return pairs // topk_ids.shape[-1] if is_per_token(x, topk_ids) else pairs


def project_pairs(
    x: Tensor, topk_ids: Tensor, shape: Sequence[int], product: Product, bias: Tensor | None
) -> Tensor:
    """[..., K, N]: product + bias of all pairs, zeros of sentinels. `shape` of the stack begins with E, N."""
    source = as_rows(x)
    out = x.new_zeros(topk_ids.numel(), shape[1])
    for groups in group_by_expert(topk_ids, shape[0]).chunks(PAIRS_AT_ONCE):
        rows = source[_rows_of(groups.pairs, x, topk_ids)]
        out[groups.pairs] = add_bias(product(rows, groups), groups, topk_ids, bias).to(x.dtype)
    return out.view(*topk_ids.shape, shape[1])


class Mlp(NamedTuple):
    """The experts between their inputs and the sum over a token's experts."""

    gate_up: Product
    down: Product
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    activation: Activation

    def rows(self, x: Tensor, groups: Groups, topk_ids: Tensor) -> Tensor:
        rows = add_bias(self.gate_up(x, groups), groups, topk_ids, self.gate_up_bias)
        rows = self.activation.apply(rows).to(x.dtype)
        return add_bias(self.down(rows, groups), groups, topk_ids, self.down_bias).to(wide_dtype(x))

    def row(self, x: Tensor, expert: int) -> Tensor:
        """[1, H] -> [1, H], in float32 or float64: one expert of a single token."""
        row = self.gate_up.of(x, expert)
        if self.gate_up_bias is not None:
            row = row + wide(self.gate_up_bias[expert])
        row = self.down.of(self.activation.apply(row).to(x.dtype), expert)
        return wide(row) if self.down_bias is None else row + wide(self.down_bias[expert])


def as_rows(x: Tensor) -> Tensor:
    """[..., W] as [T, W]."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def combine_experts(
    x: Tensor,
    norm: InputNorm,
    topk_weights: Tensor,
    topk_ids: Tensor,
    num_experts: int,
    mlp: Mlp,
    around: ExpertSum,
    has_identity: bool = False,
    weights_on_inputs: bool = False,
) -> Tensor:
    """sum_k topk_weights * mlp(norm(x)) + g * shared_out + residual, in float32, rounded once.

    A token's terms are added in ascending order of expert, whatever the other tokens do. With `has_identity`
    ids beyond the experts give norm(x); with `weights_on_inputs` a term is mlp(topk_weights * norm(x)).
    """
    leading = x.shape
    x, topk_ids, topk_weights = as_rows(norm.applied_to(x)), as_rows(topk_ids), as_rows(topk_weights)
    total = x.new_zeros(x.shape, dtype=wide_dtype(x))
    if has_identity:
        share = wide(topk_weights).masked_fill(topk_ids < num_experts, 0.0).sum(-1, keepdim=True)
        total += share * x
    if weights_on_inputs:
        rows = (wide(x).unsqueeze(1) * topk_weights.unsqueeze(-1)).to(x.dtype)
        pairs = [(rows[:, k], topk_ids[:, k : k + 1]) for k in range(rows.shape[1])]
        for inputs, ids in pairs:
            groups = group_by_expert(ids, num_experts)
            total.index_add_(0, groups.pairs, mlp.rows(inputs[groups.pairs], groups, ids))
        return around.added_to(total).to(x.dtype).view(leading)
    if len(x) == 1:  # grouping would cost more than it saves
        chosen = zip(topk_ids[0].tolist(), topk_weights[0].tolist(), strict=True)
        for expert, scale in sorted(chosen, key=itemgetter(0)):
            if 0 <= expert < num_experts:
                total += mlp.row(x, expert).mul_(scale)
        return around.added_to(total).to(x.dtype).view(leading)
    scales = topk_weights.reshape(-1, 1)
    for groups in group_by_expert(topk_ids, num_experts).chunks(PAIRS_AT_ONCE):
        tokens = groups.pairs // topk_ids.shape[1]
        total.index_add_(0, tokens, mlp.rows(x[tokens], groups, topk_ids).mul_(scales[groups.pairs]))
    return around.added_to(total).to(x.dtype).view(leading)


def _dense_product(weight: Tensor, transposed: bool) -> Product:
    """The product with a dense stack, whatever its strides.

    float16 does not hold every product that a bias or a weight brings back into its range. bfloat16 does, and
    its products are rounded: cast matrices would take up to 4 times as long.
    """
    matrices = weight if transposed else weight.mT
    return Product(matrices.__getitem__, matrices.shape[2], in_float32=weight.dtype == torch.float16)


def _meta_expert_mm(check, x, weight, topk_ids, bias, transposed):
    experts, rows, hidden = weight.mT.shape if transposed else weight.shape
    if hidden != x.shape[-1]:
        layout = "[E, H, N]" if transposed else "[E, N, H]"
        check.fail("weight", f"of shape {layout} with H = {x.shape[-1]} as in x", tuple(weight.shape))
    if bias is not None:
        check.shape("bias", bias, (experts, rows), "[E, N]")
    return x.new_empty(*topk_ids.shape, rows)


def _outer_of_all(dy: Tensor, x: Tensor, topk_ids: Tensor, num_experts: int) -> Tensor:
    """_expert_outer of any number of experts, in parts: an id outside of a part counts for nothing there."""
    outer = torch.ops.moe_mps._expert_outer
    if num_experts <= MAX_EXPERTS:
        return outer(dy, x, topk_ids, num_experts)
    starts = range(0, num_experts, MAX_EXPERTS)
    return torch.cat([outer(dy, x, topk_ids - s, min(MAX_EXPERTS, num_experts - s)) for s in starts])


def _mm_backward(grad, asked, given):
    x, weight, topk_ids, transposed = (given[name] for name in ("x", "weight", "topk_ids", "transposed"))
    ops, gradients = torch.ops.moe_mps, {}
    if "x" in asked:
        gradients["x"] = ops.expert_mm(grad, topk_ids, weight, None, transposed=not transposed)
        if is_per_token(x, topk_ids):
            gradients["x"] = gradients["x"].sum(-2, dtype=wide_dtype(x)).to(x.dtype)
    if "weight" in asked:
        outer = _outer_of_all(grad, x, topk_ids, weight.shape[0]).to(weight.dtype)
        gradients["weight"] = outer.mT if transposed else outer
    return gradients


@operator(
    f"{IDS} x[..., H]|[..., K, H] weight[E, _, _]:x bias[E, _]",
    _meta_expert_mm,
    backward=Backward(_mm_backward, {"x": ("weight", "topk_ids"), "weight": ("x", "topk_ids")}),
    public="experts matrix by matrix, and their training",
)
def expert_mm(
    x: Tensor, topk_ids: Tensor, weight: Tensor, bias: Tensor | None = None, *, transposed: bool = False
) -> Tensor:
    """Matrix product of each token with the weights of its experts.

    out[t, k] = weight[e] @ x[t] + bias[e] with e = topk_ids[t, k], or with x[t, k] if `x` has a row per pair.

    Args:
        x: [..., H] or [..., K, H], float32, float16 or bfloat16.
        topk_ids: [..., K] with K <= 64, int32 or int64. An id outside [0, E) reads nothing and gives zeros.
        weight: [E, N, H] in the dtype of `x`, or [E, H, N] with `transposed`. On Metal a stack whose memory
            is [E, N, H], one behind the other, or without a bias [E, H, N], is read where it lies; any other
            is copied in each call.
        bias: [E, N], float32, float16 or bfloat16.
        transposed: the input dimension of `weight` comes before the output dimension.

    Returns: [..., K, N] in the dtype of `x`; accumulated in float32. On a CPU a product in bfloat16 is
        rounded before the bias. Gradients reach `x` and `weight`.

    Raises: ValueError for a dtype, shape or device that does not fit.

    Example:
        >>> weight = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])  # two experts, [E, N, H] = [2, 1, 2]
        >>> ops.expert_mm(torch.tensor([[5.0, 7.0]]), torch.tensor([[1, 0]]), weight).tolist()
        [[[7.0], [5.0]]]
    """
    shape = weight.mT.shape if transposed else weight.shape
    return project_pairs(x, topk_ids, shape, _dense_product(weight, transposed), bias)


def _meta_expert_outer(check, dy, x, topk_ids, num_experts):
    return dy.new_empty(num_experts, dy.shape[-1], x.shape[-1], dtype=wide_dtype(dy))


@operator(
    f"{IDS} dy[..., K, N] x[..., H]|[..., K, H]:dy",
    _meta_expert_outer,
    allowed={"num_experts": range(1, MAX_EXPERTS + 1)},
)
def _expert_outer(dy: Tensor, x: Tensor, topk_ids: Tensor, num_experts: int) -> Tensor:
    """The gradient of the weight of expert_mm: out[e] = sum over the pairs of e dy[t, k] x[t, k]^T.

    Where `x` has one row for each token, it is x[t].

    Args:
        dy: [..., K, N], float32, float16 or bfloat16: the gradient of the output.
        x: [..., H] or [..., K, H] in the dtype of `dy`: the input.
        topk_ids: [..., K] with K <= 64, int32 or int64. A pair with an id outside [0, E) counts for nothing.
        num_experts: E, between 1 and 1024.

    Returns: [E, N, H], float32; zeros for an expert without pairs. On Metal a sum goes over the pairs in
        ascending order.

    Raises: ValueError for a dtype, shape, device or number that does not fit.
    """
    left, right = as_rows(wide(dy)), as_rows(wide(x))
    out = left.new_zeros(num_experts, dy.shape[-1], x.shape[-1])
    groups = group_by_expert(topk_ids, num_experts)
    rows = _rows_of(groups.pairs, x, topk_ids)
    parts = zip(left[groups.pairs].split(groups.counts), right[rows].split(groups.counts), strict=True)
    for expert, (of_dy, of_x) in zip(groups.experts, parts, strict=True):
        torch.mm(of_dy.t(), of_x, out=out[expert])
    return out


def _check_moe_experts(check, x, gate_up, down, gate_up_bias, transposed, **given):
    """Refuses shapes of dense stacks that do not fit x, each other, or the activation."""
    options_in(given, ExpertSum).check(check)
    activation = options_in(given, Activation)
    activation.check(check)
    gated = activation.gated
    experts, rows, hidden = gate_up.mT.shape if transposed else gate_up.shape
    if hidden != x.shape[-1] or (gated and rows % 2 != 0):
        dims = f"{'2I' if gated else 'I'}"
        layout = f"[E, H, {dims}]" if transposed else f"[E, {dims}, H]"
        check.fail("gate_up", f"of shape {layout} with H = {x.shape[-1]} as in x", tuple(gate_up.shape))
    intermediate = rows // 2 if gated else rows
    if transposed:
        check.shape("down", down, (experts, intermediate, hidden), "[E, I, H]")
    else:
        check.shape("down", down, (experts, hidden, intermediate), "[E, H, I]")
    if gate_up_bias is not None:
        check.shape("gate_up_bias", gate_up_bias, (experts, rows), "[E, 2I]" if gated else "[E, I]")


@operator(
    f"{AROUND} gate_up[E, _, _]:x down[E, _, _]:x gate_up_bias[E, _] down_bias[E, H] -> x",
    _check_moe_experts,
    dependences=(NO_SHARED,),
)
def _moe_experts(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    alpha: float | None = None,
    limit: float | None = None,
    gated: bool = True,
    interleaved: bool = False,
    transposed: bool = False,
    shared_gate: Tensor | None = None,
    shared_out: Tensor | None = None,
    residual: Tensor | None = None,
    gate_is_logit: bool = False,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-06,
    norm_weight_offset: float = 0.0,
    has_identity: bool = False,
) -> Tensor:
    """moe_experts, and what joins a layer around them into the same dispatches. It may change in any release.

        out[t] = moe_experts(norm(x))[t] + g[t] * shared_out[t] + residual[t]

    Args:
        x, topk_weights, topk_ids, gate_up, down, gate_up_bias, down_bias, activation, alpha, limit, gated,
            interleaved, transposed: as for moe_experts.
        shared_gate: [..., 1] or [...]; g = sigmoid(shared_gate) if `gate_is_logit`, else shared_gate; or 1.
        shared_out: [..., H] in the dtype of `x`.
        residual: [..., H], or as many rows of any leading shape, in the dtype of `x`.
        norm_weight: [H], float32, float16 or bfloat16. With it norm(x) is rms(x) * (norm_weight +
            norm_weight_offset), without it x. On Metal the norm of one token joins the first product and is
            not rounded, if its weight is float32 or has the dtype of `x`; else it is a dispatch of its own.
        norm_eps, norm_weight_offset: of the norm, as of rms_norm.
        has_identity: ids from E on are of experts that give norm(x). Without it they give nothing. Only
            without shared_out.

    Returns: [..., H] in the dtype of `x`; sums in float32.

    Raises: ValueError for a dtype, shape, device or option that does not fit.
    """
    products = _dense_product(gate_up, transposed), _dense_product(down, transposed)
    options = Activation(activation, alpha, limit, gated, interleaved)
    mlp = Mlp(*products, gate_up_bias, down_bias, options)
    norm = InputNorm(norm_weight, norm_eps, norm_weight_offset)
    around = ExpertSum(shared_gate, shared_out, residual, gate_is_logit)
    return combine_experts(x, norm, topk_weights, topk_ids, gate_up.shape[0], mlp, around, has_identity)


@door(_moe_experts, public="a layer of experts with dense weights")
def moe_experts(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    alpha: float | None = None,
    limit: float | None = None,
    gated: bool = True,
    interleaved: bool = False,
    transposed: bool = False,
) -> Tensor:
    """Combined output of a layer's experts, from the hidden states:

        h[t, k] = act(gate_up[e] @ x[t] + gate_up_bias[e])          with e = topk_ids[t, k]
        y[t, k] = down[e] @ h[t, k] + down_bias[e]
        out[t]  = sum_k topk_weights[t, k] * y[t, k]

    h is rounded to the dtype of `x`; on Metal, for more than 32 tokens, each y too. On a CPU products in
    bfloat16 are rounded before their biases.

    Args:
        x: [..., H], float32, float16 or bfloat16.
        topk_weights: [..., K], float32, float16 or bfloat16.
        topk_ids: [..., K] with K <= 64, int32 or int64. An id outside [0, E) adds nothing and reads nothing.
        gate_up: [E, 2I, H] in the dtype of `x` ([E, I, H] when not gated), [E, H, 2I] with `transposed`. On
            Metal a stack whose memory is [E, 2I, H], one behind the other, is read where it lies; any other
            is copied in each call; so is `down`, [E, H, I].
        down: [E, H, I] in the dtype of `x`, or [E, I, H] with `transposed`.
        gate_up_bias, down_bias: [E, 2I] ([E, I] when not gated) and [E, H], float32, float16 or bfloat16.
        activation: with gate and up the two halves of the first product,
            silu, gelu (exact), gelu_tanh, relu, relu2 (relu squared): act(gate) * up;
            swiglu_oai: (up + 1) * gate * sigmoid(alpha * gate), gate at most `limit`, up within +-`limit`;
            silu_clamped: silu(gate) * up, clamped likewise;
            silu_capped: silu(gate) * up, silu(gate) at most `limit`, up within +-`limit`. The last three
            need `gated`.
        alpha: of swiglu_oai, 1.702 unless given.
        limit: of swiglu_oai, 7.0 unless given; of silu_clamped and silu_capped, required.
        gated: without it there is no up half and the activation acts alone.
        interleaved: the rows of `gate_up` are gate0, up0, gate1, up1, ... instead of all gates, then all ups.
        transposed: the input dimension of both weights comes before the output dimension.

    Returns: [..., H] in the dtype of `x`; sums in float32.

    Raises: ValueError for a dtype, shape, device or option that does not fit.

    In models, `_moe_experts` replaces it.

    Example:
        >>> gate_up, down = torch.ones(2, 2, 4), torch.ones(2, 4, 1)  # two experts, H = 4, I = 1
        >>> topk_weights, topk_ids = torch.tensor([[0.5, 0.25]]), torch.tensor([[0, 1]])
        >>> x = torch.ones(1, 4)
        >>> ops.moe_experts(x, topk_weights, topk_ids, gate_up, down, activation="relu").tolist()
        [[12.0, 12.0, 12.0, 12.0]]
    """
    return inspect.unwrap(_moe_experts)(**locals())


def _layer(s):
    stacks = {"gate_up": s.values(s.E, 2 * s.I, s.H), "down": s.values(s.E, s.H, s.I)}
    return stacks | {"topk_weights": s.topk_weights, "topk_ids": s.topk_ids}


CALLS: Calls = {
    "expert_mm": lambda s: {"weight": s.values(s.E, s.I, s.H), "topk_ids": s.topk_ids},
    "_expert_outer": lambda s: s.of("dy[T, K, I] x[T, H]", topk_ids=s.topk_ids, num_experts=s.E),
    "_moe_experts": _layer,
    "moe_experts": _layer,
}
CHANGES: Changes = {
    "expert_mm": lambda s: [{"weight": s.values(s.E, s.H, s.I).mT}],
    "_expert_outer": lambda s: [s.of("x[T, K, H]", topk_ids=s.topk_ids)],
    "_moe_experts": lambda s: [
        {**s.shared, "gate_up_bias": s.values(s.E, 2 * s.I), "interleaved": True},
        {**s.norm, "has_identity": True},
        {**s.one_token, **s.norm},
    ],
    "moe_experts": lambda s: [{"gate_up_bias": s.values(s.E, 2 * s.I), "interleaved": True}],
}
