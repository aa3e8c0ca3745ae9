"""Experts in a checkpoint's own files: the bytes that another reader of these files finds."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.experts_on_disk import EXPERTS, draw, layers, same

from torch_moe_mps.checkpoints.layouts.files import places_in
from torch_moe_mps.disk import pool as module
from torch_moe_mps.disk.pool import Pools
from torch_moe_mps.disk.stored import FileRows, StoredExperts, StoredTensor

CUTS = (3, 4, EXPERTS)  # of a tensor in three parts


def stored(folder: Path, scales: torch.dtype = torch.bfloat16) -> tuple[StoredExperts, list[dict]]:
    """Three layers in two files, their codes in three parts; and the tensors as they were saved."""
    tensors = draw()
    whole, parts, rows = {}, {}, []
    for number, own in enumerate(tensors):
        finite = torch.randn(own["scales"].shape, generator=torch.Generator().manual_seed(number))
        own["scales"] = finite.to(scales)
        whole |= {f"{number}.{name}": own[name] for name in ("scales", "kinds")}
        for end, begin in zip(CUTS, (0, *CUTS), strict=False):
            parts[f"{number}.codes.{begin}"] = own["codes"][begin:end].clone()
    paths = [str(folder / "whole"), str(folder / "parts")]
    for path, saved in zip(paths, (whole, parts), strict=True):
        save_file(saved, path)
    places, cut = (places_in(path) for path in paths)
    for number in range(len(tensors)):
        own = {
            name: StoredTensor([FileRows(paths[0], places[f"{number}.{name}"].offset, EXPERTS)], tensor.dtype)
            for name, tensor in tensors[number].items()
            if name != "codes"
        }
        names = [
            (f"{number}.codes.{begin}", end - begin) for end, begin in zip(CUTS, (0, *CUTS), strict=False)
        ]
        own["codes"] = StoredTensor(
            [FileRows(paths[1], cut[name].offset, count) for name, count in names], torch.int32
        )
        rows.append(own)
    return StoredExperts(folder, "key", layers(), rows), tensors


@pytest.mark.parametrize("piece", [1000, 1 << 21], ids=["many reads", "one read"])
def test_experts_in_slots(tmp_path, monkeypatch, piece):
    """Reads end anywhere in a tensor; parts are of several files."""
    monkeypatch.setattr(module, "PIECE", piece)
    file, tensors = stored(tmp_path)
    pools = Pools(file, 2, torch.device("cpu"))
    for step in range(40):
        layer, ids = step % 3, torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(step))[:2]
        slots = pools.layers[layer].slots(ids.int())
        for name, tensor in pools.layers[layer].tensors.items():
            assert same(tensor[slots.long()], tensors[layer][name][ids])
    pools.staging.read(1)
    assert all(same(own, tensors[1][name]) for name, own in pools.staging.tensors[1].items())


def test_other_16_bits_are_converted(tmp_path):
    file, tensors = stored(tmp_path, torch.float16)
    pools = Pools(file, 3, torch.device("cpu"))
    slots = pools.layers[0].slots(torch.tensor([7, 0, 4])).long()
    assert same(pools.layers[0].tensors["scales"][slots], tensors[0]["scales"][[7, 0, 4]].bfloat16())
    pools.staging.read(2)
    assert same(pools.staging.tensors[2]["scales"], tensors[2]["scales"].bfloat16())


def test_a_file_that_becomes_short_ends_its_step_alone(tmp_path):
    file, tensors = stored(tmp_path)
    pools = Pools(file, 2, torch.device("cpu"))
    os.truncate(tmp_path / "parts", os.path.getsize(tmp_path / "parts") - 1)
    with pytest.raises(ValueError, match=r"parts: expert \d of layers.\d.experts is truncated"):
        for layer in pools.layers:
            layer.slots(torch.tensor([2, 7]))
    slots = pools.layers[0].slots(torch.tensor([0, 1])).long()
    assert same(pools.layers[0].tensors["codes"][slots], tensors[0]["codes"][:2])
