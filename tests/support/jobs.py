"""Jobs for a batch and an engine, and what came of them."""

import functools
import threading

import torch
from transformers import GenerationConfig

import torch_moe_mps
from support import tiny_models
from support.models import eager
from torch_moe_mps.serving.engine.engine import Engine
from torch_moe_mps.serving.engine.job import Job
from torch_moe_mps.serving.engine.loop import EngineThread
from torch_moe_mps.serving.prefix_cache.disk import Disk
from torch_moe_mps.serving.prefix_cache.memory import PrefixCache

MEMORY = 1 << 30  # bytes, more than any prefixes of these models take


@functools.cache
def model_of(architecture: str = "qwen3_moe"):
    model = eager(tiny_models.tiny_model(architecture))
    torch_moe_mps.accelerate(model)
    return model


def ids_of(number: int, length: int) -> torch.Tensor:
    return torch.randint(2, 90, (1, length), generator=torch.Generator().manual_seed(number))


def octets_of(kept) -> int:
    """Bytes of all memory that a kept prompt lies in."""
    storages = [tensor.untyped_storage() for tensor in kept.tensors]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


class Asked:
    """A job, and what came of it."""

    def __init__(self, ids: torch.Tensor, new: int, until=lambda token: False, **settings):
        self.tokens, self.reasons, self.read = [], [], []
        self.done, self.until = threading.Event(), until
        config = GenerationConfig(max_new_tokens=new, eos_token_id=None, pad_token_id=0)
        self.config = config
        self.job = Job({"input_ids": ids}, config, self.take, self.end, self.progress, **settings)

    def take(self, token):
        self.tokens.append(token)
        return self.until(token)

    def end(self, reason):
        self.reasons.append(reason)
        self.done.set()

    def progress(self, read, of):
        self.read.append((read, of))

    def expected(self, model) -> list[int]:
        ids = self.job.inputs["input_ids"].to(model.device)
        return model.generate(ids, generation_config=self.config)[0, ids.shape[1] :].tolist()


def answer(model, disk: Disk | None, *asked: Asked) -> PrefixCache:
    """Answers by a new server, which ends."""
    prompts = PrefixCache(MEMORY, disk=disk)
    batch = Engine(model, prompts, 4)
    batch.submit(*(each.job for each in asked))
    while batch.has_work:
        batch.step()
        prompts.store()
    prompts.close()
    return prompts


def on_thread(engine: EngineThread, function=lambda: None) -> None:
    """Calls a function on the thread of the device, between two steps: in the end of a job without tokens."""
    asked = Asked(torch.tensor([[-1]]), 1)
    asked.job.on_end = lambda reason: (function(), asked.end(reason))
    engine.submit(asked.job)
    assert asked.done.wait(60)


def answer_of(model, prefix_cache: PrefixCache | None, ids: torch.Tensor, new: int, **inputs) -> list[int]:
    """The tokens of a greedy answer of an engine, whose model gets inputs beside the tokens."""
    asked = Asked(ids, new)
    asked.config.do_sample = False
    asked.job.inputs |= inputs
    run(Engine(model, prefix_cache, 1), asked)
    if isinstance(asked.reasons[0], Exception):
        raise asked.reasons[0]
    return asked.tokens


def run(batch: Engine, *asked: Asked) -> None:
    batch.submit(*(each.job for each in asked))
    for _ in range(10_000):
        if not batch.has_work:
            return
        batch.step()
    raise AssertionError("jobs are left that never end")
