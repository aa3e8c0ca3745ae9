"""What torch does on a Mac beside its kernels: copies to the CPU, and errors that it stores."""

import contextlib
import re

import pytest
import torch
from simulator import aten
from simulator.errors import SimulatorError

VERSIONS = ("2.13", "2.14", "2.15")
SAYS = re.escape(f"{__file__}:") + r"\d+: a copy to the CPU that does not block is read before the GPU has"

CHANGED = re.escape(f"{__file__}:") + r"\d+: the source of a copy to mps that does not block is changed"


@pytest.fixture
def x(simulated) -> torch.Tensor:
    return torch.arange(24.0).view(4, 6).to("mps")


def begun(value: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    return torch.empty(value.shape if like is None else like.shape).copy_(value, non_blocking=True)


@pytest.mark.parametrize("schedule", range(4))
def test_a_copy_that_is_waited_for(x, simulated, schedule):
    simulated.set_schedule(schedule)
    copies = [begun(x * factor) for factor in (1, 2)]
    x.add_(100)  # behind both
    torch.mps.synchronize()
    for factor, copy in enumerate(copies, 1):
        assert torch.equal(copy, factor * torch.arange(24.0).view(4, 6))


@pytest.mark.parametrize("read", [torch.Tensor.tolist, lambda copy: bytes(copy.numpy()), torch.Tensor.sum])
def test_a_copy_is_poison_before(x, read):
    """Whoever reads it, the line of the copy is named; operators of aten in between are no wait."""
    copy = begun(x + 1)
    x.mul(3)
    read(copy)
    with pytest.raises(SimulatorError, match=SAYS):
        torch.mps.synchronize()
    assert torch.equal(copy, torch.arange(24.0).view(4, 6) + 1)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("schedule", [0, 1])
def test_other_strides_go_through_memory_that_is_read_at_once(x, simulated, version, schedule):
    """The values never arrive: not behind a wait either."""
    simulated.set_schedule(schedule)
    with simulated.torch_version(version):
        for value in (x[:, :3], x.t(), x[:1].as_strided((1, 6), (99, 1))):
            with pytest.raises(SimulatorError, match=SAYS):
                begun(value)
        assert torch.equal(x.t().cpu(), torch.arange(24.0).view(4, 6).t())  # one that blocks is right


def test_equal_strides_with_holes(x, simulated):
    """Torch 2.13 copies the memory in between, and not all of the elements."""
    for version, expected in (("2.13", [0, 1, 2, 0, 0, 0]), ("2.14", None)):
        held = torch.zeros(6)
        with simulated.torch_version(version):
            if expected is None:
                with pytest.raises(SimulatorError, match="differ"):
                    held[::2].copy_(x[0, ::2], non_blocking=True)
                continue
            held[::2].copy_(x[0, ::2], non_blocking=True)
            torch.mps.synchronize()
        assert held.tolist() == expected


@pytest.mark.parametrize("schedule", range(4))
def test_a_source_that_changes_before_the_gpu_has_read_it(x, simulated, schedule):
    """Torch keeps one that is freed, and copies one of another type or of other strides."""
    simulated.set_schedule(schedule)
    for source in (torch.arange(24.0), torch.arange(24), torch.arange(48.0)[::2]):
        sent, expected = source.to("mps", torch.float32, non_blocking=True), source.float()
        del source
        assert torch.equal(sent.cpu(), expected)
    for source in (torch.ones(24), torch.ones(24, dtype=torch.int64), torch.ones(48)[::2]):
        sent = torch.empty(24, device="mps").copy_(source, non_blocking=True)
        source.fill_(5)
        is_late = source.is_contiguous() and source.dtype == torch.float32 and schedule % 2 == 0
        with pytest.raises(SimulatorError, match=CHANGED) if is_late else contextlib.nullcontext():
            torch.mps.synchronize()
        assert (sent == (5 if is_late else 1)).all()


def test_a_destination_between_words(x):
    for non_blocking in (False, True):
        with pytest.raises(RuntimeError, match="Unaligned blit request"):
            torch.zeros(8, dtype=torch.bfloat16)[1:7].copy_(x[0].bfloat16(), non_blocking=non_blocking)
    column = torch.zeros(6, 3, dtype=torch.bfloat16)[:, 1]  # by a temporary
    assert torch.equal(column.copy_(x[0]), x[0].bfloat16().cpu())


def test_operators_that_wait_and_those_of_mpsgraph(x, simulated):
    """By aten.json: torch 2.13's floor waits for the GPU, 2.15's does not."""
    for version, waits in (("2.13", True), ("2.15", False)):
        with simulated.torch_version(version), simulated.timeline(lambda dispatch: 0.0, 0.25, 4.0) as times:
            x.floor()
            assert (times.now >= 4.0) == waits
    assert aten.table()["2.13.0"]["aten::max.dim"]["graph"]
    assert "graph" not in aten.table()["2.15.0"]["aten::max.dim"]
    assert aten.table()["2.15.0"][aten.row_of("aten::topk.values")]["threadgroup"] == 32 * 1024


def test_operators_that_ran(x, simulated):
    """Those that aten.json has, and others."""
    simulated.called_aten()
    x.sort(), torch.linalg.eigvals(torch.eye(2, device="mps"))
    called = simulated.called_aten()
    assert {"aten::sort.values_stable", "aten::_linalg_eigvals"} <= {*called} and not simulated.called_aten()
    known = dict(aten.operators("2.15.0"))
    assert [name for name in called if name not in known] == ["aten::_linalg_eigvals"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", ["timeout", "memory"])
def test_the_error_that_torch_stores(x, simulated, version, kind):
    """From 2.15 on: raised once, where torch waits next, as one of memory where it was that."""
    with simulated.torch_version(version), simulated.failing(kind):
        copy = begun(x)
        if version != "2.15":
            torch.mps.synchronize()
        else:
            error = torch.OutOfMemoryError if kind == "memory" else torch.AcceleratorError
            with pytest.raises(error, match="MPS command buffer execution failed"):
                torch.mps.synchronize()
        assert not torch.equal(copy, torch.arange(24.0).view(4, 6))
        assert x.sum().item() == 276
