"""DFlash drafter: an assistant drafts a block of tokens in one call, from hidden states of the target model.

The assistant caches keys and values of the target model's states only; the block's are removed after its
call.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..._limits import MOST_TOKENS
from ...models.programs import DraftCache
from ...transformers.dflash import DFlashStep, new_dflash_cache
from ..engine.drafter import DraftedSequence, RowDrafter

_WAITING = 512  # states of a row that wait until some tokens are drafted; more are read at once


def is_dflash(config: Any) -> bool:
    """True for the config of a DFlash assistant."""
    return all(hasattr(config, name) for name in ("block_size", "mask_token_id", "target_layer_ids"))


def require_assistant(model: PreTrainedModel, config: Any) -> None:
    """Checks that a DFlash assistant fits a model. Raises: ValueError."""
    text_config = model.config.get_text_config(decoder=True)
    deepest, layers = max(config.target_layer_ids) + 1, text_config.num_hidden_layers
    if (
        config.hidden_size != text_config.hidden_size
        or deepest > layers
        or config.mask_token_id >= text_config.vocab_size
    ):
        width, tokens = text_config.hidden_size, text_config.vocab_size
        expected = f"of a model of {layers} layers, {width} wide, and {tokens} tokens"
        got = f"{deepest} layers, {config.hidden_size}, and mask token {config.mask_token_id}"
        raise ValueError(f"moe_mps::speculative: an assistant must be {expected}, got {got}")


@dataclass(eq=False)
class _DFlashState:
    """State of the assistant for one row.

    Attributes:
        cache: of the assistant.
        first: position of the first queued state.
        waiting: queued hidden states [1, T, H] that are not in the cache yet.
    """

    cache: DraftCache
    first: int
    waiting: list[Tensor] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.first + sum(states.shape[1] for states in self.waiting)

    def memory(self) -> int:
        waiting = sum(states.nbytes for states in self.waiting)
        return waiting + self.cache.memory()


class DFlash(RowDrafter[_DFlashState]):
    """Drafts blocks of tokens with a DFlash assistant.

    Args:
        model: the target model.
        assistant: trained for the target model.

    Raises: ValueError for an assistant of another model.
    """

    def __init__(self, model: PreTrainedModel, assistant: PreTrainedModel):
        super().__init__()
        require_assistant(model, assistant.config)
        self.states = tuple(layer + 1 for layer in assistant.config.target_layer_ids)
        self._model, self._config, self.modules = model, assistant.config, [assistant]
        self._step = DFlashStep(model, assistant).eval()

    @torch.no_grad()
    def computed(self, row: DraftedSequence, first: int, states: Tensor) -> None:
        """Queues the target model's hidden states [1, T, H] of a row's tokens from position `first` on."""
        read = self._read.get(row)
        if read is None:
            read = self._read[row] = _DFlashState(DraftCache(new_dflash_cache(self.modules[0])), first)
        read.waiting.append(states)
        if read.end - read.first > _WAITING:
            self._block(read, row.tokens[read.end : read.end + 1] or row.tokens[-1:])

    def _of(self, row: DraftedSequence) -> list[int]:
        read = self._read.get(row)
        if read is None or not read.waiting:
            return []
        known = row.tokens[read.end :]
        hidden = self._block(read, known)
        head = self._model.get_output_embeddings()
        found: list[int] = head(hidden[:, len(known) : len(known) + row.max_drafts]).argmax(-1)[0].tolist()
        return found

    def _block(self, read: _DFlashState, known: list[int]) -> Tensor:
        """Hidden states [1, block, H] of known and draft tokens, after the queued states were cached."""
        block, states = self._config.block_size, torch.cat(read.waiting, 1)
        ids = torch.tensor([[*known, *[self._config.mask_token_id] * block][:block]]).to(states.device)
        places = torch.arange(read.first, read.end + block, device=states.device)[None]
        call = self._step if states.shape[1] <= MOST_TOKENS else self._step.block  # prompts do not repeat
        read.cache.reserve(states.shape[1] + block)
        hidden: Tensor = call(input_ids=ids, states=states, position_ids=places, cache=read.cache.cache)
        read.cache.take_back(block)
        read.first, read.waiting = read.end, []
        return hidden
