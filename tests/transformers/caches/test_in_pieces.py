"""A prompt that is read in pieces, behind a cache, is the prompt; or it is read whole."""

import pytest
import torch
from support.models import in_parts
from support.sweep import in_sweep
from support.tiny_models import DENSE_ARCHITECTURES, architectures, build_config, randomise, tiny_model
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import torch_moe_mps
from torch_moe_mps.serving import prompt_reader, prompts
from torch_moe_mps.serving.generating import Generating
from torch_moe_mps.transformers.caches.prompt_cache import READ_WHOLE, new_cache, reads_whole

IDS = torch.randint(2, 90, (1, 30), generator=torch.Generator().manual_seed(0))
PIECES = 7, 1, 5  # behind a first one
WITHOUT_CACHE = {"openai_privacy_filter"}  # it generates nothing
# Caches of each kind: recurrent states, windows, compressed keys, and those that own code gets wrong.
OFTEN = ("jamba", "kimi_linear", "gpt_oss", "deepseek_v4", "lfm2_moe")
# Sizes of models with neither experts nor a place in docs/models.md.
RECURRENT = {
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
    "bamba": {"attn_layer_indices": [1]},
    "falcon_mamba": {},
    "mamba": {},
    "zamba": {"num_hidden_layers": 6, "layers_block_type": ["mamba", "hybrid"] * 3, "n_mamba_heads": 2},
}
EVERY = [name for name in (*architectures(), *DENSE_ARCHITECTURES) if name not in WITHOUT_CACHE]


@pytest.mark.parametrize("architecture", in_sweep(EVERY, OFTEN))
def test_pieces_give_the_logits_of_the_whole(architecture):
    """Of all architectures but those that are read whole, in their own code and in ours."""
    model = tiny_model(architecture)
    for accelerates in (False, True):
        if accelerates:
            torch_moe_mps.accelerate(model, capture=False)
        (whole,), _ = in_parts(model, IDS)
        pieces = torch.cat(in_parts(model, IDS, *PIECES)[0], 1)
        error = (pieces - whole).norm() / whole.norm()
        assert (error < 1e-5) == (not reads_whole(model)), (accelerates, error)


@pytest.mark.parametrize("architecture", in_sweep(READ_WHOLE, ("jamba",)))
def test_prompts_that_are_read_whole(architecture, monkeypatch, capsys):
    """A first turn and one behind it have the tokens of transformers' own generate()."""
    monkeypatch.setattr(prompt_reader, "AT_ONCE", 8)
    config = build_config(CONFIG_MAPPING[architecture], **RECURRENT[architecture])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    randomise(model, 0)
    generating = Generating(model, prompts.Prompts(1 << 30))
    for length in (20, 30):
        given = {"input_ids": IDS[:, :length], "attention_mask": torch.ones(1, length, dtype=torch.int64)}
        given |= {"max_new_tokens": 5, "do_sample": False}
        expected = model.generate(**given)
        assert torch.equal(generating.generate(**given), expected)
    assert f"own code of {architecture}" in capsys.readouterr().err
    with pytest.raises(ValueError, match=f"moe_mps::save_prompt_cache: .*{architecture}"):
        torch_moe_mps.save_prompt_cache("unused", model, IDS, new_cache(model))
