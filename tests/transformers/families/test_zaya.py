"""ZAYA: convolutions and half of the values by operators. Against transformers' own code in float64."""

import copy

import pytest
import torch
from support import tiny_models
from support.models import assert_close, eager, operators_of
from support.sweep import in_sweep

import torch_moe_mps
from torch_moe_mps.transformers.caches.deferred_states import deferred
from torch_moe_mps.transformers.caches.prompt_cache import new_cache
from torch_moe_mps.transformers.deferred_states import deferrable_layers
from torch_moe_mps.transformers.upstream.calls import cache_argument

OPERATOR = "causal_conv1d_update_"
FORMS = {
    "usual": {},
    # Values in front of the first token are not zero then.
    "longer convolutions, and biases": {"cca_time0": 4, "cca_time1": 3, "attention_bias": True},
}


def own_model(**changed):
    """With biases of convolutions and linear layers that are not zero."""
    model = eager(tiny_models.tiny_model("zaya", **changed))
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data = 0.5 * torch.randn(parameter.shape, generator=generator)
    return model


@torch.no_grad()
def logits_of(model, pieces, is_padded: bool) -> torch.Tensor:
    """Of two rows in pieces, the first one padded on the left or not."""
    ids = torch.randint(3, 90, (2, sum(pieces)), generator=torch.Generator().manual_seed(1))
    whole, cache, found, end = torch.ones_like(ids), new_cache(model), [], 0
    whole[0, :4] = 0
    for piece in ids.split(pieces, 1):
        end += piece.shape[1]
        mask = {"attention_mask": whole[:, :end]} if is_padded else {}
        out = model(input_ids=piece, **cache_argument(model, cache), use_cache=True, **mask)
        found.append(out.logits)
    return torch.cat(found, 1)[:, 4:].float()


@pytest.mark.parametrize("form", in_sweep(FORMS, ("longer convolutions, and biases",)))
def test_prompts_and_steps(form):
    own = own_model(**FORMS[form])
    model, pieces = copy.deepcopy(own), (9, 1, 1, 3, 1)
    report = torch_moe_mps.accelerate(model)
    rows = [row for row in report.rows if row.name.endswith("qkv_proj")]
    assert [row.replaced_by for row in rows] == [OPERATOR] * 2
    own.double()
    for is_padded in (False, True):
        assert_close(logits_of(model, pieces, is_padded), logits_of(own, pieces, is_padded), 1e-5)
    # A token alone, of two layers with two states each.
    assert operators_of(lambda: logits_of(model, (9, 1), False))[OPERATOR] == 2 * 2 * 2
    torch_moe_mps.restore(model)
    assert OPERATOR not in operators_of(lambda: logits_of(model, (9, 1), False))


@torch.no_grad()
def test_own_code_refuses_uncommitted_tokens():
    """It knows nothing of what is pending behind them."""
    model = own_model()
    torch_moe_mps.accelerate(model)
    cache = new_cache(model)
    model(torch.tensor([[5, 6, 7]]), **cache_argument(model, cache), use_cache=True)
    for number, kind in deferrable_layers(model).items():
        cache.layers[number] = deferred(cache.layers[number], kind)
    model(torch.tensor([[8]]), **cache_argument(model, cache), use_cache=True)
    model.model.layers[0].self_attn.qkv_proj.conv_qk_depthwise.register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="a state with uncommitted tokens is written in place alone"):
        model(torch.tensor([[9]]), **cache_argument(model, cache), use_cache=True)
