"""Whole models whose experts have an interface of their own, beside their own code."""

import copy

import pytest
import torch
from support.families import accelerated, output_by_operators
from support.models import assert_close, operators_of, output, prompt

ARCHITECTURES = ("dbrx", "jetmoe", "llama4", "longcat_flash", "step3p7")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_as_exact_as_those_of_eager_code(architecture):
    """Beside the model's own code in float64."""
    own, model, report = accelerated(architecture)
    exact = output(copy.deepcopy(own).double(), prompt())
    found = output_by_operators(architecture, model, report, prompt()), output(own, prompt())
    ours, eagers = ((each.double() - exact).norm() / exact.norm() for each in found)
    assert 0 < ours <= 2 * eagers < 1e-5


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_operators_run_again_after_outputs_were_recorded(architecture):
    """transformers records by hooks, which stay on the modules."""
    own, model, _ = accelerated(architecture)
    ids = prompt()
    operators = operators_of(lambda: model(ids))
    for name in ("router_logits", "hidden_states"):
        asked = {f"output_{name}": True}
        found, expected = (getattr(each(ids, **asked), name) for each in (model, own))
        assert len(found) == len(expected) > 0
        assert_close(found, expected, 1e-5)
    assert operators_of(lambda: model(ids)) == operators
    assert_close(output(model, ids), output(own, ids), 1e-5)
    seen: list[torch.nn.Module] = []
    recording = [module for module in model.modules() if module._forward_hooks]
    for module in recording:
        module.register_forward_hook(lambda module, *_: seen.append(module))
    model(ids)
    assert {*seen} == {*recording}
