"""Which tests `scripts/test --changed` runs."""

import itertools
import re
import subprocess
from types import SimpleNamespace

import pytest
from support import dependents
from support.dependents import REPOSITORY, TESTS

ROOMS = (
    "attention",
    "basics",
    "caches",
    "capture",
    "checkpoints",
    "door",
    "families",
    "graphs",
    "modules",
    "trials",
)
MODELS, LONG = "transformers/models/test_mps.py", "ops/test_any_arguments.py"


@pytest.fixture(scope="module", autouse=True)
def parsed():
    """Every file is parsed once, and not within the time of a test."""
    return dependents.graph()


def names(file: str) -> set[str]:
    """The tests of a file, but for this one, which names many."""
    tests = dependents.dependents(REPOSITORY / file) - {TESTS / "test_dependents.py"}
    return {str(test.relative_to(TESTS)) for test in tests}


def folder(name: str) -> set[str]:
    return {str(test.relative_to(TESTS)) for test in (TESTS / name).rglob("test_*.py")}


def modules(*tests: str) -> set[str]:
    return {f"transformers/modules/test_{test}.py" for test in tests}


def test_a_rule_has_the_tests_of_its_room():
    """But for those of rules that do not import it."""
    tests = names("torch_moe_mps/transformers/modules/rules/formulas.py")
    others = modules("hyper_connections", "recurrent_layers", "rotary_tables", "routers", "sampling", "loss")
    assert folder("transformers/modules") - tests >= others
    assert tests >= modules("near_misses", "decode_rules", "traced", "unknown_classes", "linear_attention")
    assert not tests & (folder("commands") | folder("ops") | folder("transformers/checkpoints"))
    rotary = names("torch_moe_mps/transformers/modules/rules/rotary.py")
    assert modules("rotary_tables", "near_misses") <= rotary and not rotary & modules("routers", "loss")
    shared = names("torch_moe_mps/transformers/trials/comparing.py")
    assert modules("rotary_tables", "hyper_connections", "recurrent_layers") <= shared


@pytest.mark.parametrize("room", ROOMS)
def test_each_room_has_tests(room):
    tests = folder(f"transformers/{room}")
    files = [*(dependents.PACKAGE / "transformers").glob("*.py" if room == "door" else f"{room}/**/*.py")]
    reached = [names(str(file.relative_to(REPOSITORY))) & tests for file in files]
    assert set().union(*reached) == tests and all(reached)


@pytest.mark.parametrize(
    ("file", "among", "beside"),
    [
        ("shaders/norms.metal", "ops/test_norms.py", "ops/test_rope.py"),
        ("shaders/params/norms.h", "ops/test_norms.py", "ops/test_sampling.py"),
        ("csrc/norms.mm", "host/test_traces.py", "ops/test_rope.py"),
        ("csrc/rope.mm", "ops/test_rope_attention.py", "ops/test_norms.py"),
        ("shaders/matmul/dots.h", "ops/test_quantized.py", "ops/test_rope.py"),  # an include of an include
        ("shaders/hash_router.metal", "ops/test_hash_router.py", "ops/test_rope.py"),
        ("ops/index.py", "ops/test_index.py", "ops/test_rope.py"),
    ],
)
def test_a_shader_has_the_tests_of_its_operators(file, among, beside):
    tests = names(f"torch_moe_mps/{file}")
    assert {among, MODELS} <= tests and not tests & {beside, LONG}


def test_arguments_of_a_family_have_the_tests_of_its_operators():
    tests = names("tests/support/ops/index.py")
    assert {"ops/test_index.py", "ops/test_errors.py", LONG} <= tests and "ops/test_rope.py" not in tests


@pytest.mark.parametrize("file", ["csrc/metal/encoder.mm", "csrc/tensors.h", "shaders/common.h"])
def test_what_all_operators_share_has_the_tests_of_all(file):
    assert len(names(f"torch_moe_mps/{file}") & folder("ops")) > 15


@pytest.mark.parametrize(
    ("file", "tests"),
    [
        ("docs/mlx.md", {"test_documents.py", "transformers/checkpoints/test_mlx.py"}),
        ("CHANGELOG.md", {"test_documents.py", "host/test_wheel.py", "commands/test_readme.py"}),
        ("scripts/demo", {"commands/test_demo.py"}),
        ("scripts/make/make_api.py", {"test_documents.py"}),
        ("tests/test_package.py", {"test_package.py"}),
        ("tests/commands/conftest.py", folder("commands")),
        ("tests/support/pipeline.py", None),
        ("torch_moe_mps/pipeline/shares.py", None),
    ],
)
def test_other_files(file, tests):
    if tests is None:  # by imports
        assert "pipeline/test_pipeline.py" in names(file) and "ops/test_norms.py" not in names(file)
    else:
        assert names(file) == tests


@pytest.mark.parametrize(
    "file", ["tests/conftest.py", "tests/requirements.txt", "tests/simulator/build.py", "pyproject.toml"]
)
def test_what_every_test_runs_in(file):
    assert names(file) == folder(".") - {"test_dependents.py"}


def test_every_source_has_tests():
    for file in dependents.PACKAGE.rglob("*"):
        if file.suffix in dependents.SOURCES:
            assert dependents.dependents(file), file


def test_what_has_changed(tmp_path, monkeypatch):
    """In a branch: committed, not committed, new and removed files; not what main has."""
    monkeypatch.setattr(dependents, "REPOSITORY", tmp_path)

    def git(*arguments: str) -> None:
        settings = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *settings, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-b", "main")
    for name in ("same", "edited", "removed", "committed"):
        (tmp_path / name).write_text("before")
    git("add", ".")
    git("commit", "-m", "first")
    assert dependents.changed() == []
    git("checkout", "-b", "branch")
    (tmp_path / "committed").write_text("after")
    git("commit", "-am", "second")
    (tmp_path / "edited").write_text("after")
    (tmp_path / "removed").unlink()
    (tmp_path / "new").write_text("")
    assert [path.name for path in dependents.changed()] == ["committed", "edited", "new", "removed"]


BEFORE = '"""A module."""\n\n\ndef one():\n    """One."""\n    return 1\n'


@pytest.mark.parametrize(
    ("after", "is_other"),
    [
        (BEFORE.replace("One.", "The number one."), False),
        (BEFORE.replace("return 1", "return 1  # the first"), False),
        (BEFORE.replace('    """One."""\n', ""), False),
        (BEFORE.replace("return 1", 'return """One."""'), True),
        (BEFORE.replace("return 1", "return 2"), True),
        (None, True),
    ],
)
def test_docstrings_and_comments_alone_change_no_code(after, is_other, tmp_path, monkeypatch):
    """Outside of the package, and where docstrings are shown, every change counts."""
    files = [tmp_path / "package" / name for name in ("a.py", "ops/a.py", "commands/arguments.py")]
    monkeypatch.setattr(dependents, "REPOSITORY", tmp_path)
    monkeypatch.setattr(dependents, "PACKAGE", tmp_path / "package")
    monkeypatch.setattr(dependents, "common", lambda: "HEAD")
    monkeypatch.setattr(dependents, "git", lambda *_: BEFORE)
    for file in (*files, tmp_path / "a.py"):
        file.parent.mkdir(parents=True, exist_ok=True)
        if after is not None:
            file.write_text(after)
        assert dependents.has_other_code(file) == (is_other or file != files[0])


def only(*files: str) -> set[str]:
    return dependents.only_operators([REPOSITORY / file for file in files])


@pytest.mark.parametrize(
    ("file", "operators"),
    [
        ("hash_router.h", {"moe_hash_router"}),
        ("matmul/embedding.h", {"embedding_quantized"}),
        ("matmul/heads.h", {"heads_mm", "heads_quantized"}),
        ("matmul/down.h", {"moe_experts", "moe_experts_quantized"}),
    ],
)
def test_a_header_has_the_operators_of_its_kernels(file, operators):
    """Not those of all shaders that include it."""
    assert only(f"torch_moe_mps/shaders/{file}") == operators


def test_what_any_kernel_may_use_has_all_operators_of_its_shaders():
    """None are left out where nothing is said."""
    shader = dependents.SHADERS / "quantized.metal"
    quantized = dependents.operators_of(shader)
    assert quantized >= {"embedding_quantized", "moe_experts_quantized", "expert_qmm"}
    shared = [f for f in dependents.included(shader) if f.parent.name in ("common", "params", "formats")]
    found = [dependents.operators_of(file) for file in shared]
    assert len(found) > 5 and any(found) and all(names >= quantized for names in found if names)


# A type, a constant, a macro or a function, at the beginning of a line.
DEFINED = re.compile(
    r"^(?:struct|enum|using) (\w+)|^constant constexpr \w+ (\w+)|^#define (\w+)"
    r"|^inline [\w:<>]+[&*]? (\w+)\(",
    re.MULTILINE,
)


def test_headers_include_what_they_use():
    """Or a kernel would depend on a file that its own does not lead to; beside what any kernel may use."""

    def code(header) -> str:
        return re.sub(r"//.*", "", header.read_text())

    def names_in(header) -> set[str]:
        return {*itertools.chain.from_iterable(DEFINED.findall(code(header)))} - {""}

    shaders = dependents.SHADERS
    headers = [h for h in shaders.rglob("*.h") if all(f.suffix == ".metal" for f in dependents.including(h))]
    common = {header for header in headers if header.is_relative_to(shaders / "common")}
    homes: dict[str, set] = {}
    for header in {*headers} - common:
        for name in names_in(header) - set().union(*map(names_in, common)):
            homes.setdefault(name, set()).add(header)
    missing = []
    for header in {*headers} - common:
        text, inside = code(header), dependents.included(header)
        for name in homes.keys() & {*re.findall(r"\w+", text)}:
            is_its_own = re.search(rf"[\w>&*\]] {name}\b(?! <)", text)  # a member or a variable of that name
            if not homes[name] & inside and not is_its_own:
                missing.append((str(header.relative_to(shaders)), name))
    assert len(homes) > 100 and not missing


def test_cases_of_other_operators_are_left_out():
    """A kernel's operators are those that launch it, of whatever family."""
    norms, others = {"rms_norm", "linear_quantized"}, {"rope", "moe_router"}
    for file in ("norms.metal", "norms.h", "params/norms.h"):
        names = only(f"torch_moe_mps/shaders/{file}", "docs/speed.md")
        assert names >= norms and not names & others, file
    assert only("torch_moe_mps/shaders/norms.metal", "torch_moe_mps/shaders/rope.metal") >= norms | {"rope"}
    assert {"linear_quantized", "expert_qmm"} <= only("torch_moe_mps/shaders/matmul/dots.h")
    assert only("tests/support/ops/pooling.py") == {"_pool_window_"}
    assert {"rope", "_rope_attention_"} <= only("torch_moe_mps/csrc/rope.mm", "torch_moe_mps/ops/rope.py")
    for file in (
        "csrc/metal/encoder.mm",
        "csrc/tensors.h",
        "ops/_checks.py",
        "transformers/modules/experts.py",
    ):
        assert not only("torch_moe_mps/shaders/norms.metal", f"torch_moe_mps/{file}"), file
    for file in ("tests/ops/test_operators.py", "tests/pinned/traces.txt", "pyproject.toml"):
        assert not only("torch_moe_mps/shaders/norms.metal", file), file

    def is_other(**params) -> bool:
        return dependents.of_other_operators(SimpleNamespace(callspec=SimpleNamespace(params=params)), names)

    names = {"rms_norm"}
    assert is_other(name="rope", device="mps") and not is_other(name="rms_norm", device="mps")
    assert not is_other(device="mps", dtype=None) and not dependents.of_other_operators(object(), names)
