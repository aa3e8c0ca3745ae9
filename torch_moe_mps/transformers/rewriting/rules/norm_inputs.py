"""Blocks whose first operators norm their input: the option of a norm for their forward.

All that reads a block's input must be able to norm it: linear layers, routers, experts, shared experts. What
only asks for its shape may be anything.
"""

import ast
import functools
import types
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...interface import is_experts
from ...linears import QuantizedLinear
from ..program.building import add_option, child_of_call, helper
from ..program.formulas import Reader, is_pure
from ..program.programs import If, Program, name_of
from .options import NORM, takes
from .trial import tried

_FACTS = {"shape", "dtype", "device"}
_SIZES = {"size", "dim"}
_RESHAPING = {"view", "reshape"}
# Functions of the runtime that take a norm: where they have their input.
_CALLED = {
    "linears": 1,
    "in_order": 2,
    "experts_with_shared": 1,
    "routed": 3,
    "router_logits": 0,
    "linear": 1,
}


class _Other(Exception):
    """Something else reads the input."""


def norm_inputs(program: Program) -> None:
    """Gives a block the option of a norm in front of everything that reads its first argument."""
    arguments = program.arguments.args
    if len(arguments) < 2 or not program.rewrites or NORM in program.arguments_names():
        return
    program.drop_unused(is_pure)  # what rules have left unread would compute the rewritten calls twice
    readers = _Readers(program, arguments[1].arg)
    try:
        readers.visit_program()
    except _Other:
        return
    if readers.found:
        add_option(program, NORM)
        for call, rewrite in readers.found:
            rewrite(call)
            call.keywords.append(ast.keyword(NORM, ast.Name(NORM, ast.Load())))
        of_router = any(rewrite in (_gate, _router) for _, rewrite in readers.found)
        program.rewrites.append("router_logits of normed input" if of_router else "norm of the input")


class _Readers:
    """The calls that read an argument of a program, each with what makes it take a norm."""

    def __init__(self, program: Program, argument: str):
        self.program = program
        self.names = {argument}
        self.found: list[tuple[ast.Call, Callable[[ast.Call], None]]] = []

    def visit_program(self) -> None:
        for statement in self.program.every():
            if isinstance(statement, If):
                self.read(statement.test)
            elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                if self.is_input(statement.value):
                    if statement not in self.program.statements or statement in self.program.inplace:
                        raise _Other
                    self.names.add(name_of(statement))
            else:
                self.read(statement)
        self.read(self.program.result)

    def read(self, node: ast.AST) -> None:
        """Visits what must not be the input itself."""
        if self.is_input(node):
            raise _Other

    def is_input(self, node: ast.AST) -> bool:
        """Whether a value is the input, in whatever shape."""
        if isinstance(node, ast.Name):
            return node.id in self.names
        if isinstance(node, ast.Attribute):
            if node.attr not in _FACTS:
                self.read(node.value)
            elif not self.is_input(node.value):
                return False
            return False
        if isinstance(node, ast.Call):
            return self._call(node)
        for child in ast.iter_child_nodes(node):
            self.read(child)
        return False

    def _call(self, call: ast.Call) -> bool:
        if isinstance(call.func, ast.Attribute) and call.func.attr in _RESHAPING | _SIZES:
            is_input = self.is_input(call.func.value)
            for argument in (*call.args, *call.keywords):
                self.read(argument)
            return is_input and call.func.attr in _RESHAPING
        self.read(call.func)
        if self._is_mask(call) and self.is_input(call.args[0]):
            for argument in call.args[1:]:
                self.read(argument)
            return True
        place, rewrite = self._taker(call)
        for index, argument in enumerate(call.args):
            if self.is_input(argument):
                if index != place:
                    raise _Other
                self.found.append((call, rewrite))
        for keyword in call.keywords:
            self.read(keyword.value)
        return False

    def _taker(self, call: ast.Call) -> tuple[int | None, Callable[[ast.Call], None]]:
        """Where a call that can take a norm has its input (None: it cannot), and what it becomes."""
        owner, _, function = ast.unparse(call.func).rpartition(".")
        if owner == "_moe_mps" and function in _CALLED:
            return _CALLED[function], _as_it_is
        if Reader(self.program).resolve(call.func) is F.linear and self._is_router():
            return 0, _router
        found = child_of_call(self.program, call)
        if found is None or len(call.args) == 0:
            return None, _as_it_is
        child = found[1]
        if is_experts(child) and len(call.args) == 3:
            return 0, _becomes("experts_with_shared")
        if len(call.args) == 1 and not call.keywords:
            if isinstance(child, QuantizedLinear):
                return 0, _becomes("linear")
            if type(child) is nn.Linear and child.out_features == 1:
                return 0, _gate
            if takes(child, NORM):
                return 0, _becomes("hand_on")
        return None, _as_it_is

    def _is_mask(self, call: ast.Call) -> bool:
        """Whether a function of the model's file masks tokens."""
        function = Reader(self.program).resolve(call.func)
        if len(call.args) != 2 or call.keywords or not isinstance(function, types.FunctionType):
            return False
        return "mask" in function.__name__ and _masks_tokens(function)

    def _is_router(self) -> bool:
        return any(note.startswith("moe_router") for note in self.program.rewrites)


@functools.cache
def _masks_tokens(function: Callable) -> bool:
    """Whether a function of tokens and a mask of them makes the masked ones zero, as their norm is then."""
    tokens, mask = torch.linspace(0.5, 1.5, 24).view(2, 3, 4), torch.tensor([[0, 1, 1], [1, 0, 1]])
    results = tried(function, tokens, mask), tried(function, tokens, None)
    expected = tokens * mask.unsqueeze(-1), tokens
    return all(isinstance(r, Tensor) and torch.equal(r, e) for r, e in zip(results, expected, strict=True))


def _as_it_is(call: ast.Call) -> None:
    pass


def _becomes(function: str) -> Callable[[ast.Call], None]:
    """The function of the runtime that is called with what was called."""

    def rewrite(call: ast.Call) -> None:
        call.args.insert(0, call.func)
        call.func = helper(function).func

    return rewrite


def _router(call: ast.Call) -> None:
    call.func = helper("small_linear").func


def _gate(call: ast.Call) -> None:
    """self.gate(x) -> small_linear(x, self.gate.weight, self.gate.bias)"""
    call.args += [ast.Attribute(call.func, name, ast.Load()) for name in ("weight", "bias")]
    call.func = helper("small_linear").func
