"""Folders as their makers publish them, of architectures without transformers' interface of experts."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from support import published, tiny_models
from support.capturing import answer
from support.models import assert_close, eager, generate, output, prompt

import torch_moe_mps
from torch_moe_mps import from_pretrained
from torch_moe_mps.checkpoints import on_disk
from torch_moe_mps.commands import main
from torch_moe_mps.models.attention.attention import NAME as ATTENTION
from torch_moe_mps.models.basics.interface import experts_of
from torch_moe_mps.models.capture.classes import captures_of
from torch_moe_mps.models.modules.experts_on_disk import expert_pools

SHORT = {"max_new_tokens": 6}


def rounded(own, model):
    """The model's own code with the values of the quantised one's weights."""
    dense = eager(copy.deepcopy(own))
    for name, experts in dense.named_modules():  # LongCat's own has matrices that nothing reads
        if "gate_up_proj" in experts._parameters:
            count = len(model.get_submodule(name).down_proj_packed)
            experts.gate_up_proj = torch.nn.Parameter(experts.gate_up_proj[:count].detach().clone())
    dense = tiny_models.dense_twin(dense, model)
    return dense.language_model if type(own).__name__.startswith("Llama4") else dense  # the whole raises


@pytest.fixture
def few_slots(monkeypatch):
    monkeypatch.setattr(on_disk, "slots_in", lambda layers, memory: 3)


@pytest.mark.slow("converts a model, and loads it twice")
@pytest.mark.parametrize("architecture", [*published.NAMES])
@pytest.mark.usefixtures("captured", "few_slots")
def test_converted_and_on_the_disk(architecture, tmp_path):
    own = published.write(architecture, tmp_path / "own")
    assert {*published.NAMES[architecture]} <= load_file(tmp_path / "own" / "model.safetensors").keys()
    command = ["convert", tmp_path / "own", tmp_path / "new", "--bits", "4", "--group-size", "32"]
    assert main([*map(str, command)]) == 0
    model = from_pretrained(str(tmp_path / "new"))
    assert type(model) is not type(own) and isinstance(model, type(own))
    assert all(len(experts.down_proj_packed) == 8 for experts in experts_of(model).values())
    dense = rounded(own, model)
    on_the_disk = from_pretrained(str(tmp_path / "new"), experts_memory="1GB")
    tokens = generate(dense, prompt(1), **SHORT)
    for each in (model, on_the_disk):
        assert_close(output(each, prompt()), output(dense, prompt()), 1e-5)
        assert torch.equal(generate(each, prompt(1), **SHORT), tokens)
    assert expert_pools(on_the_disk).counters.misses > 0


@pytest.mark.slow("loads a model")
@pytest.mark.usefixtures("few_slots")
def test_rows_of_each_expert_on_the_disk(tmp_path):
    """A hook on the router lets Llama 4's block run its own code, which hands rows to each of the experts."""
    own = tiny_models.tiny_model("llama4")
    own.save_pretrained(tmp_path)
    model = from_pretrained(str(tmp_path), experts_memory="1GB")
    seen = []
    model.model.layers[0].feed_forward.router.register_forward_hook(lambda *about: seen.append(about[1]))
    assert_close(output(model, prompt()), output(own, prompt()), 1e-5)
    assert seen


@pytest.mark.slow("loads a model")
@pytest.mark.usefixtures("few_slots")
def test_dense_experts_with_other_names_on_the_disk(tmp_path):
    """DBRX's are one stack there, and run in steps in memory."""
    own = published.write("dbrx", tmp_path)
    model = from_pretrained(str(tmp_path), experts_memory="1GB")
    for shape in ((1, 1), (2, 9)):
        assert_close(output(model, prompt(*shape)), output(own, prompt(*shape)), 1e-5)
    assert torch.equal(generate(model, prompt(1), **SHORT), generate(own, prompt(1), **SHORT))
    assert expert_pools(model).counters.misses > 0


@pytest.mark.slow("a model with images")
@pytest.mark.usefixtures("captured")
@torch.no_grad()
def test_llama4_runs_where_its_own_code_raises(tmp_path):
    """transformers reads a field of a result that lacks it; once it does not, `modules/results.py` goes.

    Not by the name of its class, and its tokens are captured.
    """
    own = published.write("llama4", tmp_path)
    own.__class__ = type("Renamed", (type(own),), {"__module__": type(own).__module__})
    with pytest.raises(AttributeError, match="image_outputs"):
        output(own, prompt())
    model = copy.deepcopy(own)
    torch_moe_mps.accelerate(model)
    torch_moe_mps.accelerate(model)
    twin = copy.deepcopy(model)
    assert_close(output(twin, prompt()), output(own.language_model, prompt()), 1e-5)
    twin.set_attn_implementation(ATTENTION)
    assert_close(answer(twin, "cpu"), answer(own.language_model, "cpu"), 2e-5)
    assert captures_of(twin).programs, captures_of(twin).reason
    torch_moe_mps.restore(model)
    assert not model.language_model._forward_hooks
