"""Models of a transformers that does not exist: copies of modelling files in which arguments are others."""

import ast
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from transformers import PreTrainedModel

from torch_moe_mps.models.upstream.calls import cache_name

from . import tiny_models

_NUMBER = itertools.count()
# Children of layers that mix tokens.
MIXERS = ("self_attn", "mixer", "mamba", "linear_attn", "temporal_block")


class Edits:
    """Changes of the forwards of mixers, which take a cache, and of the calls of them in layers."""

    def __init__(self, cache: str) -> None:
        self.cache = cache

    def mixer(self, forward: ast.FunctionDef) -> None:
        raise NotImplementedError

    def call(self, call: ast.Call) -> None:
        """Changes the call of a mixer."""


class Renamed(Edits):
    """The cache has another name."""

    def mixer(self, forward: ast.FunctionDef) -> None:
        for node in ast.walk(forward):
            if isinstance(node, ast.Name) and node.id == self.cache:
                node.id = "states_of_tokens"
            elif (isinstance(node, ast.arg) and node.arg == self.cache) or (
                isinstance(node, ast.keyword) and node.arg == self.cache
            ):
                node.arg = "states_of_tokens"
        forward.decorator_list = []  # which know the names before

    def call(self, call: ast.Call) -> None:
        for keyword in call.keywords:
            if keyword.arg == self.cache:
                keyword.arg = "states_of_tokens"


def _begin(forward: ast.FunctionDef, text: str) -> None:
    forward.body[0:0] = ast.parse(text).body


class Added(Edits):
    """A new argument multiplies the input."""

    def mixer(self, forward: ast.FunctionDef) -> None:
        first = forward.args.args[1].arg
        forward.args.kwonlyargs.append(ast.arg("gain"))
        forward.args.kw_defaults.append(ast.Constant(None))
        _begin(forward, f"if gain is not None:\n {first} = {first} * gain")

    def call(self, call: ast.Call) -> None:
        call.keywords.append(ast.keyword("gain", ast.Constant(0.5)))


class Option(Added):
    """The same as an option, which no argument names."""

    def mixer(self, forward: ast.FunctionDef) -> None:
        first = forward.args.args[1].arg
        if forward.args.kwarg is None:
            forward.args.kwarg = ast.arg("kwargs")
        options = forward.args.kwarg.arg
        _begin(forward, f"if {options}.get('gain') is not None:\n {first} = {first} * {options}.pop('gain')")


class Removed(Edits):
    """Padding is no argument any more; nothing is hidden."""

    def mixer(self, forward: ast.FunctionDef) -> None:
        arguments = forward.args
        behind = len(arguments.args) - len(arguments.defaults)
        for place, argument in enumerate(arguments.args):
            if argument.arg == "attention_mask":
                if place >= behind:
                    del arguments.defaults[place - behind]
                del arguments.args[place]
                _begin(forward, "attention_mask = None")
                break

    def call(self, call: ast.Call) -> None:
        call.keywords = [keyword for keyword in call.keywords if keyword.arg != "attention_mask"]


class NoneMeans(Edits):
    """A call without a cache doubles the input."""

    def mixer(self, forward: ast.FunctionDef) -> None:
        first = forward.args.args[1].arg
        _begin(forward, f"if {self.cache} is None:\n {first} = {first} * 2.0")


EDITS: dict[str, Callable[[str], Edits]] = {
    "renamed": Renamed,
    "added": Added,
    "option": Option,
    "removed": Removed,
    "None": NoneMeans,
}


def edited_model(architecture: str, edit: str, folder: Path) -> PreTrainedModel:
    """A tiny model of a copy of its modelling file; its class is of another module."""
    module = _edited(tiny_models.modelling(architecture), edit, folder)
    build = tiny_models.other_model if architecture in tiny_models.other_causal() else tiny_models.tiny_model
    plain = build(architecture)
    model: PreTrainedModel = getattr(module, type(plain).__name__)(plain.config).eval()
    model.load_state_dict(plain.state_dict())
    return model


def mixers(module: ModuleType) -> dict[str, str]:
    """{class of a file that mixes tokens by a cache: the argument's name}"""
    named = {}
    for name, cls in vars(module).items():
        is_own = isinstance(cls, type) and cls.__module__ == module.__name__
        if is_own and "forward" in vars(cls) and not issubclass(cls, PreTrainedModel):
            argument = cache_name(cls.forward)
            is_layer = name.endswith(("Layer", "Block")) and not name.endswith("MambaLayer")
            if argument is not None and not is_layer:
                named[name] = argument
    return named


def _edited(module: ModuleType, edit: str, folder: Path) -> ModuleType:
    tree, named = ast.parse(Path(str(module.__file__)).read_text()), mixers(module)
    assert named, f"{module.__name__} has no class that mixes tokens"
    change = EDITS[edit](next(iter(named.values())))
    package = module.__name__.rpartition(".")[0].split(".")
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.level:
            above = package[: len(package) - node.level + 1]
            node.module, node.level = ".".join([*above, *([node.module] if node.module else [])]), 0
        if isinstance(node, ast.ClassDef):
            for forward in _forwards(node):
                if node.name in named:
                    change.mixer(forward)
                for call in ast.walk(forward) if node.name not in named else ():
                    if isinstance(call, ast.Call) and _calls_mixer(call, change.cache):
                        change.call(call)
    name = f"edited_{architecture_of(module)}_{edit}_{next(_NUMBER)}"
    file = folder / f"{name}.py"
    file.write_text(ast.unparse(ast.fix_missing_locations(tree)))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    made = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def architecture_of(module: ModuleType) -> str:
    return module.__name__.rpartition(".modeling_")[2]


def _forwards(cls: ast.ClassDef) -> Iterator[ast.FunctionDef]:
    for item in cls.body:
        if isinstance(item, ast.FunctionDef) and item.name == "forward":
            yield item


def _calls_mixer(call: ast.Call, cache: str) -> bool:
    """Whether it is self.<child>(..., cache=cache) of a child that mixes tokens."""
    function = call.func
    is_child = isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)
    mixes = is_child and function.attr in MIXERS  # type: ignore[attr-defined]
    return mixes and any(keyword.arg == cache for keyword in call.keywords)
