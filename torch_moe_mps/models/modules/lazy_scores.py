"""Lazy scores: `generate` samples each token from them by the operator.

The tokens equal transformers' own. `torch.multinomial` waits for an mps device twice in each call, to check
that it has a distribution.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softmax
from torch.utils._pytree import tree_map_only

from ...ops._checks import ACTIVATION_DTYPES
from ..basics.logits import is_missing, is_watched, no_distribution
from ..basics.scoped import having
from ..basics.unmodified import REFUSED
from ..upstream import LogitsProcessorList
from .sampling import OPERATOR, Sampling

_LOGITS, _COPY, _SCORES, _PROBABILITIES = range(4)
_LAST = (slice(None), -1)


class GenerateSampling(Sampling):
    """Sampling of a call of `generate`, for which it stands in the place of its processors."""

    def __init__(self, processors: LogitsProcessorList, config: Any):
        super().__init__(processors, config)
        self._invalid: Tensor | None = None  # [B], of the tokens so far
        self._last: Tensor | None = None  # logits

    def observe(self, outputs: Any) -> None:
        """Makes the logits of a model's last token lazy: transformers copies them to float32."""
        logits = outputs.get("logits")
        if type(logits) is Tensor and logits.shape[1:-1] == (1,) and logits.dtype in ACTIVATION_DTYPES:
            self._last = logits
            outputs["logits"] = LazyScores(self, logits)

    def __call__(self, input_ids: Tensor, scores: Any) -> Any:
        if self.processors:
            elements = scores.elements() if isinstance(scores, LazyScores) else scores
            scores = self.processors(input_ids, elements)
        return LazyScores(self, scores.logits if isinstance(scores, LazyScores) else scores, _SCORES)

    def next_tokens(self, logits: Tensor) -> Tensor:
        """The tokens [B, 1] that `torch.multinomial` would sample, from the same random numbers."""
        tokens, self._invalid = self.sample(logits, Tensor.exponential_, self._invalid)
        return tokens[:, None]

    def require_distributions(self, model: Any) -> None:
        """Raises: RuntimeError if a token had no distribution to be sampled from, or if a greedy answer of a
        model that is watched ends without one.
        """
        invalid = self._invalid
        if invalid is None and self._last is not None and is_watched(model):
            invalid = is_missing(self._last.amax(-1))
        if invalid is not None and invalid.any():
            raise no_distribution(model)


_CURRENT: ContextVar[GenerateSampling | None] = ContextVar("moe_mps_sampling", default=None)


class LazyScores:
    """Logits of a model and the values that `generate` computes from them, step by step.

    Nothing is computed if `generate` asks only for a token of each row; any other reader gets elements. It is
    no subclass of Tensor: each operator of one costs the host 20 us.

    Attributes:
        logits: [B, 1, V] of the model's last token; behind that step [B, V].
        stage: the last step of them.
    """

    def __init__(self, sampling: GenerateSampling, logits: Tensor, stage: int = _LOGITS):
        self.sampling, self.logits, self.stage = sampling, logits, stage

    def elements(self) -> Tensor:
        if self.stage == _LOGITS:
            return self.logits
        scores = self.logits.to(torch.float32, copy=True)
        if self.stage >= _SCORES:
            scores = self.sampling.warpers(None, scores)
        return scores.softmax(-1) if self.stage == _PROBABILITIES else scores

    def __getattr__(self, name: str) -> Any:
        return getattr(self.elements(), name)

    def __getitem__(self, index: Any) -> Any:
        is_last = self.stage == _LOGITS and index in (_LAST, (*_LAST, slice(None)))
        return LazyScores(self.sampling, self.logits[:, -1], _COPY) if is_last else self.elements()[index]

    def to(self, *args: Any, **options: Any) -> Any:
        wanted = {"dtype": torch.float32, "device": self.logits.device, "copy": True}
        is_same = self.stage == _COPY and not args and wanted.items() >= options.items()
        return self if is_same else self.elements().to(*args, **options)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = args[0]._known(func, args[1:], kwargs) if args and isinstance(args[0], LazyScores) else None
        if result is not None:
            return result
        args, kwargs = tree_map_only(LazyScores, LazyScores.elements, (args, kwargs))
        return func(*args, **kwargs)

    def _known(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Result of an operator that needs no elements; None if it needs them."""
        stage, logits, sampling = self.stage, self.logits, self.sampling
        arguments = {
            name: value for name, value in kwargs.items() if name != "_stacklevel" and value is not None
        }
        if (
            func is softmax
            and stage == _SCORES
            and (args, arguments) == ((), {"dim": -1})
            and sampling.do_sample
        ):
            return LazyScores(sampling, logits, _PROBABILITIES)
        if (
            func is torch.multinomial
            and stage == _PROBABILITIES
            and (args, arguments) == ((), {"num_samples": 1})
        ):
            return sampling.next_tokens(logits)
        if func is torch.argmax and stage == _SCORES and not sampling.warpers:  # the same as of float32
            return logits.argmax(*args, **kwargs)
        return None


def current() -> GenerateSampling | None:
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
    stands = GenerateSampling(processors, config)
    with having(_CURRENT, stands):
        yield stands
    stands.require_distributions(model)
