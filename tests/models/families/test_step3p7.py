"""Step-3.7: experts without transformers' interface, whose limits differ from layer to layer."""

import pytest
from support import families

NAME = "step3p7"


def test_a_checkpoint_loads_and_its_tokens_are_those_of_eager_code(tmp_path):
    families.check_tokens(NAME, tmp_path)


@pytest.mark.usefixtures("captured")
def test_launches_of_a_layer(simulated):
    families.check_launches(simulated, NAME, {"sliding": 11, "full": 10})
