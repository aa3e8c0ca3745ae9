"""Which tests are kept, and that whatever they depend on makes them run again."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import pytest
import torch
from simulator import build
from simulator.testing import linux_only
from support import dependents, kept
from support.dependents import REPOSITORY, TESTS

pytestmark = linux_only

# A file of each kind for each kind of test: source, shader, compiler's flags, oracle, pinned values, text.
FILES = {
    "simulator_tests/test_apple_kernels.py": (
        "torch_moe_mps/shaders/common.h",
        "torch_moe_mps/csrc/matmul_plan.mm",
        "torch_moe_mps/ops/_samples.py",
        "tests/simulator/apple/compile.py",
        "tests/simulator_tests/pinned/costs_norms.txt",
        "tests/support/oracles_operators.py",
        "tests/measured/apple/cases.py",
    ),
    "simulator_tests/test_strict.py": (
        "tests/simulator/msl/strict/metal_strict.h",
        "tests/simulator/language/strict.py",
    ),
    "host/test_traces.py": ("tests/host/pinned/traces_norms.txt", "torch_moe_mps/selfcheck/sizes.py"),
    "ops/test_norms.py": (
        "torch_moe_mps/shaders/norms.metal",
        "torch_moe_mps/csrc/norms.mm",
        "torch_moe_mps/_extension.py",
        "tests/simulator/msl/executor.cpp",
        "tests/simulator/build.py",
        "tests/support/oracles_operators.py",
        "tests/conftest.py",
        "tests/requirements.txt",
    ),
    "transformers/modules/test_routers.py": (
        "torch_moe_mps/transformers/modules/rules/selection.py",
        "torch_moe_mps/transformers/checkpoints/source.py",
        "torch_moe_mps/shaders/routing.metal",
        "tests/support/tiny_models.py",
    ),
    "transformers/checkpoints/test_mlx.py": ("docs/mlx.md",),
    # By a fixture that runs commands, which are imported by their names.
    "transformers/checkpoints/test_declared_gguf.py": (
        "torch_moe_mps/commands/convert.py",
        "torch_moe_mps/serving/app.py",
    ),
    "serving/test_many.py": ("torch_moe_mps/serving/batch.py", "torch_moe_mps/transformers/accelerate.py"),
    "simulator/tests/test_host.py": ("tests/simulator/build.py", "tests/simulator/tests/host_calls.mm"),
}
# Tests that start processes, by whatever helper.
PROCESSES = ("commands/test_serve.py", "pipeline/test_pipeline.py", "test_installed.py", "test_starts.py")


@pytest.fixture(scope="module", autouse=True)
def parsed():
    """Every file is parsed once, and not within the time of a test."""
    for test in dependents.all_tests():
        kept.dependencies(test)


@pytest.mark.parametrize("test", FILES)
def test_each_kind_of_file_counts(test):
    counted = kept.dependencies(TESTS / test)
    assert {TESTS / test, *(REPOSITORY / name for name in FILES[test])} <= counted
    assert TESTS / "test_layout.py" not in counted


def test_what_tests_import_counts():
    for test in dependents.all_tests():
        assert dependents.reached(test) | {test} <= kept.dependencies(test) <= kept.everything(test), test


def test_each_kind_of_change_leaves_others_kept():
    def depend(name: str) -> set[str]:
        path = REPOSITORY / name
        tests = {test for test in dependents.all_tests() if path in kept.dependencies(test)}
        return {str(test.relative_to(TESTS)) for test in tests}

    rule = depend("torch_moe_mps/transformers/modules/rules/formulas.py")
    assert {"transformers/modules/test_traced.py", "serving/test_engine.py", "commands/test_chat.py"} <= rule
    assert not rule & {"ops/test_norms.py", "host/test_traces.py", "quantization/test_formats.py"}
    shader = depend("torch_moe_mps/shaders/norms.metal")
    assert {"ops/test_norms.py", "transformers/models/test_mps.py"} <= shader
    assert "simulator/tests/test_host.py" not in shader
    assert "transformers/models/test_mps.py" not in depend("torch_moe_mps/commands/chat.py")
    assert "commands/test_chat.py" not in depend("docs/compile.md")


@pytest.mark.parametrize("test", PROCESSES)
def test_who_starts_processes_depends_on_all(test):
    path = TESTS / test
    assert kept.is_unknown(path) and not kept.is_unknown(TESTS / "ops" / "test_norms.py")
    for name in (
        "torch_moe_mps/commands/serve.py",
        "scripts/demo.py",
        "tests/support/pipeline.py",
        "setup.py",
    ):
        assert REPOSITORY / name in kept.everything(path)


def test_another_compiler_package_or_variable_changes_the_digest(tmp_path, monkeypatch):
    def compiler(version: str) -> Path:
        program = tmp_path / "compiler"
        program.write_text(f"#!/bin/sh\necho {version}\n")
        program.chmod(0o755)
        return program

    seen = [kept.environment()]
    assert kept.environment() == seen[0]
    for version in ("19.1.7", "19.1.8"):
        with monkeypatch.context() as patch:
            patch.setattr(build, "tool", lambda name, version=version: compiler(version))
            seen.append(kept.environment())
    (tmp_path / "mlx-0.32.4.dist-info").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(kept.sysconfig, "get_paths", lambda: {"purelib": tmp_path})
        seen.append(kept.environment())
        (tmp_path / "mlx-0.32.4.dist-info").rename(tmp_path / "mlx-0.32.5.dist-info")
        seen.append(kept.environment())
    for name, value in (("METAL_SIMULATOR_OPTIMISE", "-O2"), ("OMP_NUM_THREADS", "7")):
        monkeypatch.setenv(name, value)
        seen.append(kept.environment())
    assert len(set(seen)) == len(seen)
    monkeypatch.setenv("METAL_SIMULATOR_CACHE", os.devnull)
    assert kept.environment() == seen[-1]


# A repository in small.
SMALL = {
    "torch_moe_mps/__init__.py": '_LAZY = {\n    "accelerate": ".transformers",\n}\n',
    "torch_moe_mps/ops/__init__.py": "",
    "torch_moe_mps/shaders/norms.metal": "",
    "torch_moe_mps/transformers/__init__.py": "from . import rule\n",
    "torch_moe_mps/transformers/rule.py": "",
    "torch_moe_mps/commands/__init__.py": "",
    "tests/conftest.py": "",
    "tests/support/oracle.py": "",
    "tests/support/other.py": "",
    "tests/simulator/build.py": "FLAGS = []",
    "tests/simulator/msl/executor.cpp": "",
    "tests/ops/test_norms.py": "import support.oracle\nimport torch_moe_mps.ops\n",
    "tests/ops/test_other.py": "",
    "tests/ops/pinned/values.txt": "1",
    "tests/transformers/test_rule.py": "import torch_moe_mps\ntorch_moe_mps.accelerate\n",
    "tests/commands/test_chat.py": "import subprocess\n",
    "docs/rules.md": "",
    "scripts/demo.py": "",
}
NORMS, RULE, CHAT = (
    "tests/ops/test_norms.py::test",
    "tests/transformers/test_rule.py::test",
    "tests/commands/test_chat.py::test",
)


@pytest.fixture
def small(tmp_path, monkeypatch) -> Iterator[Path]:
    """A repository with three tests; the plugin's caches are those of it."""
    for name, text in SMALL.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    monkeypatch.setenv("METAL_SIMULATOR_CACHE", str(tmp_path / ".git" / "cache"))
    package, tests = tmp_path / "torch_moe_mps", tmp_path / "tests"
    roots = {package: tmp_path, tests: tests, tmp_path / "scripts": tmp_path / "scripts"}
    for module in (dependents, kept):
        for name, value in {
            "REPOSITORY": tmp_path,
            "PACKAGE": package,
            "TESTS": tests,
            "ROOTS": roots,
        }.items():
            monkeypatch.setattr(module, name, value, raising=False)
    kept.forget()
    yield tmp_path
    kept.forget()


class Run:
    """A run of tests with the plugin. `also` happens within the test of a name."""

    def __init__(self, outcomes: dict[str, set[str]], **also: Callable[[], object]) -> None:
        self.plugin = kept.Kept()
        assert not any(map(self.plugin.is_kept, outcomes))  # as when tests are collected
        for test, outcome in outcomes.items():
            with self.plugin.watched.during(kept.file_of(test)):
                also.get(test.partition("test_")[2].partition(".")[0], lambda: None)()
            self.plugin.outcomes[test] = outcome

    def end(self) -> None:
        config = SimpleNamespace(workeroutput={})
        self.plugin.pytest_sessionfinish(SimpleNamespace(config=config), pytest.ExitCode.OK)


PASSED = {NORMS: {"passed"}, RULE: {"passed"}, CHAT: {"passed"}}


def kept_now() -> set[str]:
    """The tests that a run which begins now leaves out."""
    kept.forget()
    plugin = kept.Kept()
    plugin.started = sys.maxsize
    return {test for test in PASSED if plugin.is_kept(test)}


def test_what_passed_is_kept_and_nothing_else(small, monkeypatch):
    """Not what failed, was skipped, draws numbers, or passed since the run began."""
    assert kept_now() == set()
    Run({NORMS: {"passed"}, RULE: {"passed", "failed"}, CHAT: {"passed", "skipped"}}).end()
    assert kept_now() == {NORMS}
    plugin = kept.Kept()
    plugin.started = 0
    assert not plugin.is_kept(NORMS)
    plugin.started, plugin.drawn = sys.maxsize, {NORMS}
    assert not plugin.is_kept(NORMS)
    monkeypatch.setattr(kept, "RUN_EACH_TIME", ("tests/ops/",))
    assert kept_now() == set()


def test_what_passed_while_a_file_changed_is_not_kept(small):
    run = Run(PASSED)
    (small / "torch_moe_mps/transformers/rule.py").write_text("# changed")
    run.end()
    assert kept_now() == {NORMS}
    run = Run({RULE: {"passed"}})
    (small / "tests/transformers/test_rule.py").unlink()
    run.end()


@pytest.mark.parametrize(
    ("change", "left"),
    [
        ("tests/ops/test_norms.py", {RULE, CHAT}),
        ("tests/ops/test_other.py", {NORMS, RULE, CHAT}),
        ("tests/ops/pinned/values.txt", {RULE}),
        ("tests/support/oracle.py", {RULE}),
        ("tests/support/other.py", {NORMS, RULE}),
        ("tests/conftest.py", set()),
        ("tests/simulator/build.py", set()),
        ("tests/simulator/msl/executor.cpp", set()),
        ("torch_moe_mps/ops/__init__.py", set()),
        ("torch_moe_mps/shaders/norms.metal", {RULE}),
        ("torch_moe_mps/shaders/new.h", {RULE}),
        ("torch_moe_mps/transformers/rule.py", {NORMS}),
        ("torch_moe_mps/transformers/new.py", {NORMS}),
        ("torch_moe_mps/commands/__init__.py", {NORMS, RULE}),
        ("scripts/demo.py", {NORMS, RULE}),
        ("docs/rules.md", {NORMS, RULE, CHAT}),
    ],
)
def test_a_change_runs_what_depends_on_it(small, change, left):
    Run(PASSED).end()
    assert kept_now() == set(PASSED)
    path, before = small / change, SMALL.get(change)
    path.write_text("# changed")
    assert kept_now() == left
    path.unlink() if before is None else path.write_text(before)
    assert kept_now() == set(PASSED)
    if before is not None and "test_" not in change:
        path.unlink()
        assert kept_now() <= left


@pytest.mark.parametrize(
    ("also", "change", "rule"),
    [
        (lambda: None, "torch_moe_mps/shaders/norms.metal", True),
        (lambda: torch.ones(1, device="mps"), "torch_moe_mps/shaders/norms.metal", False),
        (lambda: None, "scripts/demo.py", True),
        (lambda: subprocess.run([sys.executable, "-S", "-c", ""], check=True), "scripts/demo.py", False),
        (
            lambda: (kept.REPOSITORY / "tests/ops/pinned/values.txt").read_text(),
            "tests/ops/pinned/values.txt",
            False,
        ),
        (lambda: (kept.REPOSITORY / "docs/rules.md").read_text(), None, False),
    ],
    ids=("cpu", "device", "nothing", "process", "file", "text"),
)
def test_what_a_test_does_is_seen(small, also, change, rule):
    """A test that uses the device, starts a process or reads a file, none of which its imports tell."""
    Run(PASSED, rule=also).end()
    assert (RULE in kept_now()) == (change is not None)
    if change is not None:
        (small / change).write_text("# changed")
        assert (RULE in kept_now()) == rule


def test_one_hook_of_the_interpreter_however_many_runs(small, monkeypatch):
    """None can be taken out again: each would slow all tests behind."""
    hooks, hearing = [], [*kept._hearing]  # of the run that this test is in
    monkeypatch.setattr(sys, "addaudithook", hooks.append)
    for _ in range(3):
        kept.Kept()
        kept.forget()
    assert len(hooks) <= 1 and kept._hearing == hearing


def test_who_draws_numbers():
    # Said, because hypothesis chooses by itself where it finds the variable CI.
    @hypothesis.settings(derandomize=False)
    @hypothesis.given(hypothesis.strategies.integers())
    def drawn(number):
        pass

    @hypothesis.settings(derandomize=True)
    @hypothesis.given(hypothesis.strategies.integers())
    def same(number):
        pass

    assert [kept.draws(SimpleNamespace(function=each)) for each in (drawn, same, test_who_draws_numbers)] == [
        True,
        False,
        False,
    ]
