"""The package's shaders pass the strict check."""

import re

import pytest
import torch
from simulator.language import strict
from simulator.testing import linux_only

pytestmark = linux_only

# Of the formats those in groups of 64: in the others a number differs. Always one dtype, and a format of each
# way of storing; the others, in which words and numbers differ, in the sweep.
ALWAYS = ("affine3_64", "affine4_64", "mxfp4", "nvfp4", "q3_k", "q4_k", "iq4_xs")
LIBRARIES = [
    name
    for tensor_units in (False, True)
    for name in sorted(torch.ops.moe_mps._libraries(tensor_units=tensor_units))
    if not re.search("affine[0-9]_(32|128)_", name)
]


def in_sweep(library):
    others = library.endswith(("_f16", "_f32"))
    others |= library.startswith("quantized_") and library.split("_", 1)[1].rpartition("_")[0] not in ALWAYS
    if library.startswith("tensor_units_"):
        others = not library.endswith(("affine3_64_bf16", "affine4_64_f16", "mxfp4_bf16", "dense_f16"))
    return pytest.param(library, marks=pytest.mark.sweep if others else ())


@pytest.mark.parametrize("library", list(map(in_sweep, LIBRARIES)))
def test_shaders_pass(library):
    assert strict.check(torch.ops.moe_mps._library_source(library)) == []
