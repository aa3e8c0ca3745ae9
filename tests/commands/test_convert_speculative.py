"""`convert` and MTP layers: they are quantised as the last layer, and load again."""

import json
import re
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints import changed
from support.mtp import with_mtp
from support.processes import COMMAND, environment
from support.serving import letters

from torch_moe_mps.checkpoints import mtp
from torch_moe_mps.checkpoints.mtp import left_out_mtp
from torch_moe_mps.checkpoints.source import Source
from torch_moe_mps.commands import main

TEXT = "thequickbrownfoxjumpsoverthelazydog" * 20
FOUR = ("--bits", "4", "--group-size", "32")


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.sweep)])
def checkpoint(request, tmp_path_factory):
    """(folder, class)"""
    folder = tmp_path_factory.mktemp("dense")
    with with_mtp("glm4_moe", folder, request.param, vocab_size=27) as cls:
        letters().save_pretrained(folder)
        (folder / "text.txt").write_text(TEXT)
        yield folder, cls


def converted(folder, to, *arguments) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors, and the formats of MTP layers."""
    assert main(["convert", str(folder), str(to), *map(str, arguments)]) == 0
    config = json.loads((to / "config.json").read_text())["quantization_config"]
    return load_file(to / "model.safetensors"), config.get("mtp", {})


def refused(capsys, *arguments) -> str:
    """The last line of a command's error."""
    capsys.readouterr()
    assert main([*map(str, arguments)]) == 1
    return capsys.readouterr().err.splitlines()[-1]


def test_headers_are_read_once(checkpoint, tmp_path, monkeypatch):
    """For a plan, which has the bytes of these layers and reads no tensor, and for what is written."""
    folder, _ = checkpoint
    read, opened, made = [], [], []
    for name, calls in (("tensors_in", read), ("safe_open", opened), ("_without_memory", made)):
        own = getattr(mtp, name)
        monkeypatch.setattr(mtp, name, lambda *a, own=own, to=calls, **k: to.append(a) or own(*a, **k))
    mtp._read_headers.cache_clear()
    plan, asked = tmp_path / "plan.json", ["convert", str(folder), str(tmp_path / "new"), *FOUR]
    assert main([*asked, "--dry-run", "--json", str(plan)]) == 0
    assert len(read) == len(made) == 1 and not opened
    size = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert json.loads(plan.read_text())["before"] == pytest.approx(size, rel=1e-3)
    assert main(asked) == 0
    assert len(read) == 1 and len(opened) == 1 and len(made) == 3


def test_mtp_layers_of_other_quantisers_are_left_out(checkpoint, tmp_path, capsys):
    """And all of them for mlx-lm, which has none. A line says so; the model is converted."""
    folder, _ = checkpoint
    assert left_out_mtp(str(folder), Source(str(folder), {}).skeleton()) is None
    assert main([*map(str, ("convert", folder, tmp_path / "mlx", *FOUR, "--to", "mlx"))]) == 0
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "torch-moe-mps: MTP layers are left out: mlx-lm has none"
    assert not any(re.search(r"layers\.[23]\.", n) for n in load_file(tmp_path / "mlx" / "model.safetensors"))
    shutil.copytree(folder, tmp_path / "other")
    with changed(tmp_path / "other" / "config.json") as config:
        config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    skeleton = Source(str(folder), {}).skeleton()
    assert left_out_mtp(str(tmp_path / "other"), skeleton).endswith("got those of bitsandbytes")


@pytest.mark.sweep
def test_another_process_drafts_by_them(tmp_path):
    """The command's answers are those without drafts, and some tokens were drafted."""
    dense, new = tmp_path / "dense", tmp_path / "new"
    with with_mtp("qwen3_next", dense, vocab_size=27):
        letters().save_pretrained(dense)
        with changed(dense / "generation_config.json") as config:
            config["eos_token_id"] = None
        converted(dense, new, *FOUR)
    said = {}
    for speculative in ("none", "mtp"):
        command = [
            sys.executable,
            "-c",
            COMMAND,
            "chat",
            str(new),
            "--speculative",
            speculative,
            "--device",
            "cpu",
        ]
        command += ["--set", "max_new_tokens=60", "--set", "temperature=0"]
        said[speculative] = subprocess.run(
            command, input="abcabc\n!exit\n", env=environment(), capture_output=True, text=True, timeout=200
        )
        assert said[speculative].returncode == 0, said[speculative].stderr
    answers = {speculative: own.stdout.split("tokens")[0] for speculative, own in said.items()}
    assert answers["none"] == answers["mtp"] and " of " in said["mtp"].stderr
