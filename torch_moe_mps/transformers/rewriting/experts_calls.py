"""Finds the call of the experts in a block, and the router that their ids come from."""

import ast
from collections.abc import Iterator

from torch import nn

from ..interface import is_experts
from .program.building import child_of_call, every_call
from .program.formulas import Node, Reader
from .program.programs import Program, Unsupported
from .program.straightening import straighten


def is_experts_call(program: Program, call: ast.Call) -> bool:
    """Whether a call is self.experts(hidden, ids, weights)."""
    found = child_of_call(program, call)
    return found is not None and is_experts(found[1]) and len(call.args) == 3


def ids_of_experts(block: nn.Module, experts: str) -> Iterator[Node]:
    """The ids that a block calls its child `experts` with, as formulas; none without a program."""
    try:
        program = straighten(block)
    except Unsupported:
        return
    reader = Reader(program)
    for call in every_call(program):
        if is_experts_call(program, call) and ast.unparse(call.func) == f"self.{experts}":
            yield reader.read(call.args[1]).peel()


def module_that_gives(ids: Node) -> str | None:
    """The path of the module within the block that returns the ids beside other results, if one does."""
    if ids.op != "item" or ids.args[0].op != "module":
        return None
    path: str = ids.args[0].path
    return path
