"""Results of trials in the user's cache folder: a second start recalls them for the same code alone."""

import functools

import pytest
import torch
from support import tiny_models
from transformers.models.qwen3_moe import modeling_qwen3_moe as modeling

import torch_moe_mps
from torch_moe_mps.selfcheck import machine
from torch_moe_mps.transformers.modules.rules import MODULE_RULES
from torch_moe_mps.transformers.trials import batching, memory, small_models
from torch_moe_mps.transformers.trials.forms import Tried, first_form

tried = []


def begin(module, *numbers):
    tried.append(module)
    return lambda form: form == "second"


def other(x):
    return x


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv(machine.SWITCH, "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    memory.forget()
    tried.clear()
    yield tmp_path
    memory.forget()


def trials(module, *arguments, forms=("first", "second")) -> int:
    """How many trials a fresh process makes, which finds the second form."""
    memory.forget()
    tried.clear()
    for _ in range(2):
        assert first_form(module, forms, begin, *arguments) == ("second" if "second" in forms else None)
    return len(tried)


def norm(width: int = 8):
    return modeling.Qwen3MoeRMSNorm(width)


def test_a_second_start_tries_nothing():
    assert (trials(norm()), trials(norm())) == (1, 0)


def test_no_form_is_remembered_too():
    assert (trials(norm(), forms=("first",)), trials(norm(), forms=("first",))) == (1, 0)


@pytest.mark.parametrize("change", ["shape", "attribute", "argument"])
def test_another_module_is_tried(change):
    trials(norm())
    module = norm(16 if change == "shape" else 8)
    if change == "attribute":
        module.variance_epsilon = 0.5
    assert trials(module, *([3] if change == "argument" else [])) == 1


def test_layers_share_a_result():
    first, second = (modeling.Qwen3MoeAttention(modeling.Qwen3MoeConfig(hidden_size=64), n) for n in range(2))
    assert (trials(first), trials(second)) == (1, 0)


PATCHES = {
    "method": lambda patch: patch(modeling.Qwen3MoeRMSNorm, "extra_repr", other),
    "forward": lambda patch: patch(modeling.Qwen3MoeRMSNorm, "forward", lambda self, x: x),
    "wrapped": lambda patch: patch(
        modeling.Qwen3MoeRMSNorm,
        "forward",
        functools.wraps(modeling.Qwen3MoeRMSNorm.forward)(lambda self, x: x),
    ),
    "function": lambda patch: patch(modeling, "rotate_half", other),
    "value": lambda patch: patch(modeling, "some_switch", True, raising=False),
}


@pytest.mark.parametrize("patched", PATCHES)
def test_patched_code_is_tried(monkeypatch, patched):
    """Nothing that ran with a patch is kept for the plain code."""
    with monkeypatch.context() as patch:
        PATCHES[patched](patch.setattr)
        assert trials(norm()) == 1
    assert trials(norm()) == 1


@pytest.mark.parametrize("patched", PATCHES)
def test_a_patch_finds_nothing_of_plain_code(monkeypatch, patched):
    trials(norm())
    PATCHES[patched](monkeypatch.setattr)
    assert trials(norm()) == 1


def test_a_class_without_a_place_is_tried_in_each_process():
    class Local(modeling.Qwen3MoeRMSNorm):
        pass

    assert (trials(Local(8)), trials(Local(8))) == (1, 1)


def test_a_changed_file_is_tried(monkeypatch):
    trials(norm())
    monkeypatch.setattr(memory, "_source_of", lambda module: "another digest")
    assert trials(norm()) == 1


def test_a_file_that_was_changed_meanwhile_is_not_trusted(monkeypatch):
    memory._source_of.cache_clear()
    monkeypatch.setattr(memory, "_STARTED", 0.0)
    assert (trials(norm()), trials(norm())) == (1, 1)
    memory._source_of.cache_clear()


@pytest.mark.parametrize("text", ["", "[]", '{"half'])
def test_a_damaged_file_is_replaced(folder, text):
    trials(norm())
    (file,) = folder.rglob("trials-*.json")
    file.write_text(text)
    assert (trials(norm()), trials(norm())) == (1, 0)


def test_without_checks_nothing_is_kept(folder, monkeypatch):
    monkeypatch.setenv(machine.SWITCH, "0")
    assert (trials(norm()), trials(norm())) == (1, 1) and not [*folder.rglob("*.json")]


def test_rules_are_kept():
    """Their functions are found again by name in another process."""
    rules = [rule for rule in MODULE_RULES if isinstance(rule, Tried)]
    assert len(rules) > 5
    for rule in rules:
        assert memory._home(rule.forward) and memory._home(rule.trial)


def test_the_report_counts_trials(folder):
    """A layer of Mamba is recognised by a trial, at the second start from the file."""
    from transformers.models.bamba.modeling_bamba import BambaConfig, BambaMixer

    config = BambaConfig(
        hidden_size=32, mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=1, mamba_d_state=8, mamba_expand=2
    )
    lines = []
    for _ in range(2):
        memory.forget()
        layers = torch.nn.ModuleList(BambaMixer(config, n) for n in range(2)).eval()
        report = torch_moe_mps.accelerate(layers)
        assert len(report.replaced) == 2
        (line,) = (line for line in str(report).splitlines() if line.startswith("comparisons"))
        lines.append(line)
    assert "own code: 1 run (" in lines[0] and lines[1].endswith("own code: 1 known from an earlier start")


def out_of_memory(*_, **__):
    torch.empty(2**62, dtype=torch.uint8)  # torch's own error on a CPU: a RuntimeError


def test_a_trial_that_ran_out_of_memory_is_run_again(folder):
    """It says nothing of the code: neither this process nor the next takes it for an answer."""
    errors = [out_of_memory]

    def short(module, *numbers):
        return errors.pop()() if errors else begin(module, *numbers)

    assert first_form(norm(), ("second",), short) is None
    assert first_form(norm(), ("second",), short) == "second"


@pytest.mark.parametrize("trial", [batching.reason_for_order, batching.reason_against_rows])
def test_a_small_model_that_ran_out_of_memory_is_tried_again(monkeypatch, folder, trial):
    model = tiny_models.tiny_model(
        "nemotron_h", layers_block_type=["mamba", "attention"], num_hidden_layers=2
    )
    with monkeypatch.context() as patch:
        patch.setattr(small_models, "fill", out_of_memory)
        trial(model)
    assert not [*folder.rglob("trials-*.json")]
    monkeypatch.setattr(batching, "_is_alike", lambda model, drafts: True)
    assert trial(model) is None
    assert [*folder.rglob("trials-*.json")]
