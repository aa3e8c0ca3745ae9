"""Writes torch_moe_mps/models/graphs/README.md: the passes over a captured decode step.

Formulas and reasons are those of the code. What each pass saves is in tests/pinned/passes.txt. The word
`measure` writes that first: a tiny model of each architecture captures a token in the simulator, in 4 bits.
"""

import ast
import importlib
import inspect
import io
import os
import sys
import tokenize
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from unittest import mock

import paths

if __name__ == "__main__":
    asked = paths.words(__doc__, "measure")

import models_page
import simulator
import torch
import transformers
from support.simulated import install
from torch import fx

if __name__ == "__main__":
    os.environ["MOE_MPS_CHECK"] = "0"  # kernels whose dispatches are dropped compute nothing
    install()  # in front of whatever asks torch for MPS

from support import tiny_models
from support.launches import FREE, captured_call, model_on_mps

import torch_moe_mps
from torch_moe_mps.models.families import Family
from torch_moe_mps.models.graphs import passes
from torch_moe_mps.models.graphs.fusion import Fusion
from torch_moe_mps.transformers import wiring

PAGE = paths.REPOSITORY / "torch_moe_mps" / "models" / "graphs" / "README.md"
SAVED = paths.REPOSITORY / "tests" / "pinned" / "passes.txt"
NAMED = 3  # architectures by name; of more, their number
INTRODUCTION = """\
# The passes over a captured decode step

This page lists the passes that `simplify` runs on the recorded operators of a decode step, in their order.
The script scripts/make/make_passes_table.py writes it from the code.

- **formula** is what the pass looks for -> what replaces it. A name in capitals is a value, `X[S]` is X in
  the shape S, and `*A` are the remaining arguments (`Fusion` in fusion.py). If a pass has several formulas,
  the first one is shown.
- **why here** is the comment in `PASSES` in passes/, or the pass next to which a family puts its own.
- **saves** is how many operators with a dispatch a token of a tiny model in 4 bits no longer calls: the
  number of architectures for which there are fewer, and the one that saves most. A pass that saves none
  brings values into the form that a later pass looks for.

| | pass | formula | why here | saves |
|---|---|---|---|---|
"""


def names() -> list[str]:
    return [passed.__name__ for passed in passes.PASSES]


def launching(graph: fx.Graph) -> int:
    """Calls of a graph that launch something."""
    operators = [node.target for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    return sum(not op.is_view and op.overloadpacket.__name__ not in FREE for op in operators)


def saved_by(architecture: str) -> list[int]:
    """For each pass, how many calls it saves in a token of a tiny model. Raises: NotCaptured."""
    saved = [0] * len(passes.PASSES)

    def counted(place: int, passed: Callable[[fx.Graph], None]) -> Callable[[fx.Graph], None]:
        def run(graph: fx.Graph) -> None:
            before = launching(graph)
            passed(graph)
            passes.drop_unused(graph)
            saved[place] = before - launching(graph)

        return run

    model = model_on_mps(architecture)
    with mock.patch.dict(os.environ, {"MOE_MPS_CAPTURE": "1"}):
        torch_moe_mps.accelerate(model, check=False, bits=4, group_size=32)
    every = [counted(*item) for item in enumerate(passes.PASSES)]
    with mock.patch.object(passes, "PASSES", every), simulator.dropped():
        captured_call(model)
    return saved


def measured() -> str:
    """The text of tests/pinned/passes.txt: a line for each pass, in their order."""
    transformers.logging.set_verbosity_error()
    saved: list[dict[str, int]] = [{} for _ in passes.PASSES]
    others = models_page.rows(models_page.WITHOUT)
    for architecture in (*tiny_models.architectures(), *tiny_models.DENSE_ARCHITECTURES, *others):
        try:
            counts = saved_by(architecture)
        except Exception as error:  # of code that has no tokens, or takes none like these
            print(f"{architecture}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        for of_pass, count in zip(saved, counts, strict=True):
            if count > 0:
                of_pass[architecture] = count
        print(architecture, file=sys.stderr)
    lines = (
        f"{name}: {', '.join(f'{each} {of_pass[each]}' for each in sorted(of_pass))}\n"
        for name, of_pass in zip(names(), saved, strict=True)
    )
    return "".join(lines)


def pinned() -> list[tuple[str, dict[str, int]]]:
    """(pass, {architecture: calls that it saves}) of each line of tests/pinned/passes.txt.

    Raises: SystemExit where it has other passes than the code.
    """
    rows = []
    for line in SAVED.read_text().splitlines():
        name, _, text = line.partition(":")
        pairs = (each.rsplit(" ", 1) for each in text.strip().split(", ") if each)
        rows.append((name, {architecture: int(count) for architecture, count in pairs}))
    if [name for name, _ in rows] != names():
        raise SystemExit(
            "make_passes_table: tests/pinned/passes.txt must have the passes of PASSES in their order, got "
            f"{', '.join(name for name, _ in rows)}: run scripts/make/make_passes_table.py measure"
        )
    return rows


def reasons() -> dict[int, str]:
    """Place in the list of the room's own passes -> the comment beside it."""
    source = inspect.getsource(passes)
    (table,) = (
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "PASSES" and node.value
    )
    assert isinstance(table, ast.List)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}
    lines = [item.lineno for item in table.elts]
    return {number: comments[line].lstrip("# ") for number, line in enumerate(lines) if line in comments}


def formula(passed: object) -> str:
    """Formula of a pass, from its rows or its docstring."""
    if not isinstance(passed, Fusion):
        return " ".join(str(inspect.getdoc(passed)).split("\n\n")[0].split()).rstrip(".")
    (old, new), *others = passed.rows
    return f"`{old}` -> `{new}`" + (f", and {len(others)} more" if others else "")


def savings(saved: dict[str, int]) -> str:
    if not saved:
        return "-"
    most = min(saved, key=lambda name: (-saved[name], name))
    if len(saved) <= NAMED:
        return ", ".join(f"{name} {count}" for name, count in saved.items())
    return f"{len(saved)} architectures, {most} {saved[most]}"


def document() -> str:
    """The text that the page should have."""
    beside = {
        place.run: f"{name}: {'before' if place.before else 'after'} `{_other(place)}`"
        for name, family in families().items()
        for place in family.passes
    }
    of_room, number, text = reasons(), 0, INTRODUCTION
    for place, (passed, (name, saved)) in enumerate(zip(passes.PASSES, pinned(), strict=True), 1):
        if passed in beside:
            why = beside[passed]
        else:
            why, number = of_room.get(number, ""), number + 1
        row = [str(place), f"[`{name}`]({file_of(passed)})", formula(passed), why, savings(saved)]
        text += f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n"
    return text


def families() -> dict[str, Family]:
    room = "torch_moe_mps.models.families"
    return {name: importlib.import_module(f"{room}.{name}").FAMILY for name in wiring.FAMILIES}


def _other(place: passes.Place) -> str:
    return str((place.before or place.after).__name__)  # type: ignore[union-attr]  # a place has one of them


def file_of(passed: Callable[[fx.Graph], None]) -> str:
    """The file of a pass, from the page."""
    if not isinstance(passed, Fusion):
        return os.path.relpath(inspect.getfile(passed), PAGE.parent)
    paths_of = (str(module.__file__) for module in [*sys.modules.values()] if passed in _values(module))
    files = (path for path in paths_of if f"\n{passed.__name__} = Fusion(" in Path(path).read_text())
    return os.path.relpath(next(files), PAGE.parent)


def _values(module: ModuleType) -> list[object]:
    ours = module.__name__.startswith("torch_moe_mps.models.")
    return [value for value in vars(module).values() if isinstance(value, Fusion)] if ours else []


if __name__ == "__main__":
    if asked:
        SAVED.write_text(measured())
    PAGE.write_text(document())
