"""Writes this package's Metal operators as a project of kernel-builder, which builds kernels for the Hub.

    python scripts/make/build_hub_kernels.py DESTINATION

The project is hub/ with what it shares with the package: the host code of csrc/, the shaders as data, the
schemas of the operators, the table of formats, and the checks of arguments. docs/hub_kernels.md says how it
is built and used.
"""

import argparse
import inspect
import pprint
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from paths import REPOSITORY

from torch_moe_mps._extension import format_arguments
from torch_moe_mps.ops import OPERATORS
from torch_moe_mps.ops._registry import DECLARED
from torch_moe_mps.ops.families.combine import ExpertSum

PACKAGE = REPOSITORY / "torch_moe_mps"
HOST, PYTHON = "moe_mps_metal", "torch-ext/moe_mps"
# The builder's name for operators, which is another for each build, takes the place of ours.
UNIQUE = "#define moe_mps TORCH_EXTENSION_NAME\n"
BINDING = """// The schemas of torch_moe_mps; its .mm files register the kernels.
#include <torch/library.h>

#include "registration.h"

TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {{
{schemas}}}

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
"""


def schemas() -> str:
    lines = []
    for name in sorted(OPERATORS):
        schema = str(getattr(torch.ops.moe_mps, name).default._schema).removeprefix("moe_mps::")
        lines.append(f'  ops.def(R"({schema})");\n')
    return "".join(lines)


def in_python_39(text: str) -> str:
    """A module of ops/ for the oldest Python that kernels must run in."""
    text = re.sub(r'\A(""".*?"""\n)', r"\1\nfrom __future__ import annotations\n", text, flags=re.DOTALL)
    return text.replace(", strict=True)", ")")


SUMMANDS = """# What a layer adds to its experts' sum: of torch_moe_mps, by a script.
from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ._checks import Check


"""


def tables(names: list[str]) -> str:
    declared = {}
    for name in names:
        own = DECLARED[name]
        allowed = {each: tuple(v) if isinstance(v, dict) else v for each, v in own.allowed.items()}
        declared[name] = (own.line, allowed, tuple(own.texts))
    formats = pprint.pformat([*format_arguments()], width=110)
    return (
        '"""Formats of quantised weights, and the declarations of operators: written by a script."""\n\n'
        f"FORMATS = {formats}\n\nDECLARED = {pprint.pformat(declared, width=110, sort_dicts=False)}\n"
    )


def copied(destination: Path) -> Iterator[str]:
    """Copies the host code. Returns: its files, from the project's root."""
    for file in sorted((PACKAGE / "csrc").rglob("*")):
        if file.suffix in (".mm", ".h"):
            path = f"{HOST}/{file.relative_to(PACKAGE / 'csrc')}"
            text = re.sub(r'#include "(?:\.\./)+shaders/', '#include "shaders/', file.read_text())
            (destination / path).parent.mkdir(exist_ok=True)
            (destination / path).write_text(renamed(file, text))
            yield path
    for path in ("shaders/params.h", "shaders/geometry.h", *_beneath("params"), *_beneath("geometry")):
        (destination / HOST / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(PACKAGE / path, destination / HOST / path)
        yield f"{HOST}/{path}"


def _beneath(folder: str) -> list[str]:
    return [str(file.relative_to(PACKAGE)) for file in sorted((PACKAGE / "shaders" / folder).glob("*.h"))]


def renamed(file: Path, text: str) -> str:
    if file.suffix == ".h":
        return text.replace("#pragma once\n", f"#pragma once\n#ifndef moe_mps\n{UNIQUE}#endif\n", 1)
    return f"#ifndef moe_mps\n{UNIQUE}#endif\n{text}"


def listed(*paths: str) -> str:
    """A list of TOML."""
    return "[\n" + "".join(f'  "{path}",\n' for path in paths) + "]"


def build(destination: Path) -> Path:
    """Writes the project. Returns: its folder.

    Raises: FileExistsError if it is there.
    """
    shutil.copytree(REPOSITORY / "hub", destination, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copyfile(REPOSITORY / "LICENSE", destination / "LICENSE")
    settings, paths = destination / "build.toml", [*copied(destination)]
    text, binding = settings.read_text(), "torch-ext/torch_binding.cpp"
    headers = (path for path in paths if path.endswith(".h"))
    text = text.replace(f'src = ["{binding}"]\n', f"src = {listed(binding, *headers)}\n")
    host = (path for path in paths if path.endswith(".mm"))
    settings.write_text(text.replace("src = []\n", f"src = {listed(*host)}\n"))
    (destination / "torch-ext" / "torch_binding.cpp").write_text(BINDING.format(schemas=schemas()))
    package = destination / PYTHON
    for name in ("_checks", "_declared"):
        (package / f"{name}.py").write_text(in_python_39((PACKAGE / "ops" / f"{name}.py").read_text()))
    (package / "_summands.py").write_text(SUMMANDS + inspect.getsource(ExpertSum))
    names = re.findall(r'^(\w+) = operator\("\w+"\)$', (package / "operators.py").read_text(), re.MULTILINE)
    (package / "_tables.py").write_text(tables(names))
    shutil.copytree(
        PACKAGE / "shaders", package / "shaders", ignore=shutil.ignore_patterns("compiled", "*.metallib")
    )
    return destination


if __name__ == "__main__":
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("destination", type=Path)
    print(build(parser.parse_args().destination))
