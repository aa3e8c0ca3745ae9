"""Kernels that may spill on one generation of GPUs: those with more registers than it is known to give.

By our own counts, in tests/pinned/: what Apple's compiler makes of a kernel, metal-tt says
(scripts/macos/apple_registers). A variant with fewer registers shortens the list.
"""

import re
from collections.abc import Iterator

import pytest
from simulator.apple.facts import REGISTERS
from support.pinned import assert_pinned, pinned

COST = re.compile(r"^  (\w+): .*?([\d.]+)(?:/([\d.]+))? registers")

Row = tuple[str, str, float, float]  # library, kernel, registers on the M1 and M2, and from the M3 on


def counts() -> Iterator[Row]:
    """Of the pinned costs, and for other formats of the pinned registers."""
    for group, text in pinned("costs").items():
        for line in text.splitlines():
            if found := COST.match(line):
                yield group, found[1], float(found[2]), float(found[3] or found[2])
    for section, text in pinned("registers").items():
        lines = [] if section.startswith("over ") else text.replace("\n  ", " ").splitlines()
        for line in lines:
            name, _, kernels = line.partition(": ")
            for kernel, first, later in re.findall(r"(\w+) ([\d.]+)(?:/([\d.]+))?", kernels):
                yield name, kernel, float(first), float(later or first)


def over(limit: int, later: bool) -> list[str]:
    """A line for each kernel above on the M1 and M2, or `later`: library, kernel, registers."""
    rows = ((library, kernel, count[later]) for library, kernel, *count in counts())
    return list(dict.fromkeys(f"{library} {kernel} {n:g}" for library, kernel, n in rows if n > limit))


def test_pages_are_read_whole():
    """A kernel of each kind of page, and none without a number."""
    found = {(library, kernel): count for library, kernel, count, _ in counts()}
    assert all(first >= later for _, _, first, later in counts())
    assert found["turned", "attention_turned8_128_bf16"] > 60 and found["affine4_64", "rows"] > 30
    assert found["int4", "gemm32_affine4_64_bf16"] > 30 and found["q6_k", "heads_columns_few"] > 30
    assert len(found) > 500 and min(found.values()) > 0


@pytest.mark.pinned
@pytest.mark.parametrize("generation", ["M1", "M4", "M5"])
def test_kernels_over_the_registers_of_a_generation(generation):
    """None on an M1; on the others those that are named, with their counts. The M2 is as the M1, and what an
    M3 gives is not known: it is taken for an M4."""
    assert REGISTERS["M2"] == REGISTERS["M1"] and REGISTERS["M3"] == REGISTERS["M4"]
    limit = REGISTERS[generation]
    if generation == "M1":
        assert not over(limit, later=False)
    else:
        assert_pinned("registers", f"over {limit}", "\n".join(over(limit, later=True)) + "\n")
