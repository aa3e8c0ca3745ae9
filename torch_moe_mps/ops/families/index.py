"""Choice of the keys that sparse attention reads: the best scores of an indexer."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .._checks import wide, widened
from .._registry import operator
from .._sample import Calls, Changes
from .attention import MAX_INDEX_BLOCK, WORD, seen_in_order

MAX_INDEX_WIDTH = 256  # elements of an index query and key
REDUCTIONS = ("heads", "keys")


def _meta_index_topk(check, q, k, top_k, key_range, reduce, block, tail, keys, as_bits, **_):
    """Shape of the result: [B, T, K] for a choice of all heads, [B, Hi, T, K] for one of each head, int32.

    K is the number of choices: min(top_k, blocks), one more with a tail of pooled rows. With `as_bits` there
    is an axis of heads, of 1 or Hi, and K is ceil(S / 32). `k` has a row for each block only where blocks are
    pooled (reduce = "heads", block > 1); only then `keys` gives S, and `key_range` cannot be given.
    """
    batch, tokens, heads, rows = check.dims("B T Hi S")
    of_heads = reduce == "heads"
    has_pools = of_heads and block > 1
    check.none("where k has a row for each block", has_pools, key_range=key_range)
    check.between("tail", tail, 0, int(has_pools) if of_heads else top_k)
    if has_pools:
        if keys // block > rows or keys < 0:
            check.fail("keys", f"at most {rows * block + block - 1}, for which k has rows", keys)
    elif keys != 0:
        check.fail("keys", "0 where k has a row for each key", keys)
    else:
        keys = rows
        rows = -(-rows // block)
    groups = () if of_heads and not as_bits else (1 if of_heads else heads,)
    last = -(-keys // WORD) if as_bits else min(top_k, rows) + int(has_pools and tail > 0)
    return q.new_empty((batch, *groups, tokens, last), dtype=torch.int32)


@operator(
    f"q[B, T, Hi, D<={MAX_INDEX_WIDTH}] k[B, S, D]:q weights[B, T, Hi] key_range[B, 2]:int32",
    _meta_index_topk,
    allowed={"reduce": REDUCTIONS, "top_k": 1, "block": range(1, MAX_INDEX_BLOCK + 1)},
    dependences=('weights not with reduce="keys" (with reduce = "keys")',),
)
def _index_topk(
    q: Tensor,
    k: Tensor,
    weights: Tensor | None,
    top_k: int,
    scale: float,
    *,
    key_range: Tensor | None = None,
    reduce: str = "heads",
    block: int = 1,
    tail: int = 0,
    keys: int = 0,
    as_bits: bool = False,
) -> Tensor:
    """The keys, or blocks of neighbouring keys, with the best scores for each token.

    reduce = "heads": score[s] = sum_h weights[h] * relu(scale * q[h] . k[s]), one choice for all heads
        (DeepSeek Sparse Attention; of blocks, whose rows of k are pooled keys: GLM-5.3-Flash, Qwen4)
    reduce = "keys": score[h, b] = max over the keys s of block b of scale * q[h] . k[s], a choice for each
        head (MiniMax M3)

    The new tokens are the last T of S: each may choose itself and what lies before it. Arithmetic is in
    float32; a score that is NaN counts as the lowest number. Of equal scores, the first are chosen. No
    tensor of T x Hi x S is made, and of T x S only for as many tokens as 64 MB hold.

    Args:
        q: [B, T, Hi, D], float32, float16 or bfloat16, D up to 256; any strides.
        k: [B, S, D] in the dtype of `q`, with reduce = "heads" a row for each block. Strides are free: a
            slice of a cache is read where it lies.
        weights: [B, T, Hi], any of the three dtypes: of a token's heads; None for 1, and for "keys".
        top_k: how many blocks a token chooses at most, at least 1.
        scale: of the products.
        key_range: [B, 2] int32: the first key that the tokens of a batch entry may choose, and the one behind
            the last, as `cached_attention` takes it. None where rows of k are pooled.
        reduce: "heads" or "keys".
        block: so many neighbouring keys are chosen together, up to 1024; `block` of them from a multiple of
            `block` on.
        tail: with "keys": so many blocks up to the token's own are chosen first. With "heads", 0 or 1: with 1
            a token also chooses its own block while that is incomplete, which has no score yet.
        keys: S, where rows of k are pooled: the keys of S // block blocks. Else 0.
        as_bits: the result is a mask of bits, as `cached_attention` takes it.

    Returns: [B, T, min(top_k, rows)] int32, one more with a tail of pooled rows; with "keys"
        [B, Hi, T, min(top_k, blocks)]: the chosen blocks in ascending order, then -1 where a token may choose
        from fewer. Own blocks may have keys behind the token. With `as_bits` [B, 1, T, ceil(S / 32)] or
        [B, Hi, T, ceil(S / 32)] int32: a bit for each key, which is 1 where it is in a chosen block and the
        token may choose it.

    Raises: ValueError for a dtype, shape, number, choice or device that does not fit.
    """
    tokens = q.shape[1]
    is_pooled = reduce == "heads" and block > 1
    keys = keys if is_pooled else k.shape[1]
    products = torch.einsum("bthd,bsd->bhts", wide(q), wide(k)) * scale
    if reduce == "heads":
        weights = q.new_ones(q.shape[:3]) if weights is None else weights
        scores = torch.einsum("bhts,bth->bts", *widened(products.relu(), weights)).unsqueeze(1)
    else:
        scores = products
    lowest = torch.finfo(torch.float32).min
    scores = torch.where(scores.isnan(), lowest, scores)
    shown = seen_in_order(tokens, keys, keys, None, key_range, q.device)
    if reduce == "keys":
        scores = F.pad(scores.masked_fill(~shown, -torch.inf), (0, -keys % block), value=-torch.inf)
        scores = scores.unflatten(-1, (-1, block)).amax(-1)
    row = torch.arange(scores.shape[-1], device=q.device)
    end = torch.arange(keys - tokens + 1, keys + 1, device=q.device).clamp_(min=0)[:, None]
    if is_pooled:
        seen = (row + 1) * block <= end
    else:
        of_blocks = F.pad(shown, (0, len(row) * block - keys)).unflatten(-1, (-1, block))
        seen = of_blocks.any(-1)
        behind = seen.flip(-1).cumsum(-1).flip(-1)  # blocks up to the token's own, from each one on
        scores = torch.where(behind <= tail, torch.inf, scores)
    # Hidden rows come last: those that are seen, but whose score is -inf, before them.
    seen = seen.expand_as(scores)
    order = scores.sort(stable=True, dim=-1, descending=True).indices
    order = order.gather(-1, (~seen).gather(-1, order).int().sort(stable=True, dim=-1).indices)
    none = max(len(row), keys)
    best = order[..., :top_k]
    best = torch.where(seen.gather(-1, best), best, none).sort(-1).values
    if is_pooled and tail:
        own = torch.where(end % block > 0, end // block, none).expand(*best.shape[:-1], 1)
        best = torch.cat((best, own), -1).sort(-1).values
    if as_bits:
        chosen = torch.zeros((*best.shape[:-1], none + 1), dtype=torch.bool, device=q.device)
        chosen = chosen.scatter_(-1, best, True)[..., : -(-keys // block)]
        return _packed(chosen.repeat_interleave(block, -1)[..., :keys] & shown)
    best = best.masked_fill_(best == none, -1).int()
    return best.squeeze(1) if reduce == "heads" else best


def _packed(bits: Tensor) -> Tensor:
    """[..., ceil(S / 32)] int32 of bools [..., S]."""
    padded = F.pad(bits, (0, -bits.shape[-1] % WORD)).unflatten(-1, (-1, WORD)).long()
    return (padded << torch.arange(WORD, device=bits.device)).sum(-1).int()


CALLS: Calls = {
    "_index_topk": lambda s: s.of(
        f"q[2, T, 4, 16] k[2, {s.T + 9}, 16] weights[2, T, 4]:float32", top_k=5, scale=0.25
    ),
}
CHANGES: Changes = {
    "_index_topk": lambda s: [
        {"key_range": torch.tensor([[2, 9], [0, 40]], dtype=torch.int32, device=s.device)},
        {"q": s.values(2, 4, s.T, 16).transpose(1, 2), "weights": s.values(2, s.T, 4)},
        {"block": 3, "keys": 3 * s.T + 14, "tail": 1, "weights": None, "as_bits": True},
        *(
            {"reduce": "keys", "block": 2, "tail": 1, "weights": None, "top_k": 3, "as_bits": as_bits}
            for as_bits in (False, True)
        ),
    ],
}
