"""The executor: the only caller of the model, for prefill, decoding and verification."""

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ...transformers.basics.wide_logits import wide_logits
from ...transformers.upstream.calls import cache_argument
from ..prefix_cache.memory import PrefixCache
from .abilities import Abilities
from .between import Between
from .groups import Group
from .inputs import images_of, is_one_prompt
from .job import Job
from .prefill import Prefill, turned, turning
from .sequence import Sequence


class Executor:
    """Computes the steps of sequences in this process.

    Args:
        states: the numbers of the model's hidden states that drafters want; empty for none.
    """

    def __init__(self, model: Any, abilities: Abilities, states: Callable[[], tuple[int, ...]]):
        self._model, self._abilities, self._states = model, abilities, states
        self.device: torch.device = model.device
        self._turning: Mapping[str, Any] = turning(model)

    def begin(self, job: Job, prefix_cache: PrefixCache | None) -> Prefill:
        """The prefill of a job, behind its cached prefix."""
        inputs = job.inputs
        is_cached = self._abilities.caches_prefixes and is_one_prompt(inputs)
        return Prefill(
            self._model,
            inputs["input_ids"],
            prefix_cache if is_cached else None,
            images=job.images or images_of(self._model, inputs),
            beside={name: value for name, value in inputs.items() if name != "input_ids"},
            modules=self._turning,
            reads_whole=self._abilities.reads_whole,
        )

    def begin_again(self, sequence: Sequence) -> Prefill:
        """The prefill of a preempted sequence: its tokens so far are its prompt."""
        assert sequence.prefill is not None
        cache, whole = sequence.prefill.prefix_cache, self._abilities.reads_whole
        ids = sequence.computed_ids()
        return Prefill(self._model, ids, cache, modules=self._turning, reads_whole=whole)

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
        return group.compute(self._call, group.next_tokens(self.device))

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
        with wide_logits():  # samplers widen them
            return self._model(**inputs, **cache_argument(self._model, cache))
