"""scripts/bench/bench_quality.py, and what it found."""

from argparse import Namespace

import bench_quality
import pytest
from support.processes import REPOSITORY


def rows_of(text: str) -> dict[str, list[float]]:
    """{name: MB, perplexity, then divergence and agreement of each text, seconds}"""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]
    return {name: [float(cell.removesuffix(" %")) for cell in cells] for name, *cells in rows}


@pytest.fixture(scope="module")
def written() -> dict[str, list[float]]:
    return rows_of((REPOSITORY / "docs" / "quality.md").read_text())


def test_importance_is_better_in_as_many_bytes(written):
    pairs = [name.removesuffix(": importance") for name in written if name.endswith(": importance")]
    assert len(pairs) > 1
    for name in pairs:
        rule, weighed = written[f"{name}: MLX's rule"], written[f"{name}: importance"]
        assert rule[0] == weighed[0]
        most = 1.0 if name.startswith("mxfp8") else 0.9  # whose scales are powers of two: little to choose
        assert weighed[2] <= most * rule[2] and weighed[4] <= most * rule[4], name


def test_goals(written):
    size, _, divergence, *_ = written["4 bits, embedding 8: importance"]
    assert size < 90 and divergence <= 0.065
    assert written["3 bits, embedding 6: importance"][2] <= 0.38


@pytest.mark.parametrize("text", range(3))
def test_better_than_others_in_as_many_bytes(written, text):
    """By 30 %."""
    others = {name: row for name, row in written.items() if name.startswith(("llama.cpp", "mlx-lm"))}
    assert len(others) == 7
    ours = [row for name, row in written.items() if name.endswith(": importance")]
    for name, (size, _, *found) in others.items():
        best = min(row[2 + 2 * text] for row in ours if row[0] <= size)
        assert best <= 0.7 * found[2 * text], name


@pytest.mark.sweep
def test_table(smollm2):
    options = Namespace(
        tokens=512, calibration=2048, recipe=["4 bits, embedding 8"], mlx_lm=[], llama_cpp=None, work=None
    )
    found = rows_of(bench_quality.table(options))
    assert len(found) == 3 and found["dense, float16"][2] == 0
    assert found["4 bits, embedding 8: importance"][2] < 0.35 * found["4 bits, embedding 8: MLX's rule"][2]
