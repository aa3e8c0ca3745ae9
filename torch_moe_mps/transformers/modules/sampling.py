"""`generate` draws each token in one launch, where transformers' processors of logits end with those of
temperature, top-k, top-p and min-p. It gives the tokens that transformers would: see the operator `sample_`.

`torch.multinomial` waits for an mps device twice in each call, to look whether it has a distribution.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers.generation import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ...ops._checks import ACTIVATION_DTYPES
from ...ops.sampling import MAX_VOCABULARY, sample_
from ..basics.deferred import Deferred
from ..basics.self_check_state import refused

OPERATOR = "sample_"
_ATEN = torch.ops.aten
# The processors that the operator knows, in their order, with the argument that each has.
_KNOWN = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}
_ORDER = [*_KNOWN]
_LOGITS, _SCORES, _PROBABILITIES = range(3)


class Sampling:
    """Stands for the processors of a call of `generate`, and draws its tokens."""

    def __init__(self, processors: LogitsProcessorList, config: Any):
        first = len(processors)
        while first and _is_known(processors[first - 1], processors[first : first + 1]):
            first -= 1
        self._others, self.known = (
            LogitsProcessorList(part) for part in (processors[:first], processors[first:])
        )
        self._arguments = {_KNOWN[type(p)]: getattr(p, _KNOWN[type(p)]) for p in self.known}
        self.draws = bool(config.do_sample)
        end = config.eos_token_id
        self._end = next(iter(end), 0) if isinstance(end, (list, tuple)) else end or 0
        self._invalid: Tensor | None = None

    def take(self, outputs: Any) -> None:
        """Has the logits of a model's last token read where they lie: transformers copies them to float32."""
        logits = outputs.get("logits")
        if type(logits) is Tensor and logits.shape[1:-1] == (1,) and logits.dtype in ACTIVATION_DTYPES:
            outputs["logits"] = _Steps.of(self, logits, _LOGITS)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self._others:
            scores = self._others(input_ids, scores.elements() if isinstance(scores, _Steps) else scores)
        logits = scores.logits if isinstance(scores, _Steps) else scores
        return _Steps.of(self, logits, _SCORES)

    def draw(self, logits: Tensor) -> Tensor:
        """A token of each row, with the numbers that `torch.multinomial` would draw."""
        draws = torch.empty(logits.shape, dtype=torch.float32, device=logits.device).exponential_()
        if self._invalid is None:
            self._invalid = torch.zeros(len(logits), dtype=torch.int32, device=logits.device)
        end = self._end if 0 <= self._end < logits.shape[1] else 0
        return sample_(logits, draws, self._invalid, **self._arguments, otherwise=end)

    def require_distributions(self) -> None:
        """Raises: RuntimeError if a token had no distribution to be drawn from."""
        if self._invalid is not None and self._invalid.any():
            raise RuntimeError(
                "moe_mps::sample_: logits must be finite or -inf, and not all -inf, to draw a token, "
                "got NaN, +inf or -inf alone: the answer ends there"
            )


_CURRENT: ContextVar[Sampling | None] = ContextVar("moe_mps_sampling", default=None)


class _Steps(Deferred):
    """[B, 1, V] logits, [B, V] in float32, their scores or probabilities, none of which is made if all that
    is asked is a token of each row.

    Attributes:
        logits: in the model's dtype.
        stage: what of them this stands for.
    """

    sampling: Sampling
    logits: Tensor
    stage: int

    @classmethod
    def of(cls, sampling: Sampling, logits: Tensor, stage: int) -> "_Steps":
        dtype = logits.dtype if logits.dim() == 3 else torch.float32
        given = {"sampling": sampling, "logits": logits, "stage": stage}
        made: _Steps = cls.made(logits.shape, dtype, logits.device, **given)
        return made

    def elements(self) -> Tensor:
        if self.dim() == 3:
            return self.logits
        scores = self.logits.to(torch.float32, copy=True)
        if self.stage >= _SCORES:
            scores = self.sampling.known(None, scores)
        return scores.softmax(-1) if self.stage == _PROBABILITIES else scores

    @classmethod
    def without_elements(cls, func: Any, args: Any, kwargs: Any) -> Any:
        steps = args[0] if isinstance(args[0], _Steps) else None
        known = None if steps is None else _OPERATORS.get(func)
        return NotImplemented if known is None else known(steps, args[1:], kwargs)


def _select(steps: _Steps, given: tuple[Any, ...], options: dict[str, Any]) -> Any:
    is_last = steps.dim() == 3 and given in ((1, -1), (1, 0))
    return _Steps.of(steps.sampling, steps.logits[:, -1], _LOGITS) if is_last else NotImplemented


def _to(steps: _Steps, given: tuple[Any, ...], options: dict[str, Any]) -> Any:
    wanted = options.get("dtype"), torch.device(options.get("device") or steps.device)
    is_same = steps.dim() == 2 and wanted == (torch.float32, steps.device)
    return _Steps.of(steps.sampling, steps.logits, steps.stage) if is_same else NotImplemented


def _softmax(steps: _Steps, given: tuple[Any, ...], options: dict[str, Any]) -> Any:
    is_known = steps.stage == _SCORES and given[0] in (-1, 1) and steps.sampling.draws
    return _Steps.of(steps.sampling, steps.logits, _PROBABILITIES) if is_known else NotImplemented


def _multinomial(steps: _Steps, given: tuple[Any, ...], options: dict[str, Any]) -> Any:
    is_known = steps.stage == _PROBABILITIES and given == (1,) and steps.shape[1] <= MAX_VOCABULARY
    return steps.sampling.draw(steps.logits)[:, None] if is_known else NotImplemented


def _argmax(steps: _Steps, given: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The same of the model's dtype as of float32."""
    is_known = steps.dim() == 2 and steps.stage <= _SCORES and not steps.sampling.known
    return steps.logits.argmax(*given, **options) if is_known else NotImplemented


_OPERATORS: dict[Any, Callable[..., Any]] = {
    _ATEN.select.int: _select,
    _ATEN._to_copy.default: _to,
    _ATEN._softmax.default: _softmax,
    _ATEN.multinomial.default: _multinomial,
    _ATEN.argmax.default: _argmax,
}


def _is_known(processor: Any, following: list[Any]) -> bool:
    """Whether a processor is one that the operator knows, in front of `following`: at most one more."""
    cls = type(processor)
    return (
        cls in _KNOWN
        and getattr(processor, "filter_value", -torch.inf) == -torch.inf
        and getattr(processor, "min_tokens_to_keep", 1) == 1
        and all(_ORDER.index(cls) < _ORDER.index(type(each)) for each in following)
    )


def current() -> Sampling | None:
    """Of the call of `generate` that this thread is in."""
    return _CURRENT.get()


@contextlib.contextmanager
def sampling(processors: Any, config: Any, device: torch.device) -> Iterator[Any]:
    """What stands for the processors of logits inside the block: they themselves where transformers' own code
    draws the tokens, because their scores are wanted or the operator has failed the self-check.

    Raises: RuntimeError at the end if a token had no distribution.
    """
    shows = config.return_dict_in_generate and (config.output_scores or config.output_logits)
    is_plain = type(processors) is LogitsProcessorList
    if device.type != "mps" or shows or not is_plain or OPERATOR in refused():
        yield processors
        return
    stands = Sampling(processors, config)
    token = _CURRENT.set(stands)
    try:
        yield stands
    finally:
        _CURRENT.reset(token)
    stands.require_distributions()
