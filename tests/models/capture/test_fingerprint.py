"""What a captured token rests on: each change of the model and of Python around it is noticed."""

import copy
import functools
import gc
import sys
import warnings
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from support import tiny_models
from support.capturing import accelerated, double, norm
from support.models import Conversation
from torch import nn
from transformers import AttentionInterface, DynamicCache, masking_utils, modeling_utils
from transformers.cache_utils import DynamicLayer
from transformers.integrations import sdpa_attention
from transformers.utils import output_capturing

from torch_moe_mps.models.capture import fingerprint as fingerprints
from torch_moe_mps.models.capture.classes import captures_of
from torch_moe_mps.models.capture.fingerprint import Fingerprint
from torch_moe_mps.models.upstream import reach
from torch_moe_mps.models.upstream.calls import cache_argument

pytestmark = pytest.mark.usefixtures("captured")


class Slotted:
    __slots__ = ("number", "numbers")

    def __init__(self) -> None:
        self.number, self.numbers = 1, {"a": 1}


def counter():
    count = 0

    def reads():
        return count

    return reads


def file_of(model):
    return sys.modules[type(model).__module__]


def adds(numbers):
    """To a list or a set. Returns: what undoes it."""
    (numbers.append if isinstance(numbers, list) else numbers.add)(3)
    return lambda: numbers.remove(3)


def has(name, value):
    """What is done before the fingerprint is made: the norm gets an attribute."""
    return lambda model: setattr(norm(model), name, value)


def file_has(name, value):
    return lambda model: setattr(file_of(model), name, value)


def sets(of, name, value, **options):
    """A change, of an attribute of what `of` finds in a model."""
    return lambda model, patch: patch.setattr(of(model), name, value, **options)


def puts(of, key, value):
    """A change, of an item."""
    return lambda model, patch: patch.setitem(of(model), key, value)


def of_functions(interface):
    return lambda model: interface._local_mapping


# What may change between two tokens; models/test_changes.py has what comes of it.
# name: (what is done before the fingerprint is made, the change)
WATCHED = {
    "attribute": (None, sets(norm, "variance_epsilon", 2.0)),
    "kind of a number": (has("factor", 1), sets(norm, "factor", 1.0)),
    "attribute with another name": (
        has("named", SimpleNamespace(one=1)),
        lambda m, p: (p.delattr(norm(m).named, "one"), p.setattr(norm(m).named, "two", 1, raising=False)),
    ),
    "parameter": (None, puts(lambda m: norm(m)._parameters, "weight", None)),
    "tensor of one element in another dictionary": (
        has("ordered", OrderedDict(one=torch.ones(1))),
        puts(lambda m: norm(m).ordered, "one", torch.ones(1)),
    ),
    "tensor of one element": (
        lambda m: norm(m).register_buffer("one", torch.ones(1)),
        puts(lambda m: norm(m)._buffers, "one", torch.ones(1)),
    ),
    "module": (None, puts(lambda m: m.model._modules, "norm", nn.Identity())),
    "attribute of the config": (None, sets(lambda m: m.config, "num_experts_per_tok", 3)),
    "hook": (None, puts(lambda m: norm(m)._forward_hooks, 0, double)),
    "hook before": (None, puts(lambda m: norm(m)._forward_pre_hooks, 0, double)),
    "state of the package": (None, sets(lambda m: fingerprints, "_changes", -1)),
    "class of a module": (
        None,
        lambda m, p: p.setattr(norm(m), "__class__", type("Other", (type(norm(m)),), {})),
    ),
    "interface": (None, puts(lambda m: AttentionInterface._global_mapping, "sdpa", double)),
    "interface of one file": (
        None,
        puts(of_functions(modeling_utils.ALL_ATTENTION_FUNCTIONS), "sdpa", double),
    ),
    "masks": (None, puts(of_functions(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS), "sdpa", double)),
    "name in the file": (None, sets(file_of, "apply_rotary_pos_emb", double)),
    "numbers in the file": (
        file_has("_numbers", {"scale": 1}),
        puts(lambda m: file_of(m)._numbers, "scale", 2),
    ),
    "list in the file": (file_has("_list", [1, 2]), lambda m, p: adds(file_of(m)._list)),
    "set in the file": (file_has("_set", {1}), lambda m, p: adds(file_of(m)._set)),
    "set of a module": (has("set", {1}), lambda m, p: adds(norm(m).set)),
    "order of a dictionary": (has("two", {"a": 1, "b": 1}), sets(norm, "two", {"b": 1, "a": 1})),
    "name in the file of a helper": (None, sets(lambda m: sdpa_attention, "repeat_kv", double)),
    "torch's functions": (None, sets(lambda m: nn.functional, "scaled_dot_product_attention", double)),
    "method of a cache": (None, sets(lambda m: DynamicCache, "get_seq_length", double)),
    "method of a cache's layer": (None, sets(lambda m: DynamicLayer, "get_mask_sizes", double)),
    "class of the config": (None, sets(lambda m: type(m.config), "scale", 2, raising=False)),
    "list of the config": (
        lambda m: setattr(m.config, "numbers", [{"a": 1}, 2]),
        puts(lambda m: m.config.numbers[0], "a", 2),
    ),
    "slot of an object": (has("slotted", Slotted()), sets(lambda m: norm(m).slotted, "number", 2)),
    "dictionary in a slot": (has("held", Slotted()), puts(lambda m: norm(m).held.numbers, "a", 2)),
    "arguments of a partial": (
        has("partial", functools.partial(double, args=1)),
        puts(lambda m: norm(m).partial.keywords, "args", 2),
    ),
    "what a function has closed over": (
        has("reads", counter()),
        sets(lambda m: norm(m).reads.__closure__[0], "cell_contents", 2),
    ),
    "hook of a module that is not registered": (
        lambda m: norm(m).__dict__.update(hidden=[nn.Identity()]),
        puts(lambda m: norm(m).hidden[0]._forward_hooks, 0, double),
    ),
}


@torch.no_grad()
def test_what_the_fingerprint_holds(monkeypatch):
    model = accelerated("qwen3_moe", "cpu")
    for _, (prepare, _) in WATCHED.items():
        if prepare is not None:
            prepare(model)
    fingerprint = Fingerprint(model)
    found = {}
    for what, (_, change) in WATCHED.items():
        with monkeypatch.context() as patch:
            undo = change(model, patch)
            found[what] = fingerprint.holds()
            if callable(undo):
                undo()
        assert fingerprint.holds(), what
    torch.set_default_dtype(torch.float64)
    try:
        found["default dtype"] = fingerprint.holds()
    finally:
        torch.set_default_dtype(torch.float32)
    assert [what for what, holds in found.items() if holds] == []
    norm(model).variance_epsilon = float(repr(norm(model).variance_epsilon))  # another object
    assert fingerprint.holds()
    norm(model).factor = 1.0  # what is an equal object is not said to have changed
    assert not fingerprint.holds()
    assert fingerprint.changed() == "model.layers.0.post_attention_layernorm.factor"


NAMES = {
    "transformers.models.qwen3_moe.modeling_qwen3_moe.apply_rotary_pos_emb": sets(
        file_of, "apply_rotary_pos_emb", double
    ),
    ".ALL_ATTENTION_FUNCTIONS.sdpa": puts(  # a table that several files import
        lambda m: file_of(m).ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", double
    ),
    "transformers.cache_utils.DynamicLayer.get_mask_sizes": sets(
        lambda m: DynamicLayer, "get_mask_sizes", double
    ),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_library_name_that_changed_is_named(name, monkeypatch):
    model = accelerated("qwen3_moe", "cpu")
    fingerprint = Fingerprint(model)
    NAMES[name](model, monkeypatch)
    assert not fingerprint.holds() and fingerprint.changed().endswith(name)


def test_functions_that_stand_in_for_those_of_transformers_stay(monkeypatch):
    """They would go with the last layer of attention that needs them, in another model."""
    monkeypatch.setattr(reach, "_held", {})  # whichever models of other tests are alive
    monkeypatch.setattr(reach, "_undo", {})
    model, entries = accelerated("deepseek_v32", "cpu"), AttentionInterface._global_mapping
    own, of_another_model = entries["sdpa"], reach.hold_reach("transformers")
    fingerprint = Fingerprint(model)
    assert reach._held and entries["sdpa"] is not own
    del of_another_model
    assert fingerprint.holds(), fingerprint.changed()
    del fingerprint
    gc.collect()
    assert entries["sdpa"] is own


@torch.no_grad()
def test_what_python_notes_at_first_is_no_change():
    """In a class that is copied and in a file that warns; and what transformers notes of another model."""
    model = accelerated("qwen3_moe", "cpu")
    cls, file = type(model.config), file_of(model)
    if "__slotnames__" in vars(cls):
        del cls.__slotnames__
    vars(file).pop("__warningregistry__", None)
    fingerprint = Fingerprint(model)
    copy.copy(model.config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec("__import__('warnings').warn('a first one')", vars(file))
    assert fingerprint.holds()
    output_capturing._CAN_RECORD_REGISTRY[nn.Linear(1, 1)] = {}
    try:
        assert fingerprint.holds()
    finally:
        output_capturing._CAN_RECORD_REGISTRY.pop(str(nn.Linear))


@torch.no_grad()
def test_a_key_that_cannot_be_compared():
    """As torch's DispatchKey with any string, from torch 2.15 on."""

    class Key:
        __hash__ = object.__hash__

        def __eq__(self, other):
            raise RuntimeError("could not parse dispatch key")

    model = accelerated("qwen3_moe", "cpu")
    model.model.held = {Key(): [1]}
    fingerprint = Fingerprint(model)
    assert fingerprint.holds()
    next(iter(model.model.held.values())).append(2)
    assert not fingerprint.holds() and fingerprint.changed().startswith("model.held[")


@torch.no_grad()
def test_the_end_of_a_class_is_no_change():
    """The garbage collector may come in the middle of a call."""
    model = accelerated("qwen3_moe", "cpu")

    class Unused(DynamicCache):
        pass

    fingerprint = Fingerprint(model)
    del Unused
    gc.collect()
    assert fingerprint.holds()


@torch.no_grad()
def test_a_patched_model_class_and_a_shallow_copy():
    model = accelerated("qwen3_moe", "cpu")
    talk = Conversation(model)
    talk.tokens(4)
    assert captures_of(model).programs
    cls = tiny_models.model_class("qwen3_moe")
    forward = cls.forward
    try:
        cls.forward = lambda self, *args, **kwargs: forward(self, *args, **kwargs) | {"logits": None}
        assert model(talk.token, **cache_argument(model, talk.cache))["logits"] is None
    finally:
        cls.forward = forward
    talk.tokens(4)
    assert captures_of(model).programs
    other = copy.copy(model)  # with the same modules, and attributes of its own
    other.lm_head_of_both = None
    other._modules = other._modules | {"lm_head": copy.deepcopy(model.lm_head)}
    other.lm_head.weight.mul_(2)
    mine, theirs = Conversation(model, copy.deepcopy(talk.cache)), Conversation(other, talk.cache)
    mine.token = theirs.token = talk.token
    for _ in range(4):
        (one,), (two,) = mine.tokens(1), theirs.tokens(1)
        assert torch.equal(2 * one, two)
