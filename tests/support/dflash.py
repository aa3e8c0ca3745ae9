"""Assistants of small models that make a block of tokens."""

import pytest
import torch

BLOCK, MASK, LAYERS = 6, 3, [0, 1]


def assistant_of(model, **sizes):
    """An assistant of a model, in the model's width; skips the test where transformers has none."""
    dflash = pytest.importorskip("transformers.models.muse_glimmer_assistant")
    config = dflash.MuseGlimmerAssistantConfig(
        **{
            "hidden_size": model.config.hidden_size, "intermediate_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"], "block_size": BLOCK,
            "mask_token_id": MASK, "target_layer_ids": LAYERS,
        } | sizes
    )  # fmt: skip
    torch.manual_seed(0)
    return dflash.MuseGlimmerAssistantModel(config).eval()
