"""RecurrentGemma: states of recurrent blocks lie in the cache. Against transformers' own code in float64."""

import copy

import pytest
import torch
from support import tiny_models
from support.models import assert_close, generate, operators_of, prompt
from support.sweep import in_sweep
from transformers import DynamicCache

import torch_moe_mps
from torch_moe_mps.transformers.basics.state import state_of
from torch_moe_mps.transformers.caches.deferred_states import deferred
from torch_moe_mps.transformers.caches.prompt_cache import new_cache
from torch_moe_mps.transformers.capture.classes import captures_of
from torch_moe_mps.transformers.deferred_states import deferrable_layers
from torch_moe_mps.transformers.upstream.calls import cache_argument

ROUNDING = 1e-5
OPERATORS = "causal_conv1d_update_", "heads_mm", "rg_lru_"
PIECES = 9, *[1] * 8


def own_model(**overrides):
    """With a window that fills, and a recurrent block behind the attention."""
    sizes = {"num_hidden_layers": 4, "attention_window_size": 12}
    return tiny_models.tiny_model("recurrent_gemma", **sizes | overrides)


def accelerated(capture: bool = True, **overrides):
    model = own_model(**overrides)
    report = torch_moe_mps.accelerate(model, capture=capture)
    blocks = [row for row in report.rows if row.name.endswith((".0.temporal_block", ".3.temporal_block"))]
    assert [row.replaced_by for row in blocks] == ["; ".join(OPERATORS)] * 2
    return model


def talk(seed: int, batch: int = 1, tokens: int = sum(PIECES)) -> torch.Tensor:
    return torch.randint(2, 90, (batch, tokens), generator=torch.Generator().manual_seed(seed))


class Reading:
    """A conversation in a cache of its own, read piece by piece."""

    def __init__(self, model, ids: torch.Tensor):
        self.model, self.ids, self.cache, self.logits, self.read = model, ids, new_cache(model), [], 0

    def on(self, tokens: int) -> None:
        ids = self.ids[:, self.read : self.read + tokens]
        out = self.model(input_ids=ids, **cache_argument(self.model, self.cache), use_cache=True)
        self.logits.append(out.logits.detach())
        self.read += tokens

    def all(self, *pieces: int) -> torch.Tensor:
        for tokens in pieces:
            self.on(tokens)
        return torch.cat(self.logits, 1)


@torch.no_grad()
def whole(ids: torch.Tensor, **overrides) -> torch.Tensor:
    """The logits of a text by transformers' own code in float64, in one call without a cache."""
    return own_model(**overrides).double()(input_ids=ids, use_cache=False).logits.float()


@torch.no_grad()
@pytest.mark.parametrize("batch", in_sweep((1, 2), (1,)))
def test_tokens_are_one_call_and_right(simulated, batch):
    model = accelerated()
    module_by_module = copy.deepcopy(model)
    state_of(module_by_module).captures = None
    for seed in (0, 1):
        ids = talk(seed, batch)
        result = Reading(model, ids).all(*PIECES)
        assert_close(result, whole(ids), ROUNDING)
        assert_close(result, Reading(module_by_module, ids).all(*PIECES), ROUNDING)
    assert captures_of(model).reason is None and captures_of(model).programs
    names = ("conv1d_state", "recurrent_states")
    assert {getattr(m, name, None) for m in model.modules() for name in names} == {None}


@pytest.mark.sweep
@torch.no_grad()
def test_what_own_code_gets_wrong(simulated):
    """Two conversations in turn, several tokens behind a cache, and a cache that is used again."""
    model = accelerated()
    readings = [Reading(model, talk(seed)) for seed in (2, 3)]
    for tokens in PIECES:
        for reading in readings:
            reading.on(tokens)
    for reading in readings:
        assert_close(torch.cat(reading.logits, 1), whole(reading.ids), ROUNDING)
    assert captures_of(model).reason is None
    ids = talk(4, 2)
    assert_close(Reading(model, ids).all(5, 1, 6, 2, 3), whole(ids), ROUNDING)
    again = Reading(model, ids)
    again.all(4, 1, 1)
    again.cache.reset()
    again.read, again.logits = 0, []
    assert_close(again.all(*PIECES), whole(ids), ROUNDING)
    own = [Reading(own_model(), talk(seed)) for seed in (2, 3)]
    own[1].model = own[0].model
    for tokens in PIECES:
        for reading in own:
            reading.on(tokens)
    error = torch.cat(own[0].logits, 1) - whole(own[0].ids)
    assert error.abs().max() > 0.01  # why this test is here


@pytest.mark.sweep
def test_generate_twice_and_beams(simulated):
    """Another prompt on the same model, and beams, whose states follow them: the oracle has no cache."""
    model, own = accelerated(), own_model().double()
    for ids in (prompt(1), prompt(2, 5), prompt(1, 1)):
        assert torch.equal(generate(model, ids), generate(own, ids, use_cache=False))
        options = {"num_beams": 3, "max_new_tokens": 6}
        assert torch.equal(generate(model, ids, **options), generate(own, ids, use_cache=False, **options))


@torch.no_grad()
def test_copies_and_restoring(simulated):
    model, ids = accelerated(), talk(5)
    reading = Reading(model, ids)
    reading.all(9, 1, 1)
    fork = copy.copy(reading)
    fork.model, fork.cache, fork.logits = copy.deepcopy(model), copy.deepcopy(reading.cache), []
    fork.ids = torch.cat((ids[:, :11], talk(6)[:, :6]), 1)
    for _ in range(6):
        reading.on(1)
        fork.on(1)
    assert_close(torch.cat(reading.logits, 1), whole(ids), ROUNDING)
    assert_close(torch.cat(fork.logits, 1), whole(fork.ids)[:, 11:], ROUNDING)
    torch_moe_mps.restore(model)
    assert not {*OPERATORS} & operators_of(lambda: generate(model, prompt(1))).keys()
    assert torch.equal(generate(model, prompt(1)), generate(own_model(), prompt(1)))


def test_own_code_goes_on_with_the_states_of_the_cache():
    """With gradients, with hooks, and with an attribute changed on the way; and the operators behind it."""
    model, ids = accelerated(capture=False), talk(7)
    block, seen = model.model.layers[0].temporal_block, []
    reading = Reading(model, ids)
    with torch.no_grad():
        reading.all(9, 1)
    reading.on(1)  # with gradients
    with torch.no_grad():
        reading.on(1)
        hook = block.rg_lru.register_forward_hook(lambda *_: seen.append(None))
        reading.on(1)
        hook.remove()
        reading.on(1)
        block.act_fn = copy.deepcopy(block.act_fn)
        assert "rg_lru_" in operators_of(lambda: reading.on(1))  # of the other blocks
        reading.all(1, 1)
    assert len(seen) == 1
    assert_close(torch.cat(reading.logits, 1), whole(ids), ROUNDING)
    beginning = Reading(model, ids)
    beginning.on(9)
    loss = sum(logits.square().mean() for logits in [model(input_ids=ids, use_cache=True).logits])
    loss.backward()
    assert block.rg_lru.recurrent_param.grad.isfinite().all()
    with torch.no_grad():
        beginning.all(*PIECES[1:])
    assert_close(torch.cat(beginning.logits, 1), whole(ids), ROUNDING)


@torch.no_grad()
def test_own_code_refuses_uncommitted_tokens():
    """It knows nothing of what is pending behind them."""
    model = accelerated(capture=False)
    reading = Reading(model, talk(11))
    reading.all(9)
    for number, kind in deferrable_layers(model).items():
        reading.cache.layers[number] = deferred(reading.cache.layers[number], kind)
    reading.all(1)
    model.model.layers[0].temporal_block.rg_lru.register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="a state with uncommitted tokens is written in place alone"):
        reading.on(1)


def test_gradients_through_several_calls():
    """A loss over tokens of a cache has the gradients of the own code."""
    grads = []
    for model in (own_model(), accelerated(capture=False)):
        cache = DynamicCache(config=model.config)
        parts = talk(8, tokens=12).split([9, 1, 1, 1], 1)
        logits = [model(input_ids=p, **cache_argument(model, cache), use_cache=True).logits for p in parts]
        torch.cat(logits, 1).square().mean().backward()
        grads.append(model.model.layers[0].temporal_block.rg_lru.input_gate_weight.grad)
    assert_close(grads[1], grads[0], ROUNDING)


@torch.no_grad()
def test_a_cache_without_a_place_for_states():
    """One that was made without the config: the own code runs, and keeps them in its modules."""
    results = []
    for model in (own_model(), accelerated(capture=False)):
        reading = Reading(model, talk(9))
        reading.cache = DynamicCache()
        results.append(reading.all(*PIECES))
    assert_close(results[1], results[0], ROUNDING)


@torch.no_grad()
def test_padding_in_front(simulated):
    """As the own code has it: the recurrence begins anew at position 0, behind the padding."""
    ids, mask = talk(10, 2), torch.ones(2, 9, dtype=torch.int64)
    mask[0, :4] = 0
    options = {"attention_mask": mask, "max_new_tokens": 8, "output_logits": True}
    options |= {"return_dict_in_generate": True, "do_sample": False, "pad_token_id": 0}
    own, ours = (each.generate(ids[:, :9], **options) for each in (own_model(), accelerated()))
    assert torch.equal(ours.sequences, own.sequences)
    assert_close(ours.logits, own.logits, ROUNDING)
