"""What torch's own operators do on mps, by its version: aten.json, found in its wheels for macOS.

A row is named by the operator that returns its results; the one that writes them into `out` and the one in
place are the same kernel.
"""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

TABLE = Path(__file__).with_name("aten.json")


@functools.cache
def table() -> dict[str, dict[str, dict[str, Any]]]:
    """{version of torch: {operator: what its kernel does}}"""
    return json.loads(TABLE.read_text())


def _arguments(schema: torch.FunctionSchema) -> tuple[str, ...]:
    """Names and types of what a call computes with."""
    outputs = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write and a.kwarg_only}
    return tuple(f"{a.name}: {a.type}" for a in schema.arguments if a.name not in outputs)


def _full_name(schema: torch.FunctionSchema) -> str:
    return schema.name + (f".{schema.overload_name}" if schema.overload_name else "")


@functools.cache
def _names(base: str) -> dict[str, str]:
    """{operator of this name: the one with the same arguments that returns its results}"""
    groups: dict[tuple[str, ...], list[torch.FunctionSchema]] = {}
    for name in (base, base + "_"):
        for schema in torch._C._jit_get_schemas_for_operator(name):
            groups.setdefault(_arguments(schema), []).append(schema)
    names = {}
    for group in groups.values():
        returning = [s for s in group if not s.is_mutable] or group
        names |= {_full_name(schema): _full_name(returning[0]) for schema in group}
    return names


def _base(name: str) -> str:
    return name.partition(".")[0].removesuffix("_")


def row_of(name: str) -> str:
    """The name of the row for an operator: "aten::topk" for "aten::topk.values"."""
    return _names(_base(name)).get(name, name)


def operators(version: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each operator that has a row, and the row."""
    rows = table()[version]
    for base in sorted({_base(name) for name in rows}):
        for name, row in _names(base).items():
            if row in rows:
                yield name, rows[row]
