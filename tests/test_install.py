"""What pip installs: the declared requirements are enough, and the commands of hints are right."""

import json
import os
import shlex
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
from support import installed
from support.processes import REPOSITORY, python
from support.sweep import in_sweep

import torch_moe_mps
from torch_moe_mps.ops import OPERATORS

HINT = "from torch_moe_mps._install import install_extra; print(install_extra('serve'))"


@pytest.mark.sweep
def test_pip_finds_an_extra_in_the_installed_package(tmp_path_factory):
    """By its name alone, without an index."""
    home = installed.new_environment(tmp_path_factory)
    *_, name = shlex.split(run_in(home, HINT))
    options = ["install", "--dry-run", "--no-index", "--disable-pip-version-check", name]
    command = [sys.executable, "-m", "pip", "--python", home / "bin" / "python", *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=home)
    assert "Requirement already satisfied: xgrammar" in result.stdout, result.stderr


def test_the_pip_is_that_of_this_python(tmp_path):
    """Where a shell finds another one first, as when nothing is activated.

    A hint leaves distutils to setuptools, whose finder gives them up for ever in a process that looks for
    pip.
    """
    (tmp_path / "pip").write_text("#!/bin/sh\n")
    (tmp_path / "pip").chmod(0o755)
    then = "import distutils.core; print(distutils.core.__file__)"
    line, file = python(f"{HINT}\n{then}", PATH=str(tmp_path)).splitlines()
    assert shlex.split(line) == [sys.executable, "-m", "pip", "install", "torch-moe-mps[serve]"]
    assert "setuptools" in file  # Python has no distutils of its own from 3.12 on


@pytest.mark.sweep
def test_a_module_that_is_gone_is_not_installed_again(tmp_path):
    """From a checkout that was installed before, and has been updated since."""
    sources = installed.build_wheel.copy_sources(tmp_path / "sources")
    (gone := sources / "torch_moe_mps" / "gone.py").write_text("")
    names = []
    for folder in ("first", "second"):
        wheel = installed.build_wheel.build_wheel(sources, tmp_path / folder)
        names.append({*zipfile.ZipFile(wheel).namelist()})
        gone.unlink(missing_ok=True)
    assert names[0] - names[1] == {"torch_moe_mps/gone.py"} and names[1] < names[0]


COMMANDS = """
    import json, shlex, sys, torch_moe_mps_command
    from torch_moe_mps.commands import main
    sys.exit(max(main(shlex.split(line)) for line in sys.argv[1:]))
"""
EXTRA_OF = {
    "bench Qwen/X": "transformers",
    "chat Qwen/X": "transformers",
    "convert Qwen/X new": "transformers",
    "fit Qwen/X": "transformers",
    "generate Qwen/X --prompt a": "transformers",
    "perplexity Qwen/X": "transformers",
    "serve Qwen/X": "serve",
}


def test_commands_without_their_extra_name_it():
    """One line each, before anything is imported: this Python finds no package but ours."""
    line = [sys.executable, "-S", "-c", textwrap.dedent(COMMANDS), *EXTRA_OF]
    result = subprocess.run(line, capture_output=True, text=True, env={"PYTHONPATH": str(REPOSITORY)})
    said = [line.partition("`") for line in result.stderr.splitlines()]
    assert [begin for begin, _, _ in said] == [
        f"torch-moe-mps: error: {command.split()[0]} needs " for command in EXTRA_OF
    ]
    found = [(*shlex.split(rest.partition("`")[0]),) for _, _, rest in said]
    assert all("install" in command for command in found)
    assert [command[-1] for command in found] == [f"torch-moe-mps[{extra}]" for extra in EXTRA_OF.values()]


OPERATOR = """
    import json, torch, torch_moe_mps
    x, weight = torch.randn(3, 64), torch.randn(64)
    got = torch.ops.moe_mps.rms_norm(x, weight, norm_eps=1e-6)
    expected = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    torch.testing.assert_close(got, expected.float())
    checks = torch.library.opcheck(torch.ops.moe_mps.rms_norm.default, (x, weight), {"norm_eps": 1e-6})
    print(json.dumps([torch_moe_mps.__file__, {*checks.values()} == {"SUCCESS"}]))
"""
WITHOUT_MODELS = """
    import json, torch_moe_mps
    said = {}
    for name in torch_moe_mps.__all__:
        try:
            getattr(torch_moe_mps, name)
        except ImportError as error:
            said[name] = str(error)
    print(json.dumps(said))
"""
EVERY_OPERATOR = """
    import importlib.util, json, torch
    from torch_moe_mps import ops
    from torch_moe_mps.ops._samples import packet, sample_arguments
    found = {}
    for name in ops.OPERATORS:
        given = sample_arguments(name, "cpu", torch.float32)
        found[name] = {*torch.library.opcheck(packet(name).default, (), given).values()} == {"SUCCESS"}
    others = [name for name in ("numpy", "transformers", "starlette") if importlib.util.find_spec(name)]
    print(json.dumps([found, others]))
"""
MODEL = """
    import torch, torch_moe_mps
    from transformers import MixtralConfig, MixtralForCausalLM
    sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_local_experts=4)
    heads = dict(num_attention_heads=2, num_key_value_heads=2, vocab_size=32)
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads)).eval()
    report = torch_moe_mps.accelerate(model, bits=4, group_size=32)
    is_finite = model(torch.arange(4)[None]).logits.isfinite().all().item()
    print(is_finite, "_moe_experts_quantized" in report.operators())
"""
SERVE = "import torch_moe_mps.serving.http.app, torch_moe_mps.commands.serve; print(True)"


@pytest.mark.slow("builds a wheel, and imports torch in an environment of its own")
@pytest.mark.parametrize("extra", in_sweep(("", "transformers", "serve"), ("",)))
def test_environment_of_the_declared_requirements(tmp_path_factory, extra):
    """The wheel, torch and what the metadata declares, in a new process from another folder."""
    home = installed.declared_environment(tmp_path_factory, extra)
    file, is_right = json.loads(run_in(home, OPERATOR))
    assert is_right and Path(file).is_relative_to(home)
    if not extra:
        said = json.loads(run_in(home, WITHOUT_MODELS))
        assert {*said} == {*torch_moe_mps.__all__} - {"ops", "synchronize"}
        for line in said.values():
            assert line.startswith("torch_moe_mps: models need transformers: `") and "[transformers]" in line
    else:
        assert run_in(home, MODEL) == "True True"
    if extra == "serve":
        assert run_in(home, SERVE) == "True"


@pytest.mark.sweep
def test_every_operator_with_torch_and_numpy_alone(tmp_path_factory):
    found, others = json.loads(run_in(installed.declared_environment(tmp_path_factory), EVERY_OPERATOR))
    assert sorted(found) == sorted(OPERATORS) and all(found.values()), found
    assert others == ["numpy"]


def run_in(home: Path, source: str) -> str:
    """What the Python of an environment prints, from its folder."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    line = [home / "bin" / "python", "-I", "-c", textwrap.dedent(source)]
    result = subprocess.run(line, capture_output=True, text=True, timeout=300, env=kept, cwd=home)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()
