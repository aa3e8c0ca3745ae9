"""Experts in a checkpoint's own files: the bytes that another reader of these files finds."""

import gc
import os
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support import processes
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


def in_many_files(folder: Path) -> tuple[StoredExperts, list[dict]]:
    """Three layers in 72 files: one for each tensor of each expert."""
    tensors, rows = draw(), []
    for number, own in enumerate(tensors):
        parts = {name: [] for name in own}
        for name, tensor in own.items():
            for expert, row in enumerate(tensor):
                path = folder / f"{number}.{name}.{expert}"
                path.write_bytes(row.contiguous().view(torch.uint8).numpy().tobytes())
                parts[name].append(FileRows(str(path), 0, 1))
        rows.append({name: StoredTensor(parts[name], tensor.dtype) for name, tensor in own.items()})
    return StoredExperts(folder, "key", layers(), rows), tensors


def files() -> int:
    """How many this process has open."""
    gc.collect()
    return len(os.listdir("/dev/fd"))


def test_more_files_than_the_process_may_open(tmp_path):
    """Its limit is raised, as far as the system lets it."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files() + 50, before[1]))
    try:
        file, tensors = in_many_files(tmp_path)
        pools = Pools(file, 2, torch.device("cpu"))
        for layer, ids in ((0, [7, 0]), (2, [3, 4])):
            slots = pools.layers[layer].slots(torch.tensor(ids)).long()
            for name, tensor in pools.layers[layer].tensors.items():
                assert same(tensor[slots], tensors[layer][name][ids])
        assert len(file.opened) == 72 and resource.getrlimit(resource.RLIMIT_NOFILE)[1] == before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


REFUSED = """
    import resource, sys, torch
    from pathlib import Path
    sys.path.insert(0, sys.argv[2])
    from test_stored import Pools, files, in_many_files
    import torch_moe_mps

    folder, device = Path(sys.argv[1]), torch.device("cpu")
    Pools(in_many_files(folder)[0], 2, device)  # what reads it is there
    before = files()
    for more in (100, 50):  # the pools' own, and those of whoever opens them
        resource.setrlimit(resource.RLIMIT_NOFILE, (before + more, before + more))
        try:
            Pools(in_many_files(folder)[0], 2, device)
        except (OSError, RuntimeError) as error:
            print(error)
        print(files() - before)
"""


def test_files_that_the_system_does_not_let_it_open(tmp_path):
    """One line, and none of them stays open: other work of the process goes on."""
    said = processes.forked(REFUSED, tmp_path, Path(__file__).parent).splitlines()
    assert len(said) == 4 and said[1] == said[3] == "0"
    assert said[0] == f"moe_mps: {tmp_path} cannot be read: Too many open files"
    assert "Too many open files: " in said[2]
