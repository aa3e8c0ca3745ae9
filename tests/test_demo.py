"""scripts/demo.py: the main job from a checkpoint on disk to text, and one line for what is wrong."""

import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models

DEMO = Path(__file__).resolve().parent.parent / "scripts" / "demo.py"


def demo(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, DEMO, "--device", "cpu", *arguments], capture_output=True, text=True
    )


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


@pytest.mark.parametrize("kind", ["missing", "empty", "dense"])
def test_errors_are_one_line(kind, tmp_path):
    path, expected = tmp_path, f"error: {tmp_path} is not a checkpoint: there is no {tmp_path}/config.json"
    if kind == "missing":
        path = tmp_path / "missing"
        expected = f"error: {path} is not a checkpoint: there is no {path}/config.json"
    if kind == "dense":
        config = tiny_models.build_config(tiny_models.transformers.Qwen3Config)
        tiny_models.transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path)
        expected = f"error: {tmp_path} has no Mixture-of-Experts layers (Qwen3ForCausalLM)"
    result = demo("--model", str(path))
    assert result.returncode == 1
    assert result.stderr.strip().splitlines()[-1] == expected
    assert "Traceback" not in result.stderr
