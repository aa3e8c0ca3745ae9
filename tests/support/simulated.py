"""The package in the simulator: its own host code on the simulated device."""

import functools
import os

import simulator

from .processes import REPOSITORY

# Built pieces are kept in MOE_MPS_CACHE, or in .cache of the repository; subprocesses follow.
os.environ.setdefault(
    "METAL_SIMULATOR_CACHE", f"{os.environ.get('MOE_MPS_CACHE', REPOSITORY / '.cache')}/simulator"
)


@functools.cache
def install() -> None:
    """From here on device="mps" works in this process, and the package's operators with it."""
    simulator.install(strict=True)
    from torch_moe_mps._extension import activate  # which asks torch for MPS

    sources = sorted((REPOSITORY / "torch_moe_mps" / "csrc").rglob("*.mm"))
    activate(simulator.extension("host", sources, units=3))
