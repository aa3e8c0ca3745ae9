"""Which tests depend on which files: `scripts/test --changed` runs those of the files that differ from main.

| file | tests |
| --- | --- |
| a test | itself |
| `conftest.py` | its folder |
| Python in `tests/` or `scripts/` | tests that import it, and tests that name its file |
| Python of the package | the folder of its room, and tests that import it other than through a door |
| a rule of `modules/` | the folder of its room, and tests that import it themselves |
| a trial of `trials/` | the folders of its room and of `modules/`, and tests that import it |
| an operator's family in `ops/` | tests that name one of its operators, and a model of each router |
| `.mm`, `.metal` and their headers | the same, for the families whose sources include the file |
| a text, a table, pinned values | tests that name it, itself or in a module of `tests/` that they import |
| docstrings and comments of Python in the package alone | the documents |
| the simulator, requirements and settings | all |

A header that only shaders include counts for the operators whose kernels include it.

Of the folder of a room those tests are left out that are named like another module of it, where this does not
import the file.

Where only sources and families of operators differ, cases of other operators are left out (`--operators`).

A door is a module that gathers what others declare (a package's `__init__`, `accelerate`, `install`): nearly
every test of models goes through one, so that all would depend on all. `scripts/test` runs every test.
"""

import ast
import functools
import itertools
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from simulator import build

from . import simulated  # noqa: F401  # which says where built pieces are kept

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "torch_moe_mps"
TESTS = REPOSITORY / "tests"
SCRIPTS = REPOSITORY / "scripts"
_OF_SCRIPTS = (SCRIPTS, *(SCRIPTS / room for room in ("bench", "make", "macos")))
ROOTS = {
    PACKAGE: REPOSITORY,
    TESTS: TESTS,
    **{folder: folder for folder in _OF_SCRIPTS},
}  # the inner ones last
SHADERS = PACKAGE / "shaders"
SOURCES = (".mm", ".metal", ".h")
# A kernel's function, and (kernel, function that it is an instance of).
KERNEL = re.compile(r"\[\[kernel[^\]]*\]\]\s+void\s+(\w+)\(")
INSTANTIATED = re.compile(r'\bINSTANTIATE\w*\(\s*"(\w+)(?:"[^,()]*,\s*(\w+))?')
# What every test runs in: the simulator, the pinned packages, settings.
EVERYTHING = re.compile(
    r"tests/(simulator/(?!tests/|example/|README|(apple|cuda|coverage)\b.*\.py)|conftest\.py|\w+\.txt)"
    r"|pyproject\.toml|scripts/environment\.sh"
)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# Calls of every operator in every format, for minutes: only `scripts/test` runs them.
ANY_ARGUMENTS = TESTS / "ops" / "test_any_arguments.py"
# Arguments and oracles of each family of operators, which are imported by name.
OF_FAMILIES = TESTS / "support" / "ops"
TRIALS = PACKAGE / "transformers" / "trials"
RULES = PACKAGE / "transformers" / "modules" / "rules"
# Models on the simulated GPU: how operators work together.
MODELS = TESTS / "transformers" / "models" / "test_mps.py"


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


def imports(path: Path, root: Path, part: ast.AST | None = None) -> Iterator[str]:
    """What a file imports, in its functions too: absolute names of modules, or of names in modules.

    `part`: a piece of the file alone.
    """
    name = name_of(path, root).split(".")
    package = name if path.name == "__init__.py" else name[:-1]
    for node in statements(part or ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = [*above, *([node.module] if node.module else [])]
            yield from (".".join([*module, alias.name]) for alias in node.names)


@functools.cache
def graph() -> dict[Path, set[Path]]:
    """{Python file: the files of the repository that it imports}, read anew when one has changed."""
    files = {path: root for folder, root in ROOTS.items() for path in sorted(folder.rglob("*.py"))}
    files = {path: root for path, root in files.items() if not path.is_symlink()}
    texts = [(path.relative_to(REPOSITORY), path.read_bytes()) for path in files]
    name = build.digest(Path(__file__).read_bytes(), *itertools.chain.from_iterable(texts))
    edges = build.kept(f"imports-{name}", lambda: _read(files))
    return {REPOSITORY / path: {REPOSITORY / other for other in others} for path, others in edges.items()}


def _read(files: dict[Path, Path]) -> dict[str, set[str]]:
    by_name = {name_of(path, root): path for path, root in files.items()}
    edges = {}
    for path, root in files.items():
        names = set(imports(path, root))
        modules = {name if name in by_name else name.rpartition(".")[0] for name in names}
        others = {by_name[module] for module in modules & by_name.keys()}
        edges[str(path.relative_to(REPOSITORY))] = {str(other.relative_to(REPOSITORY)) for other in others}
    return edges


@functools.cache
def is_door(path: Path) -> bool:
    return path.is_relative_to(PACKAGE) and (
        path.name == "__init__.py" or path.parent == PACKAGE / "transformers"
    )


@functools.cache
def reached(path: Path) -> frozenset[Path]:
    """The files that a file imports, and these in turn, but for those behind doors."""
    seen: set[Path] = set()
    ahead = [path]
    while ahead:
        for other in graph()[ahead.pop()] - seen:
            seen.add(other)
            if not is_door(other):
                ahead.append(other)
    return frozenset(seen)


@functools.cache
def all_tests() -> frozenset[Path]:
    """The tests of the repository, without the simulator's own."""
    return frozenset(path for path in graph() if path.name.startswith("test_"))


@functools.cache
def tests_in(folder: Path) -> frozenset[Path]:
    return frozenset(test for test in all_tests() if test.is_relative_to(folder))


@functools.cache
def read(path: Path) -> str:
    return path.read_text()


@functools.cache
def modules(test: Path) -> frozenset[Path]:
    """A test and the modules of `tests/` and `scripts/` that it imports."""
    return frozenset({test} | {path for path in reached(test) if not path.is_relative_to(PACKAGE)})


@functools.cache
def naming(word: str) -> frozenset[Path]:
    """Tests that name a file or a folder, or import what does."""
    pattern = re.compile(rf"(?<![\w.]){re.escape(word)}(?!\w|\.\w)")
    texts = {path: read(path) for path in graph() if not path.is_relative_to(PACKAGE)}
    named = {path for path, text in texts.items() if word in text and pattern.search(text)}
    return frozenset(test for test in all_tests() if modules(test) & named)


@functools.cache
def operators() -> dict[str, set[str]]:
    """{family: its operators}: a family has the same file name on every layer."""
    families: dict[str, set[str]] = {}
    for path in (PACKAGE / "ops").glob("[!_]*.py"):
        functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
        families[path.stem] = {
            function.name
            for function in functions
            if any("operator" in ast.unparse(decorator) for decorator in function.decorator_list)
        }
    return families


@functools.cache
def includes() -> dict[Path, set[Path]]:
    """{file of the host code or of the shaders: the files of the package that it includes}."""
    files = [path for path in PACKAGE.rglob("*") if path.suffix in SOURCES]
    return {
        path: {
            (folder / name).resolve()
            for name in re.findall(r'^#(?:include|import) "(\S+)"', path.read_text(), re.MULTILINE)
            for folder in (path.parent, SHADERS)
        }
        for path in files
    }


def closure(path: Path, behind: Callable[[set[Path]], set[Path]]) -> set[Path]:
    """A file, those behind it, those behind these, and so on."""
    found, ahead = set(), {path}
    while ahead:
        found |= ahead
        ahead = behind(ahead) - found
    return found


@functools.cache
def included(path: Path) -> frozenset[Path]:
    """A file of the host code or of the shaders, and those that it includes, by other headers too."""
    known = includes()
    found = closure(path, lambda files: {other for file in files for other in known.get(file, ())})
    return frozenset(found & known.keys())


def including(path: Path) -> set[Path]:
    """A source, or those that include a header, themselves or by other headers."""
    known = includes().items()
    found = closure(path, lambda files: {other for other, names in known if names & files})
    return {source for source in found if source.suffix != ".h"}


@functools.cache
def of_family(family: str, some: frozenset[str] = frozenset()) -> frozenset[Path]:
    """Tests that name an operator of a family, or have the family's name.

    `some`: operators that alone count, those of other families where none is of this one.
    """
    own = operators().get(family, set())
    counted = own & some or some if own and some else own
    names = re.compile("|".join(rf"\b{name}\b" for name in counted) or "(?!)")
    tests = {test for test in tests_in(TESTS / "ops") if names.search(read(test))}
    for folder in ("ops", "host", "selfcheck"):
        tests |= {test for test in tests_in(TESTS / folder) if f"{test.stem}_".startswith(f"test_{family}_")}
    return frozenset(tests)


def of_source(path: Path) -> set[Path]:
    """Tests of the operators whose host code or shaders have a file."""
    tests = {TESTS / "simulator_tests" / "test_strict.py"}
    if path.is_relative_to(PACKAGE / "csrc"):
        tests = {TESTS / "host" / name for name in ("test_traces.py", "test_macos.py")}
    some = frozenset(operators_of(path)) if path.suffix == ".h" and SHADERS in path.parents else frozenset()
    for stem, families in families_of(path).items():
        named = set().union(*(of_family(family, some) for family in families or [stem]))
        tests |= named or tests_in(TESTS / "ops") | tests_in(TESTS / "host")  # what all operators share
    return tests


def families_of(path: Path) -> dict[str, list[str]]:
    """{name of a source that is a file or includes it: its families of operators}"""
    sources = including(path)
    # All host code includes the parameters of all shaders.
    shaders = {source for source in sources if source.suffix == ".metal"}
    stems = {source.stem for source in shaders or sources}
    return {stem: [name for name in operators() if f"{stem}_".startswith(f"{name}_")] for stem in stems}


@functools.cache
def kernels_of_operators() -> dict[str, set[str]]:
    """{operator: the kernels that it launches}, as tests/host/test_traces.py pins them."""
    kernels: dict[str, set[str]] = defaultdict(set)
    operator = ""
    for line in (TESTS / "pinned" / "traces.txt").read_text().splitlines():
        if heading := re.match(r"(\w+): ", line):
            operator = heading[1]
        elif launch := re.match(r"  (\w+) grid", line):
            kernels[operator].add(launch[1])
    return kernels


def launching(shader: Path, changed: Path) -> set[str]:
    """The operators that launch a kernel of a shader, of those whose code includes a file.

    A header includes what it needs (test_dependents.py). What a shader includes beside its kernels are the
    types that these are made for.
    """
    inside = included(shader)
    using = {path for path in inside if changed in included(path)}

    def defined(paths: Iterable[Path]) -> set[str]:
        return set().union(*(KERNEL.findall(read(path)) for path in paths))

    every = defined(inside)
    of_all = changed == shader or not all(defined(included(path)) for path in using & includes()[shader])
    others = set() if of_all else every - defined(using)
    names = tuple(
        name
        for path in inside
        for name, function in INSTANTIATED.findall(read(path))
        if path == changed or function not in others
    )
    return {
        name
        for name, kernels in kernels_of_operators().items()
        if names and any(kernel.startswith(names) for kernel in kernels)
    }


def operators_of(path: Path) -> set[str]:
    """The operators whose kernels, host code or reference have a file; none if it may be any."""
    if SHADERS in path.parents and path.suffix in SOURCES:
        sources = including(path)
        shaders = [source for source in sources if source.suffix == ".metal"]
        # The host may launch other kernels with another constant; any kernel may use what is in common/.
        is_of_all = sources != {*shaders} or path.is_relative_to(SHADERS / "common")
        found = [launching(shader, shader if is_of_all else path) for shader in shaders]
        return set().union(*found) if all(found) else set()
    if path.is_relative_to(PACKAGE / "csrc"):
        sources = {path} | including(path.with_suffix(".h"))
        families = [families_of(source)[source.stem] for source in sources if source.suffix == ".mm"]
    elif path.parent in (PACKAGE / "ops", OF_FAMILIES):
        using = {path} | {
            other for other in graph() if other.parent == path.parent and path in graph()[other]
        }
        families = [[other.stem] if other.stem in operators() else [] for other in using]
    else:
        return set()
    return set().union(*(operators()[name] for some in families for name in some)) if all(families) else set()


def only_operators(paths: list[Path]) -> set[str]:
    """The operators that files belong to; none where one of them may belong to any."""
    found = [operators_of(path) for path in paths if path.suffix != ".md"]
    return set().union(*found) if all(found) else set()


def of_other_operators(item: Any, names: set[str]) -> bool:
    """Whether a test is a case of an operator, and of none of these."""
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    cases = {value for value in values if isinstance(value, str)} & set().union(*operators().values())
    return bool(cases) and not cases & names


def room(path: Path) -> set[Path]:
    """The tests in the folder of a module's room, but for those of modules that do not import it."""
    parts = path.relative_to(PACKAGE).parts
    if parts[0] == "transformers":
        folder = TESTS / "transformers" / (parts[1] if len(parts) > 2 else "door")
    else:
        folder = TESTS / parts[0] if len(parts) > 1 else TESTS / "host"
    modules = (PACKAGE / folder.relative_to(TESTS)).rglob("[!_]*.py")
    others = [module for module in modules if path not in {module} | reached(module)]
    own = {test for test in tests_in(folder) for other in others if is_named_like(test, other)}
    return {*tests_in(folder)} - own or {*tests_in(folder)}


def is_named_like(test: Path, module: Path) -> bool:
    """Whether a test's name begins with that of a module, as one or as many."""
    return re.match(rf"test_{module.stem}s?(_|$)", test.stem) is not None


def dependents(path: Path) -> set[Path]:
    """The tests that depend on one file of the repository, by the table above."""
    relative = path.relative_to(REPOSITORY)
    in_package = path.is_relative_to(PACKAGE)
    if EVERYTHING.match(str(relative)):
        return set(all_tests())
    if path.name == "conftest.py":
        return {*tests_in(path.parent)}
    if path.name.startswith("test_"):
        return {path} & all_tests()
    if in_package and path.suffix in SOURCES:
        return of_source(path) - {ANY_ARGUMENTS} | {MODELS}
    if path.parent == PACKAGE / "ops" and path.stem in operators():
        return of_family(path.stem) - {ANY_ARGUMENTS} | {MODELS}
    if path.parent == OF_FAMILIES and path.stem in operators():
        return of_family(path.stem) | {ANY_ARGUMENTS, TESTS / "ops" / "test_errors.py"}
    if path.suffix == ".py":
        if path.parent == RULES:
            importing = {
                test for test in all_tests() if path in set().union(*map(graph().get, modules(test)))
            }
        else:
            importing = {test for test in all_tests() if path in reached(test)}
        if path.parent == TRIALS:
            importing |= {*tests_in(TESTS / "transformers" / "modules")}
        return importing | (room(path) if in_package else naming(path.name))
    if path.parent.name == "pinned":
        return {test for test in naming("assert_pinned") if f'"{path.stem}"' in test.read_text()}
    folders = () if in_package else relative.parts[:-1]  # a test may read all that is in one
    quoted = {f'"{name}"' for name in folders} - {'"docs"', '"tests"', '"scripts"'}
    tests = set().union(*map(naming, quoted | {path.name if path.suffix else f'"{path.name}"'}))
    return tests | ({TESTS / "test_documents.py"} if path.suffix == ".md" else set())


def git(*arguments: str) -> str:
    """The output of a git command; empty where it fails."""
    told = subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True)
    return told.stdout if told.returncode == 0 else ""


def common() -> str:
    """The last commit that this branch and main have in common."""
    found = git("merge-base", "HEAD", "origin/main") or git("merge-base", "HEAD", "main") or "HEAD"
    return found.strip()


def changed() -> list[Path]:
    """The files that differ from `common()`, those of no commit included."""
    names = git("diff", "--name-only", common()) + git("ls-files", "--others", "--exclude-standard")
    return [REPOSITORY / name for name in sorted({*names.splitlines()})]


def code(text: str) -> str:
    """The syntax tree of Python text without docstrings and comments; they change no behaviour."""
    tree = ast.parse(text)
    for node in statements(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.dump(tree)


def has_other_code(path: Path) -> bool:
    """False for a module of the package that differs from `common()` in docstrings and comments alone.

    Docstrings of operators are tested, and those of the commands' options are their help.
    """
    shown = path.is_relative_to(PACKAGE / "ops") or path == PACKAGE / "commands" / "arguments.py"
    if shown or path.suffix != ".py" or not path.is_relative_to(PACKAGE) or not path.exists():
        return True
    before = git("show", f"{common()}:{path.relative_to(REPOSITORY)}")
    return not before or code(before) != code(path.read_text())


def main() -> None:
    """Prints the tests, a line each, behind an option of pytest if cases of other operators are left out."""
    every = changed()
    paths = [path for path in every if has_other_code(path)]
    tests = {test for path in paths for test in dependents(path) if test.exists()}
    tests |= {TESTS / "test_documents.py"} if len(paths) < len(every) else set()
    if names := only_operators(paths):
        print(f"--operators={','.join(sorted(names))}")
    for test in sorted(tests | ({TESTS / "test_layout.py"} if tests else set())):
        print(test.relative_to(REPOSITORY))


if __name__ == "__main__":
    sys.exit(main())
