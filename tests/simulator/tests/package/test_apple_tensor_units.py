"""The kernels for tensor units by the cost model: what threads do around the products, and a bound."""

import math

import pytest
from measured.apple import cases
from simulator.apple import GPUS
from simulator.testing import linux_only

pytestmark = linux_only
SHAPE = cases.Shape(1, 1, 512, 64)  # one expert, so that tiles are full


def first(format: str, tokens: int, tensor_units: bool):
    """The measurement of the first matmul."""
    rows = cases.ours(SHAPE, format, "f16", tokens, tensor_units=tensor_units)
    return next(row.measurement for row in rows if row.matmul == "gate+up")


@pytest.mark.parametrize(
    ("format", "tokens", "kernel", "slots", "registers"),
    [
        ("int4", 32, "gemm32_tensor_affine4_64_f16", 0.25, 45),
        pytest.param("int4", 64, "gemm64_tensor_affine4_64_f16", 0.17, 51, marks=pytest.mark.sweep),
        pytest.param("mxfp4", 32, "gemm32_tensor_mxfp4_f16", 0.31, 42, marks=pytest.mark.sweep),
        pytest.param("f16", 32, "gemm32_tensor_dense_f16", 0.13, 41, marks=pytest.mark.sweep),
    ],
)
def test_slots_and_registers(simulated, format, tokens, kernel, slots, registers):
    measured = first(format, tokens, True)
    assert (measured.kernel, round(measured.registers.registers)) == (kernel, registers)
    assert measured.slots_per_mac(GPUS["M5 Max"]) == pytest.approx(slots, rel=0.06)
    assert measured.fits


@pytest.mark.sweep  # of a kernel for more tokens
def test_the_units_are_a_bound_beside_the_rest(simulated):
    """At 512 multiply-adds a cycle and core; other GPUs have none, and other kernels use none."""
    measured, gpu = first("int4", 64, True), GPUS["M5 Max"]
    bounds = measured.bounds(gpu)
    assert bounds.tensor == pytest.approx(measured.work.macs / (512 * 40 * 1.62e3))
    assert bounds.issue < bounds.tensor
    assert measured.bounds(GPUS["M4 Max"]).tensor == math.inf
    assert first("int4", 64, False).bounds(gpu).tensor == 0.0
