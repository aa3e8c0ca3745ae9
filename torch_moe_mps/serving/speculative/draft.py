"""Draft model: a small model with the target model's vocabulary."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...models.programs import BatchedCache, NotBatchable, cache_argument, keeps_prompts
from ...transformers.deferrable import forgets_states
from ..engine.drafter import DraftedSequence, RowDrafter
from ..engine.prefill import Prefill
from ..engine.ranges import vocabulary_of
from ..engine.width import MOST

_NAME = "moe_mps::speculative"


def require_tokens(model: Any, draft: Any, alike: bool = True) -> None:
    """Checks that a draft model shares the target model's vocabulary. Raises: ValueError.

    Args:
        alike: True if their tokenizers map tokens to the same texts.
    """
    expected, got = vocabulary_of(model), vocabulary_of(draft)
    if expected != got or not alike:
        raise ValueError(f"{_NAME}: a draft must have the model's {expected} tokens, got {got} others")


class _DraftModelState(NamedTuple):
    """Draft model's cache of one row, and the tokens in it."""

    rows: BatchedCache
    tokens: list[int]

    def memory(self) -> int:
        return self.rows.memory()


class Draft(RowDrafter[_DraftModelState]):
    """Drafts greedily with a draft model, with a separate cache per row.

    Args:
        model: the target model.
        draft: the draft model, accelerated.
        memory: bytes for the draft model's prefix cache.

    Recurrent states are copied before a row's last token and restored after drafting.

    Raises: ValueError for another vocabulary, or a draft model whose cache cannot be cut.
    """

    def __init__(self, model: PreTrainedModel, draft: PreTrainedModel, memory: int):
        super().__init__(memory)
        require_tokens(model, draft)
        kind = type(draft).__name__
        if not keeps_prompts(draft) or forgets_states(draft):
            raise ValueError(f"{_NAME}: a draft must have a cache that can be cut, got a {kind}")
        self._draft, self.modules = draft, [draft]

    def _of(self, row: DraftedSequence) -> list[int]:
        """Draft tokens of one sequence, greedy, by the draft model behind the prefix that it has cached."""
        cached, read = self._read.get(row) or self._begin(row)
        same = next((n for n, (a, b) in enumerate(zip(read, row.tokens, strict=False)) if a != b), len(read))
        last = len(row.tokens) - 1
        same = min(same, last)
        if same < len(read):
            cached.take_back([len(read) - same])
        cached.reserve(len(row.tokens) - same + MOST)  # so that these can be taken back
        if cached.are_states:
            if same < last:
                self._likeliest(cached, torch.tensor([row.tokens[same:last]]))
            cached.hold()
            same = last
        tokens, next_tokens = torch.tensor([row.tokens[same:]]), list[Tensor]()
        for _ in range(row.max_drafts):
            tokens = self._likeliest(cached, tokens)
            next_tokens.append(tokens)
        drafts: list[int] = torch.cat(next_tokens, 1)[0].tolist()
        if cached.are_states:
            cached.take_back([row.max_drafts])
        read = row.tokens[:last] if cached.are_states else [*row.tokens, *drafts[:-1]]
        self._read[row] = _DraftModelState(cached, read)
        return drafts

    def _likeliest(self, cached: BatchedCache, tokens: Tensor) -> Tensor:
        """Greedy next token [1, 1] after tokens [1, T], which are added to the cache."""
        ids = tokens.to(self._draft.device)
        out = self._called(cached.cache, input_ids=ids, logits_to_keep=1, **cached.arguments(ids.shape[1]))
        cached.advance(ids.shape[1])
        return out.logits[:, -1:].argmax(-1)

    def _begin(self, row: DraftedSequence) -> _DraftModelState:
        """Prefills all tokens of a row but the last one."""
        ids, rows = torch.tensor([row.tokens[:-1]]), BatchedCache(self._draft)
        prefill = Prefill(self._draft, ids, self.prompts)
        while prefill.chunks:
            prefill.compute(self._called)
        kept = prefill.cached
        self.prompts.put(kept)
        try:
            rows.admit(kept.cache, len(kept.ids))
        except NotBatchable as error:
            raise ValueError(f"the draft cannot be cut: {error}") from None
        return _DraftModelState(rows, row.tokens[: len(kept.ids)])

    def _called(self, cache: Any, **inputs: Any) -> Any:
        return self._draft(**inputs, **cache_argument(self._draft, cache))
