"""Model capabilities that the engine needs, each determined once."""

import functools
import inspect
import logging

from transformers import GenerationConfig, PreTrainedModel

from ...transformers.caches.cache import hands_cache_on
from ...transformers.caches.prompt_cache import reads_whole, takes_layers
from ...transformers.trials.batching import reason_against_rows
from ...transformers.upstream import GenerationMixin, GenerationMode

logger = logging.getLogger(__name__)

# Caches that grow, of `cache_implementation`: "hybrid", which Gemma 2 and 3 say, is no wish for `generate`.
_GROWING = (None, "dynamic", "hybrid")


class Abilities:
    """Capabilities of a model, computed at first use and cached."""

    def __init__(self, model: PreTrainedModel):
        self._model, self._said = model, set[str]()

    @functools.cached_property
    def reads_whole(self) -> bool:
        """True if the model must compute a prompt in one call."""
        return reads_whole(self._model)

    @functools.cached_property
    def caches_prefixes(self) -> bool:
        """True if prefix caching works for the model."""
        return not self.reads_whole and keeps_prompts(self._model)

    @functools.cached_property
    def not_batchable(self) -> str | None:
        """Reason why sequences cannot be batched, or None."""
        return reason_against_rows(self._model)

    @functools.cached_property
    def own_generate(self) -> str | None:
        """Reason why all sequences must run through `model.generate`, or None."""
        return reason_for_own_generate(self._model)

    def say_alone(self, reason: str) -> None:
        """Logs once why sequences run sequentially."""
        if reason not in self._said:
            self._said.add(reason)
            logger.warning("torch_moe_mps: sequences run sequentially: %s", reason)

    def alone(self, config: GenerationConfig) -> str | None:
        """Reason why a sequence with these settings must run through `model.generate`, or None."""
        return reason_of_settings(config) or self.own_generate


def keeps_prompts(model: PreTrainedModel) -> bool:
    """True if the whole state of a model is in a growing cache."""
    has_cache = takes_layers(model) and not model.config.is_encoder_decoder
    return has_cache and hands_cache_on(model)


def reason_of_settings(config: GenerationConfig) -> str | None:
    """Reason why these settings need `model.generate`, or None.

    `use_cache=False` is no reason: trained checkpoints often carry it, and the tokens are the same.
    """
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        return f"{mode.value.replace('_', ' ')} is generate()'s"
    if config.cache_implementation not in _GROWING:
        return "generation_config asks for another cache"
    return None


def reason_for_own_generate(model: PreTrainedModel) -> str | None:
    """Reason why a model needs its `generate` for all sequences, or None."""
    kind = type(model).__name__
    if model.config.is_encoder_decoder:
        return f"{kind} is an encoder with a decoder"
    if not hands_cache_on(model):
        return f"{kind} has states that are in no cache"
    own, known = inspect.unwrap(model.generate), inspect.unwrap(GenerationMixin.generate)
    return None if own is known else f"{kind} has a generate() of its own"
