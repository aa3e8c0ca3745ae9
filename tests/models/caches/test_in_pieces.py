"""A prompt that is read in pieces, behind a cache, is the prompt; or it is read whole."""

import pytest
import torch
from support.jobs import answer_of
from support.models import in_parts
from support.sweep import in_sweep
from support.tiny_models import DENSE_ARCHITECTURES, architectures, build_config, randomise, tiny_model
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import torch_moe_mps
from torch_moe_mps.models.upstream.calls import cache_argument
from torch_moe_mps.serving.engine import prefill as prompt_reader
from torch_moe_mps.serving.engine.prefill import Prefill
from torch_moe_mps.serving.prefix_cache import memory as prompts
from torch_moe_mps.transformers.deferrable import forgets_states

IDS = torch.randint(2, 90, (1, 30), generator=torch.Generator().manual_seed(0))
PIECES = 7, 1, 5  # behind a first one
# Nothing is generated; a trial of eager lightning attention draws buffers that do not fit each other.
WITHOUT_CACHE = {"minimax", "openai_privacy_filter"}
# Caches of each kind: recurrent states, windows, compressed keys, and those that own code gets wrong.
OFTEN = ("jamba", "kimi_linear", "gpt_oss", "deepseek_v4", "lfm2_moe")
# Models whose own code forgets a cache in front of several tokens: Mamba-1.
FORGETTING = {
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
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
        parts, _ = in_parts(model, IDS, *PIECES, tells_positions=architecture == "bamba")
        pieces = torch.cat(parts, 1)
        error = (pieces - whole).norm() / whole.norm()
        assert (error < 1e-5) == (not forgets_states(model)), (accelerates, error)


def model_of(architecture: str, sizes: dict):
    config = build_config(CONFIG_MAPPING[architecture], **sizes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    randomise(model, 0)
    return model


def turns(length: int) -> dict:
    given = {"input_ids": IDS[:, :length], "attention_mask": torch.ones(1, length, dtype=torch.int64)}
    return given | {"max_new_tokens": 5, "do_sample": False}


@pytest.mark.parametrize("architecture", in_sweep(FORGETTING, ("jamba",)))
def test_prompts_that_are_read_whole(architecture, monkeypatch):
    """A first turn and one behind it have the tokens of transformers' own generate()."""
    monkeypatch.setattr(prompt_reader, "LARGEST_CHUNK", 8)
    model = model_of(architecture, FORGETTING[architecture])
    prefixes = prompts.PrefixCache(1 << 30)
    for length in (20, 30):
        expected = model.generate(**turns(length))[0, length:].tolist()
        assert answer_of(model, prefixes, IDS[:, :length], 5) == expected
    assert not prefixes.kept


@pytest.mark.parametrize(
    ("architecture", "sizes"),
    [
        ("jamba", FORGETTING["jamba"]),
        ("bamba", {"attn_layer_indices": [1]}),
        ("minimax", {}),
    ],
)
def test_prompts_in_pieces_behind_kept_ones(architecture, sizes, monkeypatch):
    """Of Mamba-1, once accelerated, of a model whose own code counts positions anew in each call, and of one
    that insists on a cache of its own.
    """
    monkeypatch.setattr(prompt_reader, "LARGEST_CHUNK", 8)
    model = model_of(architecture, sizes)
    expected = [model.generate(**turns(length))[0, length:].tolist() for length in (20, 30)]
    torch_moe_mps.accelerate(model)
    read, prefixes = [], prompts.PrefixCache(1 << 30)
    monkeypatch.setattr(prompt_reader, "END", 3)
    handle = model.register_forward_pre_hook(
        lambda _, args, given: read.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    assert [answer_of(model, prefixes, IDS[:, :length], 5) for length in (20, 30)] == expected
    handle.remove()
    steps = [1] * 4
    assert read == [8, 8, 1, 3, *steps, 7, 3, 3, *steps]


def read_all(prefill: Prefill, model) -> list[int]:
    """Tokens of each call of a model that reads a prompt."""
    sizes = []

    def call(cache, *, input_ids, **given):
        sizes.append(input_ids.shape[1])
        return model(input_ids=input_ids, **given, **cache_argument(model, cache))

    while prefill.chunks:
        prefill.compute(call)
    return sizes


@pytest.mark.parametrize(("whole", "sizes"), [(False, [8, 8, 8, 6]), (True, [30])])
def test_a_reader_takes_one_piece_where_it_must(whole, sizes, monkeypatch):
    monkeypatch.setattr(prompt_reader, "LARGEST_CHUNK", 8)
    model = tiny_model("qwen3_moe")
    prefill = Prefill(model, IDS, None, reads_whole=whole)
    assert prefill.chunks == len(sizes) and read_all(prefill, model) == sizes


def test_states_are_kept_of_the_first_and_the_last_places(monkeypatch):
    """Two of each, of all places at which they may be."""
    for name in ("LARGEST_CHUNK", "_EVERY"):
        monkeypatch.setattr(prompt_reader, name, 4)
    model = tiny_model("lfm2_moe")
    prefill = Prefill(model, IDS, prompts.PrefixCache(1 << 30))
    read_all(prefill, model)
    assert [*prefill.cached.states] == [4, 8, 24, 28]
