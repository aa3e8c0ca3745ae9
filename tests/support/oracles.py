"""What the operators must compute, in numpy and float64, written from their definitions."""

import numpy as np
import torch
from torch import Tensor

# (bits of the significand with the hidden one, exponent of the smallest normal number, largest number)
FORMATS = {
    torch.float32: (24, -126, float(np.finfo(np.float32).max)),
    torch.float16: (11, -14, 65504.0),
    torch.bfloat16: (8, -126, 3.3895313892515355e38),
    torch.float64: (53, -1022, float(np.finfo(np.float64).max)),
}
LARGEST = FORMATS[torch.float32][2]
FLOAT32_EPS = 2.0**-23


def exact(tensor: Tensor) -> np.ndarray:
    """The tensor's values in float64, which holds all of them."""
    return tensor.detach().cpu().double().numpy()


def spacing(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The distance between neighbours of `dtype` at x."""
    bits, smallest_normal, _ = FORMATS[dtype]
    _, exponent = np.frexp(x)
    return np.ldexp(1.0, np.maximum(exponent - 1, smallest_normal) - (bits - 1))


def round_to(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """x rounded once to the nearest value of `dtype`, ties to even."""
    step = spacing(x, dtype)
    rounded = np.rint(x / step) * step
    return np.where(np.abs(rounded) > FORMATS[dtype][2], np.copysign(np.inf, x), rounded)


# Norms


def rms(x: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


# Combine


def sigmoid(x: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0.0, -x))


def silu_mul(gate, up):
    return gate * sigmoid(gate) * up


def weighted_sum(slots, weights):
    return np.einsum("...sh,...s->...h", slots, weights)


def weighted_reduce(
    weights, expert_out, shared_gate=None, shared_out=None, residual=None, gate_is_logit=False
):
    out = weighted_sum(expert_out.reshape(*weights.shape, expert_out.shape[-1]), weights)
    if shared_out is not None:
        gate = 1.0 if shared_gate is None else shared_gate.reshape(-1, 1)
        out = out + (sigmoid(gate) if gate_is_logit else gate) * shared_out
    return out if residual is None else out + residual.reshape(out.shape)


# Routing


def finite(x: np.ndarray) -> np.ndarray:
    """Degenerate logits by the value they count as."""
    return np.clip(np.where(np.isnan(x), -LARGEST, x), -LARGEST, LARGEST)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


SCORES = {
    "softmax": softmax,
    "sigmoid": sigmoid,
    "sqrtsoftplus": lambda x: np.sqrt(np.logaddexp(0.0, x)),
    "softmax_after_topk": lambda x: x,
}


def descending(values: np.ndarray) -> np.ndarray:
    """The positions of the values from the largest to the smallest, the lower position first among equals."""
    return np.lexsort((np.arange(values.size), -values))


def gap(values: np.ndarray, count: int) -> float:
    """The smallest difference that decides the order of the `count` largest values."""
    leaders = np.sort(values)[::-1][: count + 1]
    return float(np.min(-np.diff(leaders), initial=np.inf))


def top_groups_of(choice: np.ndarray, groups: int, count: int, kind: str) -> tuple[np.ndarray, float]:
    """Which experts lie in the best groups, and the gap of that decision."""
    ranked = np.sort(choice.reshape(groups, -1), axis=1)
    scores = ranked[:, -1] if kind == "max" else ranked[:, -1] + ranked[:, -2]
    chosen = np.zeros(groups, dtype=bool)
    chosen[descending(scores)[:count]] = True
    worst, best_left = scores[chosen].min(), scores[~chosen].max(initial=-np.inf)
    return np.repeat(chosen, choice.size // groups), worst - best_left


def route(
    logits: np.ndarray,
    top_k: int,
    scoring: str,
    *,
    norm_topk_prob: bool,
    bias: np.ndarray | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    group_score: str = "top2_sum",
    masked_score: float | None = None,
    bias_on_logits: bool = False,
    sum_eps: float = 1e-20,
    sum_min: float = 0.0,
    scaling_factor: float = 1.0,
    per_expert_scale: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(weights, ids, gaps) of one router, row by row.

    A row's gap is the smallest difference that decided its ids: rows with a gap near float32's rounding have
    no one right answer. Comparisons of logits are exact and do not count.
    """
    all_weights, all_ids, gaps = [], [], []
    for row in finite(logits):
        scores = SCORES[scoring](row)
        by_score = not (bias_on_logits or scoring == "softmax_after_topk")
        choice = scores if by_score else row
        if bias is not None:
            choice = choice + bias
        exact_order = bias is None and masked_score is None
        compared, row_gap = (row if exact_order else choice), np.inf
        if num_groups > 1:
            by = row if exact_order and group_score == "max" else choice
            inside, group_gap = top_groups_of(by, num_groups, top_groups, group_score)
            row_gap = np.inf if by is row and group_score == "max" else group_gap
            compared = np.where(inside, compared, -np.inf if masked_score is None else masked_score)
        ids = descending(compared)[:top_k]
        if not exact_order:
            row_gap = min(row_gap, gap(compared, top_k))
        weights = softmax(row[ids]) if scoring == "softmax_after_topk" else scores[ids]
        if norm_topk_prob:
            total = max(weights.sum() + sum_eps, sum_min)
            weights = weights / (total if total != 0.0 else 1.0)
        weights = weights * scaling_factor * (1.0 if per_expert_scale is None else per_expert_scale[ids])
        all_weights.append(weights)
        all_ids.append(ids)
        gaps.append(row_gap)
    return np.array(all_weights), np.array(all_ids), np.array(gaps)


def gate_weights(logits, ids, per_expert_scale, renormalize):
    """The weights of given ids: softmax over their logits, scaled, renormalised."""
    weights = softmax(np.take_along_axis(logits, ids, -1)) * per_expert_scale[ids]
    if renormalize:
        total = weights.sum(-1, keepdims=True)
        weights = weights / np.where(total == 0.0, 1.0, total)
    return weights


def pairs_of_experts(ids: np.ndarray, num_experts: int) -> tuple[list[list[int]], list[int]]:
    """The pairs of each expert and the pairs without an expert, in ascending order."""
    lists, rest = [[] for _ in range(num_experts)], []
    for pair, expert in enumerate(ids.reshape(-1).tolist()):
        (lists[expert] if 0 <= expert < num_experts else rest).append(pair)
    return lists, rest
