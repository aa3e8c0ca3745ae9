"""The package's shaders pass the strict check."""

import re

import pytest
import torch
from simulator.language import strict
from simulator.testing import linux_only

pytestmark = linux_only

# A format of each way of storing in all dtypes, two of them in bfloat16 always. Of the others, in which
# words and numbers differ, bfloat16 in the sweep; of those in groups of 32 or 128, in which a number differs,
# nothing.
IN_EACH_DTYPE = ("affine3_64", "affine4_64", "mxfp4", "nvfp4", "q3_k", "q4_k", "iq4_xs")
ALWAYS = ("affine3_64", "q4_k")
# Libraries with the code of others, but for types or a constant.
LIKE_OTHERS = re.compile(r"attention_(\w+_)?(64|256|512)|attention_(\w+_)?affine8|bucket_i64")


def format_of(library: str) -> str | None:
    found = re.fullmatch(r"(?:quantized(?:_prompts|_heads|_variants)?|tensor_units)_(\w+)_[a-z0-9]+", library)
    return found and found[1]


def is_checked(library: str) -> bool:
    format = format_of(library)
    if format in (None, "dense", *IN_EACH_DTYPE):
        return True
    return library.endswith("_bf16") and not re.search("affine[0-9]_(32|128)", format)


LIBRARIES = [
    name
    for tensor_units in (False, True)
    for name in sorted(torch.ops.moe_mps._libraries(tensor_units=tensor_units))
    if is_checked(name)
]


def in_sweep(library):
    if library.startswith("tensor_units_"):
        others = not library.endswith(("affine4_64_f16", "dense_f16"))
    else:
        others = library.endswith(("_f16", "_f32")) or format_of(library) not in (None, *ALWAYS)
        others = others or (
            not library.endswith("q4_k_bf16") and re.match("quantized_(prompts|heads|variants)", library)
        )
        others = others or (LIKE_OTHERS.match(library) is not None and "tailed" not in library)
    return pytest.param(library, marks=pytest.mark.sweep if others else ())


@pytest.mark.parametrize("library", [*map(in_sweep, LIBRARIES), "probe_f32"])
def test_shaders_pass(library):
    assert strict.check(torch.ops.moe_mps._library_source(library)) == []
