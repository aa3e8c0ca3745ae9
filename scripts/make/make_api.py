"""Writes docs/api.md from the docstrings of the package's public functions."""

import inspect
import re
from pathlib import Path
from typing import Any

import torch_moe_mps
from torch_moe_mps import pipeline
from torch_moe_mps.transformers.caches.cache import QuantizedCache

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "api.md"
HEAD = """<!-- scripts/make/make_api.py writes this file -->
# The package in Python

Functions and classes for programs. [operators.md](operators.md) has the operators, and
`torch-moe-mps --help` the commands, which call the same functions.
"""
NAMES = re.compile(r"^(\w[\w, ]*):")
SECTION = re.compile(r"^(Args|Returns|Raises|Attributes):", re.MULTILINE)


def public() -> dict[str, Any]:
    """{name: function or class}, loading first."""
    names = sorted(set(torch_moe_mps.__all__) - {"ops"})
    return {f"torch_moe_mps.{name}": getattr(torch_moe_mps, name) for name in names} | {
        "torch_moe_mps.pipeline.from_pretrained": pipeline.from_pretrained,
        "torch_moe_mps.transformers.caches.cache.QuantizedCache": QuantizedCache,
    }


def entry(name: str, value: Any) -> str:
    short = name.rpartition(".")[2]
    found = inspect.signature(value.__init__ if inspect.isclass(value) else value).parameters.values()
    shown = [p for p in found if p.name != "self"]
    parameters = [re.sub(r"\b(?:\w+\.)+(?=[A-Z])", "", str(p)) for p in shown]
    for index, parameter in enumerate(shown):
        if parameter.kind is parameter.KEYWORD_ONLY:
            parameters.insert(index, "*")
            break
    arguments = "".join(f"    {parameter},\n" for parameter in parameters)
    return f"\n## {name}\n\n```python\n{short}(\n{arguments})\n```\n\n{prose(inspect.getdoc(value) or '')}"


def prose(document: str) -> str:
    """A docstring in Markdown: its sections, of which those with names are lists."""
    summary, *parts = SECTION.split(document)
    text = summary.strip() + "\n"
    for kind, body in zip(parts[::2], parts[1::2], strict=True):
        if kind in ("Args", "Attributes"):
            inside, after = re.fullmatch(
                r"\n((?:[ ]+[^\n]*\n|\n)*)(.*)", body.rstrip() + "\n", re.DOTALL
            ).groups()
            items = [NAMES.sub(r"- `\1`:", line[4:]) for line in inside.rstrip().splitlines()]
            listed = "".join(line.replace("    ", "  ", 1) + "\n" for line in items)
            text += f"\n{kind}:\n\n{listed}" + (f"\n{after.strip()}\n" if after.strip() else "")
        else:
            text += f"\n{kind}: {' '.join(body.split())}\n"
    return text


def document() -> str:
    return HEAD + "".join(entry(name, value) for name, value in public().items())


if __name__ == "__main__":
    DOCUMENT.write_text(document())
