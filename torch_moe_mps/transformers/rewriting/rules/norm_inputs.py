"""Gives the forward of a block the option of a norm, which its first operators apply to its input.

Everything that reads the block's input must be able to norm it: linear layers, routers, experts, shared
experts. Code that only asks for its shape does not matter.
"""

import ast
import functools
import types
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...interface import is_experts
from ...linears import QuantizedLinear
from ...report import Done
from ..program.building import RESHAPING, add_option, child_of_call, code
from ..program.formulas import Reader, is_pure
from ..program.programs import Program, name_of
from .options import NORM, takes
from .trial import tried

_FACTS = {"shape", "dtype", "device", "size", "dim"}
# Functions of the runtime that take a norm: where they have their input.
_CALLED = {
    "linears": 1,
    "in_order": 2,
    "experts_with_shared": 1,
    "routed": 3,
    "router_logits": 0,
    "linear": 1,
}
_OF_ROUTER = "small_linear(*ARGS)"


def norm_inputs(program: Program) -> None:
    """Gives a block the option of a norm in front of everything that reads its first argument."""
    arguments = program.arguments.args
    if len(arguments) < 2 or not program.rewrites or NORM in program.arguments_names():
        return
    program.drop_unused(is_pure)  # what rules have left unread would compute the rewritten calls twice
    found = _readers(program, arguments[1].arg)
    if not found:
        return
    add_option(program, NORM)
    for call, text in found:
        new = code(text, F=call.func, ARGS=call.args)
        call.func, call.args = new.func, new.args
        call.keywords.append(ast.keyword(NORM, code(NORM)))
    of_router = any(text == _OF_ROUTER for _, text in found)
    logits = Done("router_logits", "router_logits of normed input")
    program.rewrites.append(logits if of_router else Done(None, "norm of the input"))


def _readers(program: Program, argument: str) -> list[tuple[ast.Call, str]] | None:
    """The calls that read an argument, and the calls that can norm it; None if something else reads it."""
    names, found = {argument}, []
    for tree in (*program.statements, program.result):
        for name, around in _names(tree):
            if name.id not in names:
                continue
            value = _reshaped(program, name, around)
            outer = around[-1] if around else None
            if isinstance(outer, ast.Attribute):
                if outer.attr not in _FACTS:
                    return None
            elif isinstance(outer, ast.Assign) and isinstance(outer.targets[0], ast.Name):
                if outer not in program.statements or outer in program.inplace:
                    return None
                names.add(name_of(outer))
            else:
                if not isinstance(outer, ast.Call) or (taker := _taker(program, outer)) is None:
                    return None
                place, text = taker
                if outer.args[place : place + 1] != [value]:
                    return None
                found.append((outer, text))
    return found


def _names(node: ast.AST, around: tuple[ast.AST, ...] = ()) -> Iterator[tuple[ast.Name, list[ast.AST]]]:
    """The names in a tree, each with the nodes around it, the innermost last."""
    if isinstance(node, ast.Name):
        yield node, list(around)
    for child in ast.iter_child_nodes(node):
        yield from _names(child, (*around, node))


def _reshaped(program: Program, value: ast.AST, around: list[ast.AST]) -> ast.AST:
    """The value in its last shape, behind masks too; drops the nodes around it up to there."""
    while around:
        outer, call = around[-1], around[-2] if len(around) > 1 else None
        if isinstance(outer, ast.Attribute) and outer.attr in RESHAPING and isinstance(call, ast.Call):
            value = call
            del around[-2:]
        elif isinstance(outer, ast.Call) and outer.args[:1] == [value] and _is_mask(program, outer):
            value = around.pop()
        else:
            break
    return value


def _taker(program: Program, call: ast.Call) -> tuple[int, str] | None:
    """(position of the input, the call that norms it too); None if it cannot."""
    owner, _, function = ast.unparse(call.func).rpartition(".")
    if owner == "_moe_mps" and function in _CALLED:
        return _CALLED[function], "F(*ARGS)"
    is_router = any(done.operator == "moe_router" for done in program.rewrites)
    if is_router and Reader(program).resolve(call.func) is F.linear:
        return 0, _OF_ROUTER
    _, child = child_of_call(program, call) or ("", None)
    if child is None:
        return None
    if is_experts(child) and len(call.args) == 3:
        return 0, "experts_with_shared(F, *ARGS)"
    if len(call.args) != 1 or call.keywords:
        return None
    if isinstance(child, QuantizedLinear):
        return 0, "linear(F, *ARGS)"
    if type(child) is nn.Linear and child.out_features == 1:
        return 0, "small_linear(*ARGS, F.weight, F.bias)"
    return (0, "hand_on(F, *ARGS)") if takes(child, NORM) else None


def _is_mask(program: Program, call: ast.Call) -> bool:
    """Whether a function of the model's file masks tokens."""
    function = Reader(program).resolve(call.func)
    if len(call.args) != 2 or call.keywords or not isinstance(function, types.FunctionType):
        return False
    return "mask" in function.__name__ and _masks_tokens(function)


@functools.cache
def _masks_tokens(function: Callable) -> bool:
    """Whether a function of tokens and a mask of them makes the masked ones zero, as their norm is then."""
    tokens, mask = torch.linspace(0.5, 1.5, 24).view(2, 3, 4), torch.tensor([[0, 1, 1], [1, 0, 1]])
    results = tried(function, tokens, mask), tried(function, tokens, None)
    expected = tokens * mask.unsqueeze(-1), tokens
    return all(isinstance(r, Tensor) and torch.equal(r, e) for r, e in zip(results, expected, strict=True))
