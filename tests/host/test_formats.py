"""Formats in the host code: their templates come from the rows of _weight_formats.py."""

import pytest
from support.processes import python

ADDED = """
import torch_moe_mps_command  # the script, which registers operators behind its options
from torch_moe_mps import _weight_formats

rows, integers = _weight_formats.ROWS, _weight_formats.Integers(6, centre=32)
rows["new_0"] = _weight_formats.FormatRow(6, 32, _weight_formats.Halves(), offset=32)
rows["new_k"] = _weight_formats.FormatRow(5, 32, integers, offset=16)

from support import oracles_experts, simulated

integers = oracles_experts.Integers(6, 32)
oracles_experts.GGML["new_0"] = oracles_experts.Ggml(6, 32, (0,), centre=32)
oracles_experts.GGML["new_k"] = oracles_experts.Ggml(5, 32, (0,), centre=16, integers=integers)
simulated.install()

import torch
from support.quantized_layers import check_linear

for format, tokens in (("new_0", 40), ("new_k", 1)):
    check_linear("mps", (tokens, 512, 37), format, torch.float16, 0)
    print(format)
"""


@pytest.mark.slow("compiles libraries in a process of its own")
def test_a_row_is_all_that_a_format_needs(simulated):
    """Two formats that do not exist, against the oracle."""
    assert python(ADDED).split() == ["new_0", "new_k"]
