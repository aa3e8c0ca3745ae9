"""How the repository is laid out: what may import what."""

import ast
import functools
import io
import itertools
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import rooms
from support.rooms import PACKAGE, REPOSITORY, floor, graph, imports

from torch_moe_mps._weight_formats import ROWS, Floats, LikeActivations
from torch_moe_mps.models import programs
from torch_moe_mps.ops import _activations, _checks
from torch_moe_mps.ops._samples import FAMILY_OF
from torch_moe_mps.ops.families import routing, slots
from torch_moe_mps.transformers import wiring


@pytest.fixture(scope="module", autouse=True)
def parsed():
    """Every file is parsed once, and not within the time of a test."""
    return rooms.files()


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def circle(edges: dict[str, set[str]]) -> list[str] | None:
    """A circle of imports, if there is one."""
    done: set[str] = set()

    def visit(name: str, above: list[str]) -> list[str] | None:
        if name in above:
            return [*above[above.index(name) :], name]
        if name in done:
            return None
        found = next(filter(None, (visit(other, [*above, name]) for other in sorted(edges[name]))), None)
        done.add(name)
        return found

    return next(filter(None, (visit(name, []) for name in sorted(edges))), None)


def test_no_circle_of_imports():
    edges = graph()
    assert len(edges) > 20 and edges["torch_moe_mps.transformers.accelerate"]
    assert circle(edges) is None
    assert circle(edges | {"torch_moe_mps.ops._checks": {"torch_moe_mps.ops.families.norms"}}) is not None


def test_imports_go_down():
    upwards = {
        (name, other)
        for name, others in graph().items()
        for other in others - {"torch_moe_mps"}  # which imports the rest when that is used
        if name != "torch_moe_mps" and floor(other) > floor(name)
    }
    assert not upwards


def folders(edges: dict[str, set[str]]) -> dict[str, set[str]]:
    """{folder: the folders that it imports}, by {module: modules that it imports}.

    A file that lies directly in a floor, such as checkpoints/quantizer.py, counts as a folder: a folder that
    imports it must not be imported by it. Folders are compared within one floor, and families/ with what is
    next to it.
    """
    parents = {name.rpartition(".")[0] for name in edges}

    def folder(name: str) -> str:
        return ".".join(name.split(".")[:3]) if name in parents or name.count(".") > 2 else name

    found: dict[str, set[str]] = {folder(name): set() for name in edges}
    for name, others in edges.items():
        same = {folder(other) for other in others if other.split(".")[:2] == name.split(".")[:2]}
        found[folder(name)] |= same - {folder(name)}
    return found


def test_no_circle_of_folders_inside_a_floor():
    """No floor has an exception: a folder may be read with those below it, and nothing else."""
    between = folders(graph())
    assert len(between) > 100 and "torch_moe_mps.checkpoints.quantize" in between
    assert circle(between) is None
    up = {"torch_moe_mps.checkpoints.quantize.sizes": {"torch_moe_mps.checkpoints.write.parts"}}
    assert circle(folders(graph() | up)) is not None


def test_families_are_known_by_themselves_alone():
    rooms = {path.parent.name for path in (PACKAGE / "models/families").glob("*/__init__.py")}
    for name, others in graph().items():
        for room in rooms:
            family = f"torch_moe_mps.models.families.{room}"
            known = [each for each in others if f"{each}.".startswith(f"{family}.")]
            assert f"{name}.".startswith(f"{family}.") or not known, (name, room)


def stated(begin: str) -> set[str]:
    """Names in a table of the docstring of checkpoints/: file.name."""
    text = ast.get_docstring(tree(PACKAGE / "checkpoints/__init__.py")).partition(begin)[2].strip("\n")
    found, file = set(), ""
    for line in itertools.takewhile(str.strip, text.splitlines()):
        head, names = re.fullmatch(r"    (\S*) +(.+)", line).groups()
        file = head or file
        found |= {f"{file}.{name}" for name in re.findall(r"\w+", names)}
    return found


def test_the_names_that_other_floors_import_from_checkpoints_are_stated():
    inside, passed = "torch_moe_mps.checkpoints.", set()
    for path in PACKAGE.rglob("*.py"):
        if not path.is_relative_to(PACKAGE / "checkpoints"):
            passed |= {each for each in imports(path, REPOSITORY) if each.startswith(inside)}
    assert len(passed) > 40
    assert stated("import these names alone:\n\n") == {name.removeprefix(inside) for name in passed}


def test_programs_import_one_module_of_models():
    """models/programs.py has at most 30 names, each of which a program imports."""
    inside, asked = "torch_moe_mps.models.", set()
    for program in ("serving", "pipeline", "commands"):
        for path in (PACKAGE / program).rglob("*.py"):
            asked |= {each for each in imports(path, REPOSITORY) if each.startswith(inside)}
    names = {each.removeprefix(f"{inside}programs.") for each in asked}
    assert not [name for name in names if "." in name]
    assert names == {*programs.__all__} and len(names) <= 30
    described = ast.get_docstring(tree(PACKAGE / "models/programs.py"))
    assert not [name for name in names if name not in described]


WIRING = "transformers/wiring.py"  # the one module whose import fills tables of others


def changes_of_others(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements outside of functions that change what a module imports: a table, or an attribute."""
    imported = {
        alias.asname or alias.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }

    def is_theirs(node: ast.expr) -> bool:
        while isinstance(node, ast.Attribute | ast.Subscript | ast.Starred):
            node = node.value
        return isinstance(node, ast.Name) and node.id in imported

    def inside(node: ast.AST) -> Iterator[ast.stmt]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            targets = getattr(child, "targets", [getattr(child, "target", None)])
            if isinstance(child, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete):
                in_place = isinstance(child, ast.AugAssign)
                if any(is_theirs(each) and (in_place or not isinstance(each, ast.Name)) for each in targets):
                    yield child
            elif isinstance(child, ast.Expr) and isinstance(child.value, ast.Call):
                function = child.value.func
                is_method = isinstance(function, ast.Attribute) and is_theirs(function)
                if is_method or any(map(is_theirs, child.value.args)):
                    yield child
            yield from inside(child)

    return inside(tree)


def test_an_import_changes_no_other_module():
    """Calls that are statements count, since they are there for what they change."""
    changing = ("rules.append(f)", "a.b = 1", "b['x'] = f", "for x in y:\n b.c[x] = 1", "patch(b)", "b |= c")
    for each in changing:
        assert [*changes_of_others(ast.parse(f"import a, b\nfrom c import rules\n{each}"))], each
    for each in ("def f():\n b.c = 1", "c = {}\nc['x'] = b.c", "d = b.e()"):
        assert not [*changes_of_others(ast.parse(f"import b\n{each}"))], each
    changes = {
        path.relative_to(PACKAGE).as_posix(): [ast.unparse(each) for each in changes_of_others(tree(path))]
        for path in PACKAGE.rglob("*.py")
    }
    assert len(changes.pop(WIRING)) > 8
    assert {path: found for path, found in changes.items() if found} == {"__main__.py": ["sys.exit(run())"]}


def test_every_family_is_wired():
    folders = {path.parent.name for path in (PACKAGE / "models/families").glob("*/__init__.py")}
    assert sorted(folders) == [*wiring.FAMILIES]


@pytest.mark.parametrize("room", ["ops", "quantization"])
def test_rooms_that_know_no_model(room):
    for path in (PACKAGE / room).rglob("*.py"):
        assert not [name for name in imports(path, REPOSITORY) if "transformers" in name.split(".")], path


def test_no_test_imports_another():
    tests = {path for path in rooms.files() if path.name.startswith("test_")}
    for path, others in rooms.files().items():
        assert not others & tests, path


def test_no_file_of_tests_is_long():
    """At most 700 lines: what a file tests is in its name."""
    lines = {path: len(path.read_text().splitlines()) for path in (REPOSITORY / "tests").rglob("*.py")}
    assert len(lines) > 300 and not {path.name: count for path, count in lines.items() if count > 700}


@pytest.mark.parametrize(
    ("file", "name", "value"),
    [
        ("shaders/params/matmul.h", "SWIGLU_OAI_ALPHA", _activations.SWIGLU_OAI_ALPHA),
        ("shaders/params/matmul.h", "SWIGLU_OAI_LIMIT", _activations.SWIGLU_OAI_LIMIT),
        ("shaders/geometry/matmul.h", "kMaxSlots", _checks.MAX_TOP_K),
        ("csrc/bucket.h", "kMaxBuckets", _checks.MAX_EXPERTS),
        ("csrc/bucket.mm", "kRowsPerTile", routing.ROWS_PER_TILE),
        ("csrc/slots.mm", "kLimit", slots.LIMIT),
    ],
)
def test_limits_are_the_same_on_every_floor(file, name, value):
    """The limits that Python checks or assumes are those of the host and the shaders."""
    (written,) = re.findall(rf"\b{name}(?: =)? ([0-9.]+)f?\b", (PACKAGE / file).read_text())
    assert float(written) == value


# Words with which a text begins in the middle of a sentence: the thing that it describes is missing.
MIDDLE = re.compile(r"(Of|That|Those|As|What|Which|Whose)\b")
IN_COMMENT = re.compile(rf"# {MIDDLE.pattern}", re.IGNORECASE)


def documented(tree: ast.Module) -> Iterator[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for node in ast.walk(tree) if isinstance(node, kinds))
    return filter(None, map(ast.get_docstring, nodes))


def test_the_version_of_macos_is_never_asked_of_python():
    """Which may be told an older one, depending on its build (cpython#135675): `macs.macos` asks sw_vers."""
    root = REPOSITORY
    paths = [root / "setup.py", *PACKAGE.rglob("*.py"), *(root / "scripts").rglob("*.py")]
    assert [path.name for path in paths if "mac_ver(" in path.read_text()] == []


def test_docstrings_begin_with_the_thing():
    """A noun or a verb comes first, in the package and in the scripts."""
    assert MIDDLE.match(*documented(ast.parse('def f():\n    """Of each row."""')))
    assert not MIDDLE.match(*documented(ast.parse('class A:\n    """Offsets of rows."""')))
    paths = [*PACKAGE.rglob("*.py"), *(REPOSITORY / "scripts").rglob("*.py")]
    texts = [(path, text) for path in paths for text in documented(tree(path))]
    assert not [(path, text) for path, text in texts if MIDDLE.match(text)]


def comments(text: str) -> Iterator[str]:
    """Comments, those of several lines as one, and those behind `type: ignore` alone."""
    before = 0  # the line of a comment that stands alone
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            alone = not token.line[: token.start[1]].strip()
            if not (alone and before == token.start[0] - 1):
                yield "# " + token.string.rpartition("# ")[2]
            before = token.start[0] if alone else 0


def test_comments_begin_with_the_thing():
    """As docstrings do."""
    wrong = "x = 1  # of each row\n# Rows of it\n# of each\ny = 2  # type: ignore[x]  # that it has\n"
    assert [*map(bool, map(IN_COMMENT.match, comments(wrong)))] == [True, False, True]
    texts = {path: path.read_text() for path in PACKAGE.rglob("*.py")}
    found = [(p, c) for p, text in texts.items() if IN_COMMENT.search(text) for c in comments(text)]
    assert not [(path, comment) for path, comment in found if IN_COMMENT.match(comment)]


@functools.cache
def words() -> dict[str, set[str]]:
    """{file of the repository: the words in it, in lower case}"""
    folders = ("torch_moe_mps", "tests", "docs", "scripts", "hub")
    suffixes = {".py", ".mm", ".h", ".metal", ".md", ".txt"}
    paths = [
        path for folder in folders for path in (REPOSITORY / folder).rglob("*.*") if path.suffix in suffixes
    ]
    return {str(p.relative_to(REPOSITORY)): {*re.findall(r"\w+", p.read_text().lower())} for p in paths}


def named_in(name: str) -> set[str]:
    """The files that name an operator or a format."""
    return {path for path, found in words().items() if name in found}


def listed(section: str) -> set[str]:
    """Paths that a section of CONTRIBUTING.md names, where <family> stands for any."""
    text = (REPOSITORY / "CONTRIBUTING.md").read_text().partition(f"\n## {section}\n")[2]
    return set(re.findall(r"`((?:torch_moe_mps|tests|docs)/[^`\s]*\.\w+)`", text.partition("\n## ")[0]))


GGUF = [name for name, row in ROWS.items() if not isinstance(row.scales, LikeActivations | Floats)]
# Product files that name formats beside those that name each: a user's choice, an example, a type of its own.
CHOICES = {
    *("commands/arguments.py", "commands/recipes.py", "ops/_formats.py", "ops/families/quantized.py"),
    *("shaders/matmul/grids.txt", "checkpoints/gguf/file.py"),
}


def test_the_files_that_a_format_needs():
    found = {name: named_in(name) for name in GGUF}
    assert set.intersection(*found.values()) == listed("Add a format")
    others = {path for paths in found.values() for path in paths if path.startswith("torch_moe_mps/")}
    assert others - listed("Add a format") == {f"torch_moe_mps/{path}" for path in CHOICES}


def test_the_files_that_an_operator_needs():
    """Those of its family, and those that name most operators."""
    found, files = {name: named_in(name) for name in FAMILY_OF}, listed("Add an operator")
    counts = Counter(path for paths in found.values() for path in paths)
    most = {path for path, count in counts.items() if count > len(found) / 2}
    assert most == {file for file in files if "<family>" not in file}
    families = {file for file in files if "<family>" in file}
    for name, family in FAMILY_OF.items():
        assert f"torch_moe_mps/ops/families/{family}.py" in found[name]
        assert f"tests/support/ops/{family}.py" in named_in(f"draw_{name}") & named_in(f"expected_{name}")
    assert {"torch_moe_mps/ops/families/<family>.py", "tests/support/ops/<family>.py"} <= families
