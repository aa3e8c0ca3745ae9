"""Assistants that make a block of tokens in one call (DFlash), as models whose calls are captured."""

from typing import Any

from torch import Tensor
from transformers import Cache, PreTrainedConfig, PreTrainedModel

from ..models.caches.cache import grow_cache
from ..models.capture.classes import capture_calls, captures_of
from ..models.capture.policy import wanted_capture
from ..models.upstream.calls import cache_argument


class DFlashStep(PreTrainedModel):
    """An assistant with the embedding of the model that it drafts for.

    Args:
        model: that verifies the blocks.
        assistant: as transformers has it.
    """

    def __init__(self, model: PreTrainedModel, assistant: PreTrainedModel):
        super().__init__(PreTrainedConfig())  # transformers would change that of the assistant
        self.embedding, self.assistant = model.get_input_embeddings(), assistant
        if captures_of(assistant) is not None:
            block: int = assistant.config.block_size
            capture_calls(self, wanted_capture(None), max_tokens=block)

    def forward(self, input_ids: Tensor, states: Tensor, position_ids: Tensor, cache: Cache) -> Tensor:
        """Result of `block`."""
        return self.block(input_ids, states, position_ids, cache)

    def block(self, input_ids: Tensor, states: Tensor, position_ids: Tensor, cache: Cache) -> Tensor:
        """States [1, block, H] of a block's tokens, which the cache holds behind the model's states then.

        Args:
            input_ids: [1, block]
            states: [1, T, H] of the model's tokens in front of the block, that the assistant has not read.
            position_ids: [1, T + block]
        """
        from ..models.upstream.models import block_embedding

        kept: Any = cache
        kept.set_previous_accepted_tokens(states.shape[1])
        out = self.assistant(
            noise_embeds=block_embedding(self.embedding, input_ids),
            context_hidden_states=states,
            position_ids=position_ids,
            attention_mask=None,
            **cache_argument(self.assistant, cache),
        )
        kept.set_previous_accepted_tokens(0)
        hidden_states: Tensor = out.last_hidden_state
        return hidden_states


def new_dflash_cache(assistant: Any) -> Any:
    """Empty cache of an assistant. A block of tokens can be taken back from it."""
    from ..models.upstream import DFlashCache  # 5.24 has it

    cache = DFlashCache(config=assistant.config)
    grow_cache(assistant, (), {"cache": cache})
    cache.activate_past_recording()  # windows show what was before a block that was taken back
    return cache
