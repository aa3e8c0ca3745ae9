"""Models whose sequences have layers of a cache for themselves: batched, cached and drafted as all others."""

import pytest
import torch
from support import tiny_models
from support.models import eager
from support.speculative import Answered, Partly, prompts, settings
from support.sweep import in_sweep, rows_in_sweep
from transformers import GenerationConfig

import torch_moe_mps
from torch_moe_mps.models.caches.batched import BatchedCache
from torch_moe_mps.models.caches.prompt_cache import new_cache
from torch_moe_mps.models.capture.classes import captures_of
from torch_moe_mps.models.trials.batching import reason_for_order
from torch_moe_mps.models.upstream.calls import cache_argument
from torch_moe_mps.transformers.deferrable import deferrable_layers

ARCHITECTURES = ("deepseek_v4", "glm5_next", "minimax_m3_vl", "qwen4_exp")


def alone(model, ids: torch.Tensor, new: int) -> list[int]:
    given = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return model.generate(ids[None], **given)[0, len(ids) :].tolist()


@pytest.mark.slow("answers of a model, with and without drafts")
@pytest.mark.parametrize("architecture", in_sweep(ARCHITECTURES, ("deepseek_v4", "qwen4_exp")))
@torch.no_grad()
def test_sequences_are_batched(architecture):
    """Tokens are those alone, with drafts and without; a call of the model has all sequences."""
    model, many, seen = eager(tiny_models.tiny_model(architecture)), prompts(3), []
    torch_moe_mps.accelerate(model)
    expected = [alone(model, ids, 9) for ids in many]
    model.get_decoder().layers[0].register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    plain = Answered(model, many, [settings(9)] * 3, most=3)
    assert plain.answers == expected and max(seen) == 3
    drafted = Answered(model, many, [settings(9)] * 3, Partly(many, expected), most=3, width=3)
    assert drafted.answers == expected and drafted.batch.drafts.drafting.accepted > 3


@pytest.mark.slow("answers of a model, alone and in a batch")
@torch.no_grad()
def test_draws_behind_prompts_of_one_token():
    """In a batch they are those of transformers' own loop with the same seed, from nine tokens each."""
    model, many = eager(tiny_models.tiny_model("deepseek_v4")), [torch.tensor([7]), *prompts(2)]
    given = {"max_new_tokens": 4, "do_sample": True, "top_k": 9, "pad_token_id": 0, "eos_token_id": None}
    expected = []
    for ids in many:
        torch.manual_seed(5)
        expected.append(model.generate(ids[None], **given)[0].tolist())
    torch_moe_mps.accelerate(model)
    configs = [GenerationConfig(**given)] * len(many)
    drawn = torch_moe_mps.generate_batch(model, many, configs, seed=[5] * len(many), progress=False)
    assert [[*ids.tolist(), *new.tolist()] for ids, new in zip(many, drawn, strict=True)] == expected


@pytest.mark.parametrize("architecture", in_sweep(ARCHITECTURES, ("glm5_next",)))
@torch.no_grad()
def test_models_that_are_not_accelerated_run_sequentially(architecture):
    """Nothing lets their modules run once for each sequence."""
    model, many = eager(tiny_models.tiny_model(architecture)), prompts(2)
    expected = [alone(model, ids, 6) for ids in many]
    assert Answered(model, many, [settings(6)] * 2, most=2).answers == expected


@pytest.mark.slow("a trial of a small model, and answers")
@torch.no_grad()
def test_eager_attention_of_sequences():
    """Its weights have another size for each sequence: they are not joined."""
    model, many = eager(tiny_models.tiny_model("deepseek_v4")), prompts(2)
    expected = [alone(model, ids, 4) for ids in many]
    torch_moe_mps.accelerate(model)
    model.set_attn_implementation("eager")
    seen = []
    model.get_decoder().layers[0].register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    assert Answered(model, many, [settings(4)] * 2, most=2).answers == expected and max(seen) == 2
    assert "cannot be tried" not in str(reason_for_order(model))


@pytest.mark.slow("answers of a model, alone and beside others")
@pytest.mark.parametrize(
    ("architecture", "rate"),
    rows_in_sweep(
        [("qwen4_exp", "indexer_compress_ratio"), ("glm5_next", "index_kpool")],
        [("qwen4_exp", "indexer_compress_ratio")],
    ),
)
@torch.no_grad()
def test_indexers_that_choose_each_key_alone(architecture, rate):
    """Positions that one of them keeps have no memory to grow in, and are of all three dimensions."""
    model, many = eager(tiny_models.tiny_model(architecture, **{rate: 1})), prompts(2)
    torch_moe_mps.accelerate(model)
    expected = [alone(model, ids, 6) for ids in many]
    assert Answered(model, many, [settings(6)] * 2, most=2).answers == expected


@pytest.mark.slow("captures of steps of two sequences, and of one")
@pytest.mark.parametrize("architecture", in_sweep(ARCHITECTURES, ("qwen4_exp",)))
@pytest.mark.parametrize("lengths", in_sweep([(20, 9), (20,)], [(20, 9)]), ids=str)
@torch.no_grad()
def test_steps_are_captured(architecture, lengths):
    """A program for each way in which pools of the sequences end; logits are those without a cache."""
    model, steps = eager(tiny_models.tiny_model(architecture)), 30
    torch_moe_mps.accelerate(model, capture=True)
    rows, talks, expected = BatchedCache(model, deferrable_layers(model)), [], []
    for number, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(number)
        ids, cache = torch.randint(2, 90, (1, length + steps), generator=generator), new_cache(model)
        model(input_ids=ids[:, :length], **cache_argument(model, cache), use_cache=True)
        rows.admit(cache, length)
        talks.append(ids[:, length:])
        expected.append(model(input_ids=ids, use_cache=False).logits[:, length:])
    expected, reasons = torch.cat(expected), []
    for step, token in enumerate(torch.cat(talks).split(1, 1)):
        out = model(input_ids=token, **cache_argument(model, rows.cache), **rows.arguments())
        rows.advance()
        reasons.append(captures_of(model).reason)
        assert (out.logits[:, 0] - expected[:, step]).abs().max() < 1e-5 * expected.abs().max()
    assert reasons.count(None) > steps - 12 and 1 <= len(captures_of(model).programs) <= 4
