"""The executor: the only caller of the model, for prefill, decoding and verification."""

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ...transformers.basics.logits import wide_logits
from ...transformers.basics.state import pipeline_of
from ...transformers.caches.batched import BatchedCache
from ...transformers.upstream.calls import cache_argument
from ..prefix_cache.memory import CachedPrefix, Images, PrefixCache
from .abilities import Abilities
from .between import Between
from .drafts import Drafts
from .groups import Group
from .inputs import images_of, is_one_prompt
from .job import Job, Reason
from .own_generate import generate_alone
from .prefill import Prefill, turned, turning
from .sequence import Sequence


class Executor:
    """Computes the steps of sequences in this process, and changes their caches.

    Args:
        states: the numbers of the model's hidden states that drafters want; empty for none.
    """

    def __init__(self, model: Any, abilities: Abilities, states: Callable[[], tuple[int, ...]]):
        self._model, self._abilities, self._states = model, abilities, states
        self.device: torch.device = model.device
        self._turning: Mapping[str, Any] = turning(model)

    def room(self, memory: int | None) -> int | None:
        """The part of so many bytes that sequences and cached prefixes may take; None is no limit."""
        return memory

    def rows(self, drafts: Drafts) -> BatchedCache:
        """The cache of a new batch, whose sequences may have these drafts."""
        return BatchedCache(self._model, drafts.deferrable)

    def keep(self, prefill: Prefill, prefix: CachedPrefix) -> None:
        """Caches a prefix that goes on from a prefill: that itself, or one with generated tokens."""
        if prefill.prefix_cache is not None:
            prefill.prefix_cache.put(prefix)

    def generate(self, job: Job, ends: Callable[[], bool], step: Callable[[], None]) -> Reason:
        """Generates a job by the model's own `generate`.

        Args:
            ends: asked between tokens whether it ends.
            step: of the others, called once a token.
        """
        return generate_alone(self._model, job, ends, step)

    def begin(self, job: Job, prefix_cache: PrefixCache | None) -> Prefill:
        """The prefill of a job, behind its cached prefix."""
        is_cached = self._abilities.caches_prefixes and is_one_prompt(job.inputs)
        images = job.images or images_of(self._model, job.inputs)
        return self._begun(job.inputs, prefix_cache if is_cached else None, images)

    def begin_again(self, sequence: Sequence) -> Prefill:
        """The prefill of a preempted sequence: its tokens so far are its prompt."""
        assert sequence.prefill is not None
        return self._begun({"input_ids": sequence.computed_ids()}, sequence.prefill.prefix_cache)

    def _begun(
        self, inputs: Mapping[str, Tensor], prefix_cache: PrefixCache | None, images: Images | None = None
    ) -> Prefill:
        whole = self._abilities.reads_whole
        return prefill_of(self._model, inputs, prefix_cache, images, self._turning, whole)

    def prefill(self, prefill: Prefill, chunk: int, beside: Callable[[], None]) -> Any:
        """Computes the next chunk of a prompt. Returns: what the model returns.

        Args:
            beside: called between the modules of an encoder of images or sound; its exceptions end the call.
        """
        between = self._between.calling(self._unturned(beside)) if prefill.has_new_images else nullcontext()
        with between:
            return prefill.compute(self._call, chunk)

    def decode(self, group: Group) -> Any:
        """Computes the next token of each sequence. Returns: what the model returns."""
        return self.verify(group, group.next_tokens(self.device))

    def verify(self, group: Group, ids: Tensor) -> Any:
        """Computes tokens [B, T] of the sequences, drafts among them. Returns: what the model returns."""
        return group.compute(self._call, ids)

    @functools.cached_property
    def _between(self) -> Between:
        return Between(self._model)

    def _unturned(self, function: Callable[[], None]) -> Callable[[], None]:
        def call() -> None:
            with turned(self._turning, {}):
                function()

        return call

    def _call(self, cache: Any, **inputs: Any) -> Any:
        if states := self._states():
            inputs["output_hidden_states"] = states[0] if len(states) == 1 else states  # these alone
        return call_model(self._model, cache, **inputs)


def prefill_of(
    model: Any,
    inputs: Mapping[str, Tensor],
    prefix_cache: PrefixCache | None,
    images: Images | None,
    modules: Mapping[str, Any],
    reads_whole: bool,
) -> Prefill:
    """The prefill of a model's inputs, behind their cached prefix."""
    beside = {name: value for name, value in inputs.items() if name != "input_ids"}
    return Prefill(
        model,
        inputs["input_ids"],
        prefix_cache,
        images=images,
        beside=beside,
        modules=modules,
        reads_whole=reads_whole,
    )


def call_model(model: Any, cache: Any, **inputs: Any) -> Any:
    """The result of a model for the next tokens of its cache."""
    with wide_logits():  # samplers widen them
        return model(**inputs, **cache_argument(model, cache))


def executor_of(model: Any, abilities: Abilities, states: Callable[[], tuple[int, ...]]) -> Executor:
    """The executor of a model. Raises: ValueError where several sequences cannot be generated."""
    running = pipeline_of(model)
    make: Callable[..., Executor] = Executor if running is None else running.executor
    return make(model, abilities, states)
