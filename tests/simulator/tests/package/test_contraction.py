"""Apple's compiler rounds a * b + c once: results are right wherever a compiler contracts."""

import ast
import os
import subprocess
import sys

import pytest
from simulator.testing import linux_only
from support.processes import REPOSITORY, python

pytestmark = linux_only
SWITCH = "METAL_SIMULATOR_CONTRACTION"
ROOMS = ("rope", "norms", "routing", "combine", "experts", "attention", "gated_delta_rule")
PROBED = """
    import numpy as np
    from simulator.testing import HEAD
    from simulator.shaderlib import shader_library
    source = HEAD + '''
    kernel void k(device const float* x [[buffer(0)]], device float* out [[buffer(1)]]) {
      out[0] = x[0] * x[0] + x[1];
      const float product = x[0] * x[0];
      out[1] = product + x[1];
    }'''
    out = np.zeros(2, np.float32)
    x = np.array([1 + 2.0**-12, -1 - 2.0**-11], np.float32)
    shader_library(source).launch("k", {0: x, 1: out}, grid=(1,), threads=(1,))
    print((out != 0).tolist())
"""


@pytest.mark.parametrize(
    ("schedule", "within_a_statement", "across_statements"),
    [
        ("on", True, False),
        *(
            pytest.param(*row, marks=pytest.mark.sweep)
            for row in (("off", False, False), ("fast", True, True))
        ),
    ],
)
def test_contraction_is_a_choice_of_the_simulator(schedule, within_a_statement, across_statements):
    expected = [within_a_statement, across_statements]
    assert ast.literal_eval(python(PROBED, **{SWITCH: schedule})) == expected


@pytest.mark.sweep  # a run of tests for each room and schedule
@pytest.mark.parametrize("schedule", ["off", "fast"])
@pytest.mark.parametrize("room", ROOMS)
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
