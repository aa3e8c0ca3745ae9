"""What the README shows works as it is pasted, after what the README says to install."""

import re
import sys
from importlib.metadata import requires

import torch
from packaging.requirements import Requirement
from support.models import tiny
from support.processes import REPOSITORY

README = (REPOSITORY / "README.md").read_text()


def test_the_first_snippet(tmp_path, capsys):
    (snippet, *_) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    model = tiny("qwen3_moe")
    model.config.num_hidden_layers = 2
    model.save_pretrained(tmp_path)
    device = "mps" if torch.backends.mps.is_available() and sys.platform == "darwin" else "cpu"
    assert 'device_map="mps"' in snippet and "path/to/model" in snippet
    snippet = snippet.replace("path/to/model", str(tmp_path)).replace('"mps"', f'"{device}"')
    exec(snippet.replace("bits=4", "bits=4, group_size=32"), {})
    assert "moe_experts_quantized" in capsys.readouterr().out


def test_a_checkout_installs_in_a_fresh_environment():
    """Without isolation pip installs nothing that the build needs; the extension is compiled with torch."""
    _, _, checkout = README.partition("## From a checkout")
    first, _, last = checkout.partition("pip install --no-build-isolation")
    assert last and (line := re.search(r"pip install (.*?) *#", first))
    project = (REPOSITORY / "pyproject.toml").read_text()
    needed = re.search(r"^requires = \[(.*)\]$", project, re.MULTILINE).group(1)
    needed += re.search(r"^dependencies = \[(.*)\]$", project, re.MULTILINE).group(1)
    assert set(re.findall('"(.*?)"', needed)) == set(re.findall('"(.*?)"', line.group(1)))


def test_the_installation_brings_what_the_snippet_needs():
    """device_map needs the package accelerate, which transformers does not require."""
    assert '".[transformers]"' in README
    project = (REPOSITORY / "pyproject.toml").read_text()
    extra = re.search(r"^transformers = \[(.*)\]$", project, re.MULTILINE).group(1)
    assert {Requirement(line).name for line in re.findall('"(.*?)"', extra)} == {"transformers", "accelerate"}
    plain = [Requirement(line) for line in requires("transformers")]
    assert not any(need.name == "accelerate" and need.marker is None for need in plain)
