"""One quantised matrix by the cost model: DRAM-bound for one token, never more slots than MLX's kernels."""

import pytest
from measured.apple import cases
from simulator.apple import GPUS, Limit
from simulator.testing import linux_only
from support.operators import plans_for

pytestmark = linux_only
SWEEP = pytest.mark.sweep
USUAL = ("int4", "int6", "int8")
TOKENS = (1, 2, 3, 4, 5, 9, 40)


def rows_of(size: int, format: str, tokens: int):
    """Ours; and on each GPU MLX's, which takes other kernels on other GPUs."""
    shape = cases.Shape(1, 1, size, size, alone=True)
    own = cases.ours(shape, format, "bf16", tokens)
    theirs = {}
    for gpu in cases.DEFAULT_GPUS:
        peers = cases.mlx_peers(shape, format, "bf16", tokens, gpu)
        yield gpu, own, theirs.setdefault(peers[0].launch.template, cases.mlx_rows(peers))


def slots(rows, gpu) -> float:
    return sum(row.measurement.slots(gpu) * row.repeats for row in rows)


@pytest.mark.parametrize("tokens", [1, *(pytest.param(t, marks=SWEEP) for t in TOKENS if t != 1)])
@pytest.mark.parametrize(
    "format", ["int4", *(pytest.param(f, marks=SWEEP) for f in cases.FORMATS if f != "int4")]
)
def test_no_more_slots_than_mlx(simulated, format, tokens):
    for gpu, own, theirs in rows_of(1024, format, tokens):
        assert slots(own, gpu) <= slots(theirs, gpu), gpu.name


@pytest.mark.parametrize("size", [512, pytest.param(2048, marks=SWEEP)])
@pytest.mark.parametrize("format", ["int4", *(pytest.param(f, marks=SWEEP) for f in USUAL if f != "int4")])
def test_one_token_is_bound_by_dram(simulated, format, size):
    for gpu, own, _ in rows_of(size, format, 1):
        assert {row.measurement.bounds(gpu).binding for row in own} == {"dram"}, gpu.name


@pytest.mark.sweep  # of real sizes
@pytest.mark.parametrize("inputs, rows", [(2048, 6144), (4096, 4096)])
def test_eight_tokens_fill_the_gpu(simulated, inputs, rows):
    """Predicted with the latency of few threadgroups; a threadgroup stands for all."""
    shape, one = cases.Shape(1, 1, inputs, rows, alone=True), Limit(groups=1, slots=1)
    with plans_for("M4 Max"):
        [row] = cases.ours(shape, "int4", "f16", 8, one)
    assert row.measurement.grid[0] == rows // 32
    for gpu, most in (("M1 Max", 55), ("M4 Max", 45)):
        assert row.measurement.latency(GPUS[gpu]).most <= most
