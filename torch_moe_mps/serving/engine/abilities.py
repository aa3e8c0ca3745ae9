"""Abilities of a model: what the engine asks once, as it walks through the model or tries it."""

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
    """Asked at the first use, and then known."""

    def __init__(self, model: PreTrainedModel):
        self._model, self._said = model, set[str]()

    @functools.cached_property
    def reads_whole(self) -> bool:
        """Whether the model must compute a prompt in one call."""
        return reads_whole(self._model)

    @functools.cached_property
    def caches_prefixes(self) -> bool:
        """Whether the cache of a prompt serves others that begin with it."""
        return not self.reads_whole and keeps_prompts(self._model)

    @functools.cached_property
    def not_batchable(self) -> str | None:
        """Why sequences are not batched, for a person; None where they are."""
        return reason_against_rows(self._model)

    @functools.cached_property
    def own_generate(self) -> str | None:
        """Why the model's own `generate` has to generate all sequences, for a person; None where not."""
        return reason_for_own_generate(self._model)

    def say_alone(self, reason: str) -> None:
        """Logs once why sequences run sequentially."""
        if reason not in self._said:
            self._said.add(reason)
            logger.warning("torch_moe_mps: sequences run sequentially: %s", reason)

    def alone(self, config: GenerationConfig) -> str | None:
        """Why the model's own `generate` has to generate with these settings; None where it does not."""
        return reason_of_settings(config) or self.own_generate


def keeps_prompts(model: PreTrainedModel) -> bool:
    """Whether a model's states are all in a cache that grows."""
    has_cache = takes_layers(model) and not model.config.is_encoder_decoder
    return has_cache and hands_cache_on(model)


def reason_of_settings(config: GenerationConfig) -> str | None:
    """Why `generate` has to generate an answer with these settings, for a person; None where it does not.

    `use_cache` is no reason: checkpoints that were trained say false, and the tokens are the same.
    """
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        return f"{mode.value.replace('_', ' ')} is generate()'s"
    if config.cache_implementation not in _GROWING:
        return "generation_config asks for another cache"
    return None


def reason_for_own_generate(model: PreTrainedModel) -> str | None:
    """Why `generate` has to generate all answers of a model, for a person; None where it does not."""
    kind = type(model).__name__
    if model.config.is_encoder_decoder:
        return f"{kind} is an encoder with a decoder"
    if not hands_cache_on(model):
        return f"{kind} has states that are in no cache"
    own, known = inspect.unwrap(model.generate), inspect.unwrap(GenerationMixin.generate)
    return None if own is known else f"{kind} has a generate() of its own"
