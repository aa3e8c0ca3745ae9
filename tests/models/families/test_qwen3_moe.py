"""Qwen3-MoE: Qwen3-30B-A3B, Qwen3-Coder, Qwen3-235B-A22B."""

import pytest
from support import families

NAME = "qwen3_moe"


def test_a_checkpoint_loads_and_its_tokens_are_those_of_eager_code(tmp_path):
    families.check_tokens(NAME, tmp_path)


@pytest.mark.sweep
def test_every_call(tmp_path):
    families.check_every_call(NAME, tmp_path)


@pytest.mark.sweep
def test_bfloat16_logits():
    families.check_bfloat16(NAME)


@pytest.mark.usefixtures("captured")
def test_launches_of_a_layer(simulated):
    families.check_launches(simulated, NAME, {"": 6, "outside": 2}, {"": 20})
