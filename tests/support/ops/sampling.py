"""Operators of the family sampling: valid arguments, results in float64, and invalid arguments."""

from types import SimpleNamespace

import numpy as np
import torch

from support.ops import wrong
from support.oracles import exact
from support.oracles_operators import Expected


def draw_sample(d):
    return {name: value for name, value in draw__sample_with_flags(d).items() if name != "invalid"}


def draw__sample_with_flags(d):
    rows, vocabulary = d.one(1, 3, 0), d.one(300, 1, 31, 1000, 5000)
    return {
        "logits": d.values(rows, vocabulary, scale=d.one(1.0, 3.0, 0.0)),
        "draws": d.maybe(lambda: torch.empty(rows, vocabulary).exponential_(generator=d.generator)),
        "invalid": d.maybe(lambda: torch.arange(rows) % 2),
        "temperature": d.one(1.0, 0.6, 2.5),
        "top_k": d.one(0, 1, 20, 5000),
        "top_p": d.one(1.0, 0.8, 0.0),
        "min_p": d.one(0.0, 0.05),
        "otherwise": d.one(0, vocabulary - 1),
    }


def expected_sample(a):
    (both,) = expected__sample_with_flags(SimpleNamespace(**vars(a), invalid=None))
    return [Expected(both.value[0], known=both.known if both.known is True else both.known[0])]


def expected__sample_with_flags(a):
    """Not known where the race, or what is kept, is as near as float32 tells."""
    logits = exact(a.logits)
    rows, vocabulary = logits.shape
    tokens, invalid = np.full(rows, a.otherwise), np.zeros(rows, np.int64)
    if a.invalid is not None:
        invalid |= a.invalid.numpy() != 0
    if a.draws is None:
        best = logits.max(-1)
        invalid |= np.isnan(best) | (best == -np.inf)
        tokens = np.where(np.isnan(best) | (best == -np.inf), tokens, logits.argmax(-1))
        return [Expected(np.stack((tokens, invalid)))]
    draws, known = exact(a.draws), np.ones(rows, bool)
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


def invalid_sample(zeros):
    return invalid__sample_with_flags(zeros)


def invalid__sample_with_flags(zeros):
    return [
        wrong("above 0 and finite, got 0.0", temperature=0.0),
        wrong("temperature must be above 0 and finite, got inf", temperature=float("inf")),
        wrong("between 0 and 1, got 1.5", top_p=1.5),
        wrong("between 0 and 1, got -0.1", min_p=-0.1),
        wrong("between 0 and 299, got 300", otherwise=300),
    ]
