"""Results of trials are remembered in the process, for the code that ran."""

import contextlib
import functools

import pytest
import torch
from support import tiny_models
from support.models import tiny
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.qwen3_moe import modeling_qwen3_moe as modeling

from torch_moe_mps import accelerate
from torch_moe_mps.checkpoints.quantize.reasons import groups_of
from torch_moe_mps.models.attention.latents import expansion_of
from torch_moe_mps.models.basics.state import Unsupported
from torch_moe_mps.models.trials import batching, memory, small_models
from torch_moe_mps.models.trials.draws import Draws, eager, normal
from torch_moe_mps.models.trials.forms import first_form

tried = []


def begin(module, *numbers):
    tried.append(module)
    return lambda form: form == "second"


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch):
    monkeypatch.setattr(memory, "_known", {})


def draws(module, *arguments, forms=("first", "second")) -> int:
    """How many draws are tried, of which the second form passes."""
    tried.clear()
    for _ in range(2):
        assert first_form(module, forms, begin, *arguments) == ("second" if "second" in forms else None)
    return len(tried)


def norm(width: int = 8):
    return modeling.Qwen3MoeRMSNorm(width)


def test_modules_that_are_alike_are_tried_once():
    assert draws(norm()) > 1 and not draws(norm())


def test_that_no_form_passes_is_remembered_too():
    assert (draws(norm(), forms=("first",)), draws(norm(), forms=("first",))) == (1, 0)


@pytest.mark.parametrize("change", ["shape", "attribute", "argument"])
def test_another_module_is_tried(change):
    draws(norm())
    module = norm(16 if change == "shape" else 8)
    if change == "attribute":
        module.variance_epsilon = 0.5
    assert draws(module, *([3] if change == "argument" else []))


def test_layers_share_a_result_but_for_a_draw_with_their_index():
    first, second = (modeling.Qwen3MoeAttention(modeling.Qwen3MoeConfig(hidden_size=64), n) for n in range(2))
    assert draws(first) > draws(second) == 1
    assert draws(first) == draws(second) == 0


def test_a_trial_that_ran_out_of_memory_is_run_again():
    errors = [lambda: torch.empty(2**62, dtype=torch.uint8)]  # torch's own error on a CPU: a RuntimeError

    def short(module, *numbers):
        return errors.pop()() if errors else begin(module, *numbers)

    assert first_form(norm(), ("second",), short) is None
    assert first_form(norm(), ("second",), short) == "second" and not errors


def test_a_trial_that_a_hook_of_all_modules_saw_is_run_again():
    told = []

    def begin_own(module):
        eager(module.forward)(torch.ones(1, 8))
        return lambda form: True

    module = modeling.Qwen3MoeMLP(modeling.Qwen3MoeConfig(hidden_size=8), 4)
    hook = register_module_forward_hook(lambda part, *_: told.append(type(part)))
    try:
        with pytest.raises(Unsupported, match="lambda>, whose closure cannot be found"):
            first_form(module, ("first",), begin_own)
    finally:
        hook.remove()
    assert first_form(module, ("first",), begin_own) == "first" and told


@pytest.mark.parametrize("trial", [batching.reason_for_order, batching.reason_against_rows])
def test_a_small_model_that_ran_out_of_memory_is_tried_again(monkeypatch, trial):
    model = tiny_models.tiny_model(
        "nemotron_h", layers_block_type=["mamba", "attention"], num_hidden_layers=2
    )
    with monkeypatch.context() as patch:
        patch.setattr(small_models, "fill", lambda model: torch.empty(2**62, dtype=torch.uint8))
        trial(model)
    monkeypatch.setattr(batching, "_is_alike", lambda model, drafts: True)
    assert trial(model) is None


def test_a_trial_draws_numbers_of_its_own():
    drawn: list[list[float]] = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        assert Draws(2)(lambda draw: drawn.append([draw.number, *normal(3).tolist()]) or True)
    assert drawn[0] == drawn[2] and drawn[1] == drawn[3] and drawn[0][1:] != drawn[1][1:]


@pytest.mark.parametrize(
    ("architecture", "find"), [("deepseek_v3", expansion_of), ("deepseek_v4", groups_of)]
)
def test_random_numbers_of_the_process_stay(architecture, find):
    """What expands latents, and layers with groups, are tried for each module."""
    model = tiny(architecture, num_hidden_layers=1)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    assert [found for module in model.modules() if (found := find(module)) is not None]
    assert torch.equal(torch.rand(3), expected)


@contextlib.contextmanager
def default_dtype():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


STATES = {
    "inference mode": torch.inference_mode,
    "autocast": functools.partial(torch.autocast, "cpu", torch.bfloat16),
    "gradients": torch.enable_grad,
    "default dtype": default_dtype,
    "default device": functools.partial(torch.device, "meta"),
    "a mode of operators": functools.partial(FlopCounterMode, display=False),
}


@pytest.mark.parametrize("state", STATES)
def test_a_result_does_not_depend_on_what_the_caller_is_in_the_middle_of(state):
    class Norm(modeling.Qwen3MoeRMSNorm):
        """A class that no test has asked about."""

    def begin_here(module):
        x = torch.ones(2, 2, requires_grad=True)
        seen = (x @ x).dtype, x.device.type, x.is_inference(), (2 * x).requires_grad
        assert seen == (torch.float32, "cpu", False, False)
        return lambda form: True

    with STATES[state]():
        assert first_form(Norm(8), ("first",), begin_here) == "first"
        accelerate(nn.Sequential(Norm(8)))
    assert "rms_norm" in str(accelerate(nn.Sequential(Norm(8))))
