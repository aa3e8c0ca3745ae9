"""scripts/demo.py: the main job from trained weights to text."""

import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable

import demo as script
import pytest
import torch
from support import tiny_models, trained
from support.processes import REPOSITORY

import torch_moe_mps

DEMO = REPOSITORY / "scripts" / "demo.py"


@pytest.fixture
def demo(monkeypatch, capsys) -> Callable[..., str]:
    """What the script prints, run in this process."""

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["demo", "--device", "cpu", *arguments])
        script.main(script.arguments())
        return capsys.readouterr().out

    return run


def test_help_needs_no_package_and_installs_nothing(tmp_path):
    """With a Python that has neither torch nor a .venv."""
    for path in ("scripts/demo", "scripts/demo.py", "scripts/environment.sh"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / path, tmp_path / path)
    result = subprocess.run(
        [tmp_path / "scripts" / "demo", "--help"], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("usage: scripts/demo") and "--tokens" in result.stdout
    assert not (tmp_path / ".venv").exists()


def test_random_weights(monkeypatch, capsys):
    """The whole script, as it is started."""
    monkeypatch.setattr(sys, "argv", [str(DEMO), "--device", "cpu", "--tokens", "3", "--random"])
    runpy.run_path(str(DEMO), run_name="__main__")
    printed = capsys.readouterr().out
    assert "moe_experts (silu)" in printed and "moe_router (softmax)" in printed
    assert "greedy tokens equal to eager's: 3 of 3" in printed
    error = float(printed.partition("relative error ")[2].split()[0])
    assert error <= 1e-5
    before, now = map(int, re.search(r"weights: (\d+) MB before, (\d+) MB in 4 bits", printed).groups())
    assert 32 / 6.5 <= before / now <= 32 / 4.5
    speeds = re.search(
        r"tokens/s, in turns: eager ([\d.]+), accelerated ([\d.]+) \(([\d.]+) times\), "
        r"in 4 bits ([\d.]+) \(([\d.]+) times\)\na CPU decodes",
        printed,
    )
    eager, accelerated, times, quantized, times_quantized = map(float, speeds.groups())
    assert accelerated / eager == pytest.approx(times, abs=0.01 + 0.2 / eager)
    assert quantized / eager == pytest.approx(times_quantized, abs=0.01 + 0.2 / eager)


@pytest.mark.sweep
def test_trained_weights_answer_a_question(smollm2, demo):
    printed = demo()
    assert "moe_experts (silu)" in printed and "moe_router (softmax)" in printed
    same, count = re.search(r"greedy tokens equal to eager's: (\d+) of (\d+)", printed).groups()
    assert same == count and float(printed.partition("relative error ")[2].split()[0]) <= 1e-5
    assert printed.endswith("What is the capital of France?\nThe capital of France is Paris.\n")


def test_without_trained_weights_they_are_random(demo, monkeypatch):
    monkeypatch.setattr(trained, "smollm2", lambda: None)
    printed = demo("--tokens", "2")
    assert printed.startswith(f"{trained.MISSING}; the weights are random instead\n")
    assert "Qwen3MoeForCausalLM, 21 M parameters" in printed


@pytest.mark.parametrize(("tokens", "turns"), [(9, [9]), (40, [16, 16, 16])])
def test_models_take_turns_with_answers_of_one_length(tokens, turns):
    """Behind an end, too, after which an answer is one token long."""
    models, calls = {}, []
    for name in ("a", "b", "c"):
        model = models[name] = tiny_models.tiny_model("qwen3", num_hidden_layers=1)
        model.generation_config.eos_token_id = [*range(model.config.vocab_size - 1)]
        model.register_forward_hook(lambda *_, name=name: calls.append(name))
    speeds = script.speeds_of(models, torch.tensor([[1, 2, 3]]), tokens)
    assert [*speeds] == [*models] and all(speed > 0 for speed in speeds.values())
    before = [(name, script.WARM_UP) for name in models]
    asked = [(name, n) for turn, n in enumerate(turns) for name in [*models][:: -1 if turn % 2 else 1]]
    assert calls == [name for name, n in before + asked for _ in range(n + 1)]


def test_models_share_tensors_and_nothing_else():
    with tiny_models.groups_of_32():
        model = tiny_models.tiny_model("qwen3_moe")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    copy = script.with_the_same_weights(model)
    assert {id(p) for p in copy.parameters()} == {id(p) for p in model.parameters()}
    torch_moe_mps.accelerate(copy, 4, 32)
    assert "quantized" not in str(model).lower()
    after = model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


def test_no_tokens(demo, capsys):
    with pytest.raises(SystemExit):
        demo("--tokens", "0")
    assert capsys.readouterr().err.endswith("error: argument --tokens: must be at least 1, got 0\n")


@pytest.mark.parametrize("name", ["meta", "nonsense", *([] if torch.cuda.is_available() else ["cuda"])])
def test_devices_without_tensors_are_one_line(name, demo):
    expected = f"error: --device must be one that holds tensors here, got {name}: "
    with pytest.raises(SystemExit, match=rf"^{re.escape(expected)}[^\n]+$"):
        demo("--device", name)
