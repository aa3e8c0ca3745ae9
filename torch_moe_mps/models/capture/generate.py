"""Overrides of `generate`: sampling by the operator, errors of the GPU, drafts of MTP layers, experts."""

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from transformers import GenerationMixin

from ..._faults import synchronized
from ..attention.causal_mask import follow_mask
from ..basics.logits import wide_logits
from ..basics.scoped import having
from ..caches.cache import FOLLOWS
from ..modules.experts import are_served
from ..modules.lazy_scores import current, sampling
from .candidates import CANDIDATES, are_by_layers
from .match import MASK


def members_of_generate(original: Any) -> dict[str, Any]:
    """Members of a capturing class that override `generate` and its steps.

    `generate` raises if the GPU failed, samples by the operator, and drafts by MTP layers. On a GPU
    transformers would choose other experts for its tokens; it does not where the operator runs them.
    """
    members: dict[str, Any] = {}
    if hasattr(original, "generate"):

        @functools.wraps(original.generate)
        def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
            follows = kwargs.get("position_ids") is None
            is_own = kwargs.get("custom_generate") is None  # else who knows what reads logits
            with (
                having(FOLLOWS, follows),
                wide_logits() if is_own else nullcontext(),
                synchronized(self.device),
            ):
                return original.generate(self, *args, **kwargs)

        members["generate"] = generate
    if getattr(original, "_sample", None) is GenerationMixin._sample:

        def update(self: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
            before = (args[0] if args else kwargs["model_kwargs"]).get(MASK)
            passed = original._update_model_kwargs_for_generation(self, outputs, *args, **kwargs)
            follow_mask(before, passed.get(MASK), self)
            if (steps := current()) is not None:
                steps.observe(outputs)
            return passed

        def sample(
            self: Any, ids: Tensor, *, logits_processor: Any, generation_config: Any, **kwargs: Any
        ) -> Any:
            with sampling(logits_processor, generation_config, ids.device, self) as stands:
                how = {"logits_processor": stands, "generation_config": generation_config}
                return original._sample(self, ids, **how, **kwargs)

        members |= {"_sample": sample, "_update_model_kwargs_for_generation": update}
    own_candidates = getattr(original, "_get_candidate_generator", None)
    if own_candidates is GenerationMixin._get_candidate_generator:

        def candidates(self: Any, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
            if are_by_layers(generation_config):
                return CANDIDATES[0](self, generation_config, kwargs["logits_processor"])
            return own_candidates(self, generation_config, *args, **kwargs)

        members["_get_candidate_generator"] = candidates
    own_experts = getattr(original, "_optimize_model_for_decode", None)
    if own_experts is GenerationMixin._optimize_model_for_decode:

        def experts_of_tokens(self: Any) -> AbstractContextManager[None]:
            return nullcontext() if are_served(self) else own_experts(self)

        members["_optimize_model_for_decode"] = experts_of_tokens
    return members
