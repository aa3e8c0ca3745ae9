"""Architectures that nothing here knows by name: what the general road makes of them."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from support.processes import REPOSITORY

FAMILIES = ("deepseek_v4", "glm5_next", "minimax_m3")
# And two with a row in tables: one has biases, and the other has experts without a gate.
TAKEN_OUT = (*FAMILIES, "gpt_oss", "nemotron_h")
ARCHITECTURES = ("deepseek_v4", "glm5_next", "gpt_oss", "minimax_m3_vl", "nemotron_h")
PROGRAM = """
import copy, json, sys
import torch, transformers
import torch_moe_mps
from support import coverage, tiny_models
from support.models import eager, output, prompt
from torch_moe_mps.transformers.wiring import FAMILIES

transformers.logging.set_verbosity_error()
found = {"package": torch_moe_mps.__file__, "families": FAMILIES}
for name in sys.argv[1:]:
    faults = []
    models = [each.model for each in coverage.tried(name, faults) if each.has_experts]
    assert models, (name, faults)
    model = models[-1]
    report = torch_moe_mps.accelerate(accelerated := copy.deepcopy(model))
    own, ours = output(model, prompt()), output(accelerated, prompt())
    error = ((ours - own).abs().max() / own.abs().max()).item()
    found[name] = [coverage.experts(report), sorted({done.operator for done in report.done()}), error]
print(json.dumps(found))
"""


def take_out(folder: Path) -> None:
    """Deletes families from a copy of the tree, and spoils every text that has their names."""
    names = re.compile(rf'"[^"\n]*({"|".join(TAKEN_OUT)})[^"\n]*"')
    families = folder / "torch_moe_mps" / "models" / "families"
    for name in FAMILIES:
        shutil.rmtree(families / name)
    wiring = folder / "torch_moe_mps" / "transformers" / "wiring.py"
    wiring.write_text(re.sub(rf"^ +{names.pattern},\n", "", wiring.read_text(), flags=re.MULTILINE))
    for file in [*folder.rglob("*.py")]:
        file.write_text(names.sub('"taken out"', file.read_text()))


@pytest.mark.sweep
def test_five_architectures_that_are_taken_out_have_experts_and_norms(tmp_path):
    """And the logits of their own code."""
    shutil.copytree(
        REPOSITORY / "torch_moe_mps",
        tmp_path / "torch_moe_mps",
        ignore=shutil.ignore_patterns("__pycache__", "*.so"),
    )
    shutil.copytree(
        REPOSITORY / "tests" / "support",
        tmp_path / "tests" / "support",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    take_out(tmp_path)
    paths = [tmp_path, tmp_path / "tests", REPOSITORY / "tests"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "MOE_MPS_CHECK": "0"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *ARCHITECTURES],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("package").startswith(str(tmp_path))
    assert {*TAKEN_OUT}.isdisjoint(found.pop("families"))
    for name in ARCHITECTURES:
        experts, operators, error = found[name]
        assert experts.startswith("moe_experts"), (name, experts)
        assert "rms_norm" in operators and error <= 1e-5, (name, operators, error)


def test_the_row_of_a_modelling_file(simulated, tmp_path, monkeypatch):
    """OLMoE's under another name runs what OLMoE does (tests/pinned/models.txt)."""
    from support import coverage

    for kind in ("modeling", "configuration"):
        source = Path(transformers.models.__path__[0]) / "olmoe" / f"{kind}_olmoe.py"
        text = source.read_text().replace("olmoe", "unheard_of").replace("Olmoe", "UnheardOf")
        (tmp_path / f"{kind}_unheard_of.py").write_text(text)
    for name in ("", ".modeling_unheard_of", ".configuration_unheard_of"):
        monkeypatch.setitem(sys.modules, f"transformers.models.unheard_of{name}", None)
        del sys.modules[f"transformers.models.unheard_of{name}"]
    name = coverage.of_file(tmp_path / "modeling_unheard_of.py")
    row = coverage.row(name)
    assert row == ("unheard_of", "moe_experts (silu)", "moe_router (softmax)", "72 / 8", "-")
    assert row.lack is None
