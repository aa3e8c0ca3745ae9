"""Drafts from repetitions, by a search through the whole text."""

import random

import torch
from transformers import DynamicCache

from torch_moe_mps.serving.engine.drafter import DraftedSequence
from torch_moe_mps.serving.prefix_cache.memory import CachedPrefix, PrefixCache
from torch_moe_mps.serving.speculative.prompt_lookup import _CANDIDATES, _LONGEST, Index, Lookup


def searched(text: list[int], tokens: list[int]) -> int:
    """The length of the longest repetition of the end of some tokens, with a token behind it."""
    places = [p for p in range(3, len(text)) if text[p - 3 : p] == tokens[-3:]]
    found = 0
    for place in places[-_CANDIDATES:]:
        length = 3
        while length < min(place, len(tokens), _LONGEST) and text[place - length - 1] == tokens[-length - 1]:
            length += 1
        found = max(found, length)
    return found


def test_the_longest_repetition_is_found():
    """Of texts that grow by one token or several, with few and with many repetitions."""
    chance = random.Random(0)
    for alphabet in (2, 5, 40):
        text: list[int] = []
        index = Index(text)
        for _ in range(120):
            text += [chance.randrange(alphabet) for _ in range(chance.choice((1, 1, 1, 4, 9)))]
            index.read()
            place, length = index.follows(text)
            assert length == searched(text, text)
            assert text[place - length : place] == text[len(text) - length :]


def row(prompt: list[int], most: int = 4) -> DraftedSequence:
    return DraftedSequence([*prompt], len(prompt), most)


def test_drafts_are_what_followed():
    lookup = Lookup()
    assert lookup.draft([row([1, 2, 3, 4, 5, 6, 9, 1, 2, 3])]) == [[4, 5, 6, 9]]
    assert lookup.draft([row([1, 2, 3, 4, 1, 2]), row([1, 2])]) == [[], []]
    grows = row([1, 2, 3, 4, 9, 8])
    assert lookup.draft([grows]) == [[]]
    grows.tokens += [1, 2, 3]
    assert lookup.draft([grows]) == [[4, 9, 8, 1]]


def test_kept_prompts_are_looked_into():
    prompts = PrefixCache(1 << 20)
    lookup = Lookup(prompts)
    assert lookup.draft([row([5, 6, 7])]) == [[]]
    prompts.kept.append(CachedPrefix(torch.tensor([1, 5, 6, 7, 8, 9]), DynamicCache()))
    assert lookup.draft([row([5, 6, 7])]) == [[8, 9]]
    prompts.kept.clear()
    assert lookup.draft([row([5, 6, 7])]) == [[]]
