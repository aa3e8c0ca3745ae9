"""The function that computes a layer's attention, looked up without the methods of config and interface.

A config finds each of its attributes in Python, which takes the host as long as a small operator.
"""

import ast
from collections.abc import Callable
from typing import Any

import torch

from ..program.formulas import Reader
from ..program.rewrites import Match, Rewrite
from ..runtime import called

_NAME = "_attn_implementation_internal"  # the field behind the property


@called
def attention_function(interface: Any, config: Any, own: Callable) -> Callable:
    """interface.get_interface(config._attn_implementation, own)"""
    found: Callable | None = None
    if not torch.compiler.is_compiling():
        name = object.__getattribute__(config, _NAME)
        found = interface._local_mapping.get(name) or interface._global_mapping.get(name)
    if found is None or "|" in name:  # "eager", no name or "paged|..."
        found = interface.get_interface(config._attn_implementation, own)
    return found


def _is_of_a_config(match: Match) -> str | None:
    name = match.values["NAME"]
    if not isinstance(name, ast.Attribute) or name.attr != "_attn_implementation":
        return None
    reader, interface = Reader(match.program), match.values["INTERFACE"]
    config = match.values["CONFIG"] = name.value
    known = hasattr(reader.resolve(interface), "_global_mapping") and hasattr(reader.resolve(config), _NAME)
    return "" if known else None


LOOK_UP_ATTENTION = Rewrite(
    "INTERFACE.get_interface(NAME, OWN)",
    "attention_function(INTERFACE, CONFIG, OWN)",
    where=_is_of_a_config,
)
