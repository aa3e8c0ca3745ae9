"""Writes the tables of docs/operators.md from the schemas and docstrings of the operators."""

import inspect
import re
from pathlib import Path
from types import ModuleType

import torch

from torch_moe_mps import ops

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "operators.md"
MARK = "<!-- scripts/make/make_operators_table.py writes what follows -->\n"
HEAD = "| operator | arguments, and optional ones | computes | stands for |\n| --- | --- | --- | --- |\n"


def family(name: str) -> ModuleType:
    return next(module for module in vars(ops).values() if hasattr(module, name) and inspect.ismodule(module))


def row(name: str) -> str:
    packet = getattr(torch.ops.moe_mps, name)
    needed, optional = [], []
    for argument in packet.default._schema.arguments:
        (optional if argument.has_default_value() else needed).append(f"`{argument.name}`")
    document = inspect.cleandoc(packet.__doc__)
    arguments = ", ".join(needed) + (f"; {', '.join(optional)}" if optional else "")
    summary = document.splitlines()[0].rstrip(":.").replace("|", "\\|")
    kernels = re.findall(r"Stands for .*source kernel\w* (.*)", document)
    named = ", ".join(f"`{kernel}`" for kernel in re.findall(r"\w+_f32|moe_gate\b", " ".join(kernels)))
    return f"| `{name}` | {arguments} | {summary} | {named or '-'} |\n"


def document() -> str:
    """The text that docs/operators.md should have: its introduction, then a table for each family."""
    text = DOCUMENT.read_text().partition(MARK)[0] + MARK
    names: dict[ModuleType, list[str]] = {}
    for name in ops.OPERATORS:
        names.setdefault(family(name), []).append(name)
    for module, members in sorted(names.items(), key=lambda item: item[0].__name__):
        stem = module.__name__.rpartition(".")[2]
        text += f"\n## {stem}\n\n{HEAD}{''.join(map(row, members))}"
    return text


if __name__ == "__main__":
    DOCUMENT.write_text(document())
