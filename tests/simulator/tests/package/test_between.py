"""Idle time between two tokens that follows from the engine's order."""

import pytest
from measured.apple.between import idle_ms
from simulator.testing import linux_only

pytestmark = linux_only


@pytest.mark.parametrize(
    ("host_ms", "gpu_ms", "at_once", "one_ahead"),
    [(0.3, 5.0, 0.3, 0.0), (1.2, 1.0, 1.2, 0.2), (0.5, 0.5, 0.5, 0.0)],
)
def test_idle_time(host_ms, gpu_ms, at_once, one_ahead):
    """All of the host's time, where a token is read at once; what is longer than the GPU's, a step ahead."""
    assert idle_ms(host_ms, gpu_ms, 0) == pytest.approx(at_once)
    assert idle_ms(host_ms, gpu_ms, 1) == pytest.approx(one_ahead, abs=1e-9)
