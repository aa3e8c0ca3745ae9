"""What a step is said to take: at least what is counted, and not many times that."""

import contextlib
import copy
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from support import tiny_models
from support.memory import Memory
from support.sweep import in_sweep

import torch_moe_mps
from torch_moe_mps.training import memory as memory_of_steps
from torch_moe_mps.training.memory import Peak, Ranks, parameters_of, peak_of, targets_in
from torch_moe_mps.training.steps import with_new_adapter
from torch_moe_mps.transformers.modules import loss


def counted_and_said(
    architecture: str,
    device: str,
    tokens: int,
    layers: int = 2,
    words: int = 97,
    around: Callable[[], AbstractContextManager] = contextlib.nullcontext,
) -> tuple[int, Peak]:
    """Bytes beside weights and adapter that a step of training takes at most, and what is said of it.

    The steps run in the context `around`.
    """
    with tiny_models.groups_of_32():
        dense = tiny_models.tiny_model(architecture, num_hidden_layers=layers, vocab_size=words)
    model = copy.deepcopy(dense).to(device)
    torch_moe_mps.accelerate(model, 4, 32, linear_bits=4, embedding_bits=4)
    ranks, ids = Ranks(8, 4), torch.randint(1, 90, (2, tokens)).to(device)
    adapted = with_new_adapter(model, targets_in(dense, None), ranks, "name").train()
    trained = [p for p in adapted.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) == parameters_of(dense, ranks)
    adapted.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with around():
        adapted(input_ids=ids, labels=ids, use_cache=False).loss.backward()  # the CPU keeps decoded weights
        for parameter in trained:
            parameter.grad = None
        with Memory([*model.parameters(), *model.buffers()]) as memory:
            before = memory.held()
            adapted(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    counted = memory.peak - before - sum(p.nbytes for p in trained)  # gradients are in the adapter's share
    return counted, peak_of(dense, 0, ranks, *ids.shape, 4)


@pytest.mark.slow("a model of each kind takes two steps of training")
@pytest.mark.parametrize("architecture", in_sweep(("qwen3_moe", "llama", "gpt_oss"), ("qwen3_moe", "llama")))
def test_peak(architecture):
    counted, said = counted_and_said(architecture, "cpu", 128)
    assert counted <= said.total - said.adapter
    assert said.checkpoints + said.layer + said.loss <= 3 * counted


@pytest.mark.sweep
def test_peak_on_the_device(simulated, monkeypatch):
    """At most checkpoints, one layer and one chunk of logits, in the tensors that operators hand to each
    other; two layers more add their checkpoints and nothing else."""
    words = 4000
    for module in (loss, memory_of_steps):
        monkeypatch.setattr(module, "LARGEST", 2 * words)
    # Memory does not depend on values, so nothing has to be computed.
    (two, said), (four, more) = (
        counted_and_said("qwen3_moe", "mps", 24, layers, words, simulated.dropped) for layers in (2, 4)
    )
    assert two <= said.total - said.adapter
    assert four - two <= more.checkpoints - said.checkpoints + 4096


def test_parameters_of_a_real_model():
    """A config alone tells: Qwen3-30B-A3B's experts at rank 16 have 629 million."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        hidden_size=2048, moe_intermediate_size=768, num_hidden_layers=48, num_experts=128,
        num_experts_per_tok=8, num_attention_heads=32, num_key_value_heads=4, head_dim=128, vocab_size=151936,
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config)
    attention = Ranks(16, 0, ["q_proj", "v_proj"])
    assert parameters_of(model, attention) == 16 * 48 * (2048 + 4096 + 2048 + 512)
    experts = parameters_of(model, Ranks(16, 16, ["q_proj", "v_proj"])) - parameters_of(model, attention)
    assert experts == 16 * 48 * 128 * (2048 + 1536 + 768 + 2048)
    with pytest.raises(
        ValueError, match=r"--targets must be linear layers, of which there are q_proj, .*got 'gate'"
    ):
        targets_in(model, ["gate"])
    at_2048 = peak_of(model, 17_200_000_000, attention, 1, 2048, 2)
    assert 17.5e9 < at_2048.total < 20e9
