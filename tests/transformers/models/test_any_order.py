"""Whatever is done to a model in whatever order, it computes what its own code does."""

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from support.model_machine import ModelMachine, TokenMachine

from torch_moe_mps._environment import CAPTURE

PHASES = (Phase.explicit, Phase.generate)  # a failure is told as it was found: to shrink it takes long
ALWAYS = {
    "phases": PHASES,
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "database": None,
    "print_blob": True,
}


@pytest.mark.slow("models are changed in any order")
def test_a_few_orders_with_captured_tokens(monkeypatch):
    monkeypatch.setenv(CAPTURE, "1")
    short = settings(max_examples=1, stateful_step_count=8, derandomize=True, **ALWAYS)
    run_state_machine_as_test(TokenMachine, settings=short)


@pytest.mark.sweep
def test_many_orders_with_captured_tokens(monkeypatch):
    monkeypatch.setenv(CAPTURE, "1")
    long = settings(max_examples=40, stateful_step_count=16, **ALWAYS)
    run_state_machine_as_test(TokenMachine, settings=long)


@pytest.mark.sweep
def test_many_orders():
    long = settings(max_examples=60, stateful_step_count=20, **ALWAYS)
    run_state_machine_as_test(ModelMachine, settings=long)
