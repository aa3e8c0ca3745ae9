"""Apple's compiler rounds a * b + c once: results are right wherever a compiler contracts."""

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
SWITCH = "METAL_SIMULATOR_CONTRACTION"
ROOMS = ("rope", "norms", "routing", "combine", "experts", "attention", "linear_attention")
PROBED = """
    from support import simulated
    simulated.install()
    from torch_moe_mps.selfcheck import probe
    print(probe.contraction(probe.Sizes()))
"""


def contracted(within: bool, across: bool) -> dict[str, bool]:
    return {"within_a_statement": within, "across_statements": across}


def test_expressions_are_contracted(simulated):
    assert probe.contraction(probe.Sizes()) == contracted(True, False)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("off", contracted(False, False)), ("fast", contracted(True, True))],
)
def test_contraction_is_a_choice_of_the_simulator(schedule, expected):
    assert ast.literal_eval(python(PROBED, **{SWITCH: schedule})) == expected


@pytest.mark.sweep
@pytest.mark.parametrize("schedule", ["off", "fast"])
@pytest.mark.parametrize("room", in_sweep(ROOMS, always=["rope"]))
def test_operators_are_right_with_other_contraction(room, schedule):
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
        command, cwd=REPOSITORY, env={**os.environ, SWITCH: schedule}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout[-3000:]
