"""Which calls are captured, how often, and what is said of the others."""

import warnings

import pytest
import torch
from support import tiny_models
from support.capturing import accelerated, assert_equal, pair
from support.models import Conversation, output, prompt
from transformers import DynamicCache

import torch_moe_mps
from torch_moe_mps import _environment
from torch_moe_mps.models.capture import policy, record
from torch_moe_mps.models.capture.classes import captures_of
from torch_moe_mps.models.capture.replay import Captures
from torch_moe_mps.models.upstream.calls import cache_among, cache_argument

pytestmark = pytest.mark.usefixtures("captured")


@torch.no_grad()
def test_kinds_behind_each_other():
    """A batch of one row has a program of its own, larger ones share one."""
    model, own = pair("qwen3_moe", "cpu")
    captures, programs = captures_of(model), []
    for batch in (1, 2, 3, 5, 1):
        mine, theirs = Conversation(model, batch=batch), Conversation(own, batch=batch)
        assert_equal(mine.tokens(4), theirs.tokens(4))
        assert captures.reason is None
        programs.append(captures.programs[0].match)
    assert len(captures.programs) == 2
    assert programs[3] is programs[2] is programs[1] and programs[4] is programs[0]


@torch.no_grad()
def test_masks_of_padding():
    """Key ranges are read anew for each token; what is no range runs too."""
    model, own = pair("gpt_oss", "cpu")
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    ids, shown = prompt(2, 60), torch.ones(2, 60, dtype=torch.int64)

    def tokens(begin, end, hidden=()):
        mask = shown.clone()
        for row, key in hidden:
            mask[row, key] = 0
        for first, stop in zip(range(begin, end), range(begin + 1, end + 1), strict=True):
            part = slice(0 if first == 30 else first, stop)
            results = [
                output(each, ids[:, part], attention_mask=mask[:, :stop], **cache_argument(each, cache))
                for each, cache in zip((model, own), caches, strict=True)
            ]
            assert torch.equal(*results)

    left = [(1, key) for key in range(4)]
    tokens(30, 36, left)
    captures = captures_of(model)
    (program,) = captures.programs
    tokens(36, 40, [(0, 0), (0, 1)])
    assert captures.programs == [program]
    tokens(40, 44)
    count = len(captures.programs[0].operators)
    assert len(captures.programs) == 2 and abs(count - len(program.operators)) <= 4
    tokens(44, 48, [(0, 10), (1, 20)])
    assert len(captures.programs) == 3
    tokens(48, 60, left)
    assert captures.programs[0].operators == program.operators


@torch.no_grad()
def test_an_unknown_cache_says_why():
    class Own(DynamicCache):
        pass

    model = accelerated("qwen3_moe", "cpu")
    Conversation(model, cache=Own(config=model.config)).tokens(4)
    assert str(captures_of(model)) == "tokens run module by module: the cache is a Own"


@pytest.mark.parametrize("own_cache", [False, True])
@torch.no_grad()
def test_short_prompts_cost_no_capture(own_cache):
    """They make a cache's states, and are no tokens behind others: the tokens behind them are captured."""
    model = accelerated("qwen3_moe", "cpu")
    captures = captures_of(model)
    for _ in range(9):
        cache = DynamicCache(config=model.config) if own_cache else None
        cache = cache_among(model(prompt(1, 5), **cache_argument(model, cache)))
        assert captures.reason in ("it fills an empty cache", "it makes a cache", policy.TOO_FEW)
    token = prompt(1, 1)
    for _ in range(4):  # the first makes the layers grow in place
        model(token, **cache_argument(model, cache))
    assert captures.reason is None and len(captures.programs) == 1, str(captures)


@torch.no_grad()
def test_a_fault_in_a_capture_warns_once(monkeypatch):
    """It stays the reason while the kind is not tried again, beside a kind that is one call or alone."""

    def fail(*args):
        raise ZeroDivisionError("injected")

    for tokens_before in (0, 4):
        model, own = pair("qwen3_moe", "cpu")
        mine, theirs = Conversation(model), Conversation(own)
        assert_equal(mine.tokens(tokens_before), theirs.tokens(tokens_before))
        with monkeypatch.context() as patch, warnings.catch_warnings():
            patch.setattr(record, "assemble", fail)
            mine.inputs = theirs.inputs = {"logits_to_keep": 1} if tokens_before else {}
            with pytest.warns(UserWarning, match=r"could not be captured.*ZeroDivisionError: injected"):
                assert_equal(mine.tokens(3), theirs.tokens(3))
            warnings.simplefilter("error")
            assert_equal(mine.tokens(12), theirs.tokens(12))
        assert captures_of(model).reason == "ZeroDivisionError: injected"


def test_the_switch(monkeypatch):
    monkeypatch.setenv(_environment.CAPTURE, "0")
    model = accelerated("qwen3_moe", "cpu")
    assert captures_of(model) is None and isinstance(model, tiny_models.model_class("qwen3_moe"))
    monkeypatch.setenv(_environment.CAPTURE, "yes")
    with pytest.raises(ValueError, match="MOE_MPS_CAPTURE must be 0, 1 or auto, got 'yes'"):
        torch_moe_mps.accelerate(model)
    monkeypatch.setenv(_environment.CAPTURE, "1")
    torch_moe_mps.accelerate(model)
    assert isinstance(captures_of(model), Captures) and isinstance(
        model, tiny_models.model_class("qwen3_moe")
    )
    torch_moe_mps.restore(model)
    assert captures_of(model) is None and type(model) is tiny_models.model_class("qwen3_moe")
