"""The package's shaders pass the strict check. Nobody's Mac compiles them for every change.

Every run checks each kind of code: all libraries without a format in bfloat16, whose conversions are the
strictest, one of each file in the other dtypes, each format, the parts of the formats with a template of
their own, and all of `torch-moe-mps check --quick`. The sweep has the libraries that differ from those in a
number or a type. A library whose source has passed before costs nothing: `strict.check` keeps its results.
Others take up to 80 CPU seconds in all.
"""

import itertools
import re

import pytest
import torch
from simulator.language import strict
from simulator.testing import linux_only

from torch_moe_mps.commands.check import QUICK
from torch_moe_mps.ops._formats import FORMATS
from torch_moe_mps.selfcheck import libraries, tensor_units, variants

pytestmark = linux_only

PLAIN = [*torch.ops.moe_mps._libraries(), "probe_f32"]
WITH_TENSORS = torch.ops.moe_mps._libraries(tensor_units=True)
PARTS = (*libraries.PARTS, "variants_")
COMMON = "affine4_64"
QUICK_FORMATS = QUICK["--format"].split(",")


def templates_of(format: str) -> str:
    """The templates that read a format's weights, without numbers: "Integers TypedScales half"."""
    return " ".join(re.findall(r"\b\w+(?=<)|\bhalf\b", FORMATS[format].row.template[0]))


def in_quick() -> set[str]:
    """The libraries that `torch-moe-mps check --quick` compiles."""
    of = [getattr(torch, QUICK["--dtype"])], [FORMATS[name] for name in QUICK_FORMATS]
    common = [name for name in libraries.libraries(*of) if not libraries.UNCOMMON.match(name)]
    return {*common, *variants.libraries(*of), *tensor_units.libraries(*of)}


def always() -> set[str]:
    """The libraries that every run checks."""
    one_of_each = {templates_of(format): format for format in (*FORMATS, *QUICK_FORMATS)}.values()
    every_part = {f"{part}{format}" for part, format in itertools.product(libraries.PARTS, one_of_each)}
    codes = {f"quantized_{format}_bf16" for format in {*FORMATS, *every_part}}
    codes |= {f"quantized_{format}_{dtype}" for format in one_of_each for dtype in ("f16", "f32")}
    codes |= {f"quantized_{part}{COMMON}_f16" for part in PARTS}
    units = {f"tensor_units_{format}_bf16" for format in (*one_of_each, "dense")}
    units |= {f"tensor_units_{format}_f16" for format in (COMMON, "dense")}
    others = [name for name in PLAIN if not name.startswith("quantized_")]
    without_numbers = {re.sub(r"_\d+", "", name): name for name in others}
    others_in_bfloat16 = {name for name in others if name.endswith("_bf16")}
    return codes | units | others_in_bfloat16 | {*without_numbers.values()} | in_quick()


ALWAYS = always()
LIBRARIES: dict[str, list[str]] = {}  # by what their names begin with: one file has most of their code
for name in sorted({*PLAIN, *WITH_TENSORS}):
    part = re.match(rf"quantized_({'|'.join(filter(None, PARTS))})|tensor_units|[a-z]+", name)
    LIBRARIES.setdefault(part[0].rstrip("_"), []).append(name)


def test_the_choice():
    assert {*PLAIN, *WITH_TENSORS} > ALWAYS
    assert len(in_quick()) > 30 and len({templates_of(format) for format in FORMATS}) > 5
    for dtype in ("bf16", "f16", "f32"):
        files = [{name.split("_")[0] for name in of if name.endswith(f"_{dtype}")} for of in (PLAIN, ALWAYS)]
        assert files[0] <= files[1]


def problems_of(names: list[str]) -> list[str]:
    return strict.check_together([torch.ops.moe_mps._library_source(name) for name in names])


@pytest.mark.parametrize("file", LIBRARIES)
def test_shaders_pass(file):
    assert problems_of([name for name in LIBRARIES[file] if name in ALWAYS]) == []


@pytest.mark.sweep  # compiles all libraries
@pytest.mark.parametrize("file", LIBRARIES)
def test_all_shaders_pass(file):
    assert problems_of(LIBRARIES[file]) == []
