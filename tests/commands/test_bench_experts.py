"""scripts/bench/train_moe.py and scripts/bench/bench_experts.py, and what they found."""

import json
import math

import bench_experts
import numpy as np
import pytest
import train_moe
from bench_experts import EACH, MLX

from torch_moe_mps.commands.perplexity import SAMPLE


@pytest.fixture(scope="module")
def kept() -> dict:
    return json.loads(bench_experts.KEPT.read_text())


@pytest.fixture(scope="module")
def measured(kept) -> dict:
    """{(recipe, way): (bytes, bytes a token, divergence on the manual, on the Opticks)}"""
    rows = kept["rows"]
    return {(r["recipe"], r["way"]): (r["bytes"], r["token"], *(t[0] for t in r["texts"][1:])) for r in rows}


def test_page_and_plot_are_those_of_what_was_measured(kept):
    assert bench_experts.PAGE.read_text() == bench_experts.page(kept)
    assert bench_experts.PLOT.read_text() == bench_experts.plot(kept)


@pytest.mark.parametrize("way", [MLX, EACH])
def test_bits_for_attention_come_first(measured, way):
    """Half of the loss for less than 2 % of the bytes and 5 % of those of a token; `down` is no rival."""
    plain, better, rival = (measured[f"4 bits{end}", way] for end in ("", ", attention 6", ", down 5"))
    assert better[0] < 1.02 * plain[0] and better[1] < 1.05 * plain[1] and better[0] < rival[0]
    assert better[2] < 0.5 * plain[2] and better[3] < 0.5 * plain[3]
    assert better[2] < 0.6 * rival[2] and better[3] < 0.6 * rival[3]


def test_better_than_mixed_recipes_of_mlx_lm_in_as_many_bytes(measured):
    for (name, way), row in measured.items():
        if "mlx-lm" in name and way == MLX and "mixed_2_6" not in name and "mixed_3_4" not in name:
            ours = [r for (other, _), r in measured.items() if "mlx-lm" not in other and r[0] <= row[0]]
            assert min(r[2] for r in ours) < 0.5 * row[2], name


def test_beside_llama_cpp_alike_at_3_bits_behind_at_4_and_ahead_at_5(measured):
    """What the page says: the smallest loss in as many bytes as theirs, by importance."""

    def ratio(kind: str) -> float:
        theirs = measured[f"llama.cpp {kind}", EACH]
        ours = [
            r for (n, way), r in measured.items() if "llama" not in n and r[0] <= theirs[0] and way == EACH
        ]
        return min(row[2] for row in ours) / theirs[2]

    assert 0.95 < ratio("Q3_K_M, attention Q6_K") < 1.05
    assert 1.05 < ratio("IQ4_XS, attention Q6_K") < 1.12
    assert 1.05 < ratio("Q4_K_S, attention Q6_K") < 1.12
    assert ratio("Q5_K_M") < 0.7


def test_superblocks_lose_less_than_groups_of_64_in_as_many_bytes(measured):
    pairs = {
        "q4_k, attention 6": "4 bits, attention 6",
        "iq4_xs, attention 6": "4 bits, attention 6",
        "q3_k, attention 6": "3 bits, attention 6",
        "q3_k, attention 6, down iq4_xs": "3 bits, attention 6, down 4",
        "iq4_xs, attention 6, down q5_k": "4 bits, attention 6, down 5",
        "iq4_xs everywhere": "4 bits, embedding 4",
    }
    for name, other in pairs.items():
        own, theirs = measured[name, EACH], measured[other, EACH]
        assert own[0] < 1.001 * theirs[0] and own[1] < 1.001 * theirs[1], name
        assert own[2] < 0.92 * theirs[2] and own[3] < 0.99 * theirs[3], name
    q5_k, affine = (measured[name, EACH] for name in ("q5_k, attention 6", "5 bits, attention 6"))
    assert q5_k[0] < 1.001 * affine[0] and 0.8 < q5_k[2] / affine[2] < 0.9


def test_recipes_with_a_name_lose_less_than_more_bits_everywhere(measured):
    """`small` than 4 bits, `best` than 5, in a tenth fewer bytes."""
    for name, other in (
        ("q3_k, attention 6, down iq4_xs", "4 bits"),
        ("iq4_xs, attention 6, down q5_k", "5 bits"),
    ):
        own, theirs = measured[name, EACH], measured[other, EACH]
        assert own[0] < 0.9 * theirs[0] and own[2] < theirs[2] and own[3] < theirs[3], name


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
