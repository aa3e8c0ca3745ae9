"""MiniMax-M3: attention to blocks that an indexer chooses."""

import pytest
from support import families

NAME = "minimax_m3_vl"


def test_a_checkpoint_loads_and_its_tokens_are_those_of_eager_code(tmp_path):
    families.check_tokens(NAME, tmp_path)


@pytest.mark.sweep
@pytest.mark.usefixtures("captured")
def test_launches_of_a_layer(simulated):
    families.check_launches(simulated, NAME, {"full, dense": 8, "minimax m3 sparse, sparse": 11})
