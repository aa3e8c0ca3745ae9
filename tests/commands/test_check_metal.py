"""scripts/check_metal.py, in the simulator."""

import re

import pytest

from torch_moe_mps._extension import SHADERS


@pytest.fixture
def check_metal(simulated):
    import check_metal

    return check_metal


def test_everything_is_built_and_compared(check_metal, capsys, monkeypatch):
    """Few libraries stand for all: each is built by other tests, too."""
    some = ["norms_bf16", "routing_bf16", "bucket_i64", "quantized_affine4_64_bf16"]
    assert set(some) < set(check_metal.libraries(every_dtype=False))
    monkeypatch.setattr(check_metal, "libraries", lambda every_dtype: some)
    assert check_metal.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "all built, all equal"
    kernels = {line.split()[0] for line in lines if line.endswith(" bytes")}
    assert {"norm_add_bf16", "route8_bf16", "bucket_pairs_i64", "gemm32_affine4_64_bf16"} <= kernels
    assert sum(line.endswith(" ok") for line in lines) == 3 * len(check_metal.OPERATORS)


def test_the_libraries_of_one_dtype_and_of_all(check_metal):
    one, every = (check_metal.libraries(every_dtype) for every_dtype in (False, True))
    of_activations = len(set(SHADERS.glob("*.metal"))) - 2  # but for bucket and quantized
    assert len(every) == 2 + 3 * (of_activations + 21) and len(one) == 2 + of_activations + 21


def test_failures_are_told(check_metal, capsys, monkeypatch):
    """A library that does not build, and an operator that gives something else."""
    monkeypatch.setattr(check_metal, "OPERATORS", ["silu_mul_stacked"])
    plain = check_metal.packet

    def wrong_on_mps(name):
        return lambda gate, up: plain(name)(gate, up) * (2 if gate.device.type == "mps" else 1)

    monkeypatch.setattr(check_metal, "packet", wrong_on_mps)
    monkeypatch.setattr(check_metal, "libraries", lambda every_dtype: ["missing"])
    assert check_metal.main([]) == 1
    out = capsys.readouterr().out
    assert re.search(r"^missing +FAILED: moe_mps: no library missing$", out, re.M)
    assert "silu_mul_stacked                     float32    FAILED" in out and out.endswith("4 failed\n")
