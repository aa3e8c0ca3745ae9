"""Tokens that are drafted and verified together, in ways that transformers has."""

import sys
from typing import Any

from transformers import DynamicCache

from ...transformers.basics.state import Beside
from ...transformers.caches.prompt_cache import new_cache
from ...transformers.upstream.calls import cache_among, cache_argument
from ...transformers.upstream.generation import AssistedCandidateGenerator
from ..prefix_cache.memory import CachedPrefix, PrefixCache


class Speculation(Beside):
    """Counts what `generate` drafts and accepts.

    Args:
        arguments: of `generate`.

    Attributes:
        prompts: of the draft, which are kept as the model's are; None keeps none.
    """

    def __init__(self, arguments: dict[str, Any]):
        self.arguments, self.drafted, self.accepted = arguments, 0, 0
        self.prompts: PrefixCache | None = None
        self._drafted: tuple[Any, Any] | None = None  # tokens and cache of the last `generate`

    @property
    def acceptance(self) -> float | None:
        """The share of the draft tokens that were accepted."""
        return self.accepted / self.drafted if self.drafted else None

    def __str__(self) -> str:
        share = "" if self.acceptance is None else f" ({100 * self.acceptance:.0f} %)"
        return f"{self.accepted} of {self.drafted} draft tokens accepted{share}"

    def counted(self, generator: Any) -> Any:
        """A candidate generator of `generate` that counts here what it drafts."""
        self._drafted = None
        draft, update = generator.get_candidates, generator.update_candidate_strategy
        # One for another tokenizer has other tokens.
        keeps = self.prompts is not None and type(generator) is AssistedCandidateGenerator

        def get_candidates(ids: Any, *others: Any, **more: Any) -> Any:
            if keeps and self._drafted is None:
                self._begin(generator, ids[0].cpu())
            result = draft(ids, *others, **more)
            self.drafted += result[0].shape[1] - ids.shape[1]
            if keeps and result[0].shape[1] > ids.shape[1]:
                self._drafted = result[0][0].cpu(), cache_among(generator.assistant_kwargs)
            return result

        def update_candidate_strategy(ids: Any, scores: Any, matches: Any) -> Any:
            self.accepted += int(matches)
            return update(ids, scores, matches)

        generator.get_candidates = get_candidates
        generator.update_candidate_strategy = update_candidate_strategy
        return generator

    def keep(self) -> None:
        """Keeps what the draft has computed for the last `generate`."""
        drafted, self._drafted = self._drafted, None
        if drafted is not None and self.prompts is not None and type(drafted[1]) is DynamicCache:
            ids, cache = drafted
            self.prompts.put(CachedPrefix(ids[: cache.get_seq_length()], cache))

    def _begin(self, generator: Any, ids: Any) -> None:
        """Gives the draft what there is for a prompt."""
        assert self.prompts is not None
        draft = generator.assistant_model
        kept = self.prompts.take(ids, new_cache(draft))
        if len(kept.ids):
            generator.assistant_kwargs |= cache_argument(draft, kept.cache)


def print_counts(speculation: Speculation | None) -> None:
    """Says on stderr how many draft tokens were accepted, if any were drafted."""
    if speculation is not None:
        print(speculation, file=sys.stderr)
