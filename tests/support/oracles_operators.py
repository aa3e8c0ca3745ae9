"""The result of each operator for its arguments in float64, and how far float32 arithmetic may be off.

The function with an operator's name gives its results, then what it leaves in arguments that it writes.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from support import oracles, oracles_experts, oracles_sequence
from support.oracles import FLOAT32_EPS, exact
from support.oracles_experts import DEVIATIONS, Estimate, activate, dequantise, multiply, numbers_of, roundoff
from torch_moe_mps.ops._samples import packet
from torch_moe_mps.quantization import Format
from torch_moe_mps.quantization.formats import quantize_stack


class Expected(NamedTuple):
    """`error` comes on top of one unit of the last place of the result; None: the value itself, rounded.

    Where `known` is False float32 cannot tell the right result.
    """

    value: np.ndarray
    error: np.ndarray | float | None = None
    known: np.ndarray | bool = True


def given(tensor: Tensor | None) -> np.ndarray | None:
    return None if tensor is None else exact(tensor)


def estimated(estimate: Estimate) -> Expected:
    return Expected(estimate.value, DEVIATIONS * estimate.deviation)


EMPTY = Expected(np.zeros(0))


def expected(name: str, arguments: dict[str, Any], results: Sequence[Tensor] = ()) -> list[Expected]:
    """What the operator must give for these arguments; tensors may be on any device. Where several results
    are right, the oracle judges those that it gave."""
    defaults = {a.name: a.default_value for a in packet(name).default._schema.arguments}
    on_cpu = {n: v.cpu() if isinstance(v, Tensor) else v for n, v in arguments.items()}
    defaults["results"] = [result.cpu() for result in results]
    with np.errstate(all="ignore"):
        return globals()[name](SimpleNamespace(**defaults | on_cpu))


def written(name: str) -> list[str]:
    """The arguments that it writes in place."""
    arguments = packet(name).default._schema.arguments
    return [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]


def checked(name: str, *args: Any, **kwargs: Any) -> Any:
    """What the operator returns, after it and all tensors written in place were compared with the oracle."""
    names = [a.name for a in packet(name).default._schema.arguments]
    arguments = dict(zip(names, args, strict=False)) | kwargs
    before = {n: v.clone() if n in written(name) and v is not None else v for n, v in arguments.items()}
    result = packet(name)(**arguments)
    results = () if result is None else result if isinstance(result, tuple) else (result,)
    right = expected(name, before, results)
    assert all(tensor.is_contiguous() for tensor in results), name
    actual = [*results, *(arguments[n] for n in written(name) if arguments.get(n) is not None)]
    for number, (tensor, tensor_right) in enumerate(zip(actual, right, strict=True)):
        check_tensor(tensor, tensor_right, f"{name}: result {number}")
    return result


def check_tensor(result: Tensor, right: Expected, what: str) -> None:
    assert tuple(result.shape) == right.value.shape, what
    if not result.dtype.is_floating_point:
        wrong = (result.cpu().numpy() != right.value) & right.known
        assert not wrong.any(), f"{what}: {wrong.sum()} wrong"
        return
    got = exact(result)
    with np.errstate(all="ignore"):
        correct = oracles.round_to(right.value, result.dtype)
        if right.error is None:
            wrong = got != correct
        else:
            wrong = ~(abs(got - correct) <= oracles.spacing(correct, result.dtype) + right.error)
        # A result beyond the dtype is infinite, or the largest number if rounded the other way.
        largest = 0.99 * oracles.FORMATS[result.dtype][2]
        wrong &= ~((abs(correct) >= largest) & (abs(got) >= largest) & (np.sign(got) == np.sign(correct)))
    wrong &= np.isfinite(right.value) & right.known
    assert not wrong.any(), f"{what}: {wrong.sum()} of {wrong.size} wrong"


# Norms


def normed(x, weight, eps, offset=0.0, factor=1.0, *, x_error=0.0) -> Expected:
    """rms(x) * (weight + offset) * factor; `x_error` is that of x."""
    if x.shape[-1] == 0:
        return Expected(np.zeros(x.shape), np.zeros(x.shape))
    weight = np.ones(x.shape[-1]) if weight is None else weight
    relative = 12 * FLOAT32_EPS
    scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    error = abs(x) * scale * (abs(weight) + abs(offset)) * abs(factor) * relative
    error = error + 2 * x_error * scale * abs(weight + offset) * abs(factor)
    return Expected(x * scale * (weight + offset) * factor, error)


def norm_add(a, factor=1.0) -> list[Expected]:
    residual = exact(a.residual)
    norm = normed(exact(a.input), exact(a.weight), a.eps, a.weight_offset)
    error = norm.error + 4 * FLOAT32_EPS * (abs(residual) + abs(norm.value))
    return [Expected((residual + norm.value) * factor, error * abs(factor))]


def residual_norm(a, of_input=1.0, factor=1.0) -> tuple[Expected, Expected]:
    """Without a factor of the input the sum is exact: 24 bits of float32 are twice float16's 11 and two more.

    With one it may be rounded to the neighbour of the nearest number.
    """
    residual, product = exact(a.residual), exact(a.input) * of_input
    total, error = oracles.round_to(residual + product, a.residual.dtype), None
    if of_input != 1.0:
        error = 2 * FLOAT32_EPS * (abs(residual) + abs(product))
    off = 0.0 if error is None else oracles.spacing(total, a.residual.dtype) + error
    return normed(total, exact(a.weight), a.eps, a.weight_offset, factor, x_error=off), Expected(total, error)


def rms_norm(a):
    return [normed(exact(a.input), given(a.weight), a.eps, a.weight_offset, a.factor)]


def layer_norm(a):
    return [layer_normed(exact(a.input), a)]


def layer_normed(x: np.ndarray, a) -> Expected:
    if x.size == 0:
        return Expected(x)
    size = abs(x).max(-1, keepdims=True)
    norm = normed(x - x.mean(-1, keepdims=True), given(a.weight), a.eps, a.weight_offset)
    spread = 1 / np.sqrt(x.var(-1, keepdims=True) + a.eps)
    weight = 1.0 if a.weight is None else abs(exact(a.weight)) + a.weight_offset
    bias = 0.0 if a.bias is None else exact(a.bias)
    # The mean is off by what float32 loses of the largest number; that of x^2 is of its square.
    error = norm.error + 4 * FLOAT32_EPS * (size * spread * weight + abs(norm.value) * size * spread)
    return Expected(norm.value + bias, error + 2 * FLOAT32_EPS * abs(bias))


def normed_and_gated(x, gate, weight, eps, offset, activation="silu", x_error=0.0) -> Expected:
    factor = oracles.sigmoid(gate) * (gate if activation == "silu" else 1.0)
    norm = normed(x, weight, eps, offset, factor, x_error=x_error)
    return Expected(norm.value, norm.error + 2 * abs(gate) * FLOAT32_EPS * abs(norm.value) + 1e-35)


def rms_norm_gated(a):
    shape, width = a.input.shape, a.group or max(1, a.input.shape[-1])
    groups = shape[-1] // width, width
    x, gate, weight = (exact(t).reshape(*t.shape[:-1], *groups) for t in (a.input, a.gate, a.weight))
    if a.gate_first:
        factor = oracles.sigmoid(gate) * (gate if a.activation == "silu" else 1.0)
        # From a gate of -88 on the sigmoid is 0.
        error = 4 * (1 + abs(gate)) * FLOAT32_EPS * abs(x * factor) + 1e-36 * abs(x)
        result = normed(x * factor, weight, a.eps, a.weight_offset, x_error=error)
    else:
        result = normed_and_gated(x, gate, weight, a.eps, a.weight_offset, a.activation)
    error = result.error + 1e-35  # the GPU has no smaller numbers
    return [Expected(result.value.reshape(shape), error.reshape(shape))]


def fused_norm_add(a):
    return norm_add(a)


def fused_norm_add_scalar(a):
    return norm_add(a, exact(a.scalar))


def fused_residual_norm(a):
    norm, total = residual_norm(a, a.factor)
    return [norm, total if a.write_sum else EMPTY]


def fused_residual_layer_norm(a):
    """The sum is exact, as in `residual_norm`."""
    total = oracles.round_to(exact(a.residual) + exact(a.input), a.residual.dtype)
    return [layer_normed(total, a), Expected(total)]


def fused_residual_norm_scalar(a):
    return [residual_norm(a, factor=exact(a.scalar))[0]]


# Combine


def summed(terms: np.ndarray, magnitude: np.ndarray, count: int) -> Expected:
    return Expected(terms, (4 + count) * FLOAT32_EPS * magnitude)


def weighted(slots, weights, residual=0.0) -> Expected:
    value = residual + oracles.weighted_sum(slots, weights)
    magnitude = abs(residual) + oracles.weighted_sum(abs(slots), abs(weights))
    return summed(value, magnitude, slots.shape[-2])


def silu_mul_stacked(a):
    gate, up = exact(a.gate), exact(a.up)
    value = oracles.silu_mul(gate, up)
    return [Expected(value, (8 + abs(gate) / 4) * FLOAT32_EPS * abs(value) + 1e-37)]


def expert_activation(a):
    rows = exact(a.rows).reshape(-1, a.rows.shape[-1]) if a.rows.numel() else exact(a.rows)
    if a.rows.numel() == 0:
        return [Expected(np.zeros((*rows.shape[:-1], rows.shape[-1] // (1 + a.gated))))]
    out = activate(Estimate(rows, np.zeros_like(rows)), vars(a), a.rows.dtype)
    return [estimated(Estimate(*(part.reshape(*a.rows.shape[:-1], -1) for part in out)))]


def clamped(x: Tensor, high: float, low: float = -math.inf) -> Tensor:
    """torch.clamp, with a gradient of 1 at both limits: since torch 2.15 its own is 0 there."""
    return torch.where(x > high, high, torch.where(x < low, low, x))


def expert_activation_backward(a):
    """By torch's own derivatives, in float64."""
    rows, dy = a.rows.double().requires_grad_(), a.dy.double()
    functions = {
        **{"silu": F.silu, "gelu": F.gelu, "relu": F.relu, "relu2": lambda x: F.relu(x) ** 2},
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    }
    gate, up = rows, torch.ones_like(rows)
    if a.gated:
        gate, up = (rows[..., 0::2], rows[..., 1::2]) if a.interleaved else rows.chunk(2, -1)
    if a.activation in functions:
        out = functions[a.activation](gate) * up
    else:
        limit, alpha = 7.0 if a.limit is None else a.limit, 1.702 if a.alpha is None else a.alpha
        gate, up = clamped(gate, limit), clamped(up, limit, -limit)
        out = (
            (up + 1) * gate * torch.sigmoid(alpha * gate)
            if a.activation == "swiglu_oai"
            else F.silu(gate) * up
        )
    (value,) = torch.autograd.grad(out, rows, dy)
    sizes = [(1 + part.detach().abs()) for part in (gate, up)]
    size = dy.abs() * sizes[0] ** 2 * sizes[1]
    if a.gated:
        both = (size, size)
        size = torch.stack(both, -1).flatten(-2) if a.interleaved else torch.cat(both, -1)
    return [Expected(value.numpy(), 16 * FLOAT32_EPS * size.numpy())]


def moe_weighted_reduce_backward(a):
    dy, weights = exact(a.dy)[:, None], exact(a.weights)
    slots = exact(a.expert_out).reshape(*weights.shape, dy.shape[-1])
    error = (8 + dy.shape[-1]) * FLOAT32_EPS * (abs(slots) * abs(dy)).sum(-1)
    of_slots = (weights[..., None] * dy).reshape(a.expert_out.shape)
    return [Expected((slots * dy).sum(-1), error), Expected(of_slots, 2 * FLOAT32_EPS * abs(of_slots))]


def weighted_sum_stacked(a):
    return [weighted(exact(a.slots), exact(a.weights))]


def weighted_sum_residual_stacked_(a):
    return [weighted(exact(a.slots), exact(a.weights), exact(a.residual_))]


def weighted_sum_residual_norm_stacked_(a):
    total = weighted(exact(a.slots), exact(a.weights), exact(a.residual_))
    dtype = a.residual_.dtype
    error = total.error + oracles.spacing(total.value, dtype)
    rounded = oracles.round_to(total.value, dtype)
    return [normed(rounded, exact(a.norm_weight), a.eps, x_error=error), total]


def moe_weighted_reduce(a):
    arguments = [given(x) for x in (a.weights, a.expert_out, a.shared_gate, a.shared_out, a.residual)]
    value = oracles.weighted_reduce(*arguments, a.gate_is_logit)
    sizes = [None if x is None else abs(x) for x in arguments]
    if a.gate_is_logit:
        sizes[2] = oracles.sigmoid(arguments[2]) * (1 + abs(arguments[2]))
    return [summed(value, oracles.weighted_reduce(*sizes), a.weights.shape[1])]


# Routing

SURE = 1e-5  # of the largest choice: how far apart two choices are that float32 tells from each other


def routed(logits, a, **options) -> list[Expected]:
    if logits.shape[0] == 0:
        empty = Expected(np.zeros((0, a.top_k)))
        return [empty, empty]
    weights, ids, gaps = oracles.route(logits, a.top_k, **options)
    largest = np.abs(oracles.finite(logits)).max(-1, initial=1.0)
    bias = options.get("bias")
    largest = largest + (0.0 if bias is None else abs(bias).max())
    sure = (gaps > SURE * largest)[:, None]
    chosen = np.take_along_axis(oracles.finite(logits), ids, -1)
    error = (64 + 2 * np.minimum(abs(chosen), 200)) * FLOAT32_EPS * abs(weights)
    return [Expected(weights, error + 1e-36, sure), Expected(ids, None, sure)]


def moe_router(a):
    names = (
        *("scoring", "norm_topk_prob", "num_groups", "top_groups", "group_score", "masked_score"),
        *("bias_on_logits", "norm_eps", "norm_min", "scaling_factor"),
    )
    options = {name: getattr(a, name) for name in names}
    return routed(
        exact(a.logits), a, **options, bias=given(a.bias), per_expert_scale=given(a.per_expert_scale)
    )


def moe_router_topk_softmax(a):
    return routed(exact(a.logits), a, scoring="softmax", norm_topk_prob=a.norm_topk_prob, norm_eps=0.0)


def fused_moe_routing(a):
    logits = exact(a.logits)
    results = routed(
        logits.reshape(-1, logits.shape[-1]),
        a,
        scoring="softmax_after_topk",
        norm_topk_prob=False,
        per_expert_scale=exact(a.per_expert_scale),
    )
    if logits.ndim == 2:
        return results
    return [Expected(*(part[0] if isinstance(part, np.ndarray) else part for part in r)) for r in results]


def dot_products(x: np.ndarray, weight: np.ndarray, shift: np.ndarray | float) -> Expected:
    """x @ weight^T + shift in float32."""
    magnitude = abs(x) @ abs(weight).T + abs(shift)
    return Expected(x @ weight.T + shift, (4 + np.sqrt(x.shape[-1])) * FLOAT32_EPS * magnitude)


def input_rows(a) -> Estimate:
    """The rows of x, or their norm: rounded to the dtype of x or not."""
    x = exact(a.x)
    if a.norm_weight is None:
        return Estimate(x, np.zeros_like(x))
    norm = normed(x, exact(a.norm_weight), a.norm_eps, a.norm_offset)
    return Estimate(norm.value, norm.error + roundoff(a.x.dtype) * abs(norm.value))


def router_logits(a):
    rows, weight = input_rows(a), a.factor * exact(a.weight)
    logits = dot_products(rows.value, weight, 0.0 if a.bias is None else exact(a.bias))
    inherited = DEVIATIONS * np.sqrt(rows.deviation**2 @ (weight**2).T)
    return [Expected(logits.value, logits.error + inherited)]


def moe_hash_router(a):
    rows, weight = input_rows(a), exact(a.weight)
    logits = dot_products(rows.value, weight, 0.0)
    error = logits.error + DEVIATIONS * np.sqrt(rows.deviation**2 @ (weight**2).T)
    tokens, table = a.tokens.long().numpy(), a.table.long().numpy()
    known = (tokens >= 0) & (tokens < len(table))
    ids = table[tokens.clip(0, len(table) - 1)]
    known = known[:, None] & (ids >= 0) & (ids < len(weight))
    places = np.where(known, ids, 0)
    chosen, error = (np.take_along_axis(each, places, -1) for each in (oracles.finite(logits.value), error))
    scores = np.where(known, oracles.SCORES[a.scoring](chosen), 0.0)
    # Both scorings change by at most as much as the logit; float32 rounds them.
    error = np.where(known, error + 16 * (1 + abs(chosen)) * FLOAT32_EPS * scores, 0.0)
    if a.norm_topk_prob:
        total = scores.sum(-1, keepdims=True) + a.sum_eps
        total[total == 0.0] = 1.0
        error = (error + scores / total * error.sum(-1, keepdims=True)) / total
        scores = scores / total
    factor = abs(a.scaling_factor)
    error = factor * (error + 64 * FLOAT32_EPS * scores) + 1e-36
    sure = np.isfinite(error).all(-1, keepdims=True)
    return [Expected(scores * a.scaling_factor, error, sure), Expected(np.where(known, ids, -1))]


def moe_gate(a):
    rows = normed(exact(a.hidden), exact(a.norm_weight), a.eps).value
    weight, scale = exact(a.router_weight), exact(a.per_expert_scale)
    logits = rows @ weight.T
    # Roundings are independent of each other: their sum is far below the bound that grows with the width.
    error = 4 * FLOAT32_EPS * (abs(rows) @ abs(weight).T).max(-1, initial=0.0)
    ids = np.array([oracles.descending(row)[: a.top_k] for row in logits], dtype=np.int64)
    ids = ids.reshape(-1, a.top_k)
    gaps = np.array([oracles.gap(row, a.top_k) for row in logits])
    sure = (gaps > 2 * error)[:, None]
    weights = oracles.gate_weights(logits, ids, scale, a.renormalize_after_scale)
    relative = 64 * FLOAT32_EPS + error[:, None]
    if a.renormalize_after_scale:  # scales of both signs cancel in the sum
        plain = oracles.gate_weights(logits, ids, scale, False)
        total, size = plain.sum(-1, keepdims=True), abs(plain).sum(-1, keepdims=True)
        relative = relative * (1 + size / np.where(total == 0, 1.0, abs(total)))
    return [Expected(weights, relative * abs(weights) + 1e-36, sure), Expected(ids, None, sure)]


def moe_bucket(a):
    lists, rest = oracles.pairs_of_experts(a.ids.numpy(), a.num_experts)
    offsets = np.cumsum([0, *map(len, lists)])
    return [Expected(np.array([p for pairs in lists for p in pairs] + rest)), Expected(offsets)]


def moe_compute_ids_tpe(a):
    lists, _ = oracles.pairs_of_experts(a.ids.numpy(), a.num_experts)
    pairs = a.ids.numel()
    padded = np.array([p + [-1] * (pairs - len(p)) for p in lists]).reshape(a.num_experts, pairs)
    counts = np.array([len(p) for p in lists])
    tiles = max(1, -(-counts.max() // 32))
    grids = [np.array([tiles, -(-rows // 64), a.num_experts]) for rows in (a.gate_up_rows, a.down_rows)]
    return [Expected(counts), Expected(padded), *map(Expected, grids)]


# Experts

EXPERT_OPTIONS = (
    *("gate_up_bias", "down_bias", "activation", "alpha", "limit", "gated", "interleaved"),
    *("shared_gate", "shared_out", "residual", "gate_is_logit"),
)


def experts(a, gate_up: np.ndarray, down: np.ndarray, rounded_weight: bool) -> list[Expected]:
    options = {name: getattr(a, name) for name in EXPERT_OPTIONS}
    return [
        estimated(
            oracles_experts.moe_experts_of_rows(
                a.x.dtype,
                input_rows(a),
                gate_up,
                down,
                a.ids,
                a.weights,
                options,
                rounded_weight=rounded_weight,
            )
        )
    ]


def sample(a):
    """Not known where the race, or what is kept, is as near as float32 tells."""
    logits, draws = exact(a.logits), exact(a.draws)
    rows, vocabulary = logits.shape
    tokens, invalid = np.full(rows, a.otherwise), np.zeros(rows, np.int64)
    if a.invalid is not None:
        invalid |= a.invalid.numpy() != 0
    known = np.ones(rows, bool)
    for row in range(rows):
        scores = logits[row] / a.temperature
        if not np.isfinite(scores.max()):
            invalid[row] = 1
            continue
        order = np.lexsort((-np.arange(vocabulary), -scores))  # of equal ones the last first
        last = scores[order[min(a.top_k or vocabulary, vocabulary) - 1]]
        weights = np.exp(scores - scores.max()) * (scores >= last)
        before = np.cumsum(weights[order]) - weights[order]
        share = a.top_p * weights.sum()
        kept = order[(before < share) | (a.top_p == 1) | (np.arange(vocabulary) == 0)]
        kept = kept[(weights[kept] >= a.min_p) & (weights[kept] > 0)]
        races = weights[kept] / draws[row, kept]
        best = np.argsort(-races)
        tokens[row] = kept[best[0]]
        known[row] = len(best) == 1 or races[best[1]] < races[best[0]] * (1 - 1e-5)
        known[row] &= a.top_p == 1 or abs(before - share).min() > 1e-6 * share
        known[row] &= a.min_p == 0 or abs(weights - a.min_p).min() > 1e-6 * a.min_p
    return [Expected(np.stack((tokens, invalid)), known=np.stack((known, np.ones(rows, bool))))]


def index_topk(a):
    """Not known for a token whose last chosen row has almost the score of another."""
    is_pooled, of_heads = a.reduce == "heads" and a.block > 1, a.reduce == "heads"
    keys = a.keys if is_pooled else a.k.shape[1]
    products = np.einsum("bthd,bsd->bhts", exact(a.q), exact(a.k)) * a.scale
    if of_heads:
        weights = np.ones(a.q.shape[:3]) if a.weights is None else exact(a.weights)
        products = np.einsum("bhts,bth->bts", np.maximum(products, 0), weights)[:, None]
    batch, heads, tokens, rows = products.shape
    rows = rows if is_pooled else -(-keys // a.block)
    slots = min(a.top_k, rows)
    width = -(-keys // 32) if a.as_bits else slots + (is_pooled and a.tail > 0)
    chosen = np.full((batch, heads, tokens, width), 0 if a.as_bits else -1)
    known = np.ones(chosen.shape, bool)
    for entry, head, token in np.ndindex(batch, heads, tokens):
        begin, end = (0, keys) if a.key_range is None else a.key_range[entry].tolist()
        begin, end = max(begin, 0), max(0, min(end, keys - tokens + token + 1))
        of_token = products[entry, head, token]
        if is_pooled:
            scores = {row: of_token[row] for row in range(end // a.block)}
        else:
            places = np.arange(begin, end)
            of_blocks = {row: places[places // a.block == row] for row in sorted({*(places // a.block)})}
            scores = {row: of_token[of_block].max() for row, of_block in of_blocks.items()}
            for row in [*scores][len(scores) - min(a.tail, len(scores)) :]:
                scores[row] = np.inf
        order = sorted(scores, key=lambda row: (-scores[row], row))
        best = sorted(order[:slots])
        if len(best) < len(order):
            kept, left = scores[order[len(best) - 1]], scores[order[len(best)]]
            highest = max((abs(each) for each in scores.values() if np.isfinite(each)), default=0.0)
            known[entry, head, token] = kept == left or kept - left > 1e-4 * highest
        if is_pooled and a.tail and end % a.block:
            best.append(end // a.block)
        row = chosen[entry, head, token]
        if a.as_bits:
            shown = [key for key in range(begin, end) if key // a.block in best]
            words = np.zeros(width, np.int64)
            np.bitwise_or.at(words, np.array(shown, int) // 32, 1 << (np.array(shown, np.int64) % 32))
            row[:] = words.astype(np.uint32).astype(np.int32)
        else:
            row[: len(best)] = best
    if of_heads and not a.as_bits:
        chosen, known = chosen[:, 0], known[:, 0]
    return [Expected(chosen, known=known)]


def hyper_update(a):
    out, post, streams = (exact(t) for t in (a.out, a.post, a.streams))
    mixed, size = streams, abs(streams)
    if a.comb is not None:
        comb = np.swapaxes(exact(a.comb), -1, -2)
        mixed, size = comb @ streams, abs(comb) @ size
    added = post[..., None] * out[..., None, :]
    return [Expected(added + mixed, 4 * FLOAT32_EPS * (abs(added) + size))]


POINTWISE = {
    "to": lambda x: x,
    "neg": np.negative,
    "exp": np.exp,
    "log": np.log,
    "log1p": np.log1p,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "softplus": lambda x: np.logaddexp(x, 0),
    "tanh": np.tanh,
    "relu": lambda x: np.where(x < 0, 0, x),
    "cos": np.cos,
    "sin": np.sin,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "max": np.maximum,
    "min": np.minimum,
}
_INEXACT = ("log", "log1p", "exp", "tanh", "softplus", "cos", "sin")
_SILU_LEAST = -1.2784645427610738  # where silu has its minimum


def pointwise(a):
    """Each step on both ends of what its operands may be, and rounded at both."""
    names = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
    given = {name: getattr(a, name) for name in "abcdef" if getattr(a, name) is not None}
    inputs = {name: tensor.double().numpy() for name, tensor in given.items()}
    shape = np.broadcast_shapes(*(value.shape for value in inputs.values()))
    ends = {name: (value, value) for name, value in inputs.items()}
    known: np.ndarray = np.ones(shape, bool)
    for number, line in enumerate(a.formula.split("; ")):
        operation, *operands, dtype = line.split(" ")
        sides = [ends[name] if name in ends else (np.float64(name),) * 2 for name in operands]
        results = [POINTWISE[operation](*values) for values in itertools.product(*sides)]
        if operation == "silu":
            turns = (sides[0][0] < _SILU_LEAST) & (sides[0][1] > _SILU_LEAST)
            results.append(np.where(turns, POINTWISE["silu"](_SILU_LEAST), results[0]))
        if operation in ("cos", "sin"):  # which may turn between the ends, but change no more than they do
            spread = sides[0][1] - sides[0][0]
            results += [results[0] - spread, results[0] + spread]
        low, high = np.minimum.reduce(results), np.maximum.reduce(results)
        if operation == "div":  # its denominator may be on both sides of zero
            known = known & ~((sides[1][0] < 0) & (sides[1][1] > 0))
        low, high = (np.broadcast_to(end, shape) for end in (low, high))
        slack = 4 * FLOAT32_EPS * np.maximum(abs(low), abs(high)) if operation not in ("to", "neg") else 0.0
        slack = slack + (8 * FLOAT32_EPS if operation in _INEXACT else 0.0)
        low, high = (oracles.round_to(end, names[dtype]) for end in (low - slack, high + slack))
        some_nan = [np.broadcast_to(np.isnan(each), shape) for each in results]
        known = known & (np.logical_and.reduce(some_nan) == np.logical_or.reduce(some_nan))
        known = known & (np.isfinite(low) == np.isfinite(high))
        ends[f"%{number}"] = low, high
    middle = np.where(low == high, low, (low + high) / 2)
    error = np.where(np.isfinite(middle), (high - low) / 2, 0.0)
    if a.mean:
        error = (error + shape[-2] * FLOAT32_EPS * abs(middle)).mean(-2)
        middle, known = middle.mean(-2), known.all(-2)
    return [Expected(middle, error, known)]


def hyper_connection(a):
    streams, updated, shift = exact(a.streams), EMPTY, 0.0
    if a.out is not None:
        (updated,) = hyper_update(a)
        streams = oracles.round_to(updated.value, a.streams.dtype)
        shift = updated.error + oracles.spacing(streams, a.streams.dtype)  # it may be rounded the other way
    *leading, count, width = streams.shape
    flat, shifts = (
        np.broadcast_to(x, streams.shape).reshape(*leading, count * width) for x in (streams, shift)
    )
    scale = np.repeat(exact(a.scale), [count, count, count * count][: a.scale.numel()])
    inverse = 1 / np.sqrt(np.mean(flat * flat, -1, keepdims=True) + a.norm_eps)
    fn, sizes = exact(a.fn).T, abs(exact(a.fn)).T
    logits = flat @ fn * inverse * scale + exact(a.base)
    error = (8 * FLOAT32_EPS * (abs(flat) @ sizes) + 2 * shifts @ sizes) * inverse * abs(scale)
    error = error + 8 * FLOAT32_EPS * (1 + abs(logits))
    pre = oracles.sigmoid(logits[..., :count]) + a.eps
    x = np.einsum("...n,...nh->...h", pre, streams)
    slack = (error[..., :count, None] + 8 * FLOAT32_EPS) * abs(streams) + pre[..., None] * shift
    post, comb = EMPTY, EMPTY
    if scale.size > count:
        post = a.post_factor * oracles.sigmoid(logits[..., count : 2 * count]) + a.post_eps
        post = Expected(post, abs(a.post_factor) * (error[..., count : 2 * count] + 8 * FLOAT32_EPS))
    if scale.size > 2 * count:
        c = oracles.softmax(logits[..., 2 * count :].reshape(*leading, count, count)) + a.eps
        for axis in (-2, *(-1, -2) * (a.iterations - 1)):
            c = c / (c.sum(axis, keepdims=True) + a.eps)
        highest = error[..., 2 * count :].max(-1, initial=0.0)[..., None, None]
        comb = Expected(c, 4 * highest + 4 * a.iterations * FLOAT32_EPS)
    return [Expected(x, slack.sum(-2)), post, comb, updated]


def heads(a, matrices, dtype) -> list[Expected]:
    """`matrices`: [Hq, rows, columns], an array, whatever it was packed as; `dtype` is that of the result."""
    batch, tokens, count, width = a.x.shape
    ids = torch.arange(count).expand(batch * tokens, count)
    matrices = matrices.swapaxes(1, 2) if a.transposed else matrices
    x = a.x.reshape(batch * tokens, count, width)
    packed = hasattr(a, "packed")
    product = oracles_experts.expert_mm(x, matrices, ids, rounded_weight=packed, dtype=dtype)
    value, deviation = (part.reshape(batch, tokens, *part.shape[1:]) for part in product)
    if a.tail is not None:
        tail = exact(a.tail)
        value = np.concatenate((value, tail), -1)
        deviation = np.concatenate((deviation, np.zeros_like(tail)), -1)
    return [estimated(Estimate(value, deviation))]


def heads_mm(a):
    return heads(a, exact(a.weight), a.weight.dtype)


def heads_quantized(a):
    return heads(a, dense(a), a.dtype or a.x.dtype)


def expert_mm(a):
    weight = exact(a.weight).swapaxes(1, 2) if a.transposed else exact(a.weight)
    return [estimated(oracles_experts.expert_mm(a.x, weight, a.ids, a.bias))]


def expert_outer(a):
    left, right = exact(a.a), exact(a.b)
    value = np.zeros((a.experts, left.shape[2], right.shape[-1]))
    size = np.zeros_like(value)
    for e, t, k in oracles_experts.pairs_by_expert(a.ids, a.experts):
        of_right = right[t, k] if right.ndim == 3 else right[t]
        value[e] = left[t, k].T @ of_right
        size[e] = abs(left[t, k]).T @ abs(of_right)
    return [Expected(value, (8 + a.ids.numel()) * FLOAT32_EPS * size)]


def lora(a, rank: int, x: np.ndarray, of_a: np.ndarray, of_b: np.ndarray, added: np.ndarray) -> Expected:
    """added + scaling * B (A x), rounded once behind sums in float32."""
    value = added + a.scaling * ((x @ of_a.T) @ of_b.T)
    size = abs(added) + abs(a.scaling) * ((abs(x) @ abs(of_a).T) @ abs(of_b).T)
    return Expected(value, (8 + math.sqrt(x.shape[-1]) + rank) * FLOAT32_EPS * size)


def linear_lora(a):
    return [lora(a, a.a.shape[0], exact(a.x), exact(a.a), exact(a.b), exact(a.added))]


def of_experts(a) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, tuple]]:
    """For each expert with pairs: its A [r, H], its B [N, r], its rows, and their numbers (e, t, k)."""
    all_a, all_b, x = exact(a.a), exact(a.b), exact(a.x)
    rank = all_a.shape[0] // a.experts
    for e, t, k in oracles_experts.pairs_by_expert(a.ids, a.experts):
        rows = x[t, k] if x.ndim == 3 else x[t]
        yield all_a[e * rank : (e + 1) * rank], all_b[:, e :: a.experts], rows, (e, t, k)


def is_listed(a) -> bool:
    """Whether the list of pairs is that of the ids; with another one every result is right."""
    if a.pair_order is None:
        return True
    order, offsets = packet("moe_bucket")(a.ids, a.experts)
    return torch.equal(a.pair_order, order) and torch.equal(a.offsets, offsets)


def expert_lora(a):
    value, error = exact(a.added), np.zeros(tuple(a.added.shape))
    for of_a, of_b, rows, (_, t, k) in of_experts(a):
        value[t, k], error[t, k] = lora(a, len(of_a), rows, of_a, of_b, value[t, k])[:2]
    return [Expected(value, error, is_listed(a))]


def expert_lora_backward(a):
    dy, rank = exact(a.dy), a.a.shape[0] // a.experts
    dx, of_a, of_b = np.zeros((*dy.shape[:2], a.a.shape[1])), np.zeros(a.a.shape), np.zeros(a.b.shape)
    sizes = [np.zeros_like(each) for each in (dx, of_a, of_b)]
    for one, two, rows, (e, t, k) in of_experts(a):
        for outs, sign in (((dx, of_a, of_b), lambda x: x), (sizes, abs)):
            own, other, x, y = (sign(each) for each in (one, two, rows, dy[t, k]))
            gradient = sign(np.float64(a.scaling)) * (y @ other)
            outs[0][t, k] = gradient @ own
            outs[1][e * rank : (e + 1) * rank] = gradient.T @ x
            outs[2][:, e :: a.experts] = sign(np.float64(a.scaling)) * (y.T @ (x @ own.T))
    terms = 8 + math.sqrt(sum(a.a.shape) + sum(a.b.shape)) + a.ids.numel()
    errors = [terms * FLOAT32_EPS * size for size in sizes]
    if a.x.ndim == 2:  # a slot may be rounded before it is added
        errors[0] = errors[0].sum(1) + roundoff(a.x.dtype) * sizes[0].sum(1)
        dx = dx.sum(1)
    known = is_listed(a)
    of_b, errors[2] = of_b.T, errors[2].T
    return [Expected(*each, known) for each in zip((dx, of_a, of_b), errors, strict=True)]


def moe_experts(a):
    gate_up, down = exact(a.gate_up), exact(a.down)
    if a.transposed:
        gate_up, down = gate_up.swapaxes(1, 2), down.swapaxes(1, 2)
    return experts(a, gate_up, down, rounded_weight=False)


# Quantised


def dense(a, prefix="", down=False) -> np.ndarray:
    weight = (getattr(a, f"{prefix}{part}") for part in ("packed", "scales", "biases"))
    return dequantise(*weight, (down and a.down_format) or a.format)


def product(x: Estimate, weight: np.ndarray, bias, dtype: torch.dtype) -> Estimate:
    out = multiply(x, weight, dtype, rounded_weight=True)
    if bias is None:
        return out
    value = out.value + exact(bias)
    return Estimate(value, out.deviation + roundoff(dtype) * abs(value))


def flat_rows(a) -> Estimate:
    shape = int(np.prod(a.x.shape[:-1])), a.x.shape[-1]
    return Estimate(*(part.reshape(shape) for part in input_rows(a)))


def expert_qmm(a):
    return [estimated(oracles_experts.expert_mm(a.x, dense(a), a.ids, a.bias, rounded_weight=True))]


def expert_qmm_transposed(a):
    matrices = dense(a).swapaxes(1, 2)
    slots = oracles_experts.expert_mm(a.dy, matrices, a.ids, dtype=a.dy.dtype)
    if not a.sums:
        return [estimated(slots)]
    deviation = np.sqrt((slots.deviation**2).sum(1))
    return [estimated(oracles_experts.rounded(slots.value.sum(1), deviation, a.dy.dtype))]


def moe_experts_quantized(a):
    sure: Any = True
    if a.logits is not None:
        of_experts = {name.removeprefix("router_"): value for name, value in vars(a).items()}
        names = ("bias", "norm_eps", "norm_min")
        given_to_router = of_experts | {name: getattr(a, f"router_{name}") for name in names}
        weights, ids = moe_router(SimpleNamespace(**given_to_router))
        a = SimpleNamespace(**vars(a) | {"weights": Estimate(weights.value, weights.error)})
        a.ids, sure = torch.from_numpy(ids.value), ids.known
    if a.shared_gate_up_packed is not None:
        a = SimpleNamespace(**vars(a) | {"shared_out": mlp(a, "shared_")})
    (out,) = experts(a, dense(a, "gate_up_"), dense(a, "down_", down=True), rounded_weight=True)
    return [Expected(out.value, out.error, sure)]


def first_activated(rows: Estimate, a) -> Estimate:
    if a.activation is None:
        return rows
    own = Estimate(a.factor * rows.value, abs(a.factor) * rows.deviation)
    acted = activate(own, {"activation": a.activation, "gated": False}, torch.float32)
    count = a.packed.shape[0] if a.activated is None else a.activated
    parts = zip(acted, rows, strict=True)
    return Estimate(*(np.hstack((first[:, :count], rest[:, count:])) for first, rest in parts))


def linear_quantized(a):
    out = first_activated(product(flat_rows(a), dense(a), a.bias, a.x.dtype), a)
    shape = (*a.x.shape[:-1], out.value.shape[-1])
    value, deviation = (part.reshape(shape) for part in out)
    known: Any = True
    if a.order is not None:
        order = a.order.numpy()
        value, deviation = (part[..., order.argsort()] for part in (value, deviation))
        known = np.array_equal(np.sort(order), np.arange(len(order)))  # else nothing is said of the result
    value = value if a.residual is None else value + exact(a.residual)
    return [Expected(value, DEVIATIONS * deviation, known)]


def linear_quantized_transposed(a):
    rows, matrix = exact(a.dy), dense(a)
    rows = rows.reshape(int(np.prod(rows.shape[:-1])), rows.shape[-1])
    out = multiply(Estimate(rows, np.zeros_like(rows)), matrix.T, a.dy.dtype, rounded_weight=False)
    shape = (*a.dy.shape[:-1], matrix.shape[1])
    return [estimated(Estimate(*(part.reshape(shape) for part in out)))]


def mlp(a, prefix="") -> Estimate:
    inner = product(flat_rows(a), dense(a, f"{prefix}gate_up_"), a.gate_up_bias, a.x.dtype)
    hidden = activate(inner, vars(a), a.x.dtype)
    return product(hidden, dense(a, f"{prefix}down_", down=True), a.down_bias, a.x.dtype)


def mlp_quantized(a):
    out = mlp(a)
    value, deviation = (part.reshape(a.x.shape) for part in out)
    if a.residual is not None:
        value = value + exact(a.residual)
    return [estimated(Estimate(value, deviation))]


def embedding_quantized(a):
    matrix, ids = dense(a), a.ids.numpy()
    inside = (ids >= 0) & (ids < len(matrix))
    padded = np.concatenate((matrix, np.zeros((1, matrix.shape[1]))))
    value = padded[np.where(inside, ids, len(matrix))]
    # A bias takes back up to 1024 steps, which a code of some bits has more as a half.
    cancels = (8 + 1024 / (2 ** numbers_of(a.format)[0] - 1)) * abs(matrix).max(initial=0.0)
    return [Expected(value, FLOAT32_EPS * (4 * abs(value) + cancels))]


# Sequences


def cached(values, scales, biases) -> tuple[np.ndarray, np.ndarray]:
    """Keys or values, and the magnitudes of what they are made of."""
    if scales is None:
        return exact(values), abs(exact(values))
    group = values.shape[3] * 4 // scales.shape[3]
    number = dequantise(values, scales, torch.zeros_like(biases), f"affine8_{group}")
    bias = np.repeat(exact(biases), group, -1)
    return number + bias, abs(number) + abs(bias)


def with_tail(a, seen: np.ndarray) -> np.ndarray:
    """How often a token sees the keys, [1, T, S], and those of the tail: [B, Hk or 1, T, S + N]."""
    batch, _, tokens, _ = a.q.shape
    shape = (batch, 1, tokens) if a.indices is None else a.indices.shape[:3]
    of_tail = np.zeros((*shape, a.k_tail.shape[2]))
    for place in np.ndindex(*shape):
        complete = min((a.position + place[2] + 1) // a.tail_rate, of_tail.shape[3])
        selected = range(complete) if a.indices is None else a.indices[place].tolist()
        for key in selected:
            if 0 <= key < complete:
                of_tail[place][key] += 1
    return np.concatenate((np.broadcast_to(seen[:, None], (*shape, seen.shape[-1])), of_tail), -1)


def of_distances(relative, keys: int) -> np.ndarray:
    """[B, Hq, T, S]: what [B, T, Hq, E] adds to the scores of the last T of S positions."""
    batch, tokens, heads, extent = relative.shape
    added = np.zeros((batch, heads, tokens, keys))
    for token in range(tokens):
        for key in range(keys):
            distance = keys - tokens + token - key
            if 0 <= distance < extent:
                added[:, :, token, key] = relative[:, token, :, distance]
    return added


def attention(a):
    tokens, keys = a.q.shape[2], a.k.shape[2]
    added = 0.0
    if a.indices is not None and a.k_tail is None:
        seen = np.zeros((*a.indices.shape[:3], keys))
        for place in np.ndindex(*a.indices.shape):
            first = a.indices[place].item() * a.index_block
            if first >= 0:
                seen[place[:3]][first : first + a.index_block] += 1
    elif a.mask is None:
        seen = oracles_sequence.causal(tokens, keys, a.window, a.key_range, a.lookahead)
    elif a.mask.dtype == torch.bool:
        seen = a.mask.numpy()
    elif a.mask.dtype == torch.int32:
        seen = np.unpackbits(a.mask.numpy().view(np.uint8), axis=-1, bitorder="little")[..., :keys]
    else:
        seen = (a.mask > torch.finfo(a.mask.dtype).min).numpy()
        added = np.where(seen, exact(a.mask), 0.0)
    if a.relative is not None:
        added = of_distances(exact(a.relative), keys)
    k, k_size = cached(a.k, a.k_scales, a.k_biases)
    v, v_size = cached(a.v, a.v_scales, a.v_biases)
    if a.k_tail is not None:
        seen = with_tail(a, seen)
        k, v = (np.concatenate((x, exact(t)), 2) for x, t in ((k, a.k_tail), (v, a.v_tail)))
        k_size, v_size = abs(k), abs(v)
    options = (a.sinks, a.scale, seen, added, a.softcap, (k_size, v_size))
    value, error = oracles_sequence.attention(a.q, k, v, *options)
    if a.gate is not None:
        x = exact(a.gate)
        factor = np.logaddexp(0.0, x) if a.gate_activation == "softplus" else oracles.sigmoid(x)
        # An exponential's error is absolute in what it is added to.
        value, error = value * factor, error * factor + abs(value) * 8 * FLOAT32_EPS * factor
    return [Expected(value, error)]


def weighted_errors(weight: Tensor, quantized: Sequence[Tensor | None], importance: Tensor, format: str):
    """Of each group, in float64: sum importance * (weight - dequantised)^2."""
    difference = dequantise(*quantized, format) - exact(weight)
    return group_sums(exact(importance)[..., None, :] * difference**2, format)


def group_sums(values: np.ndarray, format: str) -> np.ndarray:
    group = oracles_experts.numbers_of(format)[1]
    return values.reshape(*values.shape[:-1], values.shape[-1] // group, group).sum(-1)


def quantize_by_importance(a):
    """Any codes and scales whose error is not over that of MLX's rule."""
    packed, scales, *biases, _ = a.results
    found = packed, scales, biases[0] if a.to.startswith("affine") else None
    format = Format(*oracles_experts.numbers_of(a.to))
    plain = quantize_stack(a.weight, format) if a.weight.numel() else found
    ours, theirs = (weighted_errors(a.weight, each, a.importance, a.to) for each in (found, plain))
    weight, decoded = exact(a.weight), dequantise(*found, a.to)
    rounding = group_sums(1e-6 * exact(a.importance)[:, None] * weight**2, a.to)
    wrong = ~((ours <= 1.00001 * theirs + rounding) | ~np.isfinite(theirs))
    sums = [group_sums(abs(each), a.to) for each in (weight - decoded, weight)]
    error = 64 * FLOAT32_EPS * group_sums(abs(weight) + abs(decoded), a.to)
    words = packed.shape[-1] // max(1, wrong.shape[-1])
    return [
        Expected(packed.numpy() ^ np.repeat(wrong, words, -1)),
        *(Expected(exact(each) if each.is_floating_point() else each.numpy()) for each in (scales, *biases)),
        Expected(np.stack(sums, -1), error[..., None]),
    ]


def pool_window_(a):
    """One window after the other, one token after the other."""
    state, entries = exact(a.state_), exact(a.entries_)
    errors = np.zeros_like(entries)
    new = np.stack((exact(a.kv), exact(a.gate)), 2)
    (_, tokens, width), rate, rows, of_entry = (
        a.kv.shape,
        len(a.position_bias),
        state.shape[1],
        entries.shape[2],
    )
    end = a.position + tokens

    def held(token):  # [B, 2, W]
        return state[:, token % rows] if token < a.position else new[:, token - a.position]

    for window in range(a.position // rate, end // rate):
        parts = [(window * rate + j, j, slice(width - of_entry, width)) for j in range(rate)]
        if width > of_entry and window > 0:
            parts += [((window - 1) * rate + j, j, slice(0, of_entry)) for j in range(rate)]
        values = np.stack([held(token)[:, 0, columns] for token, _, columns in parts])
        bias = exact(a.position_bias)
        logits = np.stack([held(token)[:, 1, columns] + bias[j, columns] for token, j, columns in parts])
        weights = np.exp(logits - logits.max(0))
        weights = weights / weights.sum(0)
        pooled = (weights * values).sum(0)
        error = (len(parts) + 8 + 4 * abs(logits).max(0)) * FLOAT32_EPS * (weights * abs(values)).sum(0)
        inverse = 1 / np.sqrt(np.mean(pooled**2, -1, keepdims=True) + a.eps)
        weight = exact(a.norm_weight)
        error += abs(pooled) * (8 * FLOAT32_EPS + inverse * np.sqrt(np.mean(error**2, -1, keepdims=True)))
        x, error = pooled * inverse * weight, error * inverse * abs(weight)
        angles = (np.float32(window * rate) * a.inv_freq.float().numpy()).astype(np.float64)
        cos, sin = np.cos(angles) * a.scaling, np.sin(angles) * a.scaling
        first, second = (slice(of_entry - 2 * len(angles) + i, None, 2) for i in range(2))
        sizes = abs(x[:, first]) + abs(x[:, second])
        slack = (error[:, first] + error[:, second] + 8 * FLOAT32_EPS * sizes) * max(abs(a.scaling), 1e-30)
        turned = x[:, first] * cos - x[:, second] * sin, x[:, second] * cos + x[:, first] * sin
        if len(angles):
            x[:, first], x[:, second] = turned
            error[:, first] = error[:, second] = slack
        entries[:, window], errors[:, window] = x, error
    for token in range(max(a.position, end - rows), end):
        state[:, token % rows] = new[:, token - a.position]
    return [Expected(state), Expected(entries, errors)]


def write_cache_quantized_(a):
    rows = slice(a.start, a.start + a.states.shape[2])
    packed, scales, biases = a.packed_.view(torch.int32).numpy().copy(), exact(a.scales_), exact(a.biases_)
    known = np.ones(packed.shape, bool)
    right = [Expected(packed, known=known), Expected(scales, 0.0), Expected(biases, 0.0)]
    if a.states.numel() == 0:
        return right
    groups = exact(a.states).reshape(*a.states.shape[:3], scales.shape[3], -1)
    low, high = groups.min(-1), groups.max(-1)
    scales[:, :, rows], biases[:, :, rows] = ((high - low) / 254, low)
    nearest = [
        oracles.round_to((high - low) / 254 * (1 + off), a.scales_.dtype)[..., None]
        for off in (-4 * FLOAT32_EPS, 4 * FLOAT32_EPS)
    ]
    codes = [np.where(s > 0, (groups - low[..., None]) / np.where(s > 0, s, 1), 0.0) for s in nearest]
    least, most = (
        np.minimum(np.rint(c * (1 + off)), 255) for c, off in zip(codes, (-1e-5, 1e-5), strict=True)
    )
    width = a.states.shape[3]
    words = least.astype(np.uint8).reshape(*a.states.shape[:3], width).view(np.int32)
    packed[:, :, rows] = words
    known[:, :, rows] = (least == most).reshape(*words.shape, 4).all(-1)
    return right


def causal_conv1d_update_(a):
    before = oracles_sequence.positions_taken_in(a)
    rest = before, a.weight, a.bias, a.activation, a.before
    value, magnitude, kept = oracles_sequence.convolution(a.x.transpose(1, 2), *rest)
    pending = [] if a.pending_ is None else [Expected(exact(a.pending_))]
    if a.keep:
        kept, pending[0].value[..., : a.x.shape[1]] = before, exact(a.x).swapaxes(1, 2)
    value, magnitude = (np.swapaxes(each, 1, 2) for each in (value, magnitude))
    if a.add_input:
        value, magnitude = value + exact(a.x), magnitude + abs(exact(a.x))
    return [Expected(value, 24 * FLOAT32_EPS * magnitude), Expected(kept), *pending]


def linear_attention_(a):
    value, state, pending = oracles_sequence.recurrence(a)
    largest = max(abs(x).max(initial=1.0) for x in (state, exact(a.state_), exact(a.v)))
    error = 200 * FLOAT32_EPS * largest
    result = Expected(value, error * max(1.0, abs(a.scale)))
    if a.gate is not None:
        rounded = oracles.round_to(value, a.v.dtype)
        x_error = result.error + (a.v.dtype != torch.float32) * oracles.spacing(rounded, a.v.dtype)
        norm = exact(a.gate), exact(a.norm_weight), a.norm_eps, a.norm_offset
        result = normed_and_gated(rounded, *norm, a.gate_activation, x_error=x_error)
    rows = [] if pending is None else [Expected(pending, 64 * FLOAT32_EPS * (1.0 + abs(pending)))]
    return [result, Expected(state, error), *rows]


def selective_scan_(a):
    result, state, *magnitudes, pending = oracles_sequence.selective_scan(a)
    error = (32 + 4 * (a.x.shape[1] + 8 * (pending is not None))) * FLOAT32_EPS
    expected = zip((result, state), (error * m for m in magnitudes), strict=True)
    rows = [] if pending is None else [Expected(pending, 8 * FLOAT32_EPS * (1.0 + abs(pending)))]
    return [*(Expected(*each) for each in expected), *rows]


def rg_lru_(a):
    result, states, *magnitudes = oracles_sequence.rg_lru(a)
    error, tokens = (64 + 8 * a.x.shape[1]) * FLOAT32_EPS, a.x.shape[1]
    result_error, errors = (error * m for m in magnitudes)
    last = 0 if a.keep else tokens
    expected = [Expected(result, result_error), Expected(states[:, last], errors[:, last])]
    if a.pending_ is None:
        return expected
    kept, kept_error = exact(a.pending_).copy(), np.zeros(a.pending_.shape)
    if a.keep:
        kept[..., :tokens], kept_error[..., :tokens] = (x[:, 1:].swapaxes(1, 2) for x in (states, errors))
    return [*expected, Expected(kept, kept_error)]


def rope(a):
    rotary = a.cos.shape[-1] if a.rotary_dim is None and a.cos is not None else a.rotary_dim
    rest = (a.pairs, rotary, a.rotary_last, a.eps, a.weight_offset)
    results = []
    for x, weight in ((a.q, a.q_weight), (a.k, a.k_weight)):
        if x is None:
            results.append(EMPTY)
            continue
        value, magnitude = oracles_sequence.rotated(x, a.cos, a.sin, weight, *rest)
        results.append(Expected(value, 16 * FLOAT32_EPS * magnitude))
    return results


def rope_cache_(a):
    q, k = rope(a)
    if a.k_bias is not None:
        k = _with_layer_norm(a)
    keys = _behind(exact(a.keys_), k)
    if a.v is None:
        return [q, keys]
    v = exact(a.v).transpose(0, 2, 1, 3)
    weight = None if a.v_weight is None else exact(a.v_weight)
    norm = (
        normed(v, weight, a.eps, 0.0 if weight is None else a.weight_offset) if a.norm_v else Expected(v, 0.0)
    )
    return [q, keys, _behind(exact(a.values_), norm)]


def rope_attention_(a):
    """What `rope_cache_` rounds may be a neighbour of what is rounded here."""
    turned, keys, values = rope_cache_(SimpleNamespace(**vars(a), k_bias=None))
    q, k, v = (oracles.round_to(each.value, a.q.dtype) for each in (turned, keys, values))
    named = dict(zip("qkv", (torch.from_numpy(each).to(a.q.dtype) for each in (q, k, v)), strict=True))
    none = ("mask", "indices", "relative", "k_tail", "k_scales", "k_biases", "v_scales", "v_biases")
    (out,) = attention(SimpleNamespace(**vars(a) | named | dict.fromkeys(none), lookahead=0))
    errors = (oracles.spacing(x, a.q.dtype) + each.error for x, each in ((q, turned), (k, keys), (v, values)))
    q_error, k_error, v_error = (np.broadcast_to(e, x.shape) for e, x in zip(errors, (q, k, v), strict=True))
    group = q.shape[1] // k.shape[1]
    k, k_error, v, v_error = (np.repeat(x, group, 1) for x in (k, k_error, v, v_error))
    scores = np.einsum("bhtd,bhsd->bhts", q_error, abs(k)) + np.einsum("bhtd,bhsd->bhts", abs(q), k_error)
    moved = (
        np.expm1(2 * a.scale * scores.max(-1, initial=0.0))[..., None]
        * abs(v).max((2, 3), initial=0.0)[..., None, None]
        + v_error.max((2, 3), initial=0.0)[..., None, None]
    )
    factor = 1.0 if a.gate is None else np.logaddexp(0.0, exact(a.gate))
    return [Expected(out.value, out.error + moved.transpose(0, 2, 1, 3) * factor), keys, values]


def _with_layer_norm(a):
    """The keys that `rope_cache_` writes, [B, Hk, T, Dk]."""
    x, weight, bias = exact(a.k), exact(a.k_weight), exact(a.k_bias)
    centred = x - x.mean(-1, keepdims=True)
    inverse = (np.square(centred).mean(-1, keepdims=True) + a.eps) ** -0.5
    new = centred * inverse * weight + bias
    size = abs(x).max(-1, keepdims=True, initial=0.0) * inverse * abs(weight) + abs(bias)
    # The mean's error is one of all elements, which a small variance makes large.
    size = size * (1.0 + abs(x).max(-1, keepdims=True, initial=0.0) * inverse)
    if a.cos is None:
        new, size = new.transpose(0, 2, 1, 3), size.transpose(0, 2, 1, 3)
    else:
        rotary = a.cos.shape[-1] if a.rotary_dim is None else a.rotary_dim
        rest = (a.pairs, rotary, a.rotary_last, a.eps, a.weight_offset)
        new, _ = oracles_sequence.rotated(torch.from_numpy(new), a.cos, a.sin, None, *rest)
        tables = [torch.from_numpy(abs(exact(table))) for table in (a.cos, a.sin)]
        _, size = oracles_sequence.rotated(torch.from_numpy(size), *tables, None, *rest)
    return Expected(new, 32 * FLOAT32_EPS * size)


def _behind(held: np.ndarray, new: Expected) -> Expected:
    """What is held, its last tokens replaced by new ones."""
    before = held[:, :, : held.shape[2] - new.value.shape[2]]
    error = np.concatenate((np.zeros(before.shape), np.broadcast_to(new.error, new.value.shape)), 2)
    return Expected(np.concatenate((before, new.value), 2), error)
