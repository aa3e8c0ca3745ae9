"""A cache that grows is right for whatever code runs on it: every architecture against transformers alone.

Calls of one cache are made in turn by the replaced forwards, by the model's own code, with gradients and with
hooks, and with positions by hand.
"""

import contextlib
import copy
import inspect
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
import transformers
from support import tiny_models
from support.models import assert_close, eager
from support.sweep import in_sweep, rows_in_sweep
from transformers import DynamicCache

import torch_moe_mps
from torch_moe_mps._environment import CAPTURE
from torch_moe_mps.models.capture.classes import captures_of
from torch_moe_mps.models.upstream.calls import cache_among, cache_argument

transformers.logging.set_verbosity_error()
# One for each kind of layers that caches have, and each of our own implementations of attention.
TELLING = ("deepseek_v4", "gpt_oss", "minimax_m3_vl", "qwen3_next", "qwen4_exp")
# Their own code forgets its states in front of several tokens, so that it is right for one alone.
FORGET = ("jamba",)
ROUNDINGS = {"lara_mini": 2e-5}  # the relative error of most is less
IDS = torch.randint(3, 90, (2, 64), generator=torch.Generator().manual_seed(11))


@contextlib.contextmanager
def hooks(model):
    """Two of every module, which see everything and change nothing."""
    handles = []
    for module in model.modules():
        handles.append(module.register_forward_hook(lambda *_: None))
        handles.append(module.register_forward_pre_hook(lambda *_: None))
    try:
        with torch.no_grad():
            yield
    finally:
        for handle in handles:
            handle.remove()


def no_grad(model):
    return torch.no_grad()


def gradients(model):
    return torch.enable_grad()


@contextlib.contextmanager
def idle_gradients(model):
    """Gradients are on, and no weight asks for them, as in a quantised model: replaced forwards run."""
    asked = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.requires_grad_(False)
    try:
        with torch.enable_grad():
            yield
    finally:
        for parameter in asked:
            parameter.requires_grad_(True)


# (new tokens, how they run, their positions less the cache's); "own" is the model that was not accelerated.
Step = tuple[int, Callable, int]
OWN = "own"
FIRST_REPLACED: list[Step] = [
    (9, no_grad, 0),
    (1, gradients, 0),
    (1, no_grad, 0),
    (1, OWN, 0),
    (3, no_grad, 0),
    (1, hooks, 0),
    (2, OWN, 0),
    (1, no_grad, 2),
    (4, no_grad, 2),
    (2, gradients, 3),
    (1, idle_gradients, 0),
    (1, no_grad, 0),
    (2, idle_gradients, 0),
    (1, hooks, 0),
    (1, no_grad, 0),
]
FIRST_OWN: list[Step] = [
    (7, gradients, 0),
    (1, gradients, 0),
    (1, idle_gradients, 0),
    (2, no_grad, 0),
    (1, OWN, 0),
    (2, hooks, 0),
    (1, gradients, 1),
    (1, no_grad, 0),
    (1, no_grad, 0),
]
# A token is captured at the third of its kind.
CAPTURED: list[Step] = [
    (9, no_grad, 0),
    *[(1, no_grad, 0)] * 5,
    (1, gradients, 0),
    (1, no_grad, 0),
    (1, OWN, 0),
    *[(1, no_grad, 0)] * 2,
    (1, hooks, 0),
    *[(1, no_grad, 0)] * 2,
]
ORDERS = {"replaced first": FIRST_REPLACED, "own first": FIRST_OWN}


def call(model, ids, cache, begin: int, moved: int):
    given = {}
    if moved:
        positions = torch.arange(begin, begin + ids.shape[1]) + moved
        given["position_ids"] = positions.expand(len(ids), -1)
    if cache is not None:
        given |= cache_argument(model, cache)
    return model(input_ids=ids, use_cache=True, **given)


def run(architecture: str, steps: list[Step]) -> Iterator:
    """The accelerated model, after each call."""
    own = eager(tiny_models.tiny_model(architecture))
    model = copy.deepcopy(own)
    torch_moe_mps.accelerate(model)
    takes = inspect.signature(own.forward).parameters
    begin, cache, right_cache = 0, None, None
    for number, (tokens, way, moved) in enumerate(steps):
        if number and architecture in FORGET:
            tokens = 1
        ids = IDS[:, begin : begin + tokens]
        moved = moved if "position_ids" in takes else 0
        with torch.no_grad():
            right = call(own, ids, right_cache, begin, moved)
        with no_grad(own) if way == OWN else way(model):
            out = call(own if way == OWN else model, ids, cache, begin, moved)
        try:
            assert_close(out[0].detach(), right[0], ROUNDINGS.get(architecture, 1e-5))
        except AssertionError as error:
            raise AssertionError(f"call {number}, {steps[number]}: {error}") from None
        cache, right_cache = map(cache_among, (out, right))
        begin += 0 if cache is None else tokens
        if cache is not None and number == len(steps) // 2:  # as beams do
            for each in (cache, right_cache):
                each.reorder_cache(torch.tensor([1, 0]))
                # MiniMax-01's own cache leaves these where they are.
                for states in getattr(each, "linear_cache", ()):
                    states[:] = states[[1, 0]] if len(states) else states
        yield model


EVERY = [*tiny_models.architectures(), *tiny_models.DENSE_ARCHITECTURES]


@pytest.mark.parametrize(
    ("architecture", "order"),
    rows_in_sweep(itertools.product(EVERY, ORDERS), [*zip(TELLING, itertools.cycle(ORDERS), strict=False)]),
)
def test_code_of_all_kinds_in_turn(architecture, order, monkeypatch):
    monkeypatch.setenv(CAPTURE, "0")
    steps = ORDERS[order]
    assert len([*run(architecture, steps)]) == len(steps)


@pytest.mark.sweep
@pytest.mark.parametrize("architecture", EVERY)
def test_captured_tokens_in_turn_with_others(architecture, monkeypatch):
    monkeypatch.setenv(CAPTURE, "1")
    captured = []
    for model in run(architecture, CAPTURED):
        captures = captures_of(model)
        captured.append(captures is not None and captures.programs != [])
        print(architecture, captures)
    assert any(captured)


# Attention that came with "sdpa" and runs on our implementation, and one that came with "eager"; routers.
RECORDED = ("deepseek_v32", "gpt_oss", "qwen3_moe")


@pytest.mark.parametrize("architecture", in_sweep(EVERY, RECORDED))
def test_recorded_outputs(architecture):
    """Hidden states, logits of routers, and the weights of attention, which torch's has none of."""
    own = eager(tiny_models.tiny_model(architecture))
    model = copy.deepcopy(own)
    torch_moe_mps.accelerate(model)
    asked = {"output_attentions": True, "output_hidden_states": True}
    asked |= {"output_router_logits": True} if hasattr(own.config, "output_router_logits") else {}
    for mode in (torch.no_grad, torch.enable_grad):
        with mode():
            out, right = (each(input_ids=IDS[:, :9], **asked) for each in (model, own))
        for name in ("attentions", "hidden_states", "router_logits"):
            ours, theirs = getattr(out, name, None), getattr(right, name, None)
            assert type(ours) is type(theirs) and len(ours or ()) == len(theirs or ())
            for each, expected in zip(ours or (), theirs or (), strict=True):
                assert_close(each.detach(), expected.detach(), 1e-5)


@pytest.mark.parametrize("architecture", ["deepseek_v3", "minimax_m3_vl"])
def test_gradients_through_a_cache(architecture):
    """Those of a prompt's embeddings, from tokens behind it, through weights that ask for none."""
    own = eager(tiny_models.tiny_model(architecture)).requires_grad_(False)
    model = copy.deepcopy(own)
    torch_moe_mps.accelerate(model)
    gradients = []
    for each in (model, own):
        embeddings = each.get_input_embeddings()(IDS[:, :7]).requires_grad_()
        cache = DynamicCache(config=each.config)
        each(inputs_embeds=embeddings, **cache_argument(each, cache))
        each(input_ids=IDS[:, 7:10], **cache_argument(each, cache))
        each(input_ids=IDS[:, 10:11], **cache_argument(each, cache)).logits.square().sum().backward()
        gradients.append(embeddings.grad)
    assert_close(*gradients, 1e-5)
