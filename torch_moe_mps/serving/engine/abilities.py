"""Model capabilities that the engine needs, each determined once."""

import functools
import inspect
import logging

from transformers import GenerationMixin, PreTrainedModel

from ..._limits import CAUTIOUS_CHUNK, LARGEST_CHUNK
from ...models.programs import hands_cache_on, keeps_prompts, reads_of, reason_against_rows
from ...selfcheck.machine import has_passed, say_what_waits
from ...transformers.deferrable import forgets_states

logger = logging.getLogger(__name__)


class Abilities:
    """Capabilities of a model, computed at first use and cached."""

    def __init__(self, model: PreTrainedModel):
        self._model, self._said = model, set[str]()

    @functools.cached_property
    def reads_whole(self) -> bool:
        """True if the model must compute a prompt in one call."""
        return forgets_states(self._model)

    @functools.cached_property
    def caches_prefixes(self) -> bool:
        """True if prefix caching works for the model."""
        return not self.reads_whole and keeps_prompts(self._model)

    @functools.cached_property
    def largest_chunk(self) -> int:
        """Tokens of a prefill chunk at most."""
        is_streamed = self._model.device.type == "mps" and "experts" in reads_of(self._model)
        if not is_streamed or has_passed():
            return LARGEST_CHUNK
        say_what_waits()
        return CAUTIOUS_CHUNK

    @functools.cached_property
    def not_batchable(self) -> str | None:
        """Reason why sequences cannot be batched, or None."""
        return reason_against_rows(self._model)

    def say_alone(self, reason: str) -> None:
        """Logs once why sequences run sequentially."""
        if reason not in self._said:
            self._said.add(reason)
            logger.warning("torch_moe_mps: sequences run sequentially: %s", reason)


def check_model(model: PreTrainedModel) -> None:
    """Raises: ValueError for a model that only its `generate` runs."""
    kind, reason = type(model).__name__, None
    if model.config.is_encoder_decoder:
        reason = "is an encoder with a decoder"
    elif not hands_cache_on(model):
        reason = "has states that are in no cache"
    elif inspect.unwrap(model.generate) is not inspect.unwrap(GenerationMixin.generate):
        reason = "has a generate() of its own"
    if reason is not None:
        raise ValueError(f"torch_moe_mps: {kind} {reason}: call model.generate")
