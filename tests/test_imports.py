"""Imports: none changes a module that was imported before, but for the one that fills all tables."""

import ast
import json
import sys

import pytest
from support.processes import REPOSITORY, python

from torch_moe_mps.transformers import wiring

# Imports every module, without registering with transformers, and wiring.py as the last. Prints how many
# modules of ours there are, the names in them that then have another value than after their own import, and
# where a module of transformers holds something of ours; and the names in what wiring.py fills.
PROGRAM = """
    import importlib, json, pkgutil, sys, types
    from importlib.machinery import SourceFileLoader
    WIRING, seen = "torch_moe_mps.transformers.wiring", {}

    def items(value):
        "What a container holds, or a class."
        if isinstance(value, type):
            return {key: each for key, each in vars(value).items() if not key.startswith("_abc")}
        if isinstance(value, dict):
            return value
        return dict(enumerate(value)) if isinstance(value, (list, tuple, set)) else {}

    def held(module):
        own = {name: value for name, value in vars(module).items() if not isinstance(value, types.ModuleType)}
        return {name: (id(value), [*map(id, items(value).values())]) for name, value in own.items()}

    def execute(self, module, own=SourceFileLoader.exec_module):
        if module.__name__ != WIRING:
            own(self, module)
        if module.__name__.startswith("torch_moe_mps."):
            seen[module.__name__] = module, held(module)

    def is_ours(value):
        return str(getattr(value, "__module__", None)).startswith("torch_moe_mps")

    exec_module, SourceFileLoader.exec_module = SourceFileLoader.exec_module, execute
    import torch_moe_mps
    for each in pkgutil.walk_packages(torch_moe_mps.__path__, "torch_moe_mps."):
        if not each.name.rpartition(".")[2].startswith(("_C", "__main__")):
            importlib.import_module(each.name)
    changed = []
    for name, (module, before) in seen.items():
        now = held(module)
        changed += [f"{name}.{key}" for key in before if now.get(key) != before[key]]
    for name in [name for name in sys.modules if name.startswith("transformers.")]:
        for key, value in [*vars(sys.modules[name]).items()]:
            inside = items(value).values() if str(getattr(value, "__module__", name)) == name else ()
            changed += [f"{name}.{key}"] * any(map(is_ours, [value, *inside]))
    SourceFileLoader.exec_module = exec_module
    module = importlib.reload(sys.modules[WIRING])
    filled = {name: [*map(str, getattr(module, name))] for name in sys.argv[1:]}
    print(json.dumps([len(seen), changed, filled]))
"""
# Operators register themselves, and so do forwards that know what runs unmodified in their place.
OWN = [
    "torch_moe_mps.models.basics.state._EAGER",
    "torch_moe_mps.ops._registry.DECLARED",
    "torch_moe_mps.ops._registry.OPERATORS",
    "torch_moe_mps.ops._registry.PUBLIC",
    "torch_moe_mps.ops._registry.PUBLIC_FOR",
    "torch_moe_mps.ops._registry.WITH_BACKWARD",
    "torch_moe_mps.ops._registry._OPERATORS",
]


@pytest.mark.sweep
def test_an_import_changes_nothing_else():
    """The tables are filled alike after all other imports. `tests/test_layout.py` reads the source, too."""
    pytest.importorskip("trl")  # one of our modules imports it
    public = {name: value for name, value in vars(wiring).items() if name.isupper()}
    tables = [name for name, value in public.items() if isinstance(value, list | dict)]
    assert len(tables) == 10, tables
    modules, changed, filled = json.loads(python(PROGRAM, *tables))
    assert modules > 200 and sorted(changed) == OWN, changed
    for name in tables:
        ours = [str(each).partition(" at 0x")[0] for each in getattr(wiring, name)]
        assert [each.partition(" at 0x")[0] for each in filled[name]] == ours, name


def test_tests_of_operators_need_few_libraries():
    """Those of tests/requirements-operators.txt, in the versions that all tests have."""
    allowed = {"torch", "numpy", "pytest", "hypothesis", "torch_moe_mps", "support", "simulator", "measured"}
    for path in sorted((REPOSITORY / "tests/ops").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            found = {name.partition(".")[0] for name in names} - sys.stdlib_module_names
            assert found <= allowed, (path.name, found - allowed)
    few, every = (
        {line.partition("#")[0].strip() for line in (REPOSITORY / "tests" / name).read_text().splitlines()}
        for name in ("requirements-operators.txt", "requirements.txt")
    )
    assert few <= every
