"""scripts/bench/bench_quality.py, and what it found."""

from argparse import Namespace

import bench_quality
import pytest
import torch


@pytest.mark.sweep
def test_rows(smollm2, monkeypatch, tmp_path):
    # Another test of this process may have simulated a GPU.
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    options = Namespace(
        tokens=512, calibration=2048, recipe=["4 bits, embedding 8"], mlx_lm=[], llama_cpp=None
    )
    dense, rule, importance = bench_quality.rows(options, tmp_path)
    assert dense.name == "dense, float16" and dense.means[0].divergence < 5e-5
    assert importance.means[0].divergence < 0.35 * rule.means[0].divergence
