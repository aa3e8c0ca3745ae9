"""What README and docs/chat.md show works as it is pasted, after what README says to install."""

import re
import shlex
import sys
import textwrap
import tomllib
from importlib.metadata import requires

import torch
from packaging.requirements import Requirement
from support.models import tiny
from support.processes import REPOSITORY

from torch_moe_mps.commands import main
from torch_moe_mps.commands.arguments import parser

README = (REPOSITORY / "README.md").read_text()


def test_the_first_snippet(tmp_path, capsys, monkeypatch):
    if sys.platform != "darwin":  # where the simulator may be installed
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    operators, snippet = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(operators, found := {})
    assert found["combined"].shape == (3, 64)
    model = tiny("qwen3_moe")
    model.config.num_hidden_layers = 2
    model.save_pretrained(tmp_path)
    assert "device_map=device" in snippet and "path/to/model" in snippet
    snippet = snippet.replace("path/to/model", str(tmp_path))
    exec(snippet.replace("bits=4", "bits=4, group_size=32"), {})
    assert "moe_experts_quantized" in capsys.readouterr().out


def commands_under(*headings: str) -> list[str]:
    """The first block under each heading."""
    texts = [README.partition(f"\n## {heading}\n")[2] for heading in headings]
    return [
        line.strip() for text in texts for line in re.search(r"\n\n((?: {4}.*\n)+)", text)[1].splitlines()
    ]


def first_commands() -> list[str]:
    return commands_under("Install", "Qwen3-30B-A3B on a Mac with 32 GB")


def test_a_checkout_installs_in_a_fresh_environment():
    """Without isolation pip installs nothing that the build needs; the extension is compiled with torch."""
    environment, first, install, *others = first_commands()
    assert environment.startswith("python3 -m venv ~/moe && source ~/moe/bin/activate")
    project = (REPOSITORY / "pyproject.toml").read_text()
    needed = re.search(r"^requires = \[(.*)\]$", project, re.MULTILINE).group(1)
    needed += re.search(r'^dependencies = \[("torch.*?")', project, re.MULTILINE).group(1)
    assert {*shlex.split(first)[2:]} == {*re.findall('"(.*?)"', needed)}
    assert install.startswith("pip install --no-build-isolation ")
    assert all(command.startswith("torch-moe-mps ") for command in others) and len(others) == 2


def test_other_pages_install_what_the_build_needs():
    """In the line in front of the build, as README has it."""
    _, first, *_ = first_commands()
    pages = [page.read_text() for page in (REPOSITORY / "docs").glob("*.md")]
    lines = [
        line for text in pages for line in re.findall(r"(.*)\n    pip install --no-build-isolation", text)
    ]
    assert lines and {*lines} == {f"    {first}"}


def test_every_command_is_named():
    listed = re.search(r"^Commands: (.*?);", README, re.DOTALL | re.MULTILINE)[1]
    (commands,) = (action for action in parser()._actions if action.choices)
    assert {*re.findall(r"`(?:torch-moe-mps )?(\w+)`", listed)} == {*commands.choices}


def test_the_installation_brings_what_the_commands_need():
    """device_map needs the package accelerate, which transformers does not require; adapters need peft."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    left, brought = [re.search(r'"(\.\[.*\])"', README)[1].replace(".", "torch-moe-mps", 1)], set()
    while left:
        need = Requirement(left.pop())
        if need.name == "torch-moe-mps":
            left += [line for extra in need.extras for line in project["optional-dependencies"][extra]]
        else:
            brought.add(need.name)
            asked = [Requirement(line) for line in requires(need.name) or () if need.name == "transformers"]
            extras = [{"extra": extra} for extra in need.extras]
            brought |= {one.name for one in asked if one.marker and any(map(one.marker.evaluate, extras))}
    assert {"transformers", "accelerate", "gguf", "jinja2", "peft", "uvicorn", "xgrammar"} <= brought
    assert {"jinja2"} <= {Requirement(line).name for line in requires("torch")}
    plain = [Requirement(line) for line in requires("transformers")]
    assert not any(need.name == "accelerate" and need.marker is None for need in plain)


def test_a_chat_looks_as_it_is_shown(printable, capsys, monkeypatch):
    """But for the answer, the name of the model, and figures."""
    name = first_commands()[-1].split()[-1]
    _, _, text = (REPOSITORY / "docs" / "chat.md").read_text().partition("Then you see:\n\n")
    shown = textwrap.dedent(re.match(r"(?:(?: {4}.*)?\n)+", text)[0]).strip()
    lines = iter([question := "Why is the sky blue?"])

    def typed(prompt: str) -> str:
        print(prompt, end="")
        line = next(lines, None)
        if line is None:
            raise EOFError
        print(line)
        return line

    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr("getpass.getuser", lambda: "you")
    assert main(["chat", str(printable), "--device", "cpu", "--max-tokens", "20"]) == 0
    pattern = re.escape(shown.replace(name, printable.name)).replace(re.escape("..."), "(.|\n)*")
    assert question in shown and re.match(pattern, capsys.readouterr().out.replace("; !continue goes on", ""))


def test_what_is_pasted_works_in_zsh():
    """The shell of macOS has no comments where commands are typed: they would be arguments."""
    for document in (REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")):
        pasted = r"^(?: {4})?(?:\w+=\S+ )*(?:torch-moe-mps|pip|python3?|torchrun|scripts/\w+) .*"
        for line in re.findall(pasted, document.read_text(), re.MULTILINE):
            assert "  #" not in line, f"{document.name}: {line}"


def test_what_is_not_released_is_installed_from_the_checkout():
    """And the other way round, once there is a release."""
    unreleased = (
        "(unreleased)" in (REPOSITORY / "CHANGELOG.md").read_text().partition("\n## ")[2].splitlines()[0]
    )
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")]
    for page in pages:
        text = page.read_text()
        assert re.search(r"pip install .?torch-moe-mps", text) is None or not unreleased, page
        assert "--no-build-isolation" not in text or unreleased, page
