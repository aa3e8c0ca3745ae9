"""Verification of draft tokens: accepted as long as the target model samples the same tokens.

A draft token is accepted if it is the one that would have been sampled without it. So each token has the
target model's distribution, whatever was drafted: a draft g is accepted with the probability p(g), and
otherwise the token is one of the others, as by rejection sampling. The random number of a sample belongs to
the position of its token: with a seed, an answer is the same with drafts and without.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..engine.sampling import Sampler, sample

Choice = int | Exception


def verified(
    samplers: Sequence[Sampler], logits: Tensor, known: Sequence[int], drafts: Sequence[Sequence[int]]
) -> list[list[Choice]]:
    """The accepted draft tokens of each row and the token behind them, or an error at the end.

    Rows without processors of their own are chosen together, in one dispatch where their settings are equal;
    the tokens of others one by one, as each of their processors reads the token before.

    Args:
        logits: [B, T, V], of tokens that are known and drafts behind them.
        known: how many tokens of each row are not drafts; a row that knows more than T gets no token.
    """
    made: list[list[Choice]] = [[] for _ in samplers]
    rows = [row for row, count in enumerate(known) if count <= logits.shape[1]]
    plain = [row for row in rows if not samplers[row].sampling.others]
    places = [(row, known[row] - 1 + n) for row in plain for n in range(len(drafts[row]) + 1)]
    if places:
        for row in plain:
            samplers[row].begin_draws()
        chosen = sample([samplers[row] for row, _ in places], _at(logits, places)).read()
        for (row, _), token in zip(places, chosen, strict=True):
            made[row].append(token)
        for row in plain:
            made[row] = _accepted(made[row], drafts[row])
            samplers[row].end_draws(len(made[row]))
    for row in rows:
        if samplers[row].sampling.others:
            made[row] = _one_by_one(samplers[row], logits[row, known[row] - 1 :], drafts[row])
    return made


def _at(logits: Tensor, places: list[tuple[int, int]]) -> Tensor:
    """Logits [N, V] of these rows and tokens."""
    tokens = logits.shape[1]
    numbers = [row * tokens + token for row, token in places]
    flat, first = logits.flatten(0, 1), numbers[0]
    if numbers == [*range(first, first + len(numbers))]:
        return flat[first : first + len(numbers)]
    return flat[torch.tensor(numbers).to(logits.device)]


def _accepted(tokens: Sequence[Choice], drafts: Sequence[int]) -> list[Choice]:
    """Tokens up to the first that is not the draft."""
    count = next((n for n, draft in enumerate(drafts) if tokens[n] != draft), len(drafts))
    return [*tokens[: count + 1]]


def _one_by_one(sampler: Sampler, logits: Tensor, drafts: Sequence[int]) -> list[Choice]:
    """Tokens from logits [T, V], each chosen when the one before it is known."""
    made: list[Choice] = []
    for n in range(len(drafts) + 1):
        (token,) = sample([sampler], logits[n : n + 1]).read()
        made.append(token)
        if n == len(drafts) or token != drafts[n] or token in sampler.ends:
            break
    return made
