"""DeepSeek-V3 and R1, and Kimi-K2, which has its layers: latent attention."""

import pytest
from support import families

NAME = "deepseek_v3"


def test_a_checkpoint_loads_and_its_tokens_are_those_of_eager_code(tmp_path):
    families.check_tokens(NAME, tmp_path)


def test_every_call(tmp_path):
    families.check_every_call(NAME, tmp_path)


@pytest.mark.sweep
def test_bfloat16_logits():
    families.check_bfloat16(NAME)


@pytest.mark.sweep
@pytest.mark.usefixtures("captured")
def test_launches_of_a_layer(simulated):
    families.check_launches(
        simulated, NAME, {"dense": 12, "sparse": 10, "outside": 2}, {"dense": 18, "sparse": 24}
    )
