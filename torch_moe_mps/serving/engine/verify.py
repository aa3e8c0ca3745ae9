"""Verification of draft tokens: accepted as long as the target model samples the same tokens.

A draft token is accepted if sampling from the target model gives the same token. So each token has the target
model's distribution: a draft token g is accepted with probability p(g), as in rejection sampling. Random
numbers belong to token positions: with a seed, an answer is the same with and without draft tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .sampling import Sampler, sample

Choice = int | Exception


def verified(
    samplers: Sequence[Sampler], logits: Tensor, known: Sequence[int], drafts: Sequence[Sequence[int]]
) -> list[list[Choice]]:
    """Accepted draft tokens of each row, followed by the next sampled token or an error.

    Rows without logits processors are sampled together, in one dispatch per setting. Rows with processors are
    sampled token by token, because processors read the previous token.

    Args:
        logits: [B, T, V] of known tokens followed by draft tokens.
        known: number of known tokens of each row; a row with more than T gets no token.
    """
    results: list[list[Choice]] = [[] for _ in samplers]
    rows = [row for row, count in enumerate(known) if count <= logits.shape[1]]
    plain = [row for row in rows if not samplers[row].sampling.processors]
    places = [(row, known[row] - 1 + n) for row in plain for n in range(len(drafts[row]) + 1)]
    if places:
        for row in plain:
            samplers[row].begin_draws()
        chosen = sample([samplers[row] for row, _ in places], _at(logits, places)).read()
        for (row, _), token in zip(places, chosen, strict=True):
            results[row].append(token)
        for row in plain:
            results[row] = _accepted(results[row], drafts[row])
            samplers[row].end_draws(len(results[row]))
    for row in rows:
        if samplers[row].sampling.processors:
            results[row] = _one_by_one(samplers[row], logits[row, known[row] - 1 :], drafts[row])
    return results


def _at(logits: Tensor, places: list[tuple[int, int]]) -> Tensor:
    """Logits [N, V] at (row, token) pairs."""
    tokens = logits.shape[1]
    numbers = [row * tokens + token for row, token in places]
    flat, first = logits.flatten(0, 1), numbers[0]
    if numbers == [*range(first, first + len(numbers))]:
        return flat[first : first + len(numbers)]
    return flat[torch.tensor(numbers).to(logits.device)]


def _accepted(tokens: Sequence[Choice], drafts: Sequence[int]) -> list[Choice]:
    """Sampled tokens up to and including the first that differs from its draft token."""
    count = next((n for n, draft in enumerate(drafts) if tokens[n] != draft), len(drafts))
    return [*tokens[: count + 1]]


def _one_by_one(sampler: Sampler, logits: Tensor, drafts: Sequence[int]) -> list[Choice]:
    """Samples tokens from logits [T, V] one at a time, until one differs from its draft token."""
    tokens: list[Choice] = []
    for n in range(len(drafts) + 1):
        (token,) = sample([sampler], logits[n : n + 1]).read()
        tokens.append(token)
        if n == len(drafts) or token != drafts[n] or token in sampler.ends:
            break
    return tokens
