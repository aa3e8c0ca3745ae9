"""Quantised weights decoded to float32, which the references on a CPU keep.

A matrix takes several times as long to decode as to multiply with the row of a token. What is decoded lies
beside the memory of its codes and goes with it. It is decoded again once the weight has changed in place: by
torch's count of versions, or by sums over tensors without versions, those of inference mode; and, as no write
through `.data` is counted, by the bytes of scales and biases and of one word of codes in each row. To compare
these takes a few hundredths of a product with one row.
"""

import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..macs import said
from ._formats import QuantizedWeight

VARIABLE = "MOE_MPS_CPU_MEMORY"
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class _Kept(NamedTuple):
    values: Tensor
    changes: list[Any]  # of the tensors that were decoded
    bytes: list[bytes]  # of some of their elements
    beside: list[weakref.ref]  # the memory of scales and biases: another may lie at the same address


# {memory of codes: {where in it, and where the scales are: what is decoded}}
_KEPT: weakref.WeakKeyDictionary[torch.UntypedStorage, dict[tuple, _Kept]] = weakref.WeakKeyDictionary()
_here = threading.local()
_lock = threading.RLock()  # a finalizer may run wherever memory is asked for
_bytes = 0
_quarter = 0


def decoded(weight: QuantizedWeight) -> Tensor:
    """All values of a weight in float32; nobody may write to them."""
    if weight.packed.device.type != "cpu":
        return weight.values(slice(None))
    storage, place = weight.packed.untyped_storage(), _place(weight)
    of_storage = _KEPT.get(storage)
    kept = None if of_storage is None else of_storage.get(place)
    beside = [tensor.untyped_storage() for tensor in (weight.scales, weight.biases) if tensor is not None]
    now, some = changes(weight), _some_bytes(weight)
    if (
        kept is not None
        and (kept.changes, kept.bytes) == (now, some)
        and [ref() for ref in kept.beside] == beside
    ):
        return kept.values
    values = weight.values(slice(None))
    if kept is not None or _takes(values.nbytes):
        _keep(storage, place, _Kept(values, now, some, [*map(weakref.ref, beside)]))
    return values


def _place(weight: QuantizedWeight) -> tuple:
    scales, biases = weight.scales, weight.biases
    packed = weight.packed
    of_biases = None if biases is None else (biases.data_ptr(), biases.stride())
    of_scales = (scales.data_ptr(), scales.stride(), scales.dtype)
    return packed.data_ptr(), packed.shape, packed.stride(), of_scales, of_biases, weight.format.name


def changes(tensors: Iterable[Tensor | None]) -> list[Any]:
    """What is another once one of the tensors has been written in place."""
    present = [tensor for tensor in tensors if tensor is not None]
    try:
        return [tensor._version for tensor in present]
    except RuntimeError:  # of inference mode
        return [_sums(tensor) for tensor in present]


def _sums(tensor: Tensor) -> bytes:
    """Of each row."""
    return tensor.view(_BITS[tensor.itemsize]).sum(-1, dtype=torch.int32).numpy().tobytes()


def _some_bytes(weight: QuantizedWeight) -> list[bytes]:
    """Scales and biases, and of each row of codes a word, every time of another column."""
    beside = [tensor for tensor in (weight.scales, weight.biases) if tensor is not None]
    words = weight.packed.view(torch.int32).numpy()
    some = words.ravel()[:: max(1, words.shape[-1] - 1)].tobytes()
    return [some, *[tensor.view(_BITS[tensor.itemsize]).numpy().tobytes() for tensor in beside]]


def kept_bytes() -> int:
    return _bytes


@contextlib.contextmanager
def nothing_kept() -> Iterator[None]:
    """Around calls in this thread whose weights no other call has: nothing more is kept."""
    before, _here.keeps = getattr(_here, "keeps", True), False
    try:
        yield
    finally:
        _here.keeps = before


def _takes(nbytes: int) -> bool:
    """Whether so much more may be kept."""
    return getattr(_here, "keeps", True) and _bytes + nbytes <= memory()


def _keep(storage: torch.UntypedStorage, place: tuple, kept: _Kept) -> None:
    global _bytes
    with _lock:
        of_storage = _KEPT.get(storage)
        if of_storage is None:
            of_storage = _KEPT[storage] = {}
            weakref.finalize(storage, _dropped, of_storage).atexit = False
        if place not in of_storage:
            _bytes += kept.values.nbytes
        of_storage[place] = kept


def _dropped(of_storage: dict[tuple, _Kept]) -> None:
    global _bytes
    with _lock:
        _bytes -= sum(kept.values.nbytes for kept in of_storage.values())


def memory() -> int:
    """The bytes that decoded weights may take: MOE_MPS_CPU_MEMORY, in GB, or a quarter of what is free.

    That is what was free when nothing was kept.

    Raises: ValueError where the variable is no number of GB.
    """
    global _quarter
    chosen = os.environ.get(VARIABLE)
    if chosen is None:
        if _bytes == 0:
            _quarter = free_memory() // 4
        return _quarter
    try:
        size = float(chosen)
    except ValueError:
        size = -1.0
    if not 0.0 <= size < float("inf"):
        raise ValueError(f"moe_mps: {VARIABLE} must be a number of GB, 0 to keep nothing, got {chosen!r}")
    return int(size * 1e9)


def free_memory() -> int:
    """The bytes that programs may still take, without those that only cache files; 0 if nothing tells."""
    try:
        if sys.platform == "darwin":
            size, percent = said("sysctl", "-n", "hw.memsize", "kern.memorystatus_level").split()
            return int(size) * int(percent) // 100
        known = _numbers(Path("/proc/meminfo"))
        return min(known["MemAvailable:"] << 10, _free_of_group(Path("/sys/fs/cgroup")))
    except (OSError, ValueError, KeyError):
        return 0


def _free_of_group(group: Path) -> int:
    """What a container leaves, by its limit."""
    try:
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        return max(0, limit - used + _numbers(group / "memory.stat")["file"])
    except (OSError, ValueError, KeyError):  # none
        return sys.maxsize


def _numbers(file: Path) -> dict[str, int]:
    return {name: int(number) for name, number, *_ in map(str.split, file.read_text().splitlines())}
