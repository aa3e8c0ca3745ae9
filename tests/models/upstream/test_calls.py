"""Arguments of calls are bound by what they are for; what is not understood runs the model's own code."""

import copy
import inspect
import sys
from collections import Counter
from typing import Optional

import pytest
import torch
from support import tiny_models
from support.edited import EDITS, edited_model
from support.models import eager, operators_of, prompt
from support.sweep import covering, in_sweep
from transformers import Cache, DynamicCache, EncoderDecoderCache

import torch_moe_mps
from torch_moe_mps.models.basics.state import original_class
from torch_moe_mps.models.upstream.calls import (
    Binder,
    cache_among,
    cache_argument,
    cache_name,
    decoder_cache,
    in_place,
)
from torch_moe_mps.transformers.install import is_rewritten

CACHE = DynamicCache()


def of(text: str):
    """A function with these arguments that returns nothing."""
    made: dict = {"Cache": Cache, "DynamicCache": DynamicCache, "Optional": Optional}
    exec(f"def own({text}): pass", made)
    return made["own"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("self, x, cache=None", "cache"),
        ("self, x, past_key_values=None, **kwargs", "past_key_values"),
        ("self, x, cache_params=None", "cache_params"),
        ("self, x, kv: Cache | None = None, cache: int = 0", "kv"),
        ("self, x, kv: 'DynamicCache | None' = None", "kv"),
        ("self, x, kv: Optional[Cache] = None", "kv"),
        ("self, x, cached: bool = False", None),
        ("self, x, **kwargs", None),
    ],
)
def test_the_cache_is_found_by_its_type_then_by_its_name(arguments, expected):
    own = of(arguments)
    assert cache_name(own) == expected
    assert cache_argument(own, CACHE) == {expected or "cache": CACHE}


def test_the_cache_is_found_among_values():
    both = EncoderDecoderCache(DynamicCache(), DynamicCache())
    assert cache_among({"a": 1, "whatever": CACHE}) is CACHE
    assert cache_among({"cache": None}) is None and cache_among({}, default=3) == 3
    assert decoder_cache(both) is both.self_attention_cache and decoder_cache(None) is None


OWN = "self, x, past: Cache | None = None, mask=None, scale=1.0, **kwargs"


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((5,), {}, {"hidden": 5}),
        ((5, CACHE), {}, {"hidden": 5, "cache": CACHE}),
        ((), {"x": 5, "past": CACHE, "mask": 7}, {"hidden": 5, "cache": CACHE, "mask": 7}),
        ((5,), {"scale": 1.0}, {"hidden": 5}),  # its default
        ((5,), {"scale": None, "unknown": None}, {"hidden": 5}),
        ((5,), {"position_ids": 3, "use_cache": True}, {"hidden": 5}),  # options that the code does not name
        ((5,), {"scale": 2.0}, None),
        ((5,), {"unknown": 0}, None),
        ((5,), {"cache": CACHE}, None),  # the code has another name for it
        ((5,), {"x": 6}, None),
        ((), {"past": CACHE}, None),
        ((1, 2, 3, 1.0, 5), {}, None),
    ],
)
def test_what_a_call_gives_to_a_forward_of_ours(args, kwargs, expected):
    def ours(module, hidden, cache=None, mask=None):
        return hidden

    bound = Binder(of(OWN), ours)(args, kwargs)
    assert bound == (None if expected is None else ((), expected))


def test_a_cache_among_options_is_the_cache():
    def ours(module, x, cache=None):
        return x

    assert Binder(of("self, x, **kwargs"), ours)((1,), {"anything": CACHE}) == ((), {"x": 1, "cache": CACHE})


def test_arguments_in_their_order_stay_so():
    def ours(module, *args, **named):
        return args

    bound = Binder(of("self, a, b=None"), ours)
    assert bound((1, 2), {}) == ((1, 2), {}) and bound((1,), {"b": 2}) == ((1,), {"b": 2})
    assert bound((1,), {"c": 2}) is None


def test_what_wants_more_runs_the_own_code():
    def own(self, x, **options):
        return "own", options

    forward = in_place(own, lambda module, x: NotImplemented if x == 0 else "ours")
    assert forward(None, 1) == "ours" and forward(None, 0) == ("own", {})
    assert forward(None, 1, other=2) == ("own", {"other": 2})


# Every rewritten forward of every architecture

FEW = ("deepseek_v3", "deepseek_v4", "glm_moe_dsa", "kimi_linear", "minimax", "minimax_m3_vl")
ARCHITECTURES = sorted({*tiny_models.architectures(), *tiny_models.DENSE_ARCHITECTURES, "mamba2"})


def tiny(architecture: str):
    build = tiny_models.other_model if architecture in tiny_models.other_causal() else tiny_models.tiny_model
    return build(architecture)


class _OwnCode:
    """Sees whether code of a function runs, or of a copy in which names are others."""

    def __init__(self, function) -> None:
        self.code, self.runs = inspect.unwrap(function).__code__, 0

    def __call__(self, frame, event, _) -> None:
        code = frame.f_code
        place = code.co_filename, code.co_firstlineno
        self.runs += event == "call" and place == (self.code.co_filename, self.code.co_firstlineno)


@pytest.mark.parametrize("architecture", in_sweep(ARCHITECTURES, FEW))
def test_an_unknown_keyword_runs_the_own_code(architecture):
    """A module of each class with a forward of ours is called again as the model called it, with one more."""
    model, calls = tiny(architecture), {}
    torch_moe_mps.accelerate(model)

    def note(module, args, kwargs):
        calls.setdefault(type(module), (module, args, kwargs))

    for module in model.modules():
        if is_rewritten(module):
            module.register_forward_pre_hook(note, with_kwargs=True)
    with torch.no_grad():
        model(input_ids=prompt(1), use_cache=True)
    for module in model.modules():
        module._forward_pre_hooks.clear()
    assert calls
    for cls, (module, args, kwargs) in calls.items():
        seen = _OwnCode(original_class(module).forward)
        sys.setprofile(seen)
        try:
            with torch.no_grad():
                cls.forward(module, *args, **kwargs, not_known=torch.ones(1))
            error = None
        except TypeError as raised:
            error = str(raised)
        except RuntimeError:  # of a cache that has this call's tokens already
            error = None
        finally:
            sys.setprofile(None)
        assert seen.runs or "not_known" in str(error), cls.__name__


# Copies of modelling files

MIXING = (
    "bamba",
    "granitemoehybrid",
    "kimi_linear",
    "mamba2",
    "nemotron_h",
    "qwen3_next",
    "llama",
)
EDITED = covering(MIXING, EDITS)


@torch.no_grad()
@pytest.mark.slow("a model of an edited file each")
@pytest.mark.parametrize(("architecture", "edit"), EDITED)
def test_an_edited_file_computes_what_it_says(tmp_path, architecture, edit):
    own = eager(edited_model(architecture, edit, tmp_path))
    model = copy.deepcopy(own)
    torch_moe_mps.accelerate(model)
    ids = prompt()
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    for rows, given in ((ids[:1], {}), (ids, {"attention_mask": mask}), (ids[:1], {"use_cache": False})):
        asked = {
            "max_new_tokens": 5,
            "do_sample": False,
            "pad_token_id": 0,
            "output_logits": True,
            "return_dict_in_generate": True,
        }
        right, found = (each.generate(rows, **given, **asked) for each in (own, model))
        assert torch.equal(right.sequences, found.sequences)
        torch.testing.assert_close(torch.stack(found.logits), torch.stack(right.logits), rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["kimi_linear", "granitemoehybrid"])
def test_a_renamed_cache_stays_the_cache(tmp_path, architecture):
    """The operators run as in the file before."""
    counts = []
    for model in (tiny(architecture), edited_model(architecture, "renamed", tmp_path)):
        torch_moe_mps.accelerate(model)
        asked = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        counts.append(Counter(operators_of(lambda: model.generate(prompt(1), **asked))))  # noqa: B023
    assert counts[0] == counts[1] and counts[0]["_gated_delta_rule_"] >= 4
