"""Attention of few new tokens over a long cache, with a sink for each head."""

import torch
from torch import Tensor

from ._checks import ACTIVATION_DTYPES, Check
from ._registry import operator

MAX_HEAD = 256  # elements


def _check_mask(check: Check, mask: Tensor, q: Tensor, k: Tensor) -> None:
    check.dtype("mask", mask, (torch.bool, *ACTIVATION_DTYPES))
    batch, _, tokens, _ = q.shape
    expected = (batch, 1, tokens, k.shape[2])
    if mask.dim() != 4 or mask.shape[0] not in (1, batch) or tuple(mask.shape[1:]) != expected[1:]:
        check.fail("mask", f"of shape [B or 1, 1, T, S], with B, 1, T, S = {expected}", tuple(mask.shape))


def _meta_attention_sinks(check, q, k, v, sinks, scale, mask=None, window=None):
    check.dtype("q", q, ACTIVATION_DTYPES)
    check.rank("q", q, (4,))
    batch, heads, _, width = q.shape
    check.between("q's head dimension", width, 1, MAX_HEAD)
    check.dtype("k", k, (q.dtype,))
    check.rank("k", k, (4,))
    check.shape("k", k, (batch, k.shape[1], k.shape[2], width), "[B, Hk, S, D]")
    if k.shape[1] < 1 or heads % k.shape[1]:
        check.fail("k", f"of a number of heads that divides Hq = {heads}", tuple(k.shape))
    check.dtype("v", v, (q.dtype,))
    check.rank("v", v, (4,))
    check.shape("v", v, (*k.shape[:3], v.shape[3]), "[B, Hk, S, Dv]")
    check.between("v's head dimension", v.shape[3], 1, MAX_HEAD)
    if sinks is not None:
        check.dtype("sinks", sinks, ACTIVATION_DTYPES)
        check.shape("sinks", sinks, (heads,), "[Hq]")
    if mask is not None:
        _check_mask(check, mask, q, k)
    if window is not None and mask is not None:
        check.fail("window", "None beside a mask, which holds it", window)
    if window is not None and window < 1:
        check.fail("window", "at least 1", window)
    check.same_device(q=q, k=k, v=v, sinks=sinks, mask=mask)
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1], v.shape[3]))


def _additive(
    mask: Tensor | None, window: int | None, tokens: int, keys: int, device: torch.device
) -> Tensor:
    """What is added to the scores, [B or 1, 1, T, S] in float32: -inf where a token does not see a key."""
    if mask is None:
        distance = torch.arange(keys - tokens, keys, device=device)[:, None] - torch.arange(
            keys, device=device
        )
        seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
        return torch.zeros_like(seen, dtype=torch.float32).masked_fill_(~seen, -torch.inf)[None, None]
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, -torch.inf)
    return mask.float().masked_fill(mask <= torch.finfo(mask.dtype).min, -torch.inf)


@operator(
    "attention_sinks(Tensor q, Tensor k, Tensor v, Tensor? sinks, float scale, Tensor? mask=None, "
    "int? window=None) -> Tensor",
    meta=_meta_attention_sinks,
)
def attention_sinks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    scale: float,
    mask: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Grouped-query attention with a logit a head that takes part in the softmax and has no value.

    score[s] = scale * q . k[s] + mask[s]
    out = sum_s exp(score[s]) * v[s] / (exp(sink) + sum_s exp(score[s]))

    Meant for one to eight new tokens over a cache of any length. More are right too, but slower than the
    matrix products of a prompt's attention. Query head h reads key head h // (Hq / Hk). Arithmetic is in
    float32, rounded once; the same input gives the same bits.

    Args:
        q: [B, Hq, T, D], float32, float16 or bfloat16, D up to 256.
        k: [B, Hk, S, D] in the dtype of `q`; Hk divides Hq. Strides are free: a slice of a static cache is
            read where it lies.
        v: [B, Hk, S, Dv] in the dtype of `q`, Dv up to 256.
        sinks: [Hq], any of the three dtypes, or None.
        scale: of the scores.
        mask: [B or 1, 1, T, S], bool (True: the token sees the key) or one of the three dtypes, which is
            added; -inf or the lowest number of its dtype hides a key. Keys that no token sees are not read.
            Without a mask the new tokens are the last T of S; each sees itself and what lies before it.
        window: how many keys a token sees at most, itself included; None beside a mask, which holds it.

    Returns: [B, T, Hq, Dv] in the dtype of `q`. A token that sees no key gets zeros.

    Raises: ValueError for a dtype, shape, window or device that does not fit.
    """
    batch, heads, tokens, width = q.shape
    key_heads, keys = k.shape[1:3]
    queries = q.float().reshape(batch, key_heads, heads // key_heads, tokens, width) * scale
    bias = _additive(mask, window, tokens, keys, q.device).unsqueeze(2)
    hidden = bias == -torch.inf
    scores = torch.matmul(queries, k.float().unsqueeze(2).transpose(-1, -2)) + bias
    scores = scores.masked_fill(hidden, -torch.inf)  # what a hidden key holds may be NaN
    sink = torch.full((heads,), -torch.inf, device=q.device) if sinks is None else sinks.float()
    sink = sink.view(key_heads, -1, 1, 1).expand(batch, -1, -1, tokens, 1)
    # Without any key and sink the softmax is NaN.
    probabilities = torch.cat((scores, sink), -1).softmax(-1)[..., :-1].masked_fill(hidden, 0.0)
    values = v.float().masked_fill(hidden.all(3).squeeze(2).unsqueeze(-1), 0.0)
    out = torch.matmul(probabilities, values.unsqueeze(2))
    return out.reshape(batch, heads, tokens, v.shape[3]).transpose(1, 2).to(q.dtype)
