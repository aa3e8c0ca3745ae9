"""scripts/demo.py: the main job from a checkpoint on disk to text, and one line for what is wrong."""

import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import demo as script
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
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


def one_line(expected: str):
    """The script ends with this line as its only message."""
    return pytest.raises(SystemExit, match=f"^error: {re.escape(expected)}$")


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
    printed = demo("--tokens", "2", "--bits", "0")
    assert "MB before" not in printed
    assert printed.startswith(f"{trained.MISSING}; the weights are random instead\n")
    assert "Qwen3MoeForCausalLM, 21 M parameters" in printed


@pytest.mark.parametrize(("architecture", "operator"), [("gemma4", "moe_experts"), ("qwen3", "rms_norm")])
def test_checkpoint_of_the_user(architecture, operator, demo, tmp_path):
    tiny_models.tiny_model(architecture).save_pretrained(tmp_path)
    printed = demo("--model", str(tmp_path), "--tokens", "4", "--dtype", "float32")
    assert operator in printed and "greedy tokens equal to eager's: 4 of 4" in printed


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


def test_weights_that_4_bits_do_not_fit_are_shown_dense(demo, tmp_path):
    write_model("Qwen3MoeForCausalLM", tmp_path)
    printed = demo("--model", str(tmp_path), "--tokens", "2", "--dtype", "float32")
    assert re.search(r"tokens/s, in turns: eager [\d.]+, accelerated [\d.]+ \([\d.]+ times\)\n", printed)
    assert "\nnot in 4 bits: moe_mps::quantize: model.layers.0.mlp.experts.gate_up_proj must be" in printed


def test_quantised_checkpoint(demo, tmp_path):
    """Without transformers' own code beside it, which cannot run the experts."""
    with tiny_models.groups_of_32():
        model = tiny_models.tiny_model("qwen3_moe")
    torch_moe_mps.accelerate(model, 8, 32)
    model.save_pretrained(tmp_path)
    printed = demo("--model", str(tmp_path), "--tokens", "4")
    assert "moe_experts_quantized" in printed and "tokens/s" in printed
    assert "against eager" not in printed


def write_model(name: str, folder: Path) -> None:
    cls = getattr(transformers, name)
    cls(tiny_models.build_config(cls.config_class)).save_pretrained(folder)


# The line on what is wrong with a model of transformers, and the options.
ERRORS = {
    "Llama4ForCausalLM": (
        "Llama4ForCausalLM: Llama4TextExperts is left alone: "
        "its class does not follow transformers' experts interface",
    ),
    "Qwen3MoeForCausalLM": (
        "moe_mps::quantize: model.layers.0.mlp.experts.gate_up_proj must be "
        "of an input dimension that is a multiple of 64 for affine4_64, got 32",
        "--bits",
        "4",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_models_that_are_not_served_are_one_line(name, demo, tmp_path):
    expected, *options = ERRORS[name]
    write_model(name, tmp_path)
    with one_line(expected):
        demo("--model", str(tmp_path), "--tokens", "2", *options)


def test_a_model_is_not_random(demo, capsys):
    with pytest.raises(SystemExit):
        demo("--random", "--model", "there")
    assert capsys.readouterr().err.endswith("error: argument --random: not allowed with argument --model\n")


def test_no_tokens(demo, capsys):
    with pytest.raises(SystemExit):
        demo("--tokens", "0")
    assert capsys.readouterr().err.endswith("error: argument --tokens: must be at least 1, got 0\n")


@pytest.mark.parametrize("kind", ["missing", "empty"])
def test_what_is_no_checkpoint_is_one_line(kind, demo, tmp_path):
    path = tmp_path / "missing" if kind == "missing" else tmp_path
    with one_line(f"{path} is not a checkpoint: there is no {path}/config.json"):
        demo("--model", str(path))


@pytest.mark.parametrize("name", ["meta", "nonsense", *([] if torch.cuda.is_available() else ["cuda"])])
def test_devices_without_tensors_are_one_line(name, demo):
    expected = f"error: --device must be one that holds tensors here, got {name}: "
    with pytest.raises(SystemExit, match=rf"^{re.escape(expected)}[^\n]+$"):
        demo("--device", name)


def test_truncated_file_is_one_line(demo, tmp_path):
    write_model("Qwen3MoeForCausalLM", tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(SystemExit, match=r"^error: [^\n]+ could not be loaded: [^\n]+$"):
        demo("--model", str(tmp_path))


def test_missing_tensor_is_one_line(demo, tmp_path):
    write_model("Qwen3MoeForCausalLM", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.gate.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with one_line(f"{tmp_path} (qwen3_moe) lacks model.layers.1.mlp.gate.weight"):
        demo("--model", str(tmp_path))
