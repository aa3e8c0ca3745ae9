"""Rotary position embedding of queries and keys, with the RMSNorm of their heads."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._checks import Check, wide, widened
from .._registry import operator
from .._sample import Calls, Changes, Sample
from .norms import normed

PAIRS = ("half", "interleaved", "interleaved_to_half")


# Queries and keys in the order of projections, tables, the weights of norms, and values.
TURNED = "{} {} cos[A, T, W] sin[A, T, W]:cos q_norm_weight[Dq] k_norm_weight[Dk] "
WRITTEN = ("sin only with cos", "v_norm_weight not without norm_v")  # dependences
HELD = (
    "v[B, T, Hv>=1, Dv]:k keys_[B, Hk, S, Dk]:k values_[B, Hv, V, Dv]:k v_norm_weight[Dv] "
    "k_bias[Dk]:k_norm_weight"
)


def _check_heads(check: Check, rotary: int, **heads: Tensor | None) -> None:
    for argument, x in heads.items():
        if x is not None and (x.shape[-1] % 2 or x.shape[-1] < rotary):
            expected = f"of heads of an even number of elements, {rotary} or more"
            check.fail(argument, expected, f"shape {tuple(x.shape)}")


def _check_tables(check: Check, cos: Tensor, rows: tuple[int, ...], rotary_dim: int | None) -> int:
    """Returns: how many elements turn."""
    rotary = cos.shape[-1] if rotary_dim is None else rotary_dim
    if rotary < 2 or rotary % 2:
        check.fail("rotary_dim", "an even number of at least 2", rotary)
    batch, tokens = rows
    if cos.shape[0] not in (1, batch) or cos.shape[2] not in (rotary, rotary // 2):
        expected = f"of shape [B or 1, T, R or R / 2], with B, T, R = {(batch, tokens, rotary)}"
        check.fail("cos", expected, tuple(cos.shape))
    return rotary


def _check_turned(check: Check, cos: Tensor | None, rotary_dim: int | None, **heads: Tensor | None) -> None:
    rows = next(x.shape[:2] for x in heads.values() if x is not None)
    rotary = 2 if cos is None else _check_tables(check, cos, rows, rotary_dim)
    _check_heads(check, rotary, **heads)


def _meta_rope(check, q, k, cos, rotary_dim, **_):
    _check_turned(check, cos, rotary_dim, q=q, k=k)
    return _heads_first(q), _heads_first(k)


def _meta_rope_heads(check, x, cos, rotary_dim, **_):
    _check_turned(check, cos, rotary_dim, x=x)
    return _heads_first(x)


def _heads_first(x: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[2], x.shape[1], x.shape[3]))


def _split(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The first and the second elements of the pairs."""
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    first, second = x.chunk(2, -1)
    return first, second


def _rotated(
    x: Tensor,
    weight: Tensor | None,
    norm: tuple[float, float],
    cos: Tensor | None,
    sin: Tensor | None,
    pairs: str,
    rotary_dim: int | None,
    rotary_last: bool,
) -> Tensor:
    """Heads of `x`, rotated by cosines and sines, behind the norm with a weight, an eps and an offset."""
    y = wide(x) if weight is None else normed(x, weight, *norm)
    if cos is None or sin is None:
        return y.to(x.dtype).transpose(1, 2).clone(memory_format=torch.contiguous_format)
    rotary = cos.shape[-1] if rotary_dim is None else rotary_dim
    start = x.shape[-1] - rotary if rotary_last else 0
    if rotary < x.shape[-1]:
        before, y, after = y.tensor_split((start, start + rotary), -1)
    cos, sin = (wide(table).unsqueeze(2) for table in (cos, sin))
    if pairs == "half" and cos.shape[-1] == sin.shape[-1] == rotary:
        first, second = y.chunk(2, -1)
        rotated = (y * cos).add_(torch.cat((-second, first), -1).mul_(sin))
    else:
        rotated = _pairs_rotated(y, cos, sin, pairs)
    if rotary < x.shape[-1]:
        rotated = torch.cat((before, rotated, after), -1)
    return rotated.to(x.dtype).transpose(1, 2)


def _pairs_rotated(y: Tensor, cos: Tensor, sin: Tensor, pairs: str) -> Tensor:
    """Pairs of elements of `y`, rotated by cosines and sines."""
    interleaved, rotary = pairs != "half", y.shape[-1]
    first, second = _split(y, interleaved)
    (cos1, cos2), (sin1, sin2) = (
        (t, t) if t.shape[-1] < rotary else _split(t, interleaved) for t in (cos, sin)
    )
    halves = (first * cos1 - second * sin1, second * cos2 + first * sin2)
    return torch.stack(halves, -1).flatten(-2) if pairs == "interleaved" else torch.cat(halves, -1)


@operator(
    TURNED.format("q[B, T, Hq>=1, Dq]", "k[B, T, Hk>=1, Dk]:q"),
    _meta_rope,
    allowed={"pairs": PAIRS},
    dependences=("sin only with cos",),
    public="rotary embeddings of models",
)
def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    *,
    norm_eps: float = 1e-06,
    norm_weight_offset: float = 0.0,
    pairs: str = "half",
    rotary_dim: int | None = None,
    rotary_last: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotary position embedding of queries and keys, optionally after an RMSNorm of each head.

    x = rms(x) * (weight + norm_weight_offset), over a head, where there is a weight
    (a, b) -> (a * cos - b * sin, b * cos + a * sin), for each pair (a, b) of the R elements that turn

    Everything is computed in float32 and rounded once, when it is stored. Models that compute in 16 bit also
    round both products and the normed row.

    Args:
        q: [B, T, Hq, Dq], float32, float16 or bfloat16. Strides are free: a slice of a fused projection, or
            the transposed view of [B, Hq, T, Dq], is read where it lies.
        k: [B, T, Hk, Dk] in the dtype of `q`.
        cos, sin: [B or 1, T, R or R / 2], any of the three dtypes: of each element that turns, in the order
            of the head's elements, or of each pair; None where nothing turns.
        q_norm_weight, k_norm_weight: [Dq], [Dk], any of the three dtypes: QK-norm.
        norm_eps: added to the mean of squares.
        norm_weight_offset: 1.0 for zero-centred weights.
        pairs: "half": element i and i + R / 2 are a pair; "interleaved": elements 2 i and 2 i + 1;
            "interleaved_to_half": the same, but the results of pair i are stored at i and i + R / 2.
        rotary_dim: R; without it the width of `cos`.
        rotary_last: the last R elements of a head turn, not the first. The others are copied (and normed).

    Returns: q and k as [B, Hq, T, Dq] and [B, Hk, T, Dk], contiguous, as attention takes them.

    Raises: ValueError for a dtype, shape, choice or device that does not fit.

    Example:
        >>> q, k = torch.tensor([[[[3.0, 4.0]]]]), torch.tensor([[[[1.0, 0.0]]]])
        >>> rotated, _ = ops.rope(q, k, cos=torch.zeros(1, 1, 2), sin=torch.ones(1, 1, 2))
        >>> rotated.tolist()
        [[[[-4.0, 3.0]]]]
    """
    rest = (norm_eps, norm_weight_offset), cos, sin, pairs, rotary_dim, rotary_last
    return _rotated(q, q_norm_weight, *rest), _rotated(k, k_norm_weight, *rest)


@operator(
    "x[B, T, heads>=1, D] cos[A, T, W] sin[A, T, W]:cos norm_weight[D]",
    _meta_rope_heads,
    allowed={"pairs": PAIRS},
    dependences=("sin only with cos",),
    public="rotary embeddings of models",
)
def rope_heads(
    x: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    norm_weight: Tensor | None = None,
    *,
    norm_eps: float = 1e-06,
    norm_weight_offset: float = 0.0,
    pairs: str = "half",
    rotary_dim: int | None = None,
    rotary_last: bool = False,
) -> Tensor:
    """Rotary position embedding of one tensor, optionally after an RMSNorm of each head: half of `rope`.

    Args:
        x: [B, T, heads, D], float32, float16 or bfloat16; strides are free.
        cos, sin: as for `rope`.
        norm_weight: [D], any of the three dtypes.
        norm_eps, norm_weight_offset, pairs, rotary_dim, rotary_last: as for `rope`.

    Returns: [B, heads, T, D], contiguous.

    Raises: ValueError for a dtype, shape, choice or device that does not fit.

    Example:
        >>> x, cos, sin = torch.tensor([[[[3.0, 4.0]]]]), torch.zeros(1, 1, 2), torch.ones(1, 1, 2)
        >>> ops.rope_heads(x, cos, sin).tolist()
        [[[[-4.0, 3.0]]]]
    """
    norm = norm_eps, norm_weight_offset
    return _rotated(x, norm_weight, norm, cos, sin, pairs, rotary_dim, rotary_last)


def check_rope_cache(
    check,
    q,
    k,
    v,
    keys_,
    values_,
    cos,
    k_norm_weight,
    norm_weight_offset,
    rotary_dim,
    norm_v,
    k_bias=None,
    v_norm_factor=1.0,
    **_,
):
    """Empty queries [B, Hq, T, D], or an empty tensor without queries, for checked arguments."""
    _check_turned(check, cos, rotary_dim, q=q, k=k)
    _check_heads(check, 2, v=v)
    if norm_v and v is None:
        check.fail("norm_v", "False without v", True)
    if not norm_v and v_norm_factor != 1.0:
        check.fail("v_norm_factor", "1.0 without norm_v", v_norm_factor)
    for argument, held in (("keys_", keys_), ("values_", values_)):
        if held is not None and held.shape[2] < k.shape[1]:
            expected = f"of {k.shape[1]} tokens or more, as many as {argument[0]} has"
            check.fail(argument, expected, tuple(held.shape))
    alone = k_norm_weight is None or norm_weight_offset != 0.0
    check.none("without k_norm_weight, or with a norm_weight_offset", alone, k_bias=k_bias)
    return k.new_empty(0) if q is None else _heads_first(q)


@operator(
    TURNED.format("k[B, T, Hk>=1, Dk]", "q[B, T, Hq>=1, Dq]:k") + HELD,
    check_rope_cache,
    allowed={"pairs": PAIRS},
    dependences=(
        *WRITTEN,
        "q_norm_weight not without q",
        "v q_norm_weight not beside k_bias (with a bias)",
        "values_ only with v",
    ),
)
def _rope_cache_(
    q: Tensor | None,
    k: Tensor,
    v: Tensor | None,
    keys_: Tensor,
    values_: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    norm_eps: float = 1e-06,
    norm_weight_offset: float = 0.0,
    *,
    pairs: str = "half",
    rotary_dim: int | None = None,
    rotary_last: bool = False,
    norm_v: bool = False,
    v_norm_weight: Tensor | None = None,
    k_bias: Tensor | None = None,
    v_norm_factor: float = 1.0,
) -> Tensor:
    """Rotated queries; writes rotated keys, and values, into a KV cache. Private: may change in any release.

    keys_[:, :, S - T:] = k as `rope` returns it
    values_[:, :, S - T:] = v, or rms(v) over a head, * (v_norm_weight + norm_weight_offset) where it is given

    With `k_bias` the norm of k is a LayerNorm, as the keys of an indexer have it:
    (k - mean(k)) * rsqrt(mean((k - mean(k))^2) + norm_eps) * k_norm_weight + k_bias, over a head

    Args:
        q: as for `rope`, or None.
        k, cos, sin, q_norm_weight, k_norm_weight, norm_eps, norm_weight_offset, pairs, rotary_dim,
            rotary_last: as for `rope`.
        v: [B, T, Hv, Dv] in the dtype of `k`, Dv even; strides are free. None where only keys are kept.
        keys_, values_: [B, Hk, S, Dk] and [B, Hv, S, Dv] in the dtype of `k`: what a cache has once it has
            these tokens, whose T places at the end are updated in place. Where the elements of a head are
            contiguous they are written where they lie, else copied there. They must overlap neither
            themselves nor each other nor the inputs.
        norm_v: the values are normed, with `norm_eps`.
        v_norm_weight: [Dv], any of the three dtypes: of that norm.
        k_bias: [Dk] in the dtype of `k_norm_weight`, or None. Beside it there is no v, no
            q_norm_weight and no norm_weight_offset.
        v_norm_factor: multiplies the normed values; 1.0 without norm_v.

    Returns: q as [B, Hq, T, Dq], contiguous; without q an empty tensor, of shape [0].

    Raises: ValueError for a dtype, shape, choice or device that does not fit.
    """
    norm = norm_eps, norm_weight_offset
    rest = norm, cos, sin, pairs, rotary_dim, rotary_last
    if k_bias is not None and k_norm_weight is not None:
        rows, weight, bias = widened(k, k_norm_weight, k_bias)
        new = F.layer_norm(rows, k.shape[-1:], weight, bias, norm_eps)
        new = _rotated(new, None, *rest)
    else:
        new = _rotated(k, k_norm_weight, *rest)
    keys_.narrow(2, keys_.shape[2] - k.shape[1], k.shape[1]).copy_(new)
    if v is not None and values_ is not None:
        if norm_v:
            v = (normed(v, v_norm_weight, *norm) * v_norm_factor).to(v.dtype)
        values_.narrow(2, values_.shape[2] - v.shape[1], v.shape[1]).copy_(v.transpose(1, 2))
    return k.new_empty(0) if q is None else _rotated(q, q_norm_weight, *rest)


def _of_indexer(s: Sample) -> dict[str, Any]:
    norm = s.of("k_norm_weight[D] k_bias[D]", q_norm_weight=None)
    keys = {"k": s.values(2, s.T, 1, 2 * s.D)[..., s.D :], "keys_": s.values(2, 1, s.T + 2, s.D)}
    return {**keys, **norm, "v": None, "values_": None}


def _heads_in_front(s: Sample) -> Tensor:
    """Heads whose memory is that of the result, of which nothing is to be changed."""
    return s.values(2, 4, s.T, s.D).transpose(1, 2)


def _narrow(s: Sample) -> dict[str, Any]:
    """A part of each head turns, by a table of pairs for each sequence."""
    rotary = min(8, s.D)
    tables = {name: s.values(2, s.T, rotary // 2) for name in ("cos", "sin")}
    return {**tables, "pairs": "interleaved", "rotary_dim": rotary, "rotary_last": True}


CALLS: Calls = {
    "rope": lambda s: s.of("cos[1, T, D] sin[1, T, D] q_norm_weight[D] k_norm_weight[D]", q=s.q, k=s.k),
    "rope_heads": lambda s: s.of("cos[1, T, D] sin[1, T, D] norm_weight[D]", x=s.q),
    "_rope_cache_": lambda s: s.of(
        "v[2, T, 2, V] cos[1, T, D] sin[1, T, D] keys_[2, 2, T, D] values_[2, 2, T, V] q_norm_weight[D]",
        **{"q": s.q, "k": s.k},
    ),
}
CHANGES: Changes = {
    "rope": lambda s: [
        _narrow(s) | {"k_norm_weight": None},
        {"q": _heads_in_front(s), "cos": None, "sin": None, "q_norm_weight": None},
    ],
    "rope_heads": lambda s: [
        _narrow(s),
        {"x": _heads_in_front(s), "cos": None, "sin": None, "norm_weight": None},
    ],
    "_rope_cache_": lambda s: [
        {
            name: cache[:, :, 2 : 3 + s.T]
            for name, cache in s.of("keys_[2, 2, 9, D] values_[2, 2, 9, V]").items()
        }
        | s.of("v_norm_weight[V]", norm_v=True, v_norm_factor=1.5),
        s.of("k_norm_weight[D]", cos=None, sin=None),
        _of_indexer(s),
        _of_indexer(s) | {"q": None, "cos": None, "sin": None},
        s.of("k_norm_weight[D]", v=None, values_=None, norm_weight_offset=1.0),
    ],
}
