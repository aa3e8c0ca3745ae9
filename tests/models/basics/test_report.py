"""Reports in a terminal: its width, and nothing lost."""

import io
import sys

import pytest
from support import tiny_models

import torch_moe_mps


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [100, 80])
def test_a_report_has_the_width_of_the_terminal(monkeypatch, columns):
    with tiny_models.groups_of_32():
        report = torch_moe_mps.accelerate(tiny_models.tiny_model("qwen3_moe"), bits=4, group_size=32)
    wide = str(report)
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("COLUMNS", str(columns))
    narrow = str(report)
    assert max(map(len, narrow.splitlines())) <= columns
    assert {*wide.split()} - {*narrow.split()} <= {word for word in wide.split() if set(word) == {"-"}}
    (text,) = {line.split("  ")[-1] for line in wide.splitlines() if "Qwen3MoeTopKRouter  " in line}
    assert text in narrow.replace("\n    ", " ")  # below its row
