"""Writes the table of docs/operators.md from the schemas and docstrings of the operators."""

import inspect
import re

import paths

if __name__ == "__main__":
    paths.words(__doc__)

import torch

from torch_moe_mps import ops

DOCUMENT = paths.REPOSITORY / "docs" / "operators.md"
MARK = "<!-- scripts/make/make_operators_table.py writes what follows -->\n"
HEAD = "| operator | computes | used by | stands for |\n| --- | --- | --- | --- |\n"
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
    return f"| [`{name}`](../torch_moe_mps/ops/{family}.py) | {summary} | {users_text} | {named or '-'} |\n"


def document() -> str:
    """The text that docs/operators.md should have: its introduction, then a row for each operator.

    Raises: SystemExit where scripts/make/make_used_by.py did not run since an operator was added.
    """
    users = used_by()
    if missing := [name for name in ops.PUBLIC if name not in users]:
        raise SystemExit(
            "make_operators_table: tests/pinned/used_by.txt must have each operator, got no "
            f"{', '.join(missing)}: run scripts/make/make_used_by.py first"
        )
    text = DOCUMENT.read_text().partition(MARK)[0] + MARK + HEAD
    for family, module in sorted(ops.FAMILIES.items()):
        text += "".join(row(name, family, users[name]) for name in ops.PUBLIC if name in module.CALLS)
    return text


if __name__ == "__main__":
    DOCUMENT.write_text(document())
