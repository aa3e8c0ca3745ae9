"""Host code, and the simulated device for every test where this folder runs alone (`python -m pytest`).

Within the repository that it lies in, tests/conftest.py has it, and package/ runs, too.
"""

import contextlib
import importlib.util
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("simulator") is None:  # not installed: the folder itself
    sys.path.insert(0, str(Path(__file__).parents[2]))

import simulator
from simulator import build_device
from simulator.errors import BuildError

LINUX = sys.platform == "linux"
CALLS = Path(__file__).with_name("host_calls.mm")

if importlib.util.find_spec("support") is None:
    collect_ignore = ["package"]

    @pytest.hookimpl(trylast=True)
    def pytest_configure(config):
        config.addinivalue_line("markers", "sweep: long, left out of the run for every change")
        if LINUX:  # before test modules are imported: torch remembers whether MPS was there when first asked
            with contextlib.suppress(BuildError):
                simulator.install(strict=True)

    @pytest.fixture
    def simulated():
        """The simulator, in its first schedule and without findings of other tests."""
        if not LINUX:
            pytest.skip("the simulator runs on Linux")
        simulator.install(strict=True)
        import torch

        yield simulator
        try:
            torch.mps.synchronize()
        finally:
            simulator.reset()


@pytest.fixture
def calls(simulated):
    """torch.ops.simulator_test: the operators of host_calls.mm."""
    import torch

    if not hasattr(torch.ops.simulator_test, "axpy"):
        library = build_device.build_library("host_calls", [CALLS], [build_device.device_library()])
        torch.ops.load_library(str(library))
        torch.ops.simulator_test.set_shader(CALLS.with_suffix(".metal").read_text())
    return torch.ops.simulator_test
