"""Operators of the family index: valid arguments, results in float64, and invalid arguments."""

import numpy as np
import torch

from support.ops import wrong
from support.ops.attention import key_range
from support.oracles import exact
from support.oracles_operators import Expected
from torch_moe_mps.ops._sample import T


def draw__index_topk(d):
    batch, tokens, heads, width = d.one(1, 2, 0), d.one(1, 2, 5, 0), d.one(2, 1, 17, 0), d.one(16, 30, 1)
    keys, dtype, block = d.one(40, 1, 9, 150, 0), d.dtype(), d.one(1, 2, 5, 32)
    reduce, top_k = d.one("heads", "keys"), d.one(5, 1, 64, 2048)
    of_heads, is_pooled = reduce == "heads", reduce == "heads" and block > 1
    weights = d.maybe(lambda: d.values(batch, tokens, heads, dtype=d.dtype())) if of_heads else None
    return {
        "q": d.values(batch, tokens, heads, width, dtype=dtype),
        "k": d.values(batch, keys, width, dtype=dtype),
        "weights": weights,
        "top_k": top_k,
        "scale": d.one(width**-0.5, 1.0),
        "key_range": None if is_pooled else d.maybe(lambda: key_range(d, batch, keys)),
        "reduce": reduce,
        "block": block,
        "tail": d.one(0, 1) if is_pooled else 0 if of_heads else min(top_k, d.one(0, 1, 2)),
        "keys": keys * block + d.one(0, -1, block - 1) if is_pooled and keys else 0,
    }


def expected__index_topk(a):
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


def invalid__index_topk(zeros):
    ranges = zeros(2, 2, dtype=torch.int32)
    return [
        wrong(
            "key_range must be None where k has a row for each block",
            key_range=ranges,
            block=2,
        ),
        wrong("tail must be between 0 and 0, got 1", tail=1),
        wrong("tail must be between 0 and 1, got 2", tail=2, block=2, keys=9),
        wrong("keys must be 0 where k has a row for each key, got 3", keys=3),
        wrong("keys must be at most 25, for which k has rows", keys=2 * (T + 9) + 2, block=2),
    ]
