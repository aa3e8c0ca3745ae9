"""A family is its folder: without it all else imports, and its models run their own code and the operators
that others have, too."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from support.processes import REPOSITORY

FOLDERS = REPOSITORY / "torch_moe_mps/transformers/families"
# {folder: (an architecture, what its report has from the family alone)}
FAMILIES = {
    "deepseek_v4": ("deepseek_v4", "_pool_window_"),
    "gemma4": ("gemma4", "moe_gate"),
    "glm5_next": ("glm5_next", "_index_topk"),
    "gpt_oss": ("gpt_oss", "gpt-oss in GGUF files"),
    "inkling2": ("inkling2", "relative positions"),
    "minimax_m3": ("minimax_m3_vl", "_index_topk"),
    "qwen4_exp": ("qwen4_exp", "_index_topk"),
}
# Imports everything, and runs each architecture by its own code and accelerated: what its report has, and the
# largest difference of logits of a prompt and of two tokens behind it. The caches of a family that is not
# there do not grow in place, which is said.
PROGRAM = """
import importlib, json, pkgutil, sys, warnings
warnings.filterwarnings("ignore", "torch_moe_mps: the cache of")
import torch, torch_moe_mps, transformers
from support.tiny_models import tiny_model
for each in pkgutil.walk_packages(torch_moe_mps.__path__, "torch_moe_mps."):
    if not each.name.rpartition(".")[2].startswith(("_C", "__main__")):
        try:
            importlib.import_module(each.name)
        except ModuleNotFoundError as error:
            assert error.name == "trl", error  # of tests/sweep.txt
assert torch_moe_mps.__file__.startswith(sys.argv[1]), torch_moe_mps.__file__
from torch_moe_mps.transformers.graphs.passes import INTRODUCED
from transformers.integrations.gguf.gguf_config_mapping import GGUF_CONFIG_ARCHS
ids = torch.randint(1, 90, (1, 14), generator=torch.Generator().manual_seed(0))
found = {}
for name in sys.argv[2:]:
    def logits(model):
        options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        out = model.generate(ids, **options, output_logits=True, return_dict_in_generate=True)
        return torch.stack(out.logits)
    model = tiny_model(name)
    own, report = logits(model), torch_moe_mps.accelerate(model)
    parts = report.operators() | {str(done) for row in report.rows for done in row.done}
    parts |= {"moe_gate"} & set(INTRODUCED.values())
    parts |= {"gpt-oss in GGUF files"} if "gpt-oss" in GGUF_CONFIG_ARCHS else set()
    found[name] = sorted(parts), (logits(model) - own).abs().max().item()
print(json.dumps(found))
"""


def without(folders, names, tmp_path) -> dict:
    """What PROGRAM finds of these architectures with a copy of the package that lacks these families."""
    ignored = shutil.ignore_patterns("csrc", "shaders", "__pycache__", "*.so")
    shutil.copytree(REPOSITORY / "torch_moe_mps", tmp_path / "torch_moe_mps", ignore=ignored)
    shutil.copy(REPOSITORY / "torch_moe_mps_autoload.py", tmp_path)
    for folder in folders:
        shutil.rmtree(tmp_path / "torch_moe_mps/transformers/families" / folder)
    path = os.pathsep.join(map(str, (tmp_path, REPOSITORY / "tests")))
    run = subprocess.run(
        [sys.executable, "-W", "error:torch_moe_mps", "-c", PROGRAM, str(tmp_path), *names],
        env=os.environ | {"PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


# An operator of tokens alone, a file's names, a pass and an operator of a layer.
ALWAYS = ("gemma4", "gpt_oss", "deepseek_v4", "qwen4_exp")


@pytest.mark.sweep
@pytest.mark.parametrize(
    "folders",
    [[*FAMILIES], *([each] for each in FAMILIES)],
    ids="+".join,
)
def test_without(folders, tmp_path):
    """Without one, its models and those of two others; without all, some."""
    assert {path.parent.name for path in FOLDERS.glob("*/__init__.py")} == FAMILIES.keys()
    models = ALWAYS if len(folders) > 1 else (*folders, "gpt_oss", "deepseek_v4")
    families = {each: FAMILIES[each] for each in models}
    found = without(folders, {name for name, _ in families.values()}, tmp_path)
    for folder, (name, part) in families.items():
        parts, difference = found[name]
        assert (part in parts) == (folder not in folders), (name, parts)
        assert difference < 1e-4, (name, difference)
