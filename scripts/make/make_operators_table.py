"""Writes the table of docs/operators.md from the schemas and docstrings of the operators."""

import inspect
import re

import paths

if __name__ == "__main__":
    paths.words(__doc__)

import torch

from torch_moe_mps import ops
from torch_moe_mps.ops._registry import PUBLIC_FOR, WITH_BACKWARD

DOCUMENT = paths.REPOSITORY / "docs" / "operators.md"
BEGIN = "<!-- scripts/make/make_operators_table.py writes this table -->\n"
END = "<!-- end of the table -->\n"
HEAD = (
    "| operator | computes | for | gradients | used by models | source kernel |\n|---|---|---|---|---|---|\n"
)
USED_BY = paths.REPOSITORY / "tests" / "pinned" / "used_by.txt"
NAMED = 3  # architectures by name; of more, their number


def used_by() -> dict[str, list[str]]:
    """Architectures whose recorded steps call an operator (scripts/make/make_used_by.py)."""
    lines = (line.split(": ", 1) for line in USED_BY.read_text().splitlines())
    return {name: [each for each in text.split(", ") if each] for name, text in lines}


def row(name: str, family: str, users: list[str]) -> str:
    document = inspect.cleandoc(getattr(torch.ops.moe_mps, name).__doc__)
    summary = document.splitlines()[0].rstrip(":.").replace("|", "\\|")
    kernels = re.findall(r"Stands for .*source kernel\w* (.*)", document)
    named = ", ".join(f"`{kernel}`" for kernel in re.findall(r"\w+_f32|moe_gate\b", " ".join(kernels)))
    replaced = re.search(r"^In (models\b.*?)\.\n", document + "\n", re.DOTALL | re.MULTILINE)
    users_text = "-"
    if users:
        users_text = ", ".join(users) if len(users) <= NAMED else f"{len(users)} architectures"
    elif replaced:
        users_text = " ".join(f"in {replaced[1]}".split())
    backward = WITH_BACKWARD.get(name)
    reached = ", ".join(f"`{argument}`" for argument in backward.reads) if backward else ""
    link = f"[`{name}`](../torch_moe_mps/ops/families/{family}.py)"
    cells = link, summary, PUBLIC_FOR[name], reached, users_text, named
    return f"| {' | '.join(cells)} |\n"


def document() -> str:
    """The text that docs/operators.md should have: what it has, with a row for each operator.

    Raises: SystemExit where scripts/make/make_used_by.py did not run since an operator was added.
    """
    users = used_by()
    if missing := [name for name in ops.PUBLIC if name not in users]:
        raise SystemExit(
            "make_operators_table: tests/pinned/used_by.txt must have each operator, got no "
            f"{', '.join(missing)}: run scripts/make/make_used_by.py first"
        )
    before, begin, others = DOCUMENT.read_text().partition(BEGIN)
    text = before + begin + HEAD
    for family, module in sorted(ops.FAMILIES.items()):
        text += "".join(row(name, family, users[name]) for name in ops.PUBLIC if name in module.CALLS)
    return text + END + others.partition(END)[2]


if __name__ == "__main__":
    DOCUMENT.write_text(document())
