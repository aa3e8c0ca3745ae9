"""Tokens of models whose forward names its cache otherwise."""

import copy

import pytest
import torch
from support.models import assert_close, generate, prompt
from support.sweep import in_sweep
from support.tiny_models import tiny_model

import torch_moe_mps
from torch_moe_mps.transformers.capture.classes import captures_of


@pytest.mark.parametrize("architecture", in_sweep(("mamba", "mamba2", "falcon_mamba"), ("mamba2",)))
@torch.no_grad()
def test_mamba(architecture, simulated):
    """Captured, with the tokens and logits of the model's own code."""
    model = tiny_model(architecture)
    given = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    given |= {"return_dict_in_generate": True, "output_logits": True}
    expected = model.generate(prompt(), **given)
    torch_moe_mps.accelerate(model, capture=True)
    result = model.generate(prompt(), **given)
    assert torch.equal(result.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(result.logits), torch.stack(expected.logits), rtol=0, atol=2e-5)
    captures = captures_of(model)
    assert captures is not None and captures.programs, str(captures)


# RWKV: a list of tensors, which each call writes in place and gives back


def rwkv(dtype: torch.dtype = torch.float32):
    model = tiny_model("rwkv")
    for layer, block in enumerate(model.rwkv.blocks):  # time steps that differ from channel to channel
        for seed, part in enumerate((block.attention.time_decay, block.attention.time_first)):
            part.data = torch.randn(part.shape, generator=torch.Generator().manual_seed(9 * layer + seed))
    return model.to(dtype)


class Talk:
    """Tokens behind a prompt, with the states that are handed on."""

    def __init__(self, model, seed: int, batch: int = 1):
        ids = torch.randint(2, 90, (batch, 20), generator=torch.Generator().manual_seed(seed))
        self.model, self.tokens = model, [*ids[:, 9:].split(1, 1)]
        out = model(ids[:, :9], use_cache=True)
        self.state, self.logits = out.state, [out.logits[:, -1:]]

    def on(self) -> None:
        out = self.model(self.tokens.pop(0), state=self.state, use_cache=True)
        assert out.state is self.state  # as the own code has it
        self.logits.append(out.logits)

    def all(self) -> list[torch.Tensor]:
        while self.tokens:
            self.on()
        return [torch.cat(self.logits, 1).float(), *(each.float() for each in self.state)]

    def fork(self) -> "Talk":
        fork = copy.copy(self)
        fork.state, fork.tokens = [each.clone() for each in self.state], [*self.tokens]
        fork.logits = [*self.logits]
        return fork


@torch.no_grad()
@pytest.mark.sweep
@pytest.mark.parametrize("batch", (1, 3))
def test_rwkv(simulated, batch):
    """Two conversations in turn and a fork of one: logits and states of the own code in float64.

    Of several rows they are not those of each alone: the own code adds the states of all rows to each.
    """
    own, model = rwkv(), rwkv()
    torch_moe_mps.accelerate(model, capture=True)
    first, second = (Talk(model, seed, batch) for seed in range(2))
    for _ in range(5):
        first.on()
        second.on()
    fork, before = first.fork(), [each.clone() for each in first.state]
    fork.tokens[0] = fork.tokens[0] + 1
    forked = fork.all()
    assert all(map(torch.equal, first.state, before))
    captures = captures_of(model)
    assert captures is not None and captures.programs and captures.reason is None, str(captures)
    right = [Talk(own.double(), seed, batch) for seed in (0, 1, 0)]
    right[2].tokens[5] = right[2].tokens[5] + 1
    for ours, expected in zip((first.all(), second.all(), forked), right, strict=True):
        for result, exact in zip(ours, expected.all(), strict=True):
            assert_close(result, exact, 1e-5)
    assert captures.reason is None


@pytest.mark.sweep
def test_rwkv_generates(simulated):
    """Twice, by a copy and once more after `restore`: the tokens of the own code."""
    own, model = rwkv(), rwkv()
    torch_moe_mps.accelerate(model, capture=True)
    for ids in (prompt(1), prompt(1, 5), prompt(1, 1)):
        expected = generate(own, ids)
        assert torch.equal(generate(model, ids), expected)
        assert torch.equal(generate(copy.deepcopy(model), ids), expected)
    assert captures_of(model).reason is None
    torch_moe_mps.restore(model)
    assert captures_of(model) is None and torch.equal(generate(model, prompt(1)), generate(own, prompt(1)))


@torch.no_grad()
def test_states_of_another_form(simulated):
    """States that lie otherwise in memory, and a tuple, whose tensors the own code writes, too."""
    own, model = rwkv(), rwkv()
    torch_moe_mps.accelerate(model, capture=True)
    captures = captures_of(model)
    assert captures is not None
    Talk(model, 1).all()
    assert captures.reason is None
    for change, reason in (
        (lambda state: [turned(each) for each in state], None),
        (tuple, "state is a tuple"),
    ):
        talks = [Talk(each, 0) for each in (own, model)]
        for talk in talks:
            talk.state = change(talk.state)
        results = [talk.all() for talk in talks]
        assert_close(*reversed(results), 1e-5)
        assert captures.reason == reason


def turned(states: torch.Tensor) -> torch.Tensor:
    return states.mT.contiguous().mT
