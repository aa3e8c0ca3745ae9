"""scripts/bench_budget.py, with a model that is hardly trained."""

import bench_budget
import pytest
from support.processes import REPOSITORY


@pytest.mark.sweep
def test_table(monkeypatch):
    monkeypatch.setattr(bench_budget, "WINDOW", 32)
    text = bench_budget.table(steps=3, tested=600)
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]
    names = [row[0].removeprefix("| ") for row in rows]
    assert names[0] == "dense, bfloat16" and names[1::2] == ["3 bits", "4 bits", "mixed_4_6"]
    sizes = [float(row[1]) for row in rows]
    for uniform, measured in zip(rows[1::2], rows[2::2], strict=True):
        assert 0.97 * float(uniform[1]) <= float(measured[1]) <= float(uniform[1]) + 1
        assert float(measured[3]) < 1 and float(uniform[2]) > 1
    assert sizes[0] > 2 * max(sizes[1:])


def test_what_is_written_is_better_at_equal_bytes():
    rows = [line.split(" | ") for line in (REPOSITORY / "docs" / "budget.md").read_text().splitlines()]
    rows = [row for row in rows if len(row) == 5][1:]
    for uniform, measured in zip(rows[1::2], rows[2::2], strict=True):
        assert int(measured[1]) <= int(uniform[1])
        assert float(measured[2]) < float(uniform[2]) and float(measured[3]) < float(uniform[3])
