"""Threads at once: each gets the same tokens as a single thread would, and memory stays flat."""

import copy
import gc
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from support.models import generate, prompt, tiny
from support.threads import in_threads

import torch_moe_mps

transformers.logging.set_verbosity_error()

THREADS = 6
ARCHITECTURES = ("qwen3_moe", "gpt_oss", "gemma4", "deepseek_v3")
TOKENS = 2
# What allocators and caches of PyTorch and Python may still gain after a warm-up.
GROWTH = 16 * 2**20


def resident_bytes() -> int:
    """The resident set, on Linux now, elsewhere at its largest."""
    if sys.platform == "linux":
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def device_allocations(device: str) -> int:
    if device == "cpu":
        return 0
    torch.mps.synchronize()
    if sys.platform == "darwin":
        return torch.mps.current_allocated_memory()
    import simulator

    return simulator.live_buffers()


class Job(NamedTuple):
    """A model, its input, and the tokens that a single thread gets."""

    model: Any
    ids: torch.Tensor
    tokens: torch.Tensor

    def run(self) -> None:
        assert torch.equal(tokens_of(self.model, self.ids), self.tokens)


def tokens_of(model, ids: torch.Tensor) -> torch.Tensor:
    return generate(model, ids, max_new_tokens=TOKENS).cpu()


def inputs(number: int) -> torch.Tensor:
    return prompt(1 + number % 2, 3 + number)


def jobs(device: str, count: int, quantised: bool) -> list[Job]:
    """One for each thread, on `count` models; the tokens come from the models' own code.

    Where the last model is quantised, its are those of the quantised model.
    """
    models = [tiny(architecture) for architecture in ARCHITECTURES[:count]]
    tokens = [tokens_of(models[i % count], inputs(i)) for i in range(THREADS)]
    for i, model in enumerate(models):
        torch_moe_mps.accelerate(model.to(device), 4 if quantised and i == count - 1 else None)
    made = []
    for i in range(THREADS):
        model, ids = models[i % count], inputs(i).to(device)
        alone = quantised and model is models[-1]
        made.append(Job(model, ids, tokens_of(model, ids) if alone else tokens[i]))
    return made


def check(device: str, count: int, rounds: int, quantised: bool = False) -> None:
    def rounds_of(job: Job, rounds: int) -> Callable[[], None]:
        return lambda: [job.run() for _ in range(rounds)]

    every = jobs(device, count, quantised)
    in_threads(*(rounds_of(job, 1) for job in every))  # warm-up
    gc.collect()
    memory, allocations = resident_bytes(), device_allocations(device)
    in_threads(*(rounds_of(job, rounds) for job in every))
    gc.collect()
    assert device_allocations(device) <= allocations
    assert resident_bytes() - memory < GROWTH


@pytest.mark.slow("six threads generate")
@pytest.mark.on("mps")  # which threads share, beside all that they share on the CPU
@pytest.mark.parametrize("count", [2, pytest.param(1, marks=pytest.mark.sweep)])
def test_threads_generate(device, count):
    check(device, count, 1)


@pytest.mark.sweep
def test_many_generations(device):
    check(device, 4, 50 if device == "cpu" else 10, quantised=True)


# Threads that change models of their own


def change(device: str, architecture: str, rounds: int) -> Callable[[], None]:
    """Accelerates, restores and quantises; the tokens stay those of a single thread."""
    own, ids = tiny(architecture), inputs(1)
    dense = tokens_of(own, ids)
    quantised = copy.deepcopy(own).to(device)
    torch_moe_mps.accelerate(quantised, 8, 32)
    expected, ids = tokens_of(quantised, ids.to(device)), ids.to(device)

    def run():
        for _ in range(rounds):
            model = copy.deepcopy(own).to(device)
            for _ in range(2):
                torch_moe_mps.accelerate(model)
                assert torch.equal(tokens_of(model, ids), dense)
                torch_moe_mps.restore(model)
            torch_moe_mps.accelerate(model, 8, 32)
            assert torch.equal(tokens_of(model, ids), expected)

    return run


def check_changes(device: str, architectures: tuple[str, ...], rounds: int) -> None:
    generating = jobs(device, 1, quantised=False)[: THREADS // 2]
    works = [lambda job=job: [job.run() for _ in range(4 * rounds)] for job in generating]
    changing = [change(device, architecture, rounds) for architecture in architectures]
    in_threads(*works, *changing)


def test_threads_change_their_own_models():
    check_changes("cpu", ARCHITECTURES[:2], 1)
