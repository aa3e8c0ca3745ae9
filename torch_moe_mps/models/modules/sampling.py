"""Sampling: tokens of rows of logits, by the operator `_sample_with_flags` where transformers' processors of
logits end with temperature, top-k, top-p and min-p.

`generate` (`lazy_scores.py`) and the engine (`serving/engine/sampling.py`) sample here.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...ops._checks import ACTIVATION_DTYPES
from ...ops.families.sampling import LEAST_DRAW, MAX_VOCABULARY
from ..basics.logits import is_missing
from ..basics.unmodified import REFUSED
from ..upstream import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

OPERATOR = "_sample_with_flags"
ops = torch.ops.moe_mps
# The processors that the operator knows, in their order, with the argument that each has.
_KNOWN = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}
_ORDER = [*_KNOWN]


class Sampling:
    """Settings with which tokens are sampled: processors of logits and a generation config.

    Attributes:
        processors: other ones than `sample` knows; they come first.
        warpers: the last processors, which the operator applies.
        do_sample: False if each token is the one with the highest logit.
        end: a token, for logits without a distribution.
    """

    def __init__(self, processors: LogitsProcessorList, config: Any):
        first = len(processors)
        while first and _is_known(processors[first - 1], processors[first : first + 1]):
            first -= 1
        self.processors, self.warpers = (
            LogitsProcessorList(part) for part in (processors[:first], processors[first:])
        )
        self.do_sample = bool(config.do_sample)
        end = config.eos_token_id
        ends = end.flatten().tolist() if isinstance(end, Tensor) else end
        self.end = next(iter(ends), 0) if isinstance(ends, (list, tuple)) else ends or 0

    def sample(
        self, logits: Tensor, fill: Callable[[Tensor], object], invalid: Tensor | None = None
    ) -> Tensor:
        """Tokens of rows of logits [B, V] behind `processors`, and flags of invalid rows: [2, B] int64.

        Where the operator does not take the logits or the warpers, torch computes the same tokens. Warpers
        may change from token to token, so each token asks them for their arguments.

        Args:
            fill: writes exponential noise [B, V]; called only for `do_sample`.
            invalid: [B] int64, nonzero for rows that are invalid already; None for none.
        """
        if not self.do_sample:
            return likeliest(self.warpers(None, logits.float()) if self.warpers else logits)
        draws = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
        fill(draws)
        arguments = self.arguments()
        end = self.end if 0 <= self.end < logits.shape[1] else 0  # for rows without a distribution
        if arguments is not None and _takes(logits):
            how = {**dict(arguments), "otherwise": end, "invalid": invalid}
            tokens: Tensor = ops._sample_with_flags(logits, draws, **how)
            return tokens
        shares = self.warpers(None, logits.float()).softmax(-1)
        races = shares / draws.clamp_(min=LEAST_DRAW)  # a share of 0 by a draw of 0 is NaN, the largest
        wrong = shares.isnan().any(-1)
        best = races.argmax(-1).masked_fill(wrong, end)
        wrong = wrong if invalid is None else wrong | (invalid != 0)
        return torch.stack((best, wrong.long()))

    def arguments(self) -> tuple[tuple[str, Any], ...] | None:
        """Arguments of the operator for the warpers; None if it does not take them."""
        if not all(map(_is_plain, self.warpers)):
            return None
        return tuple((_KNOWN[type(item)], getattr(item, _KNOWN[type(item)])) for item in self.warpers)


def likeliest(logits: Tensor) -> Tensor:
    """The token with the highest of the logits [B, V] of each row, and 1 where there is none: [2, B]."""
    if _takes(logits):
        tokens: Tensor = ops._sample_with_flags(logits, None)
        return tokens
    best = logits.max(-1)
    return torch.stack((best.indices, is_missing(best.values).long()))


def _takes(logits: Tensor) -> bool:
    """True if the operator takes the logits [B, V]."""
    is_known = logits.dtype in ACTIVATION_DTYPES and logits.shape[1] <= MAX_VOCABULARY
    return is_known and OPERATOR not in REFUSED


def _is_known(processor: Any, following: list[Any]) -> bool:
    """True if the operator knows a processor in front of `following`: at most one more."""
    return (
        type(processor) in _KNOWN
        and _is_plain(processor)
        and all(_ORDER.index(type(processor)) < _ORDER.index(type(item)) for item in following)
    )


def _is_plain(processor: Any) -> bool:
    """True if a processor has nothing set but what the operator takes."""
    hides = getattr(processor, "filter_value", -torch.inf) == -torch.inf
    return hides and getattr(processor, "min_tokens_to_keep", 1) == 1
