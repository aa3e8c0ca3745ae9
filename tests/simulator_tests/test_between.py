"""Between two tokens: the engine's order, as counts, and the idle time that follows."""

import pytest
from measured.apple.between import CONVERSATIONS, idle_ms
from simulator.testing import linux_only
from support.ahead import steps_ahead
from support.sweep import in_sweep

from torch_moe_mps.transformers.capture import calls

pytestmark = linux_only


@pytest.mark.slow("captures a program in the simulator")
@pytest.mark.parametrize("conversations", in_sweep(CONVERSATIONS, CONVERSATIONS[-1:]))
def test_a_step_is_encoded_before_a_token_is_read(simulated, monkeypatch, conversations):
    monkeypatch.setenv(calls.SWITCH, "1")
    assert steps_ahead(conversations) == 8 * [1.0]


@pytest.mark.parametrize(
    ("host_ms", "gpu_ms", "at_once", "one_ahead"),
    [(0.3, 5.0, 0.3, 0.0), (1.2, 1.0, 1.2, 0.2), (0.5, 0.5, 0.5, 0.0)],
)
def test_idle_time(host_ms, gpu_ms, at_once, one_ahead):
    """All of the host's time, where a token is read at once; what is longer than the GPU's, a step ahead."""
    assert idle_ms(host_ms, gpu_ms, 0) == pytest.approx(at_once)
    assert idle_ms(host_ms, gpu_ms, 1) == pytest.approx(one_ahead, abs=1e-9)
