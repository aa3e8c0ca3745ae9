"""Which modules share a weight, where transformers ties more than two."""

import pytest
from torch import nn

from torch_moe_mps.checkpoints.quantize.target import Target
from torch_moe_mps.checkpoints.quantize.tied import add_tied, sharing
from torch_moe_mps.quantization import Format

NAMES = ["a", "b", "c", "d", "e"]
# {what transformers ties, as {a module: the one whose weight it takes}: the groups that share a weight}
TIED = [
    ({"a": "b", "b": "c", "c": "d"}, [["a", "b", "c", "d"]]),
    ({"c": "d", "b": "c", "a": "b"}, [["a", "b", "c", "d"]]),
    ({"a": "b", "c": "d", "d": "b"}, [["a", "b", "c", "d"]]),
    ({"a": "d", "b": "d", "c": "d"}, [["a", "b", "c", "d"]]),
    ({"a": "b", "d": "c"}, [["a", "b"], ["c", "d"]]),
]


@pytest.mark.parametrize(("tied", "groups"), TIED)
def test_names_of_a_chain_are_one_group(tied, groups):
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in reversed(NAMES)})
    in_order = [group[::-1] for group in groups]  # of the model
    assert sharing(model, {}, tied) == {name: group for group in in_order for name in group}


@pytest.mark.parametrize("stored", NAMES[:4])
@pytest.mark.parametrize(("tied", "groups"), TIED)
def test_the_name_that_a_checkpoint_has_decides_for_all_of_a_group(tied, groups, stored):
    every = {name: Target(name, nn.Linear(32, 2), "linears") for name in NAMES}
    format = Format(4, 32)
    every[stored].formats = {"weight": format}
    targets = {stored: every[stored]}
    add_tied(tied, every, targets)
    (group,) = (group for group in groups if stored in group)
    assert sorted(targets) == group
    assert all(targets[name].formats == {"weight": format} for name in group)
    assert all(targets[name].module is every[name].module for name in group)
