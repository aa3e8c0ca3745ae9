"""Which keys sparse attention reads: the best scores of an indexer."""

import torch
from torch import Tensor

from ._checks import ACTIVATION_DTYPES
from ._registry import operator
from .attention import seen_in_order

MAX_INDEX_WIDTH = 256  # elements of an index query and key


def _meta_index_topk(check, q, k, weights, top_k, scale, key_range):
    check.dtype("q", q, ACTIVATION_DTYPES)
    check.rank("q", q, (4,))
    batch, tokens, heads, width = q.shape
    check.between("q's head dimension", width, 1, MAX_INDEX_WIDTH)
    check.dtype("k", k, (q.dtype,))
    check.rank("k", k, (3,))
    check.shape("k", k, (batch, k.shape[1], width), "[B, S, D]")
    check.tensor("weights", weights, (batch, tokens, heads), "[B, T, Hi]")
    if top_k < 1:
        check.fail("top_k", "at least 1", top_k)
    check.number("scale", scale)
    check.tensor("key_range", key_range, (batch, 2), "[B, 2]", (torch.int32,))
    chosen = min(top_k, k.shape[1])
    return q.new_empty((batch, tokens, chosen), dtype=torch.int32)


@operator(meta=_meta_index_topk)
def index_topk(
    q: Tensor, k: Tensor, weights: Tensor, top_k: int, scale: float, *, key_range: Tensor | None = None
) -> Tensor:
    """The keys with the best scores for each token (DeepSeek Sparse Attention's indexer).

    score[s] = sum_h weights[h] * relu(scale * q[h] . k[s])

    The new tokens are the last T of S: each may choose itself and what lies before it. Arithmetic is in
    float32; a score that is NaN counts as the lowest number. Of equal scores, the first keys are chosen. No
    tensor of T x Hi x S is made, and of T x S only for as many tokens as 64 MB hold.

    Args:
        q: [B, T, Hi, D], float32, float16 or bfloat16, D up to 256; any strides.
        k: [B, S, D] in the dtype of `q`. Strides are free: a slice of a cache is read where it lies.
        weights: [B, T, Hi], any of the three dtypes: of a token's heads.
        top_k: how many keys a token chooses at most, at least 1.
        scale: of the products.
        key_range: [B, 2] int32: the first key that the tokens of a batch entry may choose, and the one behind
            the last, as `attention` takes it.

    Returns: [B, T, min(top_k, S)] int32: the chosen keys in ascending order, then -1 where a token may choose
        from fewer.

    Raises: ValueError for a dtype, shape, number or device that does not fit.
    """
    batch, tokens, _, _ = q.shape
    keys = k.shape[1]
    chosen = min(top_k, keys)
    products = torch.einsum("bthd,bsd->bths", q.float(), k.float()) * scale
    scores = torch.einsum("bths,bth->bts", products.relu(), weights.float())
    lowest = torch.finfo(torch.float32).min
    scores = torch.where(scores.isnan(), lowest, scores)
    seen = seen_in_order(tokens, keys, keys, None, key_range, q.device).squeeze(1).expand(batch, -1, -1)
    # Hidden keys come last: those that are seen, but whose score is -inf, before them.
    order = scores.sort(stable=True, dim=-1, descending=True).indices
    order = order.gather(-1, (~seen).gather(-1, order).int().sort(stable=True, dim=-1).indices)
    best = order[..., :chosen]
    best = torch.where(seen.gather(-1, best), best, keys).sort(-1).values
    return best.masked_fill_(best == keys, -1).int()
