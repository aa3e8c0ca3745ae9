"""The map of the passes is the code's, and each file of passes has a file of tests."""

import runpy

import pytest
from support.processes import REPOSITORY

from torch_moe_mps.models.graphs.passes import PASSES

ROOM = REPOSITORY / "torch_moe_mps" / "models" / "graphs"


@pytest.fixture(scope="module")
def generator() -> dict:
    return runpy.run_path(str(REPOSITORY / "scripts" / "make" / "make_passes_table.py"))


def test_the_map_is_current(generator):
    written = (ROOM / "README.md").read_text()
    assert written == generator["document"](), "run scripts/make/make_passes_table.py"
    rows = [line for line in written.splitlines() if line.startswith("| ") and line[2].isdigit()]
    assert len(rows) == len(PASSES) > 30
    for number, (row, passed) in enumerate(zip(rows, PASSES, strict=True), 1):
        assert row.startswith(f"| {number} | [`{passed.__name__}`]("), row
        file = ROOM / row.partition("](")[2].partition(")")[0]
        assert any(f"{begin}{passed.__name__}" in file.read_text() for begin in ("\ndef ", "\n")), file


def test_a_pass_that_was_not_measured_is_one_line(generator, monkeypatch):
    monkeypatch.setitem(generator["pinned"].__globals__, "names", lambda: ["join_linears"])
    with pytest.raises(SystemExit, match=r"^make_passes_table: tests/pinned/passes.txt must have the passes"):
        generator["document"]()


def test_each_file_of_passes_has_a_file_of_tests():
    files = {path.stem for path in (ROOM / "passes").glob("[!_]*.py")}
    tests = {
        path.stem.removeprefix("test_") for path in (REPOSITORY / "tests/models/graphs/passes").glob("*.py")
    }
    assert files == tests
