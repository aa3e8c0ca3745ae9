"""Writes torch_moe_mps/ops/__init__.pyi: the signatures of the public operators, for type checkers.

A function has an argument for each member of a group (`ops/_groups.py`), which its annotations do not say.
"""

import inspect
from pathlib import Path

from torch_moe_mps import ops

STUBS = Path(__file__).resolve().parents[2] / "torch_moe_mps" / "ops" / "__init__.pyi"
HEAD = """# scripts/make/make_operator_stubs.py writes this file.
from types import ModuleType
from typing import Any

from torch import Tensor

FAMILIES: dict[str, ModuleType]
OPERATORS: list[str]
PUBLIC: dict[str, Any]

"""


def of_type(annotation: object) -> str:
    if annotation is type(None) or annotation is None:
        return "None"
    if isinstance(annotation, type) and not hasattr(annotation, "__origin__"):
        return annotation.__name__
    return str(annotation).replace("torch.Tensor", "Tensor")


def stub(name: str) -> str:
    signature, lines = inspect.signature(ops.PUBLIC[name]), []
    is_keyword_only = False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not is_keyword_only:
            lines.append("    *,\n")
            is_keyword_only = True
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        default = default.replace("'", '"')
        lines.append(f"    {parameter.name}: {of_type(parameter.annotation)}{default},\n")
    return f"def {name}(\n{''.join(lines)}) -> {of_type(signature.return_annotation)}: ...\n"


def text() -> str:
    return HEAD + "".join(map(stub, sorted(ops.PUBLIC)))


if __name__ == "__main__":
    STUBS.write_text(text())
