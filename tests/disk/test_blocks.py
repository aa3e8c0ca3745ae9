"""Blocks of a GGUF file that become slots as they are read: the bytes that all at once are converted to."""

import os
from pathlib import Path

import pytest
import torch
from support.experts_on_disk import same
from support.gguf_blocks import SIZES, random_blocks

from torch_moe_mps.disk import pool as module
from torch_moe_mps.disk.file import Layer
from torch_moe_mps.disk.pool import Pools
from torch_moe_mps.disk.stored import BlockExperts, FileBlocks
from torch_moe_mps.quantization.gguf import format_of_blocks, from_blocks

EXPERTS, ROWS = 5, 3
KINDS = [kind for kind in SIZES if format_of_blocks(kind) is not None]
VALUES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def columns_of(kind: str) -> int:
    """Three blocks, and rows whose codes are whole 32-bit integers."""
    return 3 * max(SIZES[kind][0], 32)


def saved(folder: Path, kinds) -> tuple[BlockExperts, dict[str, torch.Tensor]]:
    """A layer with a matrix [EXPERTS, ROWS, columns] of each type; and its tensors, converted as a whole."""
    data, parts, tensors, path = b"..........", [], {}, str(folder / "model.gguf")
    for kind in kinds:
        blocks = torch.from_numpy(random_blocks(kind, (EXPERTS, ROWS, columns_of(kind)), len(data)))
        whole = [tensor for tensor in from_blocks(blocks, kind) if tensor is not None]
        names = tuple(f"{kind}.{number}" for number in range(len(whole)))
        size = blocks[0].numel()
        place = len(data), size, ROWS, size // ROWS // SIZES[kind][1]
        parts.append(FileBlocks(kind, path, *place, names))
        tensors |= dict(zip(names, whole, strict=True))
        data += blocks.numpy().tobytes() + b"."
    Path(path).write_bytes(data)
    shapes = {n: (str(t.dtype).removeprefix("torch."), tuple(t.shape[1:])) for n, t in tensors.items()}
    return BlockExperts(Path(path), "key", [Layer("experts", EXPERTS, shapes)], [parts]), tensors


def check(file: BlockExperts, tensors: dict[str, torch.Tensor], device: str = "cpu") -> None:
    """The slots of each expert, and all experts of the layer."""
    pools = Pools(file, 2, torch.device(device))
    pool = pools.layers[0]
    for ids in ([0, 3], [4, 1], [2, 0]):
        slots = pool.slots(torch.tensor(ids, dtype=torch.int32)).long()
        assert all(same(pool.tensors[n].cpu()[slots], whole[ids]) for n, whole in tensors.items())
    pools.staging.read(0)
    assert all(same(pools.staging.tensors[0][n].cpu(), whole) for n, whole in tensors.items())


@pytest.fixture(params=["host", "reference"])
def either(request, monkeypatch):
    """The compiled extension, and what runs without it."""
    if request.param == "reference":
        monkeypatch.setattr(module, "host_library", lambda: None)


@pytest.mark.parametrize("piece", [100, 1 << 19], ids=["many reads", "one read"])
def test_blocks_of_each_type(tmp_path, monkeypatch, piece):
    """At any address: reads end after any block of a row, also where one is larger than a read."""
    monkeypatch.setattr(module, "CONVERTED", piece)
    file, tensors = saved(tmp_path, KINDS)
    check(file, tensors)


def test_without_the_extension(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "host_library", lambda: None)
    check(*saved(tmp_path, KINDS))


@pytest.mark.parametrize("schedule", range(2))
def test_on_mps(tmp_path, simulated, schedule):
    simulated.set_schedule(schedule)
    check(*saved(tmp_path, ["q4_k", "q8_0", "mxfp4"]), device="mps")


def test_rows_in_another_order(tmp_path, either):
    """Gate and up projections of two tensors are alternate rows, and the last rows come first."""
    path, columns = tmp_path / "model.gguf", columns_of("q5_0")
    halves = [torch.from_numpy(random_blocks("q5_0", (EXPERTS, 4, columns), seed)) for seed in (1, 2)]
    path.write_bytes(b"".join(half.numpy().tobytes() for half in halves))
    expected = from_blocks(torch.stack((halves[0], halves[1].flip(1)), 2).flatten(1, 2), "q5_0")
    tensors, size = {"codes": expected.packed, "scales": expected.scales}, halves[0][0].numel()
    parts = [
        FileBlocks("q5_0", str(path), first, size, 4, 3, tuple(tensors), begin, step)
        for first, begin, step in ((0, 0, 2), (EXPERTS * size, 7, -2))
    ]
    shapes = {n: (str(t.dtype).removeprefix("torch."), tuple(t.shape[1:])) for n, t in tensors.items()}
    check(BlockExperts(path, "key", [Layer("experts", EXPERTS, shapes)], [parts]), tensors)


@pytest.mark.parametrize("stored", VALUES)
def test_values_that_are_not_quantised(tmp_path, either, stored):
    path = tmp_path / "model.gguf"
    values = torch.randn(EXPERTS, 6, 7, generator=torch.Generator().manual_seed(3)).to(VALUES[stored])
    path.write_bytes(b"..." + values.view(torch.uint8).numpy().tobytes())
    tensors = {name: values.to(dtype) for name, dtype in VALUES.items()}
    place = str(path), 3, values[0].nbytes, 6, 7
    parts = [FileBlocks(stored, *place, (name,)) for name in tensors]
    shapes = {n: (str(t.dtype).removeprefix("torch."), tuple(t.shape[1:])) for n, t in tensors.items()}
    check(BlockExperts(path, "key", [Layer("experts", EXPERTS, shapes)], [parts]), tensors)


def test_a_file_that_becomes_short(tmp_path, either):
    """It ends one request; what lies before its end is still read."""
    file, tensors = saved(tmp_path, ["q4_0"])
    os.truncate(file.path, os.path.getsize(file.path) - 2)
    pool = Pools(file, 2, torch.device("cpu")).layers[0]
    with pytest.raises(ValueError, match=r"model\.gguf: expert 4 of experts is truncated$"):
        pool.slots(torch.tensor([0, 4]))
    slots = pool.slots(torch.tensor([3, 0])).long()
    assert all(same(pool.tensors[n][slots], whole[[3, 0]]) for n, whole in tensors.items())


def test_a_file_that_is_replaced(tmp_path, either):
    """What was opened is read on."""
    file, tensors = saved(tmp_path, ["q8_0"])
    (tmp_path / "other").write_bytes(bytes(os.path.getsize(file.path)))
    os.replace(tmp_path / "other", file.path)
    check(file, tensors)


def test_unknown_blocks(tmp_path):
    part = FileBlocks("q9_9", str(tmp_path / "model.gguf"), 0, 18, 1, 1, ("codes",))
    (tmp_path / "model.gguf").write_bytes(bytes(36))
    layer = Layer("experts", 2, {"codes": ("int32", (4,))})
    file = BlockExperts(tmp_path, "key", [layer], [[part]])
    with pytest.raises(RuntimeError, match="moe_mps: experts must be of known blocks, got q9_9"):
        Pools(file, 1, torch.device("cpu"))
