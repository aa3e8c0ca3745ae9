"""scripts/check_metal.py, in the simulator."""

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))


@pytest.fixture
def check_metal(simulated):
    import check_metal

    return check_metal


def test_everything_is_built_and_compared(check_metal, capsys):
    assert check_metal.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "all built, all equal"
    instantiated = sum(
        len(re.findall("INSTANTIATE_KERNEL", path.read_text()))
        for path in check_metal.SHADERS.glob("*.metal")
    )
    kernels = [line for line in lines if line.endswith(" bytes")]
    assert len(kernels) > instantiated > 20
    assert sum(line.endswith(" ok") for line in lines) == 3 * len(check_metal.OPERATORS)


def test_failures_are_told(check_metal, capsys, monkeypatch):
    """A library that does not build, and an operator that gives something else."""
    monkeypatch.setattr(check_metal, "OPERATORS", ["silu_mul_stacked"])
    plain = check_metal.packet

    def wrong_on_mps(name):
        return lambda gate, up: plain(name)(gate, up) * (2 if gate.device.type == "mps" else 1)

    monkeypatch.setattr(check_metal, "packet", wrong_on_mps)
    library = check_metal.SHADERS / "missing.metal"
    monkeypatch.setattr(check_metal, "SHADERS", type("Folder", (), {"glob": lambda self, _: [library]})())
    assert check_metal.main() == 1
    out = capsys.readouterr().out
    assert re.search(r"^missing +FAILED: moe_mps: shader source .*missing\.metal cannot be read", out, re.M)
    assert "silu_mul_stacked                     float32    FAILED" in out and out.endswith("4 failed\n")
