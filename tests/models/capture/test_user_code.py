"""Tokens of models that run code of a user's own: not captured unless he asks for it, and right."""

import importlib
import os
import sys

import pytest
import torch
from support import tiny_models
from support.models import Conversation, eager
from torch import nn
from transformers import AttentionInterface
from transformers.dynamic_module_utils import HF_MODULES_CACHE
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import torch_moe_mps
from torch_moe_mps import _environment
from torch_moe_mps.models.basics.state import state_of
from torch_moe_mps.models.capture import replay
from torch_moe_mps.models.capture.classes import captures_of
from torch_moe_mps.models.capture.replay import Captures
from torch_moe_mps.models.capture.user_code import is_of_library

MAIN = sys.modules["__main__"]


class Thing:
    factor = 1.0


STATE = {"dict": {"factor": 1.0}}
# What a forward reads: (how, what changes it)
VALUES = {
    "dictionary": (lambda: STATE["dict"]["factor"], lambda: STATE["dict"].update(factor=2.0)),
    "object of __main__": (
        eval("lambda: OWN.factor", vars(MAIN)),
        lambda: setattr(MAIN.OWN, "factor", 2.0),
    ),
}


def norm(model):
    return model.model.layers[0].post_attention_layernorm


def patched_class(model, read, patch):
    cls = type(norm(model))
    own = cls.forward
    patch.setattr(cls, "forward", lambda self, x: own(self, x) * read())


def class_of_main(model, read, patch):
    cls, members = type(norm(model)), {}
    names = {"OWN_FORWARD": cls.forward, "OWN_READ": read}
    for name, value in names.items():
        patch.setattr(MAIN, name, value, raising=False)
    exec("def forward(self, x): return OWN_FORWARD(self, x) * OWN_READ()", vars(MAIN), members)
    patch.setattr(norm(model), "__class__", type("Own", (cls,), members | {"__module__": "__main__"}))


def own_property(model, read, patch):
    cls, eps = type(norm(model)), norm(model).variance_epsilon
    own = type("Own", (cls,), {"variance_epsilon": property(lambda self: eps if read() == 1 else 1.0)})
    patch.delitem(vars(norm(model)), "variance_epsilon")
    patch.setattr(norm(model), "__class__", own)


def registered_attention(model, read, patch):
    def attention(*args, **kwargs):
        out, weights = sdpa_attention_forward(*args, **kwargs)
        return out * read(), weights

    patch.setitem(AttentionInterface._global_mapping, "sdpa", attention)


def function_of_torch(model, read, patch):
    own = nn.functional.embedding
    patch.setattr(nn.functional, "embedding", lambda *args, **kwargs: own(*args, **kwargs) * read())


def function_of_the_models_file(model, read, patch):
    file = sys.modules[type(model).__module__]
    own = file.create_causal_mask

    def mask(*args, **kwargs):
        NOTED.append(read())
        return own(*args, **kwargs)

    patch.setattr(file, "create_causal_mask", mask)


NOTED: list[float] = []
WAYS = {
    "class patched": patched_class,
    "class of __main__": class_of_main,
    "property": own_property,
    "registered attention": registered_attention,
    "function of torch": function_of_torch,
    "function of the model's file": function_of_the_models_file,
}
CASES = [*((way, "dictionary") for way in WAYS), ("class of __main__", "object of __main__")]


@pytest.fixture(scope="module")
def model():
    os.environ[_environment.CAPTURE] = "1"  # of the module: the fixture of a function comes too late
    try:
        made = eager(tiny_models.tiny_model("qwen3_moe"))
        torch_moe_mps.accelerate(made)
    finally:
        os.environ[_environment.CAPTURE] = "0"
    return made


class Talk(Conversation):
    """Tokens by a model; `captures` are its own for this conversation, None for none."""

    def __init__(self, model, captures: Captures | None) -> None:
        self.captures = captures
        super().__init__(model)

    def tokens(self, count: int) -> list[torch.Tensor]:
        state_of(self.model).captures = self.captures
        return super().tokens(count)


@pytest.fixture(autouse=True)
def first_values(monkeypatch):
    """What the cases change is as it was."""
    monkeypatch.setattr(MAIN, "OWN", Thing(), raising=False)
    monkeypatch.setitem(STATE, "dict", {"factor": 1.0})
    NOTED.clear()


@torch.no_grad()
@pytest.mark.parametrize("way,value", CASES)
def test_own_code_runs_module_by_module(model, monkeypatch, way, value):
    read, change = VALUES[value]
    WAYS[way](model, read, monkeypatch)
    mine, theirs = Talk(model, Captures(anywhere=True)), Talk(model, None)
    before = [mine.tokens(5), theirs.tokens(5)]
    change()
    after = [mine.tokens(3), theirs.tokens(3)]
    for results, expected in (before, after):
        assert all(map(torch.equal, results, expected))
    assert not mine.captures.programs
    assert "is code of your own" in str(mine.captures) and "capture=True" in str(mine.captures)
    assert ("<string>" if way == "class of __main__" else "test_user_code.py") in str(mine.captures)
    if way == "function of the model's file":
        assert NOTED[-1] == 2.0


@torch.no_grad()
def test_what_libraries_run_is_captured(model, monkeypatch, tmp_path):
    """A file is a library's where it is installed; the same file elsewhere is somebody's own."""
    for folder, is_captured in (("site-packages", True), ("project", False)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"of_{folder[:4]}.py").write_text(
            "from typing import NamedTuple\nfrom dataclasses import dataclass\n"
            "class Pair(NamedTuple):\n    a: object\n    b: int\n"
            "@dataclass\nclass Data:\n    a: object\n"
            "def twice(own):\n    return lambda x: Data(Pair(own(x), 2)).a.a * 2\n"
        )
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(tmp_path / folder))
            twice = importlib.import_module(f"of_{folder[:4]}").twice
            patch.setitem(vars(norm(model)), "forward", twice(norm(model).forward))
            mine, theirs = Talk(model, Captures(anywhere=True)), Talk(model, None)
            assert all(map(torch.equal, mine.tokens(6), theirs.tokens(6)))
        assert bool(mine.captures.programs) == is_captured, str(mine.captures)


@torch.no_grad()
def test_own_code_whose_error_a_library_catches(model, monkeypatch, tmp_path):
    """The error that keeps it from running in a recording."""
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "of_quiet.py").write_text(
        "def quiet(own, read):\n    def forward(x):\n        try:\n            return own(x) * read()\n"
        "        except Exception:\n            return own(x)\n    return forward\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    quiet, (read, change) = importlib.import_module("of_quiet").quiet, VALUES["dictionary"]
    monkeypatch.setitem(vars(norm(model)), "forward", quiet(norm(model).forward, read))
    mine, theirs = Talk(model, Captures(anywhere=True)), Talk(model, None)
    assert all(map(torch.equal, mine.tokens(5), theirs.tokens(5)))
    change()
    assert all(map(torch.equal, mine.tokens(2), theirs.tokens(2)))
    assert not mine.captures.programs and "is code of your own" in str(mine.captures)


def test_whose_files_are_whose(tmp_path):
    for file in (os.__file__, torch.__file__, torch_moe_mps.__file__, replay.__file__, "<frozen abc>"):
        assert is_of_library(file)
    assert is_of_library(os.path.join(HF_MODULES_CACHE, "transformers_modules", "some", "modeling.py"))
    assert is_of_library("/opt/python/lib/python3/dist-packages/peft/model.py")
    for file in (__file__, str(tmp_path / "script.py"), "<string>", "<stdin>", "/tmp/ipykernel_7/1.py", ""):
        assert not is_of_library(file)


@torch.no_grad()
def test_capture_of_own_code_if_asked_for(monkeypatch):
    """By the argument, and by the environment, whose values a wrong argument does not reach."""
    monkeypatch.setenv(_environment.CAPTURE, "auto")
    model = eager(tiny_models.tiny_model("qwen3_moe"))
    with pytest.raises(ValueError, match="capture must be True, False or None, got 'yes'"):
        torch_moe_mps.accelerate(model, capture="yes")
    torch_moe_mps.accelerate(model, capture=False)
    assert captures_of(model) is None
    for argument, switch in ((True, "0"), (None, "1")):
        monkeypatch.setenv(_environment.CAPTURE, switch)
        torch_moe_mps.accelerate(model, capture=argument)
        with monkeypatch.context() as patch:
            patched_class(model, VALUES["dictionary"][0], patch)
            Talk(model, captures_of(model)).tokens(6)
            assert captures_of(model).programs and captures_of(model).reason is None


@torch.no_grad()
def test_a_profiler_keeps_a_token_from_being_captured(model):
    talk = Talk(model, Captures(anywhere=True))
    sys.setprofile(lambda *seen: None)
    try:
        talk.tokens(5)
    finally:
        sys.setprofile(None)
    assert "a profiler hides whose code" in str(talk.captures)


@torch.no_grad()
def test_python_without_a_lock(model, monkeypatch):
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    talk = Talk(model, Captures(anywhere=True))
    talk.tokens(5)
    assert not talk.captures.programs and "without its global lock" in str(talk.captures)
