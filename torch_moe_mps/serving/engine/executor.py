"""The executor: the only caller of the model, for prefill, decoding and verification."""

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ...models.programs import BatchedCache, cache_argument, pipeline_of, wide_logits
from ..prefix_cache.memory import CachedPrefix, Images, PrefixCache
from .abilities import Abilities
from .drafts import Drafts
from .encoder_hook import EncoderHook
from .groups import BatchedGroup, Group, Single
from .inputs import images_of, is_one_prompt
from .job import Job
from .prefill import Prefill, modules_with_rope_deltas, with_rope_deltas
from .sequence import Sequence


class Executor:
    """Runs the model in this process and updates the caches of sequences.

    Args:
        states: returns the indices of hidden states that drafters need.
    """

    def __init__(self, model: Any, abilities: Abilities, states: Callable[[], tuple[int, ...]]):
        self._model, self._abilities, self._states = model, abilities, states
        self.device: torch.device = model.device
        self._rope_modules: Mapping[str, Any] = modules_with_rope_deltas(model)

    def room(self, memory: int | None) -> int | None:
        """Bytes of a budget that sequences and cached prefixes may take; None is no limit."""
        return memory

    def rows(self, drafts: Drafts) -> BatchedCache:
        """An empty cache for a new batch with speculative decoding by `drafts`."""
        return BatchedCache(self._model, drafts.deferrable)

    def keep(self, prefill: Prefill, prefix: CachedPrefix) -> None:
        """Caches the prefix of a prefill, or that prefix extended by generated tokens."""
        if prefill.prefix_cache is not None:
            prefill.prefix_cache.put(prefix)

    def prefill_of_job(self, job: Job, prefix_cache: PrefixCache | None) -> Prefill:
        """Prefill of a job, after its cached prefix."""
        is_cached = self._abilities.caches_prefixes and is_one_prompt(job.inputs)
        images = job.images or images_of(self._model, job.inputs)
        return self._begun(job.inputs, prefix_cache if is_cached else None, images)

    def prefill_again(self, sequence: Sequence) -> Prefill:
        """Prefill of a preempted sequence; its generated tokens become part of the prompt."""
        assert sequence.prefill is not None
        return self._begun({"input_ids": sequence.computed_ids()}, sequence.prefill.prefix_cache)

    def _begun(
        self, inputs: Mapping[str, Tensor], prefix_cache: PrefixCache | None, images: Images | None = None
    ) -> Prefill:
        whole = self._abilities.reads_whole
        return prefill_of(self._model, inputs, prefix_cache, images, self._rope_modules, whole)

    def prefill(self, prefill: Prefill, chunk: int, beside: Callable[[], None]) -> Any:
        """Computes the next prefill chunk. Returns: the model output.

        Args:
            beside: called between the modules of an encoder of images or sound; its exceptions end the call.
        """
        function = self._without_rope_deltas(beside)
        with self._encoder_hook.calling(function) if prefill.has_new_images else nullcontext():
            return prefill.compute(self._call, chunk)

    def step(self, group: Group, ids: Tensor) -> Any:
        """Computes tokens [B, T] of the sequences, including draft tokens. Returns: the model output."""
        if isinstance(group, BatchedGroup):
            return step_of(group.rows, self._call, ids)
        assert isinstance(group, Single)
        out = group.prefill.decode(self._call, ids, group.length)
        group.length += ids.shape[1]
        return out

    @functools.cached_property
    def _encoder_hook(self) -> EncoderHook:
        return EncoderHook(self._model)

    def _without_rope_deltas(self, function: Callable[[], None]) -> Callable[[], None]:
        def call() -> None:
            with with_rope_deltas(self._rope_modules, {}):
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
    """Prefill of model inputs, after their cached prefix."""
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


def step_of(rows: BatchedCache, call: Callable[..., Any], ids: Tensor) -> Any:
    """Result of `call` for the next tokens [B, T] of the sequences of a cache."""
    others = rows.arguments(ids.shape[1])  # may move the cache
    out = call(rows.cache, input_ids=ids, **others)
    rows.advance(ids.shape[1])
    return out


def call_model(model: Any, cache: Any, **inputs: Any) -> Any:
    """Model output for the next tokens of a cache."""
    with wide_logits():  # samplers widen them
        return model(**inputs, **cache_argument(model, cache))


def executor_of(model: Any, abilities: Abilities, states: Callable[[], tuple[int, ...]]) -> Executor:
    """Executor of a model. Raises: ValueError if it cannot run concurrent sequences."""
    running = pipeline_of(model)
    make: Callable[..., Executor] = Executor if running is None else running.executor
    return make(model, abilities, states)
