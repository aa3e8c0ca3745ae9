"""Kimi-Linear-48B-A3B: a decay for each channel, and latent attention."""

import pytest
from support import families

NAME = "kimi_linear"


def test_a_checkpoint_loads_and_its_tokens_are_those_of_eager_code(tmp_path):
    families.check_tokens(NAME, tmp_path)


@pytest.mark.sweep
@pytest.mark.usefixtures("captured")
def test_launches_of_a_layer(simulated):
    families.check_launches(simulated, NAME, {"linear, dense": 9, "full, sparse": 11})
