"""The latency line of the cost model, against times of llama.cpp's kernels on an M4 Pro."""

import pytest
from simulator.apple.facts import GPUS
from simulator.apple.latency import WAIT_US, latency

ROWS, INPUTS = 14336, 4096
GROUPS, SIMDGROUPS, STEPS = 64, 4, 448


@pytest.mark.parametrize("tokens, slots_a_mac, measured", [(32, 1.5, 1023), (8, 2.3, 506)])
def test_llama_cpp(tokens, slots_a_mac, measured):
    slots = ROWS * INPUTS * tokens * slots_a_mac / 32 / (GROUPS * SIMDGROUPS)
    least, most = latency(GPUS["M4 Pro"], GROUPS, SIMDGROUPS, slots, STEPS)
    assert 0.75 * most <= measured <= 1.25 * least


def test_registers_for_half_of_the_simdgroups_make_them_wait_twice():
    gpu, steps = GPUS["M1 Max"], 100
    work = gpu, 6 * gpu.cores, 4, 1000, steps
    all_at_once, in_turns = latency(*work), latency(*work, resident=12)
    assert in_turns.least - all_at_once.least == pytest.approx(steps * WAIT_US[0])
    assert latency(*work, resident=1) == latency(*work, resident=4)  # of a threadgroup at least


def test_many_simdgroups_are_bound_by_issue():
    gpu = GPUS["M1 Max"]
    slots = 1e6
    least, most = latency(gpu, 6 * gpu.cores, 4, slots, 1)
    issue = 6 * slots / (gpu.ghz * 1e3)
    assert issue == pytest.approx(least, rel=1e-3) == most
