"""Reads the loop over the layers in the `forward` of a model: `for layer in self.layers: h = layer(h, ...)`.

A process runs the loop with stand-ins for the layers of others, and one stand-in gives what the layer in its
place returned elsewhere. That is right if an iteration takes from earlier ones only what the layer just
before it returned; everything else, such as masks and position embeddings, must be the same in every process.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..basics.source import calls_in, names_in, syntax_of

_MASKS = "transformers.masking_utils"  # its functions read shape, dtype and device of embeddings, not values
_PLAIN = (bool, int, float, str, type(None))
_NO_VALUES = ("shape", "dtype", "device", "ndim", "size", "dim", "is_floating_point")


class CannotBeCut(ValueError):
    """Why the layers of a model cannot be spread over processes."""


@dataclass
class Loop:
    """The loop over the layers of a module.

    Attributes:
        layers: the name of the list of layers.
        results: what the loop calls the results of a layer.
        passed: {result: where the layer takes it, a position or the name of an argument}.
        uses_embeddings: whether anything but the hidden states depends on the embedded ids.
    """

    layers: str
    results: list[str]
    passed: dict[str, int | str]
    uses_embeddings: bool


def read_loop(model: nn.Module) -> Loop:
    """Raises: CannotBeCut with the reason."""
    function = _function(type(model).forward)
    found = [(s, name) for s in function.body if isinstance(s, ast.For) and (name := _layers_of(s, model))]
    if len(found) != 1:
        raise CannotBeCut(f"{type(model).__name__} has no loop over its layers that can be read")
    loop, name = found[0]
    layers: Any = getattr(model, name)
    number = names_in(loop.target, ast.Store)[0] if isinstance(loop.target, ast.Tuple) else ""
    body = [*_decided(loop.body, model, number, len(layers))]
    place, call = _call(body, loop.target, model)
    results = names_in(body[place].targets[0], ast.Store)  # type: ignore[attr-defined]
    _check_carried(body, place, results, model)
    given = {k.arg for k in call.keywords if k.arg} | {a.id for a in call.args if isinstance(a, ast.Name)}
    for written in _written_by(layers, given):
        raise CannotBeCut(f"the layers of {type(model).__name__} write into {written}, which later ones read")
    passed: dict[str, int | str] = {}
    arguments: dict[int | str, ast.expr] = dict(enumerate(call.args))
    arguments |= {k.arg: k.value for k in call.keywords if k.arg}
    for argument, value in arguments.items():
        if isinstance(value, ast.Name) and value.id in results:
            passed[value.id] = argument
    embedded = _embedded(_decided(function.body[: function.body.index(loop)], model), model)
    read = {n for s in [*body, *function.body[function.body.index(loop) + 1 :]] for n in names_in(s)}
    return Loop(name, results, passed, bool((embedded.tainted - {*results, *_hidden(call)}) & read))


def _function(forward: Any) -> ast.FunctionDef:
    tree = syntax_of(forward)
    if not isinstance(tree, ast.FunctionDef):
        raise CannotBeCut("the source of its forward cannot be read")
    return tree


def _layers_of(loop: ast.For, model: nn.Module) -> str | None:
    """The name of the list that a loop runs over: self.N, a slice of it, or its enumeration."""
    over: ast.expr = loop.iter
    if isinstance(over, ast.Call) and ast.unparse(over.func) == "enumerate" and len(over.args) == 1:
        over = over.args[0]
    if isinstance(over, ast.Subscript):
        over = over.value
    is_own = isinstance(over, ast.Attribute) and ast.unparse(over.value) == "self"
    if not is_own or not isinstance(getattr(model, over.attr, None), nn.ModuleList):  # type: ignore[attr-defined]
        return None
    return over.attr  # type: ignore[attr-defined]


def _call(body: list[ast.stmt], target: ast.expr, model: nn.Module) -> tuple[int, ast.Call]:
    """The statement that calls the layer, and the call."""
    layer = names_in(target, ast.Store)[-1]
    found = [
        (place, s.value)
        for place, s in enumerate(body)
        if isinstance(s, ast.Assign) and isinstance(s.value, ast.Call) and ast.unparse(s.value.func) == layer
    ]
    calls = [c for s in body for c in calls_in(s) if ast.unparse(c.func) == layer]
    if len(found) != 1 or len(calls) != 1:
        raise CannotBeCut(f"the loop of {type(model).__name__} does not call each layer once")
    return found[0]


def _check_carried(body: list[ast.stmt], place: int, results: list[str], model: nn.Module) -> None:
    """An iteration may take from the one before only what follows from the results of its layer."""
    stored = {n for s in body for n in names_in(s, ast.Store)}
    written: set[str] = set()
    carried: set[str] = set()
    for statement in body:
        carried |= ({*names_in(statement)} & stored) - written
        written |= {*names_in(statement, ast.Store)} if isinstance(statement, ast.Assign) else set()
    tainted = {*results}
    for _ in body:
        for statement in body:
            if {*names_in(statement)} & tainted:
                tainted |= {*names_in(statement, ast.Store)}
    right = {*results}
    for statement in body[place + 1 :]:
        for name in names_in(statement, ast.Store):
            follows = not ({*names_in(statement)} & (carried & tainted)) - right
            kept = isinstance(statement, ast.Assign) or name in right
            right = right | {name} if follows and kept else right - {name}
    for name in sorted((carried & tainted) - right):
        raise CannotBeCut(f"the loop of {type(model).__name__} hands on {name} beside what layers return")


def _hidden(call: ast.Call) -> list[str]:
    """The hidden states that the first layer takes."""
    first = call.args[0] if call.args else next((k.value for k in call.keywords), None)
    return [first.id] if isinstance(first, ast.Name) else []


# Which statements run


def _decided(body: list[ast.stmt], model: nn.Module, number: str = "", layers: int = 1) -> Iterator[ast.stmt]:
    """The statements without branches that a module's attributes rule out for each `number` of a layer."""
    for statement in body:
        if isinstance(statement, ast.If):
            values = [_value(statement.test, model, {number: index}) for index in range(layers)]
            outcomes = {bool(value) if isinstance(value, _PLAIN) else None for value in values}
            if len(outcomes) == 1 and None not in outcomes:
                chosen = statement.body if outcomes.pop() else statement.orelse
                yield from _decided(chosen, model, number, layers)
                continue
        yield statement


def _value(expression: ast.expr, model: nn.Module, names: dict[str, int] | None = None) -> Any:
    """The value of an expression of self and these names; NotImplemented if it needs more."""
    try:
        return eval(ast.unparse(expression), {}, {"self": model, **(names or {})})
    except Exception:
        return NotImplemented


# What depends on embedded ids


class _embedded:
    """Follows values of the embedding through statements; `tainted` are the names that depend on them."""

    def __init__(self, body: Iterator[ast.stmt], model: nn.Module):
        self.model, self.tainted = model, {"inputs_embeds"}
        self.masks: set[str] = set()
        self.globals = vars(sys.modules[type(model).__module__])
        for statement in body:
            self._follow(statement)

    def _follow(self, statement: ast.stmt) -> None:
        for node in ast.walk(statement):
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = {name for target in targets for name in names_in(target, ast.Store)}
                if self._chooses_mask(node.value):
                    self.masks |= names
                if self._depends(node.value):
                    self.tainted |= names

    def _chooses_mask(self, value: ast.expr) -> bool:
        choices = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
        return all(isinstance(c, ast.Name) and self._is_mask(c.id) for c in choices)

    def _is_mask(self, name: str) -> bool:
        function = self.globals.get(name)
        return name in self.masks or getattr(function, "__module__", None) == _MASKS

    def _depends(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Name):
            return node.id in self.tainted
        if isinstance(node, ast.Attribute) and node.attr in _NO_VALUES:
            return False
        if isinstance(node, ast.Compare) and all(isinstance(op, ast.Is | ast.IsNot) for op in node.ops):
            return False
        if isinstance(node, ast.Call) and not self._reads_values(node):
            return False
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "self.embed_tokens":
            return True
        return any(self._depends(child) for child in ast.iter_child_nodes(node))

    def _reads_values(self, call: ast.Call) -> bool:
        """Whether the function reads values of the arguments that depend on embedded ids."""
        if isinstance(call.func, ast.Name) and self._is_mask(call.func.id):
            return False
        called = _value(call.func, self.model)
        if not isinstance(called, nn.Module) or ast.unparse(call.func) == "self.embed_tokens":
            return True
        try:
            function = _function(type(called).forward)
        except CannotBeCut:
            return True
        names = [a.arg for a in function.args.args][1:]
        given = {names[i]: a for i, a in enumerate(call.args) if i < len(names)}
        given |= {k.arg: k.value for k in call.keywords if k.arg}
        return any(self._depends(value) and _has_values_read(function, name) for name, value in given.items())


def _has_values_read(function: ast.FunctionDef, name: str) -> bool:
    parents = {child: node for node in ast.walk(function) for child in ast.iter_child_nodes(node)}
    return any(
        isinstance(node, ast.Name)
        and node.id == name
        and not (isinstance(above := parents[node], ast.Attribute) and above.attr in _NO_VALUES)
        for statement in function.body
        for node in ast.walk(statement)
    )


# What layers write into


def _written_by(layers: nn.Module, given: set[str]) -> Iterator[str]:
    """The arguments of layers that their code stores elements in, `argument[...] = ...`."""
    for module in layers.modules():
        if type(module).__module__.startswith("torch."):
            continue
        try:
            function = _function(type(module).forward)
        except CannotBeCut:
            continue
        for statement in _all_decided(function.body, module):
            targets = statement.targets if isinstance(statement, ast.Assign) else []
            for target in targets:
                owner = target.value if isinstance(target, ast.Subscript) else None
                if isinstance(owner, ast.Name) and owner.id in given:
                    yield owner.id


def _all_decided(body: list[ast.stmt], model: nn.Module) -> Iterator[ast.stmt]:
    for statement in _decided(body, model):
        yield statement
        for name in ("body", "orelse"):
            yield from _all_decided(getattr(statement, name, []), model)
