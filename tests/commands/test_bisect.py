"""`torch-moe-mps check --bisect MODEL`: faults that are injected into the simulator are named."""

import json

import pytest
import torch
from support import tiny_models
from support.checkpoints import tokenizer_of
from support.faults import with_results

from torch_moe_mps._environment import REFUSE
from torch_moe_mps.commands import main

pytestmark = pytest.mark.usefixtures("captured")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_models.tiny_model("qwen3_moe", torch.float32, num_hidden_layers=1).save_pretrained(folder)
    tokenizer_of([*map(chr, range(32, 126)), "??"], unk_token="??").save_pretrained(folder)
    return folder


def doubled(memory, before) -> None:
    memory[:] = 2 * memory


def bisected(simulated, capsys, checkpoint, kernel: str | None, *options: str) -> tuple[int, list[str]]:
    """The exit code and what is printed, where a kernel's results are twice what they should be."""
    with simulated.intercepted(with_results(kernel or "none", doubled)):
        code = main(["check", "--bisect", str(checkpoint), *options])
    return code, capsys.readouterr().out.splitlines()


def test_a_model_that_agrees(simulated, capsys, checkpoint):
    code, (about, trial, verdict) = bisected(simulated, capsys, checkpoint, None)
    assert code == 0
    assert about.startswith("Compared on mps: the logits of a prompt of 55 tokens and of the 8 likeliest ")
    assert float(trial.removeprefix("everything on: ")) < 2e-4
    assert verdict == "The accelerated model agrees with its eager code."


@pytest.mark.slow("seven trials of a model")
def test_an_operator_that_is_wrong(simulated, capsys, checkpoint, tmp_path):
    """It is the first that mends the difference; the file has what was printed."""
    path = tmp_path / "found.json"
    code, lines = bisected(simulated, capsys, checkpoint, "route", "--json", str(path))
    assert code == 1
    assert lines[-2].startswith("MOE_MPS_REFUSE=moe_router: ") and lines[-2].endswith(", which mends it")
    assert not any(line.endswith("mends it") for line in lines[:-2])
    verdict = "The model differs from its eager code. Without this it agrees: the operator moe_router."
    assert lines[-1] == verdict
    written = json.loads(path.read_text())
    assert written["verdict"] == verdict and len(written["trials"]) == len(lines) - 2
    assert str(checkpoint) not in path.read_text()


@pytest.mark.slow("five trials of a captured model")
def test_a_fused_operator_that_is_wrong(simulated, capsys, checkpoint):
    """Only captured steps run it, so without capture and without fusion the model agrees."""
    code, lines = bisected(simulated, capsys, checkpoint, "normed_logits")
    mended = [line.partition(": ")[0] for line in lines if line.endswith("mends it")]
    assert code == 1
    assert mended == ["MOE_MPS_CAPTURE=0", "MOE_MPS_REFUSE=fusion", "MOE_MPS_REFUSE=norm_in_operators"]
    assert lines[-1].endswith("agrees: the pass norm_in_operators, which puts in router_logits.")


def test_names_that_the_environment_refuses_stay(simulated, capsys, checkpoint, monkeypatch):
    monkeypatch.setenv(REFUSE, "moe_router")
    code, lines = bisected(simulated, capsys, checkpoint, "route")
    assert code == 0 and len(lines) == 3
