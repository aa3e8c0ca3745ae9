#!/usr/bin/env python
"""Prints the accuracy of LoRA on quantised weights, the memory of a step, and the dispatches of a backward.

Tiny random models in 4 bits, with an adapter of rank 4 on queries, outputs and experts, beside PEFT's own on
dense models with the same values: gradients against float64, 20 steps of AdamW, the bytes that a step takes
beside weights and adapter, and launches of the backward of a layer of experts, counted in the simulator (on
Linux). It takes two minutes of a CPU.
"""

import copy
import sys
from collections.abc import Callable

import paths  # noqa: F401

if sys.platform == "linux":
    from support.simulated import install

    install()  # in front of whatever asks torch for MPS

import peft
import simulator
import torch
from support import tiny_models
from support.launches import Launches, kernels_of
from support.memory import Memory
from support.models import eager, prompt
from torch import Tensor, nn
from torch.nn import functional

import torch_moe_mps
from torch_moe_mps.transformers.basics.interface import is_experts
from torch_moe_mps.transformers.modules import loss

ARCHITECTURES = ("qwen3_moe", "mixtral", "gpt_oss")
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
LINEAR = ["q_proj", "o_proj"]
STEPS = 20
WORDS = 2000  # where memory is counted


def pair(
    architecture: str, dtype: torch.dtype = torch.float32, words: int = 97
) -> tuple[nn.Module, nn.Module]:
    """A packed model and the dense one with its values, each with the same adapter."""
    with tiny_models.groups_of_32():
        dense = eager(tiny_models.tiny_model(architecture, vocab_size=words))
    packed = copy.deepcopy(dense)
    torch_moe_mps.accelerate(packed, 4, 32, linear_bits=4)
    if dtype != torch.float32:  # scales that are rounded, as a checkpoint in this dtype has them
        packed = packed.to(dtype).float()
    dense = tiny_models.dense_twin(dense, packed)
    packed, dense = (adapted(model) for model in (packed, dense))
    packed = packed.to(dtype)
    dense.load_state_dict(packed.state_dict(), strict=False)  # norms and the adapter
    return packed, dense


def adapted(model: nn.Module, **targets: list[str]) -> nn.Module:
    torch.manual_seed(0)
    chosen = targets or {"target_modules": LINEAR, "target_parameters": EXPERTS}
    config = peft.LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM", **chosen)
    return peft.get_peft_model(model, config).eval()


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def loss_of(model: nn.Module) -> Tensor:
    logits = model(input_ids=prompt(), use_cache=False).logits
    return functional.cross_entropy(logits.double().flatten(0, 1), prompt().flatten())


def gradients(model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    loss_of(model).backward()
    return {name: parameter.grad.double() for name, parameter in trained(model).items()}


def errors(architecture: str, dtype: torch.dtype) -> list[float]:
    """Distances of all gradients from those in float64, beside their norm: packed, dense."""
    packed, dense = pair(architecture, dtype)
    right = gradients(copy.deepcopy(dense).double())
    size = sum(each.square().sum() for each in right.values())
    found = (gradients(model) for model in (packed, dense.to(dtype)))
    return [
        float((sum((g[n] - each).square().sum() for n, each in right.items()) / size).sqrt()) for g in found
    ]


def steps(architecture: str) -> tuple[float, float]:
    """The most that losses of two trainings differ, and what the dense one gains."""
    curves = []
    for model in pair(architecture):
        optimizer, curve = torch.optim.AdamW(trained(model).values(), lr=2e-3, weight_decay=0), []
        for _ in range(STEPS):
            optimizer.zero_grad()
            value = loss_of(model)
            value.backward()
            optimizer.step()
            curve.append(value.item())
        curves.append(curve)
    return max(abs(a - b) for a, b in zip(*curves, strict=True)), curves[1][0] - curves[1][-1]


def peak(make: Callable[[], nn.Module], is_whole: bool) -> int:
    """Bytes beside weights and adapter that a step of 2 x 128 tokens takes with checkpoints.

    Args:
        is_whole: logits of all tokens in place of chunks of 32.
    """
    largest, loss.LARGEST = loss.LARGEST, 1 << 40 if is_whole else 32 * WORDS
    model, ids = make().train(), torch.randint(1, 90, (2, 128))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()  # the CPU keeps decoded weights
    model.zero_grad()
    with Memory([*model.parameters(), *model.buffers()]) as memory:
        before = memory.held()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    loss.LARGEST = largest
    return memory.peak - before - sum(p.nbytes for p in trained(model).values())


def launches(architecture: str) -> list[int]:
    """Launches of the backward of a layer of experts for 40 tokens: without an adapter, and with one."""
    counts = []
    for has_adapter in (False, True):
        with tiny_models.groups_of_32():
            model = tiny_models.tiny_model(architecture, torch.bfloat16).to("mps")
        torch_moe_mps.accelerate(model, 4, 32, linear_bits=4)
        experts = next(module for module in model.modules() if is_experts(module))
        if has_adapter:
            model = adapted(model, target_parameters=EXPERTS)
        layer = next(m.experts for m in model.modules() if isinstance(getattr(m, "experts", None), nn.Module))
        x = torch.randn(40, model.config.hidden_size, dtype=torch.bfloat16, device="mps").requires_grad_()
        ids = torch.stack([torch.randperm(experts.num_experts)[:2] for _ in range(40)]).to("mps")
        weights = torch.rand(40, 2, device="mps").requires_grad_()
        out = layer(x, ids, weights)
        gradient = torch.ones_like(out)
        with simulator.trace() as commands, Launches() as mode:
            out.backward(gradient)
        counts.append(sum((mode.counts + kernels_of(commands)).values()))
    return counts


def main() -> None:
    print("| | " + " | ".join(ARCHITECTURES) + " |\n| --- |" + " --: |" * len(ARCHITECTURES))
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        found = [errors(architecture, dtype) for architecture in ARCHITECTURES]
        for label, place in (("packed", 0), ("dense", 1)):
            show(f"gradients in {name} from float64's, {label}", [f"{each[place]:.1e}" for each in found])
    curves = [steps(architecture) for architecture in ARCHITECTURES]
    show(f"{STEPS} steps: losses of packed and dense differ by", [f"{most:.1e}" for most, _ in curves])
    show(f"{STEPS} steps: the loss falls by", [f"{gained:.2f}" for _, gained in curves])
    for label, which, is_whole in (
        ("dense, all logits", 1, True),
        ("packed, all logits", 0, True),
        ("packed, loss in chunks", 0, False),
    ):
        sizes = [peak(lambda a=a, which=which: pair(a, words=WORDS)[which], is_whole) for a in ARCHITECTURES]
        show(f"peak of a step, KiB: {label}", [f"{size / 1024:,.0f}" for size in sizes])
    if sys.platform == "linux":
        counts = [launches(architecture) for architecture in ARCHITECTURES]
        show("dispatches of a backward of experts", [str(each[0]) for each in counts])
        show("the same with an adapter on both matrices", [str(each[1]) for each in counts])


def show(what: str, cells: list[str]) -> None:
    print(f"| {what} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
