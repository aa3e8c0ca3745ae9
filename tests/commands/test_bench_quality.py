"""scripts/bench/bench_quality.py, and what it found."""

from argparse import Namespace

import bench_quality
import pytest
import torch


def rows_of(text: str) -> dict[str, list[float]]:
    """{name: MB, perplexity, then divergence and agreement of each text, seconds}"""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]
    return {name: [float(cell.removesuffix(" %")) for cell in cells] for name, *cells in rows}


@pytest.mark.sweep
def test_table(smollm2, monkeypatch):
    # Another test of this process may have simulated a GPU.
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    options = Namespace(
        tokens=512, calibration=2048, recipe=["4 bits, embedding 8"], mlx_lm=[], llama_cpp=None, work=None
    )
    found = rows_of(bench_quality.table(options))
    assert len(found) == 3 and found["dense, float16"][2] == 0
    assert found["4 bits, embedding 8: importance"][2] < 0.35 * found["4 bits, embedding 8: MLX's rule"][2]
