"""`accelerate` is a list of steps, and `restore` is the same list backwards."""

import pytest
import torch
from support import tiny_models
from torch import nn

import torch_moe_mps
from torch_moe_mps.transformers.replacing import REPLACEMENTS
from torch_moe_mps.transformers.steps import Run


def changed_by_steps(model: nn.Module) -> list[tuple]:
    """What steps change of each module: its class, its hooks, and the config that it sees."""
    return [
        (name, type(module), [*module._forward_hooks.values()], [*module._forward_pre_hooks.values()],
         type(getattr(module, "config", None)))
        for name, module in model.named_modules()
    ]  # fmt: skip


@pytest.mark.parametrize("model_type", ["qwen3_moe", "jetmoe"])
def test_each_step_is_undone(model_type):
    """Undone backwards, each step leaves the model as it was before the step."""
    model = tiny_models.tiny_model(model_type, torch.float32)
    run, before = Run(model), []
    for step in REPLACEMENTS:
        before.append(changed_by_steps(model))
        step.make(run)
    after = [*before[1:], changed_by_steps(model)]
    changing = [step for step, old, new in zip(REPLACEMENTS, before, after, strict=True) if old != new]
    assert len(changing) > 3 and all(step.undo for step in changing)
    for step, old in zip(reversed(REPLACEMENTS), reversed(before), strict=True):
        if step.undo is not None:
            step.undo(model)
        assert changed_by_steps(model) == old


def test_a_warning_names_the_line_that_accelerates():
    with pytest.warns(UserWarning, match="nothing was found that can be quantised") as warned:
        torch_moe_mps.accelerate(nn.Sequential(nn.ReLU()), bits=4)
    assert {warning.filename for warning in warned} == {__file__}
