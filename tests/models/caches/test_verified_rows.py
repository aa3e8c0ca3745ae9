"""Steps that verify drafts: each row has the logits of its tokens that transformers' own code gives them."""

import copy

import pytest
import torch
from support import tiny_models
from support.models import eager
from support.sweep import in_sweep

import torch_moe_mps
from torch_moe_mps._environment import CAPTURE
from torch_moe_mps.models.attention.attention import NAME
from torch_moe_mps.models.caches import growing
from torch_moe_mps.models.caches.batched import BatchedCache, NotBatchable
from torch_moe_mps.models.caches.cache import hands_cache_on
from torch_moe_mps.models.caches.prompt_cache import new_cache
from torch_moe_mps.models.trials.batching import reason_against_rows, reason_for_order
from torch_moe_mps.models.upstream.calls import cache_argument
from torch_moe_mps.transformers.deferrable import deferrable_layers, forgets_states

CAUSAL = {*tiny_models.architectures(), *tiny_models.DENSE_ARCHITECTURES, *tiny_models.other_causal()}
# They give no logits of text, or their own code runs no conversation at these sizes, or in no plain cache.
OTHERS = {
    "blt", "diffusion_gemma", "dory", "gemma3n", "gemma4_assistant", "gemma4_unified_assistant",
    "muse_spark", "musicgen", "musicgen_melody",
    "openai_privacy_filter", "qwen3_omni_moe", "qwen4_exp", "qwen4_exp_text", "xlm", "xlstm",
}  # fmt: skip
# Models whose conversations are no rows, or that read several tokens behind a cache wrongly: none is drafted.
NO_ROWS = {
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "camembert", "cpmant",
    "data2vec-text", "git", "marian", "mbart", "mvp",
    "openai-gpt", "pegasus", "plbart", "prophetnet", "recurrent_gemma", "reformer",
    "roberta", "roberta-prelayernorm", "roformer", "rwkv", "trocr", "unlimited_ocr", "xlm-roberta",
    "xlm-roberta-xl", "xlnet", "xmod", "zamba",
}  # fmt: skip
OWN_STEPS = {"nemotron_h", "zamba2"}  # a token alone has other time steps than in a prompt
# Windows, latents, a model that takes no positions, and states that lag: Mamba-2 beside keys, convolutions.
OFTEN = ("gpt_oss", "deepseek_v3", "git", "zamba2", "lfm2_moe")
LENGTHS = (9, 14)
# How many tokens of each row are right, in steps of four.
RIGHT = ([4, 1], [1, 3], [2, 2], [0, 4], [3, 3], [4, 2], [4, 4])


def own_model(architecture: str):
    """With transformers' own code. A window moves on within a conversation."""
    if architecture in tiny_models.other_causal():
        return eager(tiny_models.other_model(architecture))
    with tiny_models.groups_of_32():
        short = {"sliding_window": 6} if architecture == "gpt_oss" else {}
        states = tiny_models.WITH_STATES.get(architecture, {})
        return eager(tiny_models.tiny_model(architecture, **short, **states))


def logits_of(own, ids: torch.Tensor, length: int) -> torch.Tensor:
    """The logits of a conversation, by the model alone."""
    if own.config.model_type not in OWN_STEPS:
        return own(ids, use_cache=False).logits[0]
    cache = new_cache(own)
    pieces = [ids[:, :length], *ids[:, length:].split(1, 1)]
    return torch.cat([own(piece, **cache_argument(own, cache)).logits[0] for piece in pieces])


def joined(model, talks: list[torch.Tensor]) -> BatchedCache | str:
    """Rows of the first tokens of conversations; or why there are none, or none with drafts."""
    if not hands_cache_on(model):
        return "its states are in no cache"
    if forgets_states(model):
        return "it reads prompts whole"
    if (reason := reason_against_rows(model)) is not None:
        return reason
    rows = BatchedCache(model, deferrable_layers(model))
    for ids, length in zip(talks, LENGTHS, strict=True):
        cache = new_cache(model)
        model(input_ids=ids[:, :length], **cache_argument(model, cache), use_cache=True)
        try:
            rows.admit(cache, length)
        except NotBatchable as reason:
            return str(reason)
    return rows


def memories_of(rows: BatchedCache) -> list[int]:
    keys = [getattr(layer, "keys", None) for layer in rows.cache.layers]
    return [each.untyped_storage().data_ptr() for each in keys if each is not None]


@pytest.mark.slow("two conversations of a model, whose steps are captured")
@pytest.mark.parametrize("architecture", in_sweep(sorted(CAUSAL - OTHERS), OFTEN))
@torch.no_grad()
def test_each_row_has_the_logits_of_its_tokens_alone(architecture, monkeypatch):
    """Whatever rows take back: each its own number of tokens, or all the same where the model needs it.

    They move to larger memory in front of a call that needs it, and no layer does so by itself.
    """
    monkeypatch.setenv(CAPTURE, "1")
    monkeypatch.setattr(growing, "LEAST_SPARE", 6)
    own = own_model(architecture)
    model = copy.deepcopy(own)
    torch_moe_mps.accelerate(model)
    model.set_attn_implementation(NAME)
    generator = torch.Generator().manual_seed(0)
    talks = [torch.randint(2, 90, (1, length + 28), generator=generator) for length in LENGTHS]
    rows = joined(model, talks)
    if isinstance(rows, str):
        assert architecture in NO_ROWS, rows
        return
    assert architecture not in NO_ROWS
    expected = [logits_of(own, ids, length) for ids, length in zip(talks, LENGTHS, strict=True)]
    in_order, done = reason_for_order(model) is not None, [*LENGTHS]
    for right in RIGHT:
        if rows.are_states:
            right = [count if count == 4 else 0 for count in right]
        if in_order:
            right = [min(right)] * 2
        tokens = torch.full((2, 4), 7)
        for row, (count, first) in enumerate(zip(right, done, strict=True)):
            tokens[row, :count] = talks[row][0, first : first + count]
        arguments = rows.arguments(4)
        if rows.are_states:
            rows.hold()
        memories = memories_of(rows)
        logits = model(input_ids=tokens, **cache_argument(model, rows.cache), **arguments).logits
        assert memories_of(rows) == memories
        rows.advance(4)
        for row, (count, first) in enumerate(zip(right, done, strict=True)):
            own_logits = expected[row][first : first + count]
            if count:
                error = (logits[row, :count] - own_logits).abs().max() / own_logits.abs().max()
                assert error <= 1e-5, (row, first, float(error))
        if min(right) < 4:
            rows.take_back([4 - count for count in right])
        done = [first + count for first, count in zip(done, right, strict=True)]
