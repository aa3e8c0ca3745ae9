"""scripts/upstream: what it counts, names and ends with."""

import importlib.metadata
import json
import sys

import pytest
from support import upstream
from support.upstream import Release, Result, Row


@pytest.fixture
def known(tmp_path, monkeypatch):
    path = tmp_path / "known.json"
    faults = {"captured": {"xlnet": "no cache"}, "bits": {"xlnet": "none"}, "experts": {"doge": "none"}}
    path.write_text(json.dumps(faults))
    monkeypatch.setattr(upstream, "KNOWN", path)


GOOD = [Result("llama"), Result("xlnet", captured="no cache", bits="none")]
ROWS = [Row("doge", "no: none"), Row("olmoe", "moe_experts (silu)", "moe_router (softmax)", "72 / 8")]


def test_the_table_of_what_is_known(known):
    release = Release("5.23.0", [], GOOD, ROWS)
    assert release.is_good()
    text = upstream.table([release])
    assert "| 5.23.0 | 2 | 2 | 0 | 1 | 1 | 0 | 1 of 2 |" in text.splitlines()
    assert "- not captured, known: xlnet: no cache" in text.splitlines()
    assert "- eager experts, known: doge: none" in text.splitlines()
    assert "| olmoe | moe_experts (silu) | moe_router (softmax) | 72 / 8 | - |" in text.splitlines()


@pytest.mark.parametrize(
    ("failed", "result", "line"),
    [
        (
            [],
            Result("mamba2", wrong="captured: token 1 differs"),
            "- wrong, new: mamba2: captured: token 1 differs",
        ),
        ([], Result("bert", captured="it asks for values"), "- not captured, new: bert: it asks for values"),
        ([], Row("newmoe", "no: why", "own"), "- eager experts, new: newmoe: why"),
        ([], Result("bert", bits="its cache holds none"), "- no 8 bits, new: bert: its cache holds none"),
        ([], Result("bert", built="KeyError: 'x'"), "- not built, new: bert: KeyError: 'x'"),
        (
            ["tests/upstream/test_names.py::test"],
            Result("bert"),
            "- contract: tests/upstream/test_names.py::test",
        ),
    ],
)
def test_what_is_wrong_or_lost(known, failed, result, line):
    results, rows = ([*GOOD, result], ROWS) if isinstance(result, Result) else (GOOD, [*ROWS, result])
    release = Release("5.25.0", failed, results, rows)
    assert not release.is_good()
    assert line in upstream.table([release]).splitlines()


def test_what_is_installed_needs_no_folder(tmp_path):
    version = importlib.metadata.version("transformers")
    assert upstream.environment(f"transformers=={version}", tmp_path) is None and not [*tmp_path.iterdir()]


def test_requirements_that_are_not_met():
    met, other = f"numpy=={importlib.metadata.version('numpy')}", "numpy<0.1"
    assert [*upstream.lacking([met, other, "no-such-package>=1", "numpy<0.1; extra == 'x'"])] == [
        other,
        "no-such-package>=1",
    ]


@pytest.mark.parametrize("name", ["modeling.py", "configuration_olmoe.py", "modeling_lost.py"])
def test_what_is_no_modelling_file_is_refused(tmp_path, monkeypatch, capsys, name):
    for existing in ("modeling.py", "configuration_olmoe.py"):
        (tmp_path / existing).touch()
    monkeypatch.setattr(sys, "argv", ["upstream", str(tmp_path / name)])
    with pytest.raises(SystemExit):
        upstream.main()
    error = capsys.readouterr().err.splitlines()[-1]
    assert "must be a file modeling_<architecture>.py" in error and error.endswith(f"got {tmp_path / name}")


@pytest.mark.sweep
def test_a_model_of_a_worker(simulated):
    assert upstream.every(None, ["model gpt2", "experts no_such"], workers=1) == [
        Result("gpt2"),
        Row(
            "no_such",
            "no: no small model is built: ModuleNotFoundError: No module named 'transformers.models.no_such'",
        ),
    ]


@pytest.mark.sweep
def test_a_model_that_takes_too_long(simulated, monkeypatch):
    worker = upstream.Worker(None)
    monkeypatch.setattr(upstream, "SECONDS", 0.01)
    assert worker.answer("model llama") == Result("llama", wrong="over 0.01 s")
    assert worker.process.poll() is not None


@pytest.mark.sweep
def test_an_error_of_a_release_is_shown():
    with pytest.raises(SystemExit, match="NameError"):
        upstream.asked(None, "no_such_name")
