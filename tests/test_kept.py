"""Which tests are kept, and that whatever they depend on makes them run again."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from simulator import build
from simulator.testing import linux_only
from support import dependents, kept

pytestmark = linux_only

# A file of each kind for each kind of result: source, compiler's flags, oracle, test.
FILES = {
    "tests/simulator_tests/test_apple_kernels.py::costs and registers": (
        "torch_moe_mps/shaders/common.h",
        "torch_moe_mps/csrc/matmul_plan.mm",
        "torch_moe_mps/ops/_samples.py",
        "tests/simulator/apple/compile.py",
        "tests/simulator_tests/pinned",
        "tests/support/oracles_operators.py",
        "tests/measured/apple/cases.py",
    ),
    "tests/simulator_tests/test_cuda.py::translation": (
        "tests/simulator/cuda/nvrtc.py",
        "tests/simulator/cuda/include",
    ),
    "tests/simulator_tests/test_strict.py::strict": (
        "tests/simulator/msl/strict",
        "tests/simulator/language/strict.py",
    ),
    "tests/host/test_macos.py::cross-build": ("scripts/macos.py", "torch_moe_mps/csrc/metal/encoder.mm"),
    "tests/host/test_traces.py::pinned": ("tests/host/pinned", "torch_moe_mps/selfcheck/sizes.py"),
    "tests/ops/test_norms.py::a kernel": (
        "torch_moe_mps/shaders/norms.metal",
        "torch_moe_mps/csrc/norms.mm",
        "torch_moe_mps/_extension.py",
        "tests/simulator/msl/executor.cpp",
        "tests/support/oracles_operators.py",
        "tests/conftest.py",
    ),
    "tests/transformers/modules/test_routers.py::a rule": (
        "torch_moe_mps/transformers/modules/rules/selection.py",
        "torch_moe_mps/serving/batch.py",
        "torch_moe_mps/shaders/routing.metal",
        "tests/support/tiny_models.py",
    ),
    "tests/quantization/test_formats.py::a format": (
        "torch_moe_mps/quantization/formats.py",
        "tests/support/oracles_experts.py",
    ),
    "tests/selfcheck/test_branches.py::branches": (
        "tests/simulator/coverage.py",
        "torch_moe_mps/selfcheck/calls.py",
    ),
    "tests/simulator/tests/test_host.py::the simulator's own": (
        "tests/simulator/build.py",
        "tests/simulator/tests/host_calls.mm",
    ),
}


@pytest.mark.parametrize("test", FILES)
def test_each_kind_of_file_counts(test):
    prefix = next(prefix for prefix in kept.KEPT if test.startswith(prefix))
    counted = kept.files(kept.KEPT[prefix])
    assert kept.REPOSITORY / test.partition("::")[0] in counted
    for name in FILES[test]:
        assert [file for file in counted if file.is_relative_to(kept.REPOSITORY / name)], name


@pytest.fixture(scope="module")
def parsed():
    """Every file is parsed once, and not within the time of a test."""
    return dependents.graph()


@pytest.mark.parametrize("prefix", kept.KEPT)
def test_what_tests_import_counts(parsed, prefix):
    counted = set(kept.files(kept.KEPT[prefix]))
    names = {str(test.relative_to(kept.REPOSITORY)): test for test in counted & dependents.all_tests()}
    of_prefix = {name: test for name, test in names.items() if name.startswith(prefix)}
    tests = [test for name, test in of_prefix.items() if name not in kept.RUN_EACH_TIME]
    assert tests
    for test in tests:
        assert dependents.reached(test) <= counted | {kept.REPOSITORY / "torch_moe_mps/__init__.py"}, test


def test_what_depends_on_more_is_run_each_time():
    plugin = kept.Kept()
    for name in kept.RUN_EACH_TIME:
        file, _, function = name.partition("::")
        assert f"def {function}" in (kept.REPOSITORY / file).read_text()
        assert plugin.record(f"{file}::{function or 'test_any'}[mps]") is None
    assert plugin.record("tests/ops/test_routing.py::test_any[mps]") is not None


def test_a_model_rule_leaves_operators_kept():
    for patterns in (kept.KEPT[prefix] for prefix in kept.KEPT if prefix != "tests/transformers/"):
        assert not [file for file in kept.files(patterns) if "transformers" in file.parts]


def test_changed_files_change_the_digest(tmp_path):
    """Another text, another name, one more: in a folder or by a pattern."""

    def digest() -> str:
        kept.forget()
        return kept.contents(("folder", "*.py"), "folder/test_a.py", tmp_path)

    (tmp_path / "folder" / "inner").mkdir(parents=True)
    (tmp_path / "folder" / "inner" / "a.metal").write_text("1")
    seen = [digest()]
    for change in (
        lambda: (tmp_path / "folder" / "inner" / "a.metal").write_text("2"),
        lambda: (tmp_path / "folder" / "inner" / "a.metal").rename(tmp_path / "folder" / "b.metal"),
        lambda: (tmp_path / "b.py").write_text(""),
        lambda: (tmp_path / "folder" / "test_a.py").write_text("1"),
        lambda: (tmp_path / "folder" / "test_a.py").write_text("2"),
    ):
        change()
        seen.append(digest())
    (tmp_path / "c.txt").write_text("beside")
    (tmp_path / "folder" / "test_b.py").write_text("another test")
    assert len(set(seen)) == len(seen) and digest() == seen[-1]


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
    monkeypatch.setenv("METAL_SIMULATOR_OPTIMISE", "-O2")
    seen.append(kept.environment())
    assert len(set(seen)) == len(seen)
    monkeypatch.setenv("METAL_SIMULATOR_CACHE", os.devnull)
    assert kept.environment() == seen[-1]


def test_what_passed_is_kept_and_nothing_else(tmp_path, monkeypatch):
    """Not what failed, not what passed while a file changed, not what passed since the run began."""
    monkeypatch.setenv("METAL_SIMULATOR_CACHE", str(tmp_path))
    monkeypatch.setattr(kept, "KEPT", {"kept/": ("tests/models.txt",)})
    plugin, session = kept.Kept(), SimpleNamespace(config=SimpleNamespace(workeroutput={}))
    plugin.outcomes |= {
        "kept/a.py::passed": {"passed"},
        "kept/a.py::failed": {"passed", "failed"},
        "kept/a.py::skipped": {"passed", "skipped"},
        "other/a.py::passed": {"passed"},
    }
    plugin.pytest_sessionfinish(session)

    def names() -> list[str]:
        return [test for test in plugin.outcomes if plugin.is_kept(test)]

    plugin.started = 0
    assert names() == []
    plugin.started = sys.maxsize
    assert names() == ["kept/a.py::passed"]
    text = iter("xyz")
    monkeypatch.setattr(kept, "contents", lambda patterns, test: next(text))
    monkeypatch.setattr(kept, "forget", lambda: None)
    plugin.outcomes = {"kept/b.py::passed": {"passed"}}
    plugin.pytest_sessionfinish(session)
    monkeypatch.setattr(kept, "contents", lambda patterns, test: "x")
    assert names() == []
