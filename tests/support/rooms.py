"""The rooms of the package, and which file imports which."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "torch_moe_mps"
TESTS = REPOSITORY / "tests"
SCRIPTS = REPOSITORY / "scripts"
_OF_SCRIPTS = (SCRIPTS, *(SCRIPTS / room for room in ("bench", "make", "macos")))
# {folder: the root of its modules' names}, the inner ones last
ROOTS = {PACKAGE: REPOSITORY, TESTS: TESTS, **{folder: folder for folder in _OF_SCRIPTS}}

# Parts of the package from the lowest floor to the highest: a part imports those below it.
FLOORS = (
    "_versions",
    "_limits",
    "_text",
    "_environment",
    "_interrupts",
    "_progress",
    "_weight_formats",
    "_install",
    "_hub",
    "_extension",
    "_faults",
    "macs",
    "ops",
    "selfcheck",
    "quantization",
    "disk",
    "models.upstream",
    "models.basics",
    "models.graphs",
    "models.caches",
    "models.trials",
    "models.modules",
    "models.attention",
    "models.families",
    "models.capture",
    "models.adapters",
    "models.kv_sizes",
    "models.programs",
    "checkpoints",
    "transformers.mtp",
    "transformers",
    "serving",
    "pipeline",
    "training",
    "commands",
    "__main__",
)


def name_of(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """A tree and the statements in it; a tenth of what ast.walk visits."""
    ahead = [tree]
    while ahead:
        node = ahead.pop()
        yield node
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            ahead += getattr(node, block, [])


def imports(path: Path, root: Path) -> Iterator[str]:
    """What a file imports, in its functions too: absolute names of modules, or of names in modules."""
    name = name_of(path, root).split(".")
    package = name if path.name == "__init__.py" else name[:-1]
    for node in statements(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = [*above, *([node.module] if node.module else [])]
            yield from (".".join([*module, alias.name]) for alias in node.names)


@functools.cache
def files() -> dict[Path, frozenset[Path]]:
    """{Python file of the repository: the files that it imports}."""
    found = {path: root for folder, root in ROOTS.items() for path in sorted(folder.rglob("*.py"))}
    found = {path: root for path, root in found.items() if not path.is_symlink()}
    by_name = {name_of(path, root): path for path, root in found.items()}

    def imported(path: Path, root: Path) -> Iterator[Path]:
        for name in imports(path, root):
            module = name if name in by_name else name.rpartition(".")[0]
            if module in by_name:
                yield by_name[module]

    return {path: frozenset(imported(path, root)) for path, root in found.items()}


@functools.cache
def graph() -> dict[str, set[str]]:
    """{module: the modules of the package that it imports}."""
    return {
        name_of(path, REPOSITORY): {name_of(o, REPOSITORY) for o in others if o.is_relative_to(PACKAGE)}
        for path, others in files().items()
        if path.is_relative_to(PACKAGE)
    }


def floor(name: str) -> int:
    """The floor of a module: that of the longest name in FLOORS that it belongs to."""
    inner = name.removeprefix("torch_moe_mps.")
    matching = [floor for floor in FLOORS if inner == floor or inner.startswith(f"{floor}.")]
    assert matching, f"{name} is on no floor"
    return FLOORS.index(max(matching, key=len))
