"""Tokens that transformers looks up in the text before, and verifies together: drafts of a pipeline."""

import sys
from typing import Any

from ..transformers.basics.state import Beside

_TOKENS = 8  # tokens looked up


class Speculation(Beside):
    """Counts what `generate` drafts and accepts.

    Attributes:
        arguments: of `generate`.
    """

    def __init__(self) -> None:
        self.arguments = {"prompt_lookup_num_tokens": _TOKENS}
        self.drafted = self.accepted = 0

    def __str__(self) -> str:
        share = f" ({100 * self.accepted / self.drafted:.0f} %)" if self.drafted else ""
        return f"{self.accepted} of {self.drafted} draft tokens accepted{share}"

    def counted(self, generator: Any) -> Any:
        """A candidate generator of `generate` that counts here what it drafts."""
        draft, update = generator.get_candidates, generator.update_candidate_strategy

        def get_candidates(ids: Any, *others: Any, **more: Any) -> Any:
            result = draft(ids, *others, **more)
            self.drafted += result[0].shape[1] - ids.shape[1]
            return result

        def update_candidate_strategy(ids: Any, scores: Any, matches: Any) -> Any:
            self.accepted += int(matches)
            return update(ids, scores, matches)

        generator.get_candidates = get_candidates
        generator.update_candidate_strategy = update_candidate_strategy
        return generator


def print_counts(speculation: Speculation | None) -> None:
    """Says on stderr how many draft tokens were accepted, if any were drafted."""
    if speculation is not None:
        print(speculation, file=sys.stderr)
