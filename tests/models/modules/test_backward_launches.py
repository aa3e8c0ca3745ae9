"""How many kernels the backward of an expert layer launches, and what memory it takes."""

import copy
import functools
from collections import Counter
from typing import Any

import peft
import pytest
import torch
from support.launches import Launches, kernels_of, model_on_mps
from support.sweep import in_sweep
from torch import nn

import torch_moe_mps
from torch_moe_mps.models.basics.interface import is_experts

TOKENS = 40
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


def experts_of(model: nn.Module) -> nn.Module:
    return next(module for module in model.modules() if is_experts(module))


def layer_of(model: nn.Module) -> nn.Module:
    """The experts, or what PEFT has put around them."""
    return next(m.experts for m in model.modules() if isinstance(getattr(m, "experts", None), nn.Module))


def backward_of(layer: nn.Module, experts: Any, hidden: int, simulated) -> Counter[str]:
    """Names of operators and kernels -> how often the backward launches them."""
    x = torch.randn(TOKENS, hidden, dtype=torch.bfloat16, device="mps").requires_grad_()
    count = experts.num_experts
    ids = torch.stack([torch.randperm(count)[:2] for _ in range(TOKENS)]).to("mps")
    weights = torch.rand(TOKENS, 2, device="mps").requires_grad_()
    with simulated.dropped():  # what is launched does not depend on what is computed
        out = layer(x, ids, weights)
        gradient = torch.randn_like(out)
        with simulated.trace() as commands, Launches() as mode:
            out.backward(gradient)
    assert x.grad is not None and weights.grad is not None
    return mode.counts + kernels_of(commands)


@functools.cache
def quantised(architecture: str) -> nn.Module:
    model = model_on_mps(architecture)
    torch_moe_mps.accelerate(model, bits=4, group_size=32)
    return model


@pytest.mark.parametrize("architecture", in_sweep(["qwen3_moe", "gpt_oss"], ["gpt_oss"]))
def test_backward_of_a_layer(simulated, architecture):
    model = quantised(architecture)
    experts = experts_of(model)
    found = backward_of(layer_of(model), experts, model.config.hidden_size, simulated)
    assert sum(found.values()) <= 8, dict(found)


def test_backward_of_a_layer_with_lora(simulated):
    model = copy.deepcopy(quantised("qwen3_moe"))
    options: dict[str, Any] = {"r": 4, "init_lora_weights": False, "target_parameters": EXPERTS}
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options))
    experts = experts_of(adapted)
    found = backward_of(layer_of(adapted), experts, model.config.hidden_size, simulated)
    alone = quantised("qwen3_moe")
    more = found - backward_of(layer_of(alone), experts_of(alone), model.config.hidden_size, simulated)
    assert sum(more.values()) <= 8, dict(more)
    assert sum(found.values()) <= 16, dict(found)
