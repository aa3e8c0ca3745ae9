"""LongCat-Flash: experts that give back their input. Against transformers' own code in float64."""

import copy

import pytest
import torch
from support import tiny_models
from support.models import assert_close, in_parts, operators_of
from support.sweep import in_sweep

import torch_moe_mps
from torch_moe_mps.transformers.basics.state import original_class
from torch_moe_mps.transformers.capture.classes import captures_of

ROUNDING = 1e-5
IDS = torch.randint(2, 90, (2, 20), generator=torch.Generator().manual_seed(0))


def own_model():
    """As many experts without weights as with them."""
    return tiny_models.other_model("longcat_flash", zero_expert_num=8)


@pytest.mark.parametrize("batch", in_sweep((1, 2), (1,)))
def test_tokens_are_one_call_and_right(simulated, batch):
    with torch.no_grad():
        exact = own_model().double()(IDS[:batch]).logits.float()
    model = own_model()
    torch_moe_mps.accelerate(model, capture=True)
    logits, _ = in_parts(model, IDS[:batch], *[1] * 8)
    assert_close(torch.cat(logits, 1), exact, ROUNDING)
    assert captures_of(model).programs and captures_of(model).reason is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_experts_with_and_without_weights(dtype):
    """Of any tokens, none among them; a hook on what gives back sees it. The oracle is the own code, wide."""
    model = own_model().to(dtype)
    torch_moe_mps.accelerate(model)
    experts = next(m for m in model.modules() if type(m).__name__ == "LongcatFlashExperts")
    own, cls = copy.deepcopy(experts).double(), original_class(experts)
    assert experts.total_experts == 16 and experts.num_routed_experts == 8
    for tokens in (0, 1, 33):
        generator = torch.Generator().manual_seed(tokens)
        x = torch.randn(tokens, experts.hidden_size, generator=generator).to(dtype)
        ids = torch.rand(tokens, 16, generator=generator).topk(3)[1]
        weights = torch.rand(tokens, 3, generator=generator)
        results = []
        used = operators_of(lambda: results.append(experts(x, ids, weights)))  # noqa: B023
        assert used == {"moe_experts": 1}
        if tokens:
            exact = cls.forward(own, x.double(), ids, weights.double())
            assert_close(results[0].float(), exact.float(), 1e-5 if dtype == torch.float32 else 0.01)
    seen = []
    experts.identity_expert.register_forward_hook(lambda *_: seen.append(None))
    assert_close(experts(x, ids, weights).float(), exact.float(), 1e-5 if dtype == torch.float32 else 0.02)
    assert len(seen) == 8
