"""LongCat: ids beyond the experts give their input, and a layer has two of attention."""

import pytest
from support import families

NAME = "longcat_flash"


def test_a_checkpoint_loads_and_its_tokens_are_those_of_eager_code(tmp_path):
    families.check_tokens(NAME, tmp_path)


@pytest.mark.usefixtures("captured")
def test_launches_of_a_layer(simulated):
    families.check_launches(simulated, NAME, {"": 26})
