"""Functions of transformers' masks, called with positions."""

import torch
from transformers import masking_utils as masks


def test_order_is_a_comparison_of_positions():
    assert masks.causal_mask_function(0, 0, 3, 3) and not masks.causal_mask_function(0, 0, 3, 4)


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
