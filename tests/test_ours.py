"""What a path or a name decides: whose a file is, in a clone of any name, in a folder of any name."""

import importlib.machinery
import inspect
import os
import re
import runpy
import sys
import types
from pathlib import Path

import pytest
import torch
from support import ours
from support.processes import REPOSITORY

from torch_moe_mps.models.basics import code
from torch_moe_mps.models.capture import user_code
from torch_moe_mps.models.trials import branches

# A part of a path, or the name of a package, that is looked for in a text.
NAME = r"""(["'])[<./\\-]*(?:torch[_-]moe[_-]mps|moe_mps|torch|transformers|\w*-packages)[./\\-]*\1"""
ASKS = re.compile(
    rf"{NAME}\s+(?:not )?in (?!sys\.modules)|\.(?:\w*find|count|\w*index|search)\(\s*{NAME.replace('1', '2')}"
)
# Lines that ask so, and ask no path.
ALLOWED = {
    '"torch_moe_mps" in str(type(f))': "the name of a class's module",
    '"moe_mps" in each for each in registries': "keys of registries",
    '"transformers" in about["versions"]': "names of packages",
    '"moe_mps" not in path.read_text()': "the text of a file",
    '"transformers" in name.split(".")': "the names of modules",
    'b"torch_moe_mps" not in saved': "a pickle, which has names of modules and no paths",
    '"moe_mps" not in str(model.config.to_dict())': "the config of a model that no folder has",
    '"site-packages" not in file.parts': "files below the standard library's folder",
}


def asking(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if ASKS.search(line)]


def test_no_part_of_a_path_says_whose_a_file_is():
    """In source that tests run in new processes neither."""
    files = [
        *REPOSITORY.glob("*.py"),
        *(
            f
            for name in ("torch_moe_mps", "tests", "scripts", "hub")
            for f in (REPOSITORY / name).rglob("*.py")
        ),
    ]
    found = [line for file in files if file != Path(__file__) for line in asking(file.read_text())]
    assert [line for line in found if not any(each in line for each in ALLOWED)] == []
    assert [each for each in ALLOWED if not any(each in line for line in found)] == []
    for line in (
        'if "torch_moe_mps" not in frame.f_code.co_filename:',
        'return str(value.__module__).startswith("torch_moe_mps") or "/torch_moe_mps" in file',
        'return "-packages" not in (getattr(sys.modules.get(name), "__file__", None) or "")',
        """return '/torch/' in file.replace("\\\\", "/")""",
        'assert said.count("torch_moe_mps") == 1',
    ):
        assert asking(line), line


@pytest.fixture(params=["torch_moe_mps", "other", "a folder"])
def clone(request, tmp_path, monkeypatch) -> Path:
    """The folder of a clone whose package is the one that is found."""
    package = tmp_path / request.param / "torch_moe_mps"
    package.mkdir(parents=True)
    spec = importlib.machinery.ModuleSpec("torch_moe_mps", None, origin=str(package / "__init__.py"))
    fake = types.ModuleType("torch_moe_mps")
    fake.__spec__, fake.__path__ = spec, [str(package)]
    monkeypatch.setitem(sys.modules, "torch_moe_mps", fake)
    return package.parent


def others_of(clone: Path) -> list[str]:
    """Files in a clone and next to it that are not the package's."""
    installed = clone / ".venv" / "lib" / "python3.13" / "site-packages"
    inside = [clone / "mine.py", clone / "tests" / "torch_moe_mps.py", clone / "torch_moe_mps_command.py"]
    return [*map(str, [*inside, installed / "torch" / "_ops.py", Path(f"{clone}_old", "a.py"), "<string>"])]


def test_which_files_tests_call_ours(clone):
    """In processes of their own, which run this source, too."""
    is_ours = runpy.run_path(ours.__file__)["is_file_of_ours"]
    assert is_ours(str(clone / "torch_moe_mps" / "ops" / "families" / "norms.py"))
    assert not any(map(is_ours, others_of(clone)))


@pytest.mark.parametrize("way", ["", "tests/../"])
def test_which_files_capture_calls_a_library(clone, way):
    """Code next to the package is somebody's own; the clone's environment is not."""
    of_package = str(clone / f"{way}torch_moe_mps")  # as PYTHONPATH has it, and Python writes it into code
    space = {**vars(user_code), "__file__": f"{of_package}/models/capture/user_code.py"}
    exec(inspect.getsource(user_code), space)
    assert space["is_of_library"](f"{of_package}/ops/families/norms.py")
    *others, installed, beside, text = others_of(clone)
    assert space["is_of_library"](installed)
    assert not any(map(space["is_of_library"], [*others, beside, text]))


def test_which_modules_are_read_for_names(tmp_path, monkeypatch):
    """All but those that are installed: a folder may have a name like theirs."""
    for folder, is_read in (("site-packages", False), ("my-packages", True), ("a site-packages b", True)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"of_{len(folder)}.py").touch()
        monkeypatch.syspath_prepend(str(tmp_path / folder))
        name = f"of_{len(folder)}"
        importlib.import_module(name)
        assert code.is_followed(name) == is_read, folder


def test_the_place_of_a_branch_is_in_the_models_file(clone):
    """And not in torch's, whatever the folders above the model's file are called."""
    own = (str(clone / "torch" / "modeling.py"), 7, 0)
    place = (own, (os.path.join(os.path.dirname(torch.__file__), "functional.py"), 9, 0)), "where"
    assert branches.in_words(place, "true") == "where in modeling.py:7 was never true"
