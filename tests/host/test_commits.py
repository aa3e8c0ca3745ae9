"""Commits without a wait: when they come, and that they change nothing else."""

import copy

import pytest
import torch
from support import tiny_models

import torch_moe_mps
from torch_moe_mps._extension import COMMIT_EVERY, COMMIT_VARIABLE, _commit_interval
from torch_moe_mps.ops._samples import packet, sample_arguments

NORM = "fused_norm_add_scalar"  # one dispatch


def norms(count: int) -> list[torch.Tensor]:
    arguments = sample_arguments(NORM, "mps", torch.float32)
    return [packet(NORM)(**arguments) for _ in range(count)]


@pytest.fixture
def every(simulated):
    """Sets after how many dispatches the stream is committed, for one test."""
    yield torch.ops.moe_mps._commit_every
    torch.ops.moe_mps._commit_every(COMMIT_EVERY)


def test_a_trace_shows_commits(every, simulated):
    every(2)
    with simulated.trace() as commands:
        norms(5)
    kinds = ["commit" if line == "commit" else "dispatch" for line in commands if line != "synchronize"]
    assert kinds == ["dispatch", "dispatch", "commit"] * 2 + ["dispatch"]


def test_the_interval_is_the_constant(simulated):
    before = simulated.commits()
    norms(COMMIT_EVERY - 1)
    assert simulated.commits() == before
    norms(COMMIT_EVERY + 1)
    assert simulated.commits() == before + 2


def test_none_when_switched_off(every, simulated):
    every(0)
    before = simulated.commits()
    norms(2 * COMMIT_EVERY)
    assert simulated.commits() == before


def test_the_environment_changes_it(monkeypatch):
    assert _commit_interval() == COMMIT_EVERY
    for text in ("0", "7"):
        monkeypatch.setenv(COMMIT_VARIABLE, text)
        assert _commit_interval() == int(text)
    for text in ("", "-1", "often"):
        monkeypatch.setenv(COMMIT_VARIABLE, text)
        with pytest.raises(ValueError, match=f"{COMMIT_VARIABLE} must be a number of dispatches, or 0, got"):
            _commit_interval()


def test_a_bad_interval(simulated):
    with pytest.raises(ValueError, match="dispatches must be at least 0, got -1"):
        torch.ops.moe_mps._commit_every(-1)


@pytest.mark.parametrize("schedule", [0, 1])
def test_results_with_a_commit_after_every_operator(every, simulated, schedule):
    """Committed work runs at once under odd schedules, at the next wait under even ones."""
    model = tiny_models.tiny_model("qwen2_moe")
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    with torch.no_grad():
        expected = model(ids).logits
        accelerated = copy.deepcopy(model).to("mps")
        torch_moe_mps.accelerate(accelerated)
        simulated.set_schedule(schedule)
        every(1)
        before = simulated.commits()
        logits = accelerated(ids.to("mps")).logits
    assert simulated.commits() > before + 10
    torch.testing.assert_close(logits.cpu(), expected, rtol=1e-5, atol=1e-5)
