"""scripts/bench/train_moe.py and scripts/bench/bench_experts.py, and what they found."""

import json
import math

import bench_experts
import numpy as np
import pytest
import train_moe

from torch_moe_mps.commands.perplexity import SAMPLE


@pytest.fixture(scope="module")
def kept() -> dict:
    return json.loads(bench_experts.KEPT.read_text())


def test_page_and_plot_are_those_of_what_was_measured(kept):
    page = bench_experts.KEPT.with_suffix(".md").read_text()
    assert bench_experts.table(kept) in page and f"has all {len(kept['rows'])} rows" in page
    assert bench_experts.PLOT.read_text() == bench_experts.plot(kept)


@pytest.mark.sweep
def test_a_small_training_goes_on_where_it_was(smollm2, tmp_path):
    """In two pieces as in one, bit for bit; and it learns: far below the loss of a draft."""
    tokenizer = train_moe.tokenizer_in(tmp_path / "one" / "tokenizer")
    ids = np.array(tokenizer(SAMPLE.read_text()).input_ids, dtype=np.uint16)
    for folder in ("one", "two"):
        train_moe.tokenizer_in(tmp_path / folder / "tokenizer")
        ids[4096:].tofile(tmp_path / folder / "train.bin")
        ids[:4096].tofile(tmp_path / folder / "held.bin")
    whole = train_moe.train(tmp_path / "one", "small", math.inf)
    assert train_moe.train(tmp_path / "two", "small", whole["seconds"] / 3) is None
    last = train_moe.train(tmp_path / "two", "small", math.inf)
    assert last["curve"] == whole["curve"] and last["held_loss"] == whole["held_loss"]
    assert last["held_loss"] < 0.85 * math.log(49152)
