"""Functions of transformers' masks, whose code and closures say which keys a token sees."""

import inspect

import torch
from transformers import masking_utils as masks


def nonlocals(function) -> dict:
    return dict(inspect.getclosurevars(function).nonlocals)


def test_order_is_a_comparison_of_positions():
    assert masks.causal_mask_function(0, 0, 3, 3) and not masks.causal_mask_function(0, 0, 3, 4)


def test_a_window_is_in_the_closure():
    function = masks.sliding_window_overlay(5)
    assert nonlocals(function) == {"sliding_window": 5}
    assert function.__code__ is masks.sliding_window_overlay(1).__code__
    assert function(0, 0, 7, 3) and not function(0, 0, 7, 2)


def test_joined_masks_are_in_the_closure():
    for join in (masks.and_masks, masks.or_masks):
        function = join(masks.causal_mask_function, masks.sliding_window_overlay(5))
        assert function.__code__ is join().__code__
        assert nonlocals(function)["mask_functions"][0] is masks.causal_mask_function


def test_blocks_are_in_the_closure():
    ids = torch.tensor([[0, 0, -1]])
    function = masks.blockwise_overlay(ids)
    assert function.__code__ is masks.blockwise_overlay(None).__code__
    assert nonlocals(function)["block_sequence_ids"] is ids


def test_the_eager_mask_is_that_of_sdpa_in_numbers():
    arguments = {
        "batch_size": 1,
        "q_length": 2,
        "kv_length": 3,
        "q_offset": 1,
        "mask_function": masks.causal_mask_function,
    }
    seen = masks.sdpa_mask(**arguments, allow_is_causal_skip=False)
    added = masks.eager_mask(**arguments, dtype=torch.float32)
    assert seen.tolist() == [[[[True, True, False], [True, True, True]]]]
    assert torch.equal(added == 0, seen)
