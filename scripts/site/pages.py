"""Pages of the site that are made from other files: README, CONTRIBUTING, and a reference for each family."""

import inspect
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import torch_moe_mps
from torch_moe_mps import ops, pipeline
from torch_moe_mps.models.caches.cache import QuantizedCache

ROOT = Path(__file__).resolve().parents[2]
MODULE = ROOT / "build" / "reference" / "moe_mps_operators.py"
HEAD = "Examples begin with `import torch` and `from torch_moe_mps import ops`."
FUNCTIONS = MODULE.with_name("moe_mps_functions.py")


def beside_docs(name: str) -> str:
    """A document of the root, whose links lead to pages. Links to other files become their text."""
    text = (ROOT / name).read_text().replace("](docs/", "](page:")
    text = re.sub(r"(?<!!)\[([^\]]*)\]\((?!page:|https?://|#)[^)]*\)", r"\1", text)
    return text.replace("](page:", "](")


def families() -> dict[str, list[str]]:
    """{page of a family: its public operators}"""
    found = {
        f"reference/{family}.md": [name for name in module.CALLS if name in ops.PUBLIC]
        for family, module in sorted(ops.FAMILIES.items())
    }
    return {page: names for page, names in found.items() if names}


def reference(page: str) -> str:
    """The operators of a family; mkdocstrings reads them from MODULE."""
    parts = [f"# {Path(page).stem.replace('_', ' ').capitalize()}\n\n{HEAD}\n"]
    return "".join([*parts, *(f"\n::: {MODULE.stem}.{name}\n" for name in families()[page])])


def public() -> dict[str, Any]:
    """{name: function or class} for programs."""
    names = sorted(set(torch_moe_mps.__all__) - {"ops"})
    return {f"torch_moe_mps.{name}": getattr(torch_moe_mps, name) for name in names} | {
        "torch_moe_mps.pipeline.from_pretrained": pipeline.from_pretrained,
        "torch_moe_mps.models.caches.cache.QuantizedCache": QuantizedCache,
    }


def api() -> str:
    """A heading for each function and class; mkdocstrings reads them from FUNCTIONS."""
    parts = ["# The package in Python\n"]
    for name in public():
        parts.append(f"\n::: {FUNCTIONS.stem}.{short(name)}\n    options: {{heading: {name}}}\n")
    return "".join(parts)


def short(name: str) -> str:
    return name.removeprefix("torch_moe_mps.").replace(".", "_")


def write_functions() -> None:
    """Functions with the signatures and docstrings of the public ones."""
    parts = []
    for name, value in public().items():
        found = inspect.signature(value.__init__ if inspect.isclass(value) else value).parameters.values()
        shown = [p.replace(annotation=p.empty) for p in found if p.name != "self"]
        document = as_markdown(inspect.getdoc(value) or "")
        parts.append(f"def {short(name)}{inspect.Signature(shown)}:\n    {document!r}\n\n")
    FUNCTIONS.write_text("".join(parts))


def write_module() -> None:
    """The signatures of the operators, with their docstrings as Markdown."""
    sys.path.insert(0, str(ROOT / "scripts" / "make"))
    from make_operators_table import used_by

    table = used_by()
    parts = ["from torch import Tensor\n\n"]
    for name, function in ops.PUBLIC.items():
        document = as_markdown(inspect.getdoc(function) or "")
        if table[name]:
            document += f"\n\n**Used by:** {', '.join(table[name])}"
        signature = str(inspect.signature(function)).replace("torch.Tensor", "Tensor")
        parts.append(f"def {name}{signature}:\n    {document!r}\n\n")
    MODULE.parent.mkdir(parents=True, exist_ok=True)
    MODULE.write_text("".join(parts))


def as_markdown(document: str) -> str:
    """A docstring whose arguments and results are lists, and whose example is a block of code."""
    document, _, example = document.partition("\n\nExample:\n")
    lines, is_list = [], False
    for line in document.splitlines():
        begins = re.match(r"(Args|Attributes|Returns|Raises)\b(.*?):(.*)", line)
        if begins:
            is_list = not begins[3]
            lines += ["", f"**{begins[1]}{begins[2]}:**{begins[3]}", ""]
        elif is_list and (entry := re.match(r"    ([\w', ]+): (.*)", line)):
            lines.append(f"- `{entry[1]}`: {entry[2]}")
        elif is_list and line.startswith("     "):
            lines.append(f"    {line.strip()}")
        else:
            is_list = is_list and not line
            lines.append(line)
    if example:
        lines += ["", "**Example:**", "", "```pycon", *textwrap.dedent(example).splitlines(), "```"]
    return "\n".join(lines)


def on_startup(**_) -> None:
    write_module()
    write_functions()  # in front of mkdocstrings, which looks for its folder once


def on_config(config) -> None:
    (own,) = (part["Operators"] for part in config.nav if "Operators" in part)
    own.append({"Reference": [*families()]})


def on_files(files: Files, config) -> Files:
    made = {"index.md": beside_docs("README.md"), "contributing.md": beside_docs("CONTRIBUTING.md")}
    made["site.css"] = Path(__file__).with_name("site.css").read_text()
    made |= {"api.md": api()} | {page: reference(page) for page in families()}
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page, **_) -> str:
    """Leads links of operators to their reference, and replaces other links to files beside docs/ by text."""
    markdown = re.sub(
        r"\[`(\w+)`\]\(\.\./torch_moe_mps/ops/families/(\w+)\.py\)",
        rf"[`\1`](reference/\2.md#{MODULE.stem}.\1)",
        markdown,
    )
    return re.sub(r"\[([^\]]*)\]\(\.\./[^)]*\)", r"\1", markdown)
