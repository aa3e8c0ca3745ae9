"""A GPU that waits for experts gets small kernels on a queue of its own, and none at other times."""

import sys
import threading
import time

import pytest
import torch
from support.experts_on_disk import NumberedPool as Pool
from support.processes import forked

import torch_moe_mps
from torch_moe_mps.disk import pool as disk_pool
from torch_moe_mps.ops.families.slots import _expert_slots as expert_slots

pytestmark = [
    pytest.mark.skipif(sys.platform == "darwin", reason="only the simulator's disk waits as it is told"),
    pytest.mark.own_gpu,
]
SOON = 20.0  # seconds: a busy machine


@pytest.fixture
def beating(simulated):
    """A beat every millisecond, of a small kernel. Returns: the beats so far."""
    pools = [Pool(), Pool()]  # that would turn them off
    torch.ops.moe_mps._keep_warm(1e-3, 1)
    try:
        with simulated.reads(Pool.read_of):
            yield pools, lambda: torch.ops.moe_mps._beats()[0]
    finally:
        torch.ops.moe_mps._keep_warm(0.0, 1)


def until(condition) -> bool:
    end = time.monotonic() + SOON
    while not condition() and time.monotonic() < end:
        time.sleep(1e-3)
    return condition()


def ids(*numbers: int) -> torch.Tensor:
    return torch.tensor([numbers], dtype=torch.int32, device="mps")


def test_the_gpu_gets_beats_while_it_waits(simulated, beating):
    """Only then: not before, and not after the answer. The step has its slots."""
    (pool, _), beats = beating
    before = beats()
    pool.may_answer.clear()
    slots, thread = expert_slots(ids(3, 1), pool.number), None
    try:
        thread = threading.Thread(target=torch_moe_mps.synchronize)
        thread.start()
        assert until(lambda: beats() >= before + 3)
    finally:
        pool.may_answer.set()
        thread.join()
    after = beats()
    assert pool.holds(slots, [3, 1])
    time.sleep(0.02)  # many beats long
    assert beats() <= after + 1  # of one that was on its way
    assert until(lambda: torch.ops.moe_mps._beats()[1])  # parked after a second


@pytest.mark.parametrize("schedule", range(4))
def test_steps_with_beats_have_the_same_slots(simulated, beating, schedule):
    simulated.set_schedule(schedule)
    (pool, other), beats = beating
    before = beats()
    for each in (pool, other):
        each.before = lambda: time.sleep(4e-3)
    for first in range(0, 12, 3):
        found = [expert_slots(ids(first, first + 1), p.number) for p in (pool, other, pool)]
        torch_moe_mps.synchronize()
        assert all(p.holds(s, [first, first + 1]) for p, s in zip((pool, other, pool), found, strict=True))
    assert beats() > before


def test_no_beat_without_keep_warm(simulated, beating):
    (pool, _), beats = beating
    torch.ops.moe_mps._keep_warm(0.0, 1)
    before = beats()
    pool.before = lambda: time.sleep(0.02)
    slots = expert_slots(ids(2), pool.number)
    torch_moe_mps.synchronize()
    assert pool.holds(slots, [2]) and beats() == before


def test_pools_turn_it_on(simulated, monkeypatch):
    monkeypatch.setattr(disk_pool, "BEAT", (1e-3, 1))
    for value, wanted in (("0", False), ("1", True)):
        monkeypatch.setenv("MOE_MPS_KEEP_WARM", value)
        pool, before = Pool(), torch.ops.moe_mps._beats()[0]
        pool.before = lambda: time.sleep(0.02)
        with simulated.reads(Pool.read_of):
            expert_slots(ids(2), pool.number)
            torch_moe_mps.synchronize()
        assert (torch.ops.moe_mps._beats()[0] > before) is wanted
    torch.ops.moe_mps._keep_warm(0.0, 1)


BROKEN = """
    import os, shutil, sys, time
    from pathlib import Path
    import simulator, torch
    from support.simulated import install
    install()
    import torch_moe_mps
    from support.experts_on_disk import NumberedPool as Pool
    from torch_moe_mps._extension import SHADERS

    shaders = Path(sys.argv[1]) / "shaders"
    shutil.copytree(SHADERS, shaders)
    (shaders / "probe.metal").write_text("kernel void broken() { undeclared = 1; }")
    torch.ops.moe_mps._set_shader_directory(str(shaders))
    pool, ids = Pool(), torch.tensor([[3, 1]], dtype=torch.int32, device="mps")
    pool.before = lambda: time.sleep(0.01)
    with simulator.reads(Pool.read_of):
        for _ in range(2):
            slots = torch.ops.moe_mps._expert_slots(ids, pool.number)
            torch_moe_mps.synchronize()
            print(pool.holds(slots, [3, 1]), torch.ops.moe_mps._beats())
"""


def test_a_kernel_that_does_not_compile(tmp_path, simulated):
    """Of the beats: the GPU is not kept warm then, and each step has its slots."""
    said = forked(BROKEN, tmp_path, MOE_MPS_KEEP_WARM="1")
    assert said.splitlines() == ["True (0, True)"] * 2


def test_wrong_seconds_are_refused(simulated):
    with pytest.raises(ValueError, match="_keep_warm: seconds and steps must be positive, got -1 and 1"):
        torch.ops.moe_mps._keep_warm(-1.0, 1)
    with pytest.raises(ValueError, match="got 1 and 0"):
        torch.ops.moe_mps._keep_warm(1.0, 0)
