"""Random hostile jobs in an engine: whoever is generated beside them has the answer that he has alone."""

import functools
import random

import pytest
import torch
from support import tiny_models
from support.jobs import Asked, ids_of, model_of
from support.sweep import in_sweep
from transformers import LogitsProcessor

from torch_moe_mps.serving.engine.engine import Engine
from torch_moe_mps.serving.engine.loop import EngineThread
from torch_moe_mps.serving.prefix_cache.memory import PrefixCache

OFTEN = ("gpt_oss", "qwen3_next")  # windows with sinks beside caches that grow; recurrent states
# Answers of images or of no text, and models that generate by a code of their own.
OTHERS = {"diffusion_gemma", "muse_spark", "qwen3_omni_moe", "openai_privacy_filter", "unlimited_ocr"}
ARCHITECTURES = sorted({*tiny_models.architectures(), *tiny_models.DENSE_ARCHITECTURES} - OTHERS)
VICTIMS = 3
SETTINGS = [
    {"top_k": 10**30}, {"temperature": 1e300}, {"temperature": float("nan")}, {"top_p": -1.0},
    {"eos_token_id": [500, -7]}, {"num_beams": "two"}, {"bad_words_ids": "a"}, {"max_new_tokens": -1},
    {"num_beams": 2}, {"max_new_tokens": 1}, {"suppress_tokens": [5, 10**9]}, {"repetition_penalty": 1e5},
]  # fmt: skip


class Keeps(LogitsProcessor):
    """Changes nothing."""

    def __call__(self, ids, scores):
        return scores


class Spoils(LogitsProcessor):
    """Does something from some token on."""

    def __init__(self, draws: random.Random):
        self.left, self.kind = (
            draws.randrange(5),
            draws.choice(["raises", "exits", "nan", "wide", "ids", "text"]),
        )

    def __call__(self, ids, scores):
        self.left -= 1
        if self.left >= 0:
            return scores
        match self.kind:
            case "raises":
                raise KeyError("mine")
            case "exits":
                raise SystemExit(3)
            case "nan":
                return scores.fill_(torch.nan)
            case "wide":
                return torch.cat((scores, scores), 1)
            case "ids":
                ids.fill_(3)
                return scores
        return "text"


def victim(number: int, length: int) -> Asked:
    """Greedy, with a processor that changes nothing, and drawn with a seed."""
    asked = Asked(ids_of(number, length), 8)
    if number % 3 == 1:
        asked.job.processors.append(Keeps())
    if number % 3 == 2:
        asked.job.seed = number
        asked.config.do_sample, asked.config.top_k = True, 20
    return asked


@functools.cache
def expected(architecture: str, number: int, length: int) -> list[int]:
    asked = victim(number, length)
    if asked.job.seed is None:
        return asked.expected(model_of(architecture))
    batch = Engine(model_of(architecture), None, 1)
    batch.submit(asked.job)
    while batch.has_work:
        batch.step()
    return asked.tokens


def hostile(draws: random.Random) -> Asked:
    """A job with something wrong, whose prompt may begin as a victim's."""
    asked = Asked(ids_of(draws.randrange(VICTIMS), 20)[:, : draws.randint(1, 20)], draws.randint(1, 9))
    at, job = draws.randrange(4), asked.job

    def at_step(does):
        return lambda *given: does() if len(asked.tokens) >= at else False

    def fails():
        raise draws.choice([KeyError, SystemExit, MemoryError])("mine")

    match draws.choice(["settings", "processor", "token", "cancel", "end", "progress", "prompt", "truth"]):
        case "settings":
            asked.config.do_sample = True
            for name, value in draws.choice(SETTINGS).items():
                setattr(asked.config, name, value)
        case "processor":
            asked.config.do_sample = draws.random() < 0.5
            job.processors.append(Spoils(draws))
        case "token":
            asked.until = at_step(fails)
        case "cancel":
            asked.until = at_step(job.cancel)
        case "end":
            job.on_end = lambda reason: (asked.end(reason), fails())
        case "progress":
            job.on_progress = lambda read, of: fails() if read or at else None
        case "prompt":
            job.inputs = draws.choice([{}, {"input_ids": torch.tensor([[5, 10**6]])}, {"input_ids": "a"}])
        case "truth":
            asked.until = at_step(lambda: torch.zeros(2))
    return asked


@pytest.mark.slow("an engine with many jobs")
@pytest.mark.parametrize("count", [12, pytest.param(100, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("architecture", in_sweep(ARCHITECTURES, OFTEN))
def test_victims_have_the_answers_of_victims_alone(architecture, count):
    draws, model = random.Random(f"{architecture} {count}"), model_of(architecture)
    lengths = [draws.randint(2, 20) for _ in range(VICTIMS)]
    victims = [victim(number, lengths[number]) for number in range(VICTIMS) for _ in range(1 + count // 12)]
    jobs = victims + [hostile(draws) for _ in range(count)]
    draws.shuffle(jobs)
    engine = EngineThread(model, PrefixCache(1 << 30), 4)
    for each in jobs:
        engine.submit(each.job)
    try:
        assert all(each.done.wait(300) for each in jobs) and engine.death is None
        assert engine.run(lambda: 5).result(60) == 5 and engine.counts.active == engine.counts.waiting == 0
    finally:
        engine.close()
    assert all(len(each.reasons) == 1 for each in jobs)
    for each in victims:
        number = victims.index(each) // (1 + count // 12)
        assert each.reasons == ["length"], each.reasons
        assert each.tokens == expected(architecture, number, lengths[number]), number
