"""scripts/bench_quality.py, and what it found."""

from argparse import Namespace

import bench_quality
import pytest
from support.processes import REPOSITORY

# The divergence of llama.cpp's IQ4_XS of the same model, 90.9 MB, with importance of the same text.
IQ4_XS = 0.093


def rows_of(text: str) -> dict[str, list[float]]:
    """{name: MB, perplexity, divergence, agreement, then those of the manual}"""
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
    assert divergence <= 0.7 * IQ4_XS


@pytest.mark.sweep
def test_table(smollm2):
    options = Namespace(
        tokens=512, calibration=2048, recipe=["4 bits, embedding 8"], mlx_lm=[], llama_cpp=None, work=None
    )
    found = rows_of(bench_quality.table(options))
    assert len(found) == 3 and found["dense, float16"][2] == 0
    assert found["4 bits, embedding 8: importance"][2] < 0.35 * found["4 bits, embedding 8: MLX's rule"][2]
