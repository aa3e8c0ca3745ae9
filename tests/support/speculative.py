"""Sources that draft what is known, and answers of a batch with and without drafts."""

import random
from collections.abc import Sequence

import torch
from transformers import GenerationConfig

from torch_moe_mps.serving.engine.drafter import Drafter
from torch_moe_mps.serving.engine.engine import Engine
from torch_moe_mps.serving.engine.job import Job
from torch_moe_mps.serving.prefix_cache.memory import PrefixCache
from torch_moe_mps.serving.speculative.asked import drafting_of

LENGTHS = (5, 20, 40, 9, 3)


class Partly(Drafter):
    """Drafts answers that are known, of which some tokens are wrong, and some are left out."""

    def __init__(self, prompts, answers, right: float = 0.7):
        self.known = {tuple(ids.tolist()): [*answer] for ids, answer in zip(prompts, answers, strict=True)}
        self.chance, self.right, self.accepted_tokens = random.Random(1), right, 0

    def draft(self, rows):
        return [self._of(row) for row in rows]

    def accepted(self, rows, counts):
        self.accepted_tokens += sum(counts)

    def _of(self, row):
        done = len(row.tokens) - row.prompt
        answer = self.known[tuple(row.tokens[: row.prompt])][done:] + [7] * 8
        count = self.chance.randint(min(1, row.max_drafts), row.max_drafts)
        return [token if self.chance.random() < self.right else 5 for token in answer[:count]]


def prompts(count: int = 3) -> list[torch.Tensor]:
    chance = torch.Generator().manual_seed(3)
    return [torch.randint(2, 90, (length,), generator=chance) for length in LENGTHS[:count]]


def settings(new: int, **more) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=new, pad_token_id=0, **{"eos_token_id": None} | more)


class Answered:
    """The answers of a batch to prompts.

    Attributes:
        answers, reasons: of each prompt.
        steps: that gave them.
        jobs, batch: as they are behind the last step.
    """

    def __init__(self, model, many: Sequence[torch.Tensor], configs, speculative=None, most=1, **options):
        """`options`: `width` of the drafts, `seeds` and `processors` of each prompt, `until`."""
        kept = PrefixCache(1 << 30)
        width, until = options.get("width"), options.get("until", lambda tokens: False)
        self.batch = Engine(
            model, kept, most, None, drafting=drafting_of(model, speculative, kept, "a", width)
        )
        self.answers, self.reasons = [[] for _ in many], [None for _ in many]
        self.jobs, self.steps = [], 0
        for number, (ids, config) in enumerate(zip(many, configs, strict=True)):
            more = {
                name: options[plural][number]
                for name, plural in {"seed": "seeds", "processors": "processors"}.items()
                if plural in options
            }
            taken = self.answers[number]
            self.jobs.append(
                Job(
                    {"input_ids": ids[None]},
                    config,
                    lambda token, taken=taken: taken.append(token) or until(taken),
                    lambda reason, number=number: self.reasons.__setitem__(number, reason),
                    **more,
                )
            )
        self.batch.submit(*self.jobs)
        while self.batch.has_work:
            self.batch.step()
            self.steps += 1
