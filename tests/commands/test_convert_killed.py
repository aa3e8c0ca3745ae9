"""`convert` that is killed at any change of its files: the same command goes on to the same bytes."""

from itertools import count
from pathlib import Path

import pytest
import torch
from support.killed import Killed, killed_at
from support.models import tiny
from support.sweep import in_sweep

from torch_moe_mps.checkpoints.layouts import files
from torch_moe_mps.commands import convert, main

PARTS = 5


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """{file: its mode and bytes}"""
    return {path.name: (path.stat().st_mode, path.read_bytes()) for path in folder.iterdir()}


def write(destination: Path) -> int:
    """Writes files of two tensors, as `convert` does. Returns: the number of parts that were made anew."""
    with convert._written_beside(destination) as folder:
        shards = files.Shards(folder, "pt", "key")
        parts = [part for part in range(PARTS) if str(part) not in shards.done]
        for part in parts:
            shards.add(f"{part}.weight", torch.full((64,), part))
            shards.end(str(part))
        shards.finish()
        (folder / "config.json").write_text("{}")
    return len(parts)


def test_files_that_are_killed_at_any_change_go_on_to_the_same_bytes(tmp_path, monkeypatch):
    """With no part made twice whose file was complete."""
    monkeypatch.setattr(files, "LARGEST", 1024)
    assert write(tmp_path / "whole") == PARTS
    expected = contents(tmp_path / "whole")
    assert len(expected) == 5
    for last in count(1):
        destination, complete = tmp_path / str(last), 0
        try:
            with killed_at(last, files):
                write(destination)
            break
        except Killed:
            left = convert.unfinished(destination)
            complete = sum(file.stat().st_size > 0 for file in left.glob("model-0*"))
        if destination.exists():  # killed behind its last name
            assert contents(destination) == expected
            continue
        assert write(destination) <= PARTS - 2 * max(0, complete - 1), last
        assert contents(destination) == expected, last
        assert not left.exists() and not files.progress_file(left).exists()
    assert last > 20


def run(*arguments: object) -> int:
    return main(["convert", *map(str, arguments)])


@pytest.mark.slow("converts a model as often as its files are changed")
@pytest.mark.parametrize("step", in_sweep((1, 29), (29,)))
def test_killed_at_any_change(step, tmp_path, monkeypatch):
    """While files of tensors, the list of them, their last names, and files beside are written."""
    monkeypatch.setattr(files, "LARGEST", 16000)
    tiny("qwen3_moe", dtype=torch.bfloat16).save_pretrained(tmp_path / "dense")
    options = ("--bits", 4, "--group-size", 32)
    whole = tmp_path / "whole" / "new"
    assert run(tmp_path / "dense", whole, *options) == 0
    expected = contents(whole)
    for last in count(step, step):
        destination = tmp_path / str(last) / "new"
        try:
            with killed_at(last, files):
                run(tmp_path / "dense", destination, *options)
            break
        except Killed:
            pass
        if not destination.exists():
            assert run(tmp_path / "dense", destination, *options) == 0
        assert contents(destination) == expected, last
    assert last > 60
