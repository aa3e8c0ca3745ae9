"""scripts/demo.py: the main job from a checkpoint on disk to text, and one line for what is wrong."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support import tiny_models
from support.processes import REPOSITORY, environment

import torch_moe_mps

DEMO = REPOSITORY / "scripts" / "demo.py"


def demo(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, DEMO, "--device", "cpu", *arguments],
        capture_output=True,
        text=True,
        env=environment(),
    )


def test_help_needs_no_package_and_installs_nothing(tmp_path):
    """With a Python that has neither torch nor a .venv."""
    for path in ("scripts/demo", "scripts/demo.py", "scripts/environment.sh"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / path, tmp_path / path)
    result = subprocess.run([tmp_path / "scripts" / "demo", "--help"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("usage: scripts/demo") and "--tokens" in result.stdout
    assert not (tmp_path / ".venv").exists()


def test_own_checkpoint():
    result = demo("--tokens", "12")
    assert result.returncode == 0, result.stderr
    assert "moe_experts (silu)" in result.stdout and "moe_router (softmax)" in result.stdout
    assert "greedy tokens equal to eager's: 12 of 12" in result.stdout
    error = float(result.stdout.partition("relative error ")[2].split()[0])
    assert error <= 1e-5
    assert "tokens/s: eager" in result.stdout


def test_checkpoint_of_the_user(tmp_path):
    tiny_models.tiny_model("gemma4").save_pretrained(tmp_path)
    result = demo("--model", str(tmp_path), "--tokens", "4", "--dtype", "float32")
    assert result.returncode == 0, result.stderr
    assert "moe_gate" in result.stdout and "greedy tokens equal to eager's: 4 of 4" in result.stdout


def test_dense_model(tmp_path):
    tiny_models.tiny_model("qwen3").save_pretrained(tmp_path)
    result = demo("--model", str(tmp_path), "--tokens", "4", "--dtype", "float32")
    assert result.returncode == 0, result.stderr
    assert "rms_norm" in result.stdout and "greedy tokens equal to eager's: 4 of 4" in result.stdout


def test_quantised_checkpoint(tmp_path):
    """Without transformers' own code beside it, which cannot run the experts."""
    with tiny_models.groups_of_32():
        model = tiny_models.tiny_model("qwen3_moe")
    torch_moe_mps.accelerate(model, 8, 32)
    model.save_pretrained(tmp_path)
    result = demo("--model", str(tmp_path), "--tokens", "4")
    assert result.returncode == 0, result.stderr
    assert "moe_experts_quantized" in result.stdout and "tokens/s" in result.stdout
    assert "against eager" not in result.stdout


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
        "of an input dimension that is a multiple of group_size 64, got 32",
        "--bits",
        "4",
    ),
}


def assert_one_line(result: subprocess.CompletedProcess, expected: str) -> None:
    assert result.returncode == 1
    assert result.stderr.strip().splitlines()[-1] == f"error: {expected}"
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.sweep if i else []) for i, name in enumerate(ERRORS)]
)
def test_models_that_are_not_served_are_one_line(name, tmp_path):
    expected, *options = ERRORS[name]
    write_model(name, tmp_path)
    assert_one_line(demo("--model", str(tmp_path), "--tokens", "2", *options), expected)


def test_no_tokens():
    result = demo("--tokens", "0")
    assert result.returncode == 2
    assert result.stderr.strip().endswith("error: argument --tokens: must be at least 1, got 0")


@pytest.mark.parametrize("kind", ["missing", pytest.param("empty", marks=pytest.mark.sweep)])
def test_what_is_no_checkpoint_is_one_line(kind, tmp_path):
    path = tmp_path / "missing" if kind == "missing" else tmp_path
    expected = f"{path} is not a checkpoint: there is no {path}/config.json"
    assert_one_line(demo("--model", str(path)), expected)


@pytest.mark.parametrize(
    "name", ["meta", *(pytest.param(name, marks=pytest.mark.sweep) for name in ("cuda", "nonsense"))]
)
def test_devices_without_tensors_are_one_line(name):
    result = subprocess.run(
        [sys.executable, DEMO, "--device", name], capture_output=True, text=True, env=environment()
    )
    if name == "cuda" and torch.cuda.is_available():
        assert result.returncode == 0
        return
    assert result.returncode == 1 and "Traceback" not in result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith(f"error: --device must be one that holds tensors here, got {name}: ")


@pytest.mark.sweep
def test_truncated_file_is_one_line(tmp_path):
    write_model("Qwen3MoeForCausalLM", tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    result = demo("--model", str(tmp_path))
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert "could not be loaded" in result.stderr.strip().splitlines()[-1]


def test_missing_tensor_is_one_line(tmp_path):
    write_model("Qwen3MoeForCausalLM", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.gate.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    result = demo("--model", str(tmp_path))
    assert_one_line(result, f"{tmp_path} (qwen3_moe) lacks model.layers.1.mlp.gate.weight")
