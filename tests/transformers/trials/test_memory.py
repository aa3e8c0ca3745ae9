"""Results of trials are remembered in the process, for the code that ran."""

import pytest
import torch
from support import tiny_models
from transformers.models.qwen3_moe import modeling_qwen3_moe as modeling

import torch_moe_mps
from torch_moe_mps.transformers.trials import batching, memory, small_models
from torch_moe_mps.transformers.trials.forms import first_form

tried = []


def begin(module, *numbers):
    tried.append(module)
    return lambda form: form == "second"


@pytest.fixture(autouse=True)
def nothing_remembered():
    memory.forget()
    yield
    memory.forget()


def trials(module, *arguments, forms=("first", "second")) -> int:
    """How many trials run, of which the second form passes."""
    before, _ = memory.trials_run()
    tried.clear()
    for _ in range(2):
        assert first_form(module, forms, begin, *arguments) == ("second" if "second" in forms else None)
    return memory.trials_run()[0] - before


def norm(width: int = 8):
    return modeling.Qwen3MoeRMSNorm(width)


def test_modules_that_are_alike_are_tried_once():
    assert (trials(norm()), trials(norm())) == (1, 0)


def test_that_no_form_passes_is_remembered_too():
    assert (trials(norm(), forms=("first",)), trials(norm(), forms=("first",))) == (1, 0)


@pytest.mark.parametrize("change", ["shape", "attribute", "argument"])
def test_another_module_is_tried(change):
    trials(norm())
    module = norm(16 if change == "shape" else 8)
    if change == "attribute":
        module.variance_epsilon = 0.5
    assert trials(module, *([3] if change == "argument" else [])) == 1


def test_layers_share_a_result_but_for_a_draw_with_their_index():
    first, second = (modeling.Qwen3MoeAttention(modeling.Qwen3MoeConfig(hidden_size=64), n) for n in range(2))
    trials(first)
    draws = len(tried)
    assert trials(second) == 1 and len(tried) == 1 < draws
    assert trials(first) == trials(second) == 0


def test_the_report_counts_trials():
    """A layer of Mamba is recognised by a trial, once for each index."""
    from transformers.models.bamba.modeling_bamba import BambaConfig, BambaMixer

    config = BambaConfig(
        hidden_size=32, mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=1, mamba_d_state=8, mamba_expand=2
    )
    lines = []
    for _ in range(2):
        layers = torch.nn.ModuleList(BambaMixer(config, n) for n in range(2)).eval()
        report = torch_moe_mps.accelerate(layers)
        assert len(report.replaced) == 2
        lines.append([line for line in str(report).splitlines() if line.startswith("comparisons")])
    (first, second) = lines
    assert "with eager code: 2 run (" in first[0] and not second  # the second is of another index


def out_of_memory(*_, **__):
    torch.empty(2**62, dtype=torch.uint8)  # torch's own error on a CPU: a RuntimeError


def test_a_trial_that_ran_out_of_memory_is_run_again():
    errors = [out_of_memory]

    def short(module, *numbers):
        return errors.pop()() if errors else begin(module, *numbers)

    assert first_form(norm(), ("second",), short) is None
    assert first_form(norm(), ("second",), short) == "second" and not errors


@pytest.mark.parametrize("trial", [batching.reason_for_order, batching.reason_against_rows])
def test_a_small_model_that_ran_out_of_memory_is_tried_again(monkeypatch, trial):
    model = tiny_models.tiny_model(
        "nemotron_h", layers_block_type=["mamba", "attention"], num_hidden_layers=2
    )
    with monkeypatch.context() as patch:
        patch.setattr(small_models, "fill", out_of_memory)
        trial(model)
    monkeypatch.setattr(batching, "_is_alike", lambda model, drafts: True)
    assert trial(model) is None
