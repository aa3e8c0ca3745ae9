"""`generate` draws each token in one dispatch, where transformers' processors of logits end with those of
temperature, top-k, top-p and min-p. It gives the tokens that transformers would: see the operator `sample`.

`torch.multinomial` waits for an mps device twice in each call, to look whether it has a distribution.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softmax
from torch.utils._pytree import tree_map_only

from ...ops._checks import ACTIVATION_DTYPES
from ...ops.sampling import MAX_VOCABULARY, sample
from ..basics.logits import is_missing, is_watched, no_distribution
from ..basics.scoped import having
from ..basics.unmodified import REFUSED
from ..upstream import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

OPERATOR = "sample"
# The processors that the operator knows, in their order, with the argument that each has.
_KNOWN = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}
_ORDER = [*_KNOWN]
_LOGITS, _COPY, _SCORES, _PROBABILITIES = range(4)
_LAST = (slice(None), -1)


class Sampling:
    """Stands for the processors of a call of `generate`, and draws its tokens.

    Attributes:
        others: the processors that `sample` does not know, which come first.
        known: processors that the operator applies.
        draws: True if tokens are drawn; otherwise each is the likeliest.
        end: a token, for logits without a distribution.
    """

    def __init__(self, processors: LogitsProcessorList, config: Any):
        first = len(processors)
        while first and _is_known(processors[first - 1], processors[first : first + 1]):
            first -= 1
        self.others, self.known = (
            LogitsProcessorList(part) for part in (processors[:first], processors[first:])
        )
        self.draws = bool(config.do_sample)
        end = config.eos_token_id
        ends = end.flatten().tolist() if isinstance(end, Tensor) else end
        self.end = next(iter(ends), 0) if isinstance(ends, (list, tuple)) else ends or 0
        self._invalid: Tensor | None = None  # [B], of the tokens so far
        self._last: Tensor | None = None  # logits

    def take(self, outputs: Any) -> None:
        """Has the logits of a model's last token read where they lie: transformers copies them to float32."""
        logits = outputs.get("logits")
        if type(logits) is Tensor and logits.shape[1:-1] == (1,) and logits.dtype in ACTIVATION_DTYPES:
            self._last = logits
            outputs["logits"] = _Steps(self, logits)

    def __call__(self, input_ids: Tensor, scores: Any) -> Any:
        if self.others:
            scores = self.others(input_ids, scores.elements() if isinstance(scores, _Steps) else scores)
        return _Steps(self, scores.logits if isinstance(scores, _Steps) else scores, _SCORES)

    def draw(
        self, logits: Tensor, fill: Callable[[Tensor], object], invalid: Tensor | None = None
    ) -> Tensor | None:
        """The tokens of rows of logits [B, V], and which are invalid: [2, B]; None where the operator cannot
        draw them.

        Processors may change from token to token, so each token asks them for their arguments.

        Args:
            fill: writes the numbers of the draw [B, V].
            invalid: rows that are invalid already; None for none.
        """
        arguments = self.arguments()
        if arguments is None or not _takes(logits):
            return None
        vocabulary = logits.shape[1]
        draws = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
        fill(draws)
        end = self.end if 0 <= self.end < vocabulary else 0  # for rows without a distribution
        return sample(logits, draws, invalid, **dict(arguments), otherwise=end)

    def next_tokens(self, logits: Tensor) -> Tensor | None:
        """The tokens [B, 1] that `torch.multinomial` would draw, of `generate`; None as for `draw`."""
        sampled = self.draw(logits, Tensor.exponential_, self._invalid)  # the numbers that it would draw
        if sampled is None:
            return None
        tokens, self._invalid = sampled
        return tokens[:, None]

    def arguments(self) -> tuple[tuple[str, Any], ...] | None:
        """Arguments of `sample` for the known processors; None if it does not take them."""
        if not all(map(_is_plain, self.known)):
            return None
        return tuple((_KNOWN[type(item)], getattr(item, _KNOWN[type(item)])) for item in self.known)

    def require_distributions(self, model: Any) -> None:
        """Raises: RuntimeError if a token had no distribution to be drawn from, or if a greedy answer of a
        model that is watched ends without one.
        """
        invalid = self._invalid
        if invalid is None and self._last is not None and is_watched(model):
            invalid = is_missing(self._last.amax(-1))
        if invalid is not None and invalid.any():
            raise no_distribution(model)


_CURRENT: ContextVar[Sampling | None] = ContextVar("moe_mps_sampling", default=None)


class _Steps:
    """Logits of a model and the values that `generate` makes of them, step by step.

    None of these is computed if all that is asked for is a token of each row; anything else gets elements.

    No subclass of Tensor: each operator of one costs the host 20 us.

    Attributes:
        logits: [B, 1, V] of the model's last token; behind that step [B, V].
        stage: the last step that is made.
    """

    def __init__(self, sampling: Sampling, logits: Tensor, stage: int = _LOGITS):
        self.sampling, self.logits, self.stage = sampling, logits, stage

    def elements(self) -> Tensor:
        if self.stage == _LOGITS:
            return self.logits
        scores = self.logits.to(torch.float32, copy=True)
        if self.stage >= _SCORES:
            scores = self.sampling.known(None, scores)
        return scores.softmax(-1) if self.stage == _PROBABILITIES else scores

    def __getattr__(self, name: str) -> Any:
        return getattr(self.elements(), name)

    def __getitem__(self, index: Any) -> Any:
        is_last = self.stage == _LOGITS and index in (_LAST, (*_LAST, slice(None)))
        return _Steps(self.sampling, self.logits[:, -1], _COPY) if is_last else self.elements()[index]

    def to(self, *args: Any, **options: Any) -> Any:
        wanted = {"dtype": torch.float32, "device": self.logits.device, "copy": True}
        is_same = self.stage == _COPY and not args and wanted.items() >= options.items()
        return self if is_same else self.elements().to(*args, **options)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = args[0]._known(func, args[1:], kwargs) if args and isinstance(args[0], _Steps) else None
        if result is not None:
            return result
        args, kwargs = tree_map_only(_Steps, _Steps.elements, (args, kwargs))
        return func(*args, **kwargs)

    def _known(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Result of an operator that needs no elements; None if it needs them."""
        stage, logits, sampling = self.stage, self.logits, self.sampling
        arguments = {
            name: value for name, value in kwargs.items() if name != "_stacklevel" and value is not None
        }
        if func is softmax and stage == _SCORES and (args, arguments) == ((), {"dim": -1}) and sampling.draws:
            return _Steps(sampling, logits, _PROBABILITIES)
        if (
            func is torch.multinomial
            and stage == _PROBABILITIES
            and (args, arguments) == ((), {"num_samples": 1})
        ):
            return sampling.next_tokens(logits)
        if func is torch.argmax and stage == _SCORES and not sampling.known:  # the same as of float32
            return logits.argmax(*args, **kwargs)
        return None


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


def current() -> Sampling | None:
    """The sampling of the call of `generate` that this thread is in."""
    return _CURRENT.get()


@contextlib.contextmanager
def sampling(processors: Any, config: Any, device: torch.device, model: Any) -> Iterator[Any]:
    """Stand-in for the processors of logits inside the block.

    They are unchanged where transformers samples the tokens: if scores are requested, or if the operator has
    failed the self-check.

    Raises: RuntimeError at the end if a token had no distribution.
    """
    shows = config.return_dict_in_generate and (config.output_scores or config.output_logits)
    is_plain = type(processors) is LogitsProcessorList
    if device.type != "mps" or shows or not is_plain or OPERATOR in REFUSED:
        yield processors
        return
    stands = Sampling(processors, config)
    with having(_CURRENT, stands):
        yield stands
    stands.require_distributions(model)


def _takes(logits: Tensor) -> bool:
    """True if the operator takes the logits [B, V]."""
    is_known = logits.dtype in ACTIVATION_DTYPES and logits.shape[1] <= MAX_VOCABULARY
    return is_known and OPERATOR not in REFUSED


def likeliest(logits: Tensor) -> Tensor:
    """The token with the highest of the logits [B, V] of each row, and 1 where there is none: [2, B]."""
    if _takes(logits):
        return sample(logits, None)
    best = logits.max(-1)
    return torch.stack((best.indices, is_missing(best.values).long()))
