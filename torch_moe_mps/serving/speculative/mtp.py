"""MTP drafter: multi-token prediction layers of the checkpoint draft from the last layer's hidden states.

At position p, MTP layer k takes token p + k + 1 and the hidden state at p of the model or of MTP layer k - 1,
and predicts the next token. Beyond the last MTP layer, it continues from its own hidden states.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...models.programs import DraftCache
from ...transformers.accelerate import accelerate
from ...transformers.mtp.steps import mtp_steps, new_mtp_cache
from ..engine.drafter import DraftedSequence, RowDrafter
from ..prefix_cache.memory import CachedPrefix, PrefixCache

_WAITING = 64  # states of a row that wait until some tokens are drafted; more are read at once
_SMALL_GAP = 8  # states that are missing between a cached prefix and the first new one, and stand as zeros


@dataclass(eq=False)
class _MtpState:
    """State of the MTP layers for one row.

    Attributes:
        cache: of all MTP layers.
        is_whole: True if it starts at the row's first token.
        next: first unread position of each layer.
        states: queued inputs [1, T, H] of each layer from that position on.
        computed: number of positions with hidden states of the model.
    """

    cache: DraftCache
    is_whole: bool
    next: list[int]
    states: list[list[Tensor]]
    computed: int

    def memory(self) -> int:
        waiting = sum(states.nbytes for layer_states in self.states for states in layer_states)
        return waiting + self.cache.memory()


class Mtp(RowDrafter[_MtpState]):
    """Drafts with a checkpoint's MTP layers.

    Args:
        model: the target model, accelerated.
        memory: bytes of the target model's prefix cache; the MTP layers' cache adds a proportional share.

    Raises: ValueError for a model without MTP layers.
    """

    states = (-1,)

    def __init__(self, model: PreTrainedModel, memory: int):
        super().__init__()
        self._model, self._steps = model, mtp_steps(model, accelerate)
        self._layers = range(len(self._steps))
        self.modules, self.layers = [self._steps[0].layers.layers], len(self._steps)
        model_layers = model.config.get_text_config(decoder=True).num_hidden_layers
        self.prompts = PrefixCache(memory * len(self._layers) // model_layers)

    @torch.no_grad()
    def computed(self, row: DraftedSequence, first: int, states: Tensor) -> None:
        """Queues the target model's hidden states [1, T, H] of a row's tokens from position `first` on."""
        read = self._read.get(row)
        if read is None:
            read = self._read[row] = self._begin(row, first, states)
        read.states[0].append(states)
        read.computed = first + states.shape[1]
        if read.computed - read.next[0] > _WAITING:
            self._read_known(row, read, read.computed - 1)

    @torch.no_grad()
    def left(self, row: DraftedSequence) -> None:
        """Caches the prefix of a row whose answer has ended."""
        read = self._read.pop(row, None)
        if read is None or not read.is_whole:
            return
        self._read_known(row, read, read.computed)
        tokens = min(read.next)
        if tokens > 0:
            for layer, count in enumerate(read.next):
                read.cache.take_back(count - tokens, layer)
            self.prompts.put(CachedPrefix(torch.tensor(row.tokens[:tokens]), read.cache.cache))

    def _begin(self, row: DraftedSequence, first: int, states: Tensor) -> _MtpState:
        kept = self.prompts.take(torch.tensor(row.tokens[: first + 1]), new_mtp_cache(self._model))
        start, waiting = len(kept.ids), list[Tensor]()
        if first - start > _SMALL_GAP:
            kept, start = CachedPrefix(kept.ids[:0], new_mtp_cache(self._model)), first
        elif first > start:
            waiting = [states.new_zeros((1, first - start, states.shape[2]))]
        is_whole = start == len(kept.ids)
        others: list[list[Tensor]] = [[] for _ in self._layers[1:]]
        return _MtpState(
            DraftCache(kept.cache), is_whole, [start for _ in self._layers], [waiting, *others], first
        )

    def _read_known(self, row: DraftedSequence, read: _MtpState, end: int) -> None:
        """Computes all layers for positions before `end` whose tokens are known."""
        for layer in self._layers:
            first = read.next[layer]
            count = min(end, len(row.tokens) - 1 - layer) - first
            if count <= 0:
                return
            states = torch.cat(read.states[layer], 1)
            tokens = torch.tensor([row.tokens[first + layer + 1 :][:count]]).to(states.device)
            _, hidden = self._called(read, layer, first, states[:, :count], tokens)
            if (reason := read.cache.why_not_cut()) is not None:
                raise ValueError(f"the MTP layers cannot be cut: {reason}")
            read.next[layer], read.states[layer] = first + count, [states[:, count:]]
            if layer + 1 < len(self._layers):
                read.states[layer + 1].append(hidden)

    def _of(self, row: DraftedSequence) -> list[int]:
        """Draft tokens of one row; computes queued positions first, and drops draft tokens from the cache."""
        read = self._read.get(row)
        if read is None or read.next[0] >= read.computed:
            return []
        known, end, last = len(row.tokens), read.computed, self._layers[-1]
        drafts, rest, right = list[Tensor](), list[Tensor](), end
        reached = [*read.next]
        for number in range(known - 1 - end + row.max_drafts):
            layer = min(number, last)
            first, states = reached[layer], rest
            if number <= last:
                first, states = read.next[layer], [*read.states[layer], *rest]
            inputs = torch.cat(states, 1)
            count = inputs.shape[1]
            logits, hidden = self._called(
                read, layer, first, inputs, self._tokens(row, drafts, first + layer + 1, count)
            )
            if number + end + 1 >= known:
                drafts.append(logits[:, -1].argmax(-1, keepdim=True))
            reached[layer] = first + count
            if number <= last:
                before, right = right - first, max(first, min(end, known - 1 - layer))
                read.next[layer], read.states[layer] = right, [inputs[:, right - first : before]]
                if layer < last:
                    read.states[layer + 1].append(hidden[:, : right - first])
                    rest = [hidden[:, right - first :]]
            if number >= last:
                rest = [hidden[:, -1:]]
        for layer, place in enumerate(reached):
            if place > read.next[layer]:
                read.cache.take_back(place - read.next[layer], layer)
        found: list[int] = torch.cat(drafts, 1)[0].tolist()
        return found

    def _tokens(self, row: DraftedSequence, drafts: list[Tensor], first: int, count: int) -> Tensor:
        """Tokens [1, count] from position `first` on, of the row and then of the draft, on the device."""
        known = torch.tensor([row.tokens[first : first + count]], dtype=torch.int64).to(self._model.device)
        begin = max(0, first - len(row.tokens))
        return torch.cat([known, *drafts[begin : begin + count - known.shape[1]]], 1)

    def _called(
        self, read: _MtpState, layer: int, first: int, states: Tensor, tokens: Tensor
    ) -> tuple[Tensor, Tensor]:
        count = states.shape[1]
        read.cache.reserve(count, layer)  # so that these can be taken back
        place = first + layer + 1
        positions = torch.arange(place, place + count, device=states.device)[None]
        result: tuple[Tensor, Tensor] = self._steps[layer](
            input_ids=tokens, states=states, position_ids=positions, cache=read.cache.cache
        )
        return result
