"""Sampling: the next token of each row of logits."""

import inspect
from typing import Any

import torch
from torch import Tensor

from .._checks import wide
from .._registry import operator
from .._sample import Calls, Changes, Sample

MAX_VOCABULARY = 2**19
LEAST_DRAW = torch.finfo(torch.float32).tiny


def _meta_sample_with_flags(check, logits, temperature, top_p, min_p, otherwise, **_):
    """Empty [2, R], after checking temperature, shares and the fallback token."""
    if not 0.0 < temperature < float("inf"):
        check.fail("temperature", "above 0 and finite", temperature)
    for name, share in (("top_p", top_p), ("min_p", min_p)):
        if not 0.0 <= share <= 1.0:
            check.fail(name, "between 0 and 1", share)
    check.between("otherwise", otherwise, 0, check.sizes["V"] - 1)
    return logits.new_empty((2, check.sizes["R"]), dtype=torch.int64)


def _meta_sample(check, logits, **given):
    return logits.new_empty(_meta_sample_with_flags(check, logits, **given).shape[1], dtype=torch.int64)


_ROWS = f"logits[R, V<={MAX_VOCABULARY}] draws[R, V]:float32"


@operator(f"{_ROWS} invalid[R]:int64", _meta_sample_with_flags, allowed={"top_k": 0})
def _sample_with_flags(
    logits: Tensor,
    draws: Tensor | None,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    otherwise: int = 0,
    invalid: Tensor | None = None,
) -> Tensor:
    """Tokens of `sample`, and a flag for each row without distribution. Private: may change in any release.

    One tensor, so that a copy to the host, which waits for the GPU, has both.

    Args:
        logits, draws, temperature, top_k, top_p, min_p, otherwise: as for `sample`.
        invalid: [R] int64; rows where it is not 0 are invalid, too: those of tokens before, for an answer.

    Returns: [2, R] int64: the tokens, and 1 for each row that is invalid, 0 for others.

    Raises: ValueError for a dtype, shape, number or device that does not fit.
    """
    if draws is None:
        best, tokens = wide(logits).max(-1)
        return _result(tokens, best > -torch.inf, invalid, otherwise)
    scores = wide(logits) / temperature
    vocabulary = scores.shape[1]
    highest = scores.amax(-1, keepdim=True)
    valid = highest.isfinite()
    scores = torch.where(valid, scores, 0.0)
    if 0 < top_k < vocabulary:
        scores = scores.masked_fill(scores < scores.topk(top_k).values[:, -1:], -torch.inf)
    if top_p < 1.0:
        ascending, order = scores.sort(stable=True)
        summed = torch.float32 if logits.device.type == "mps" else torch.float64
        below = ascending.to(summed).softmax(-1).cumsum(-1).to(scores.dtype) <= 1.0 - top_p
        below[:, -1] = False
        scores = scores.masked_fill(below.scatter(1, order, below), -torch.inf)
    weights = (scores - torch.where(valid, highest, 0.0)).exp()
    races = (
        (weights / draws.clamp(min=LEAST_DRAW))
        .masked_fill(weights < min_p, -1.0)
        .nan_to_num(nan=-1.0, posinf=torch.inf)
    )
    best, tokens = races.masked_fill(scores == -torch.inf, -1.0).max(-1)
    return _result(tokens, valid.squeeze(-1) & (best >= 0.0), invalid, otherwise)


@operator(_ROWS, _meta_sample, allowed={"top_k": 0}, public="sampling without waiting for the GPU")
def sample(
    logits: Tensor,
    draws: Tensor | None,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    otherwise: int = 0,
) -> Tensor:
    """Sampled token of each row after top-k, top-p and min-p.

    s = logits / temperature in float32; top_k keeps scores that are not below the k-th largest, so ties stay;
    of these, top_p keeps the fewest of the most probable tokens that have the share top_p of the probability,
    and of equally probable ones the last; min_p keeps those whose probability is at least min_p of the most
    probable one's. The order and the sets equal transformers' TemperatureLogitsWarper,
    TopKLogitsWarper, TopPLogitsWarper and MinPLogitsWarper, up to the rounding of sums.

    token = argmax_v exp(s[v] - max s) / draws[v] over the kept tokens, the first of equal ones. With draws of
    the exponential distribution, a token has the probability that the softmax over the kept scores gives it.
    `torch.multinomial` samples one token in the same way: `torch.empty(R, V).exponential_()` of the same
    generator gives its token.

    A GPU takes numbers below the normal ones of float32 (2^-126) as zero: scores that differ in such numbers
    alone are equal there.

    A row with NaN, with +inf, or with -inf alone has no distribution: its token is `otherwise`, where
    `torch.multinomial` waits for the device to raise an error. Without draws, +inf is the highest.

    Args:
        logits: [R, V], float32, float16 or bfloat16, V up to 524,288; any strides.
        draws: [R, V] float32, not negative; the numbers of one draw for each token. 0 and -0, which torch's
            exponential numbers on mps may be, are the smallest normal number. None for the token with the
            highest logit, the first of equal ones: the other arguments then make no difference.
        temperature: above 0.
        top_k: so many tokens at least are kept; 0 keeps all.
        top_p: a share, from 0, which keeps one token, to 1, which keeps all.
        min_p: a share; 0 keeps all.
        otherwise: a token.

    Returns: [R] int64.

    Raises: ValueError for a dtype, shape, number or device that does not fit.

    In models' `generate`, `_sample_with_flags` replaces it.

    Example:
        >>> logits = torch.tensor([[0.0, 5.0, 1.0], [0.0, float("nan"), 1.0]])
        >>> ops.sample(logits, None, otherwise=2).tolist()  # the largest logits; the second row has none
        [1, 2]
    """
    return inspect.unwrap(_sample_with_flags)(**locals())[0]


def _result(tokens: Tensor, valid: Tensor, invalid: Tensor | None, otherwise: int) -> Tensor:
    wrong = ~valid if invalid is None else ~valid | (invalid != 0)
    return torch.stack((torch.where(valid, tokens, otherwise), wrong.long()))


def _draws(s: Sample, *shape: int) -> Tensor:
    return s.values(*shape, dtype=torch.float32).abs() + 0.01  # not below float16's normal numbers


def _sampled(s: Sample) -> dict[str, Any]:
    arguments = {"logits": s.values(s.T, 300), "draws": _draws(s, s.T, 300)}
    return arguments | {"temperature": 0.7, "top_k": 40, "top_p": 0.8, "min_p": 0.02}


def _more(s: Sample) -> list[dict[str, Any]]:
    """And without draws rows of finite logits, with infinite ones, with NaN, and of -inf alone."""
    best = s.values(7, 300)
    best[2:5, 200::7], best[4, 250], best[5:] = torch.inf, torch.nan, -torch.inf
    return [
        {"top_k": 0, "top_p": 1.0, "min_p": 0.0},
        {"draws": None, "logits": best},
        {"logits": s.values(300, s.T).t(), "top_k": 2},
        {"logits": s.values(s.T, 300).fill_(torch.nan), "otherwise": 7},
    ]


def _every_other(s: Sample, rows: int) -> Tensor:
    return torch.arange(rows, device=s.device) % 2


CALLS: Calls = {
    "_sample_with_flags": lambda s: _sampled(s) | {"invalid": s.integers(2, s.T, dtype=torch.int64)},
    "sample": _sampled,
}
CHANGES: Changes = {
    "_sample_with_flags": lambda s: [
        {"invalid": None},
        *(c | {"invalid": _every_other(s, len(c["logits"]) if "logits" in c else s.T)} for c in _more(s)),
    ],
    "sample": _more,
}
