"""GLM-5-Next: streams between layers, an indexer, linear attention."""

import pytest
from support import families

NAME = "glm5_next"


@pytest.mark.slow("a model of streams or indexers is saved, loaded and answers")
def test_a_checkpoint_loads_and_its_tokens_are_those_of_eager_code(tmp_path):
    families.check_tokens(NAME, tmp_path)


@pytest.mark.sweep
@pytest.mark.usefixtures("captured")
def test_launches_of_a_layer(simulated):
    families.check_launches(simulated, NAME, {"linear, dense": 14, "indexed, sparse": 18})
