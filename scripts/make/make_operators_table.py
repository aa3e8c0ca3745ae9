"""Writes the tables of docs/operators.md from the schemas and docstrings of the operators."""

import inspect
import re
from pathlib import Path

import torch

from torch_moe_mps import ops

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "operators.md"
MARK = "<!-- scripts/make/make_operators_table.py writes what follows -->\n"
HEAD = "| operator | arguments, and optional ones | computes | stands for |\n| --- | --- | --- | --- |\n"


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
    for family, module in sorted(ops.FAMILIES.items()):
        members = [name for name in ops.PUBLIC if name in module.CALLS]
        if members:
            text += f"\n## {family}\n\n{HEAD}{''.join(map(row, members))}"
    return text


if __name__ == "__main__":
    DOCUMENT.write_text(document())
