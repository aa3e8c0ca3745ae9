"""Apple's compiler may round a * b + c once: nothing of ours depends on whether it does."""

import ast
import os
import subprocess
import sys

import pytest
from simulator.testing import linux_only
from support.processes import REPOSITORY, python
from support.sweep import in_sweep

from torch_moe_mps.selfcheck import probe

pytestmark = linux_only
CONTRACTED = {"METAL_SIMULATOR_CONTRACTION": "1"}
ROOMS = ("rope", "norms", "routing", "combine", "experts", "attention", "linear_attention")
PROBED = """
    from support import simulated
    simulated.install()
    from torch_moe_mps.selfcheck import probe
    print(probe.contraction(probe.Sizes()))
"""


def test_contraction_is_a_choice_of_the_simulator(simulated):
    """Within a statement: what lies in two is rounded twice in either."""
    chosen = {"within_a_statement": True, "across_statements": False}
    assert probe.contraction(probe.Sizes()) == chosen | {"within_a_statement": False}
    assert ast.literal_eval(python(PROBED, **CONTRACTED)) == chosen


@pytest.mark.sweep
@pytest.mark.parametrize("room", in_sweep(ROOMS, always=["rope"]))
def test_operators_are_right_with_contraction(room):
    """All tests of an operator family that run kernels, with oracles in float64."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "not sweep",
        "-k",
        "mps",
        f"tests/ops/test_{room}.py",
    ]
    result = subprocess.run(
        command, cwd=REPOSITORY, env={**os.environ, **CONTRACTED}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout[-3000:]
