"""Changes of eager code, made by ast: what a rule must notice, or run as the changed code would.

A mutant is a function of a model's file in which one value goes through a change: a bound, a limit, a factor
of the layer's index or of a buffer, another epsilon. `missed` compares modules that run other code than their
own with their own, for inputs and parameters of several magnitudes.
"""

import ast
import copy
import functools
import inspect
import random
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import torch_moe_mps
from torch_moe_mps.models.basics.state import original_class
from torch_moe_mps.transformers.install import is_rewritten

from . import tiny_models
from .models import eager, output, prompt

CHANGE = "_change"  # the name of a change in the globals of a file
BUFFER = "_scale_of_mutants"
BOUNDS = (0.02, 0.9, 3.7, 25.0)
# (factor of inputs, factor of parameters in one dimension)
PROBES = ((1.0, 1.0), (1e-3, 1.0), (0.05, 3.0), (20.0, 1.0), (1.0, 12.0), (1.0, -6.0), (100.0, 1.0))


def _index(owner: Any) -> int:
    return owner.layer_idx if isinstance(getattr(owner, "layer_idx", None), int) else 0


def _scale(x: Tensor, owner: Any) -> Tensor:
    scale = owner._buffers.get(BUFFER) if isinstance(owner, nn.Module) else None
    return x if scale is None else x * scale


CHANGES: dict[str, Callable[[float], Callable[[Tensor, Any], Tensor]]] = {
    "upper bound": lambda c: lambda x, owner: x.clamp(max=c),
    "lower bound": lambda c: lambda x, owner: x.clamp(min=-c),
    "floor": lambda c: lambda x, owner: torch.maximum(x, x.new_tensor(-c)),
    "limit": lambda c: lambda x, owner: torch.where(x.abs() > c, c * x.sign(), x),
    "kink": lambda c: lambda x, owner: torch.where(x < -c, 2 * x + c, x),
    "dead zone": lambda c: lambda x, owner: x.masked_fill((x > 0) & (x < 0.1 * c), 0.0),
    "absolute": lambda c: lambda x, owner: x + 0.5 * (x.abs() - x) * (x < -c),
    "python": lambda c: lambda x, owner: 0.5 * x if bool((x.abs() > 4 * c).any()) else x,
    "layer index": lambda c: lambda x, owner: x / (1.0 + _index(owner)),
    "one layer": lambda c: lambda x, owner: 1.5 * x if _index(owner) == 1 else x,
    "buffer": lambda c: _scale,
}


class Mutant(NamedTuple):
    """A changed function: where it lies, what is changed, and the function."""

    architecture: str
    owner: Any  # a class or a file
    name: str
    what: str
    function: Callable
    change: Callable | None

    def __str__(self) -> str:
        return f"{self.architecture}: {self.what} in {getattr(self.owner, '__name__', '')}.{self.name}"


@functools.cache
def model_of(architecture: str) -> nn.Module:
    small = {"num_hidden_layers": 3, "attn_layer_indices": [1]} if architecture == "bamba" else {}
    make = tiny_models.other_model if architecture in tiny_models.other_causal() else tiny_models.tiny_model
    return eager(make(architecture, **(tiny_models.WITH_STATES.get(architecture, {}) | small)))


def _targets(architecture: str) -> dict[tuple[Any, str], types.FunctionType]:
    """Functions of model files that modules which are rewritten run: {(owner, name): function}."""
    model, found = copy.deepcopy(model_of(architecture)), {}
    torch_moe_mps.accelerate(model)
    for cls in dict.fromkeys(original_class(m) for m in model.modules() if is_rewritten(m)):
        waiting: list[tuple[Any, str]] = [(next(c for c in cls.__mro__ if "forward" in vars(c)), "forward")]
        while waiting:
            owner, name = waiting.pop()
            function = inspect.unwrap(inspect.getattr_static(owner, name))
            if (owner, name) in found or not isinstance(function, types.FunctionType):
                continue
            if not function.__module__.startswith("transformers.models."):
                continue
            found[owner, name] = function
            for each in function.__code__.co_names:
                if isinstance(function.__globals__.get(each), types.FunctionType):
                    waiting.append((inspect.getmodule(function), each))
                elif isinstance(vars(cls).get(each), types.FunctionType):
                    waiting.append((cls, each))
    return found


def _changed(function: types.FunctionType, edit: Callable[[ast.AST], bool]) -> types.FunctionType | None:
    """A copy whose tree `edit` has changed."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    body = tree.body[0]
    assert isinstance(body, ast.FunctionDef)
    body.decorator_list = []
    if function.__code__.co_freevars or not edit(body):
        return None
    ast.fix_missing_locations(tree)
    ast.increment_lineno(tree, function.__code__.co_firstlineno - 1)
    space: dict[str, Any] = {}
    exec(compile(tree, function.__code__.co_filename, "exec"), function.__globals__, space)
    made = space[function.__name__]
    made.__module__, made.__qualname__ = function.__module__, function.__qualname__
    return made


def _assignments(tree: ast.AST) -> list[ast.Assign]:
    assigned = (node for node in ast.walk(tree) if isinstance(node, ast.Assign))
    simple = [node for node in assigned if isinstance(node.targets[0], ast.Name)]
    return [node for node in simple if isinstance(node.value, (ast.Call, ast.BinOp))]


def _numbers(tree: ast.AST) -> list[ast.AST]:
    """Small numbers and attributes that are an epsilon."""
    found = []
    for node in ast.walk(tree):
        is_small = isinstance(node, ast.Constant) and type(node.value) is float and 0 < node.value < 1e-2
        is_named = isinstance(node, ast.Attribute) and ("eps" in node.attr) and isinstance(node.ctx, ast.Load)
        found += [node] if is_small or is_named else []
    return found


def mutants(architecture: str, count: int, seed: int = 0) -> Iterator[Mutant]:
    """So many mutants of an architecture, the same each time."""
    chance, made = random.Random(f"{architecture} {seed}"), 0
    targets = [*_targets(architecture).items()]
    for _ in range(20 * count):
        if made == count or not targets:
            return
        (owner, name), function = chance.choice(targets)
        kind = chance.choice([*CHANGES, "epsilon", "epsilon"])
        place, bound = chance.randrange(1000), chance.choice(BOUNDS)

        def edit(tree: ast.AST, kind: str = kind, place: int = place) -> bool:
            if kind == "epsilon":
                found = _numbers(tree)
                if not found:
                    return False
                node = found[place % len(found)]
                if isinstance(node, ast.Constant):
                    node.value = 30 * node.value
                else:
                    _replace(tree, node, ast.BinOp(node, ast.Mult(), ast.Constant(30.0)))
                return True
            places = _assignments(tree)
            if not places:
                return False
            node = places[place % len(places)]
            owner_of = ast.parse('locals().get("self")', mode="eval").body
            node.value = ast.Call(ast.Name(CHANGE, ast.Load()), [node.value, owner_of], [])
            return True

        new = _changed(function, edit)
        if new is None:
            continue
        made += 1
        lines = f"{kind} {bound:g} at {place}"
        change = None if kind == "epsilon" else _on_tensors(CHANGES[kind](bound))
        yield Mutant(architecture, owner, name, lines, new, change)


def _replace(tree: ast.AST, old: ast.AST, new: ast.AST) -> None:
    for node in ast.walk(tree):
        for field, value in ast.iter_fields(node):
            if value is old and node is not new:
                setattr(node, field, new)
                return
            if isinstance(value, list) and old in value:
                value[value.index(old)] = new
                return


def _on_tensors(change: Callable) -> Callable:
    def changed(value: Any, owner: Any) -> Any:
        return change(value, owner) if isinstance(value, Tensor) and value.is_floating_point() else value

    return changed


# Comparing


def _calls(model: nn.Module, names: list[str]) -> dict[str, tuple[tuple, dict]]:
    calls: dict[str, tuple[tuple, dict]] = {}

    def note(name: str, module: nn.Module, args: tuple, options: dict) -> None:
        calls.setdefault(name, (args, options))

    handles = [
        model.get_submodule(name).register_forward_pre_hook(functools.partial(note, name), with_kwargs=True)
        for name in names
    ]
    output(model, prompt(2, 11), use_cache=False)
    for handle in handles:
        handle.remove()
    return calls


def _scaled(call: tuple[tuple, dict], factor: float) -> tuple[tuple, dict]:
    """A call whose floating-point tensors are others; tables and masks stay."""
    fixed = ("position_embeddings", "attention_mask", "cos", "sin")
    args, options = call

    def scale(value: Any) -> Any:
        plain = type(value) is Tensor and value.is_floating_point()
        return value * factor if plain else value

    rest = {name: value if name in fixed else tree_map(scale, value) for name, value in options.items()}
    return (tuple(map(scale, args)), rest)


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]


@torch.no_grad()
def differences(architecture: str) -> Iterator[tuple[tuple[str, int], tuple[float, list[Tensor]]]]:
    """((module, number of a probe), (difference from its own code, results of that)) of rewritten modules."""
    own, model = (copy.deepcopy(model_of(architecture)) for _ in range(2))
    for each in (own, model):
        for module in each.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                module.register_buffer(BUFFER, torch.tensor(1.0 / (2 + module.layer_idx)))
    torch_moe_mps.accelerate(model)
    names = [name for name, module in model.named_modules() if name and is_rewritten(module)]
    theirs, ours = _calls(own, names), _calls(model, names)
    for name in names:
        if name not in theirs or name not in ours:
            continue
        pair = own.get_submodule(name), model.get_submodule(name)
        for number, (of_inputs, of_rows) in enumerate(PROBES):
            results = []
            for module, call in zip(pair, (theirs[name], ours[name]), strict=True):
                rows = [p for p in module.parameters() if p.dim() == 1]
                before = [row.clone() for row in rows]
                for row in rows:
                    row.mul_(of_rows)
                args, options = _scaled(call, of_inputs)
                try:
                    results.append(_tensors(module(*args, **options)))
                finally:
                    for row, held in zip(rows, before, strict=True):
                        row.copy_(held)
            expected, found = results
            if len(expected) != len(found) or not all(x.isfinite().all() for x in expected):
                continue
            errors = [
                ((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-30)).item()
                for a, b in zip(found, expected, strict=True)
                if b.is_floating_point() and a.shape == b.shape
            ]
            yield (name, number), (max(errors, default=0.0), expected)


@functools.cache
def _plain(architecture: str) -> dict[tuple[str, int], tuple[float, list[Tensor]]]:
    """The differences without a change, of rounding."""
    return dict(differences(architecture))


@torch.no_grad()
def missed(mutant: Mutant, monkeypatch: Any) -> list[str] | None:
    """Modules whose result is not that of the changed code; None if the change has no effect."""
    plain, ids = _plain(mutant.architecture), prompt(2, 11)
    with monkeypatch.context() as patch:
        if mutant.change is not None:
            patch.setitem(mutant.function.__globals__, CHANGE, mutant.change)
        patch.setattr(mutant.owner, mutant.name, mutant.function)
        model = copy.deepcopy(model_of(mutant.architecture))
        try:
            logits = output(model, ids, use_cache=False)
        except Exception:
            return None
        found = dict(differences(mutant.architecture))
    same = torch.equal(logits, output(model, ids, use_cache=False))
    for place, (_, expected) in found.items():
        own = plain[place][1] if place in plain else []
        same = same and len(own) == len(expected) and all(map(torch.equal, own, expected))
    if same and found.keys() == plain.keys():
        return None
    return [
        f"{name} in probe {number}: {error:.1g}"
        for (name, number), (error, _) in found.items()
        if error > 1e-3 + 10 * plain.get((name, number), (0.0, []))[0]
    ]


def tried(
    architecture: str, count: int, monkeypatch: Any, seed: int = 0
) -> Iterator[tuple[Mutant, list[str]]]:
    """So many changes that change something, the same each time, and the modules that miss them."""
    made = 0
    for mutant in mutants(architecture, 8 * count, seed):
        found = missed(mutant, monkeypatch)
        if found is not None:
            yield mutant, found
            made += 1
        if made == count:
            return
