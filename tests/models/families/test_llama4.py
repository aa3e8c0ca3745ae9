"""Llama 4: the routing weight multiplies the input of an expert."""

import copy

import pytest
import torch
from support import families
from support.capturing import accelerated, answer, without_capture
from support.launches import captured_by_type, model_on_mps
from support.models import assert_close, tiny

import torch_moe_mps
from torch_moe_mps.models.attention.attention import NAME as ATTENTION
from torch_moe_mps.models.capture.classes import captures_of

NAME = "llama4"


def test_a_checkpoint_loads_and_its_tokens_are_those_of_eager_code(tmp_path):
    families.check_tokens(NAME, tmp_path)


@pytest.mark.usefixtures("captured")
def test_launches_of_a_layer(simulated):
    families.check_launches(simulated, NAME, {"": 6})


# Layers without a rotation scale their queries by the position: what of it all share counts with the first.
NO_ROTATION = {"no_rope_layers": [1, 0, 0], "num_hidden_layers": 3, "floor_scale": 4}


@pytest.mark.usefixtures("captured")
def test_launches_of_a_layer_that_does_not_turn(simulated):
    model = model_on_mps(NAME, **NO_ROTATION)
    torch_moe_mps.accelerate(model, bits=4, group_size=32)
    families.check_types(families.of_layers(captured_by_type(simulated, model)), {"chunked": 11, "full": 7})


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("bits", [None, 4])
@torch.no_grad()
def test_captured_tokens_of_layers_that_do_not_turn(bits):
    """The last of six tokens are in the second and in the third step of the scale."""
    options = {} if bits is None else {"bits": 4, "group_size": 32}
    model = accelerated(NAME, "cpu", sizes=NO_ROTATION, **options)
    own = tiny(NAME, **NO_ROTATION) if bits is None else without_capture(copy.deepcopy(model))
    model.set_attn_implementation(ATTENTION)
    if bits:
        own.set_attn_implementation(ATTENTION)
    assert_close(answer(model, "cpu"), answer(own, "cpu"), 2e-5)
    assert captures_of(model).reason is None, captures_of(model).reason
