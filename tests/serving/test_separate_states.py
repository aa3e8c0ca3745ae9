"""Models whose sequences have layers of a cache for themselves: batched, cached and drafted as all others."""

import pytest
import torch
from support import tiny_models
from support.models import eager
from support.speculative import Answered, Partly, prompts, settings
from support.sweep import in_sweep

import torch_moe_mps

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
    expected = [alone(model, ids, 12) for ids in many]
    model.get_decoder().layers[0].register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    plain = Answered(model, many, [settings(12)] * 3, most=3)
    assert plain.answers == expected and max(seen) == 3
    drafted = Answered(model, many, [settings(12)] * 3, Partly(many, expected), most=3, width=3)
    assert drafted.answers == expected and drafted.batch.drafts.drafting.accepted > 3
