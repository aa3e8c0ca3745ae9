"""Qwen3-Next and Qwen3-Coder-Next: linear attention in three of four layers."""

import pytest
from support import families

NAME = "qwen3_next"


def test_a_checkpoint_loads_and_its_tokens_are_those_of_eager_code(tmp_path):
    families.check_tokens(NAME, tmp_path)


def test_every_call(tmp_path):
    families.check_every_call(NAME, tmp_path)


@pytest.mark.sweep
def test_bfloat16_logits():
    families.check_bfloat16(NAME)


@pytest.mark.usefixtures("captured")
def test_launches_of_a_layer(simulated):
    families.check_launches(
        simulated, NAME, {"linear": 7, "full": 9, "outside": 2}, {"linear": 39, "full": 29}
    )
