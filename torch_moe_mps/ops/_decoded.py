"""Cache of quantised weights decoded to float32, for the CPU references.

Decoding a matrix takes several times as long as multiplying it with one row. Decoded values are freed with
their codes, scales or biases. A weight that changed in place is decoded again: changes are detected by
torch's version counter, by sums for tensors of inference mode, which have none, and by a fixed-size sample of
each tensor, as writes through `.data` are not counted.
"""

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..macs import said
from ._formats import QuantizedWeight

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_SAMPLES = 64  # elements, each perhaps a cache miss: 256 took a sixth of a product of 576 x 576 with a row
VALUES_AT_ONCE = 1 << 22  # decoded of a matrix: temporaries take a few times 16 MiB, whatever its size


class _Memory:
    """Elements at equal distances of what a tensor lies in; numpy reads them, and does not keep them alive.

    The distance is odd, so that they lie in all columns.
    """

    def __init__(self, tensor: Tensor):
        size = tensor.itemsize
        sizes = zip(tensor.shape, tensor.stride(), strict=True)
        span = 1 + sum((count - 1) * stride for count, stride in sizes) if tensor.numel() else 0
        step = span // _SAMPLES | 1
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{size}",
            "data": (tensor.data_ptr(), True),
            "shape": (-(-span // step),),
            "strides": (step * size,),
        }


_Sample = tuple[Callable[[], bytes], bytes]  # (reader of the sample, its bytes when the weight was decoded)


class _Kept(NamedTuple):
    values: Tensor
    changes: list[Any]  # one for each tensor that was decoded
    samples: Sequence[_Sample]  # one for each memory that these lie in

    def is_current(self, now: list[Any]) -> bool:
        """True if the weight is unchanged since it was decoded; `now` is its current `changes`."""
        return self.changes == now and all(read() == sample for read, sample in self.samples)


# {where codes, scales and biases are: {number of an expert, or None for the whole: what is decoded}}
_KEPT: dict[tuple, dict[int | None, _Kept]] = {}
_here = threading.local()
_lock = threading.RLock()  # a finalizer may run wherever memory is asked for
_bytes = 0
_quarter = 0


def decoded(weight: QuantizedWeight) -> Tensor:
    """All values of a weight in float32, read-only."""
    values = kept(weight.packed, weight.scales, weight.biases, weight.format.name)
    if values is None:
        values = _decoded_anew(weight, None) if weight.packed.is_cpu else weight.values(slice(None))
    return values


def decoded_experts(weight: QuantizedWeight) -> Callable[[int], Tensor]:
    """Matrices of a stack in float32 by index, read-only."""
    if not weight.packed.is_cpu:
        return weight.values
    found, now = _KEPT.get(_place_of(weight), {}), _versions(weight)

    def matrix(expert: int) -> Tensor:
        one = found.get(expert)
        if one is not None and one.is_current(changes(_part(weight, expert)) if now is None else now):
            return one.values
        return _decoded_anew(weight, expert)

    return matrix


def _part(weight: QuantizedWeight, expert: int | None) -> QuantizedWeight:
    return weight if expert is None else weight.map(itemgetter(expert))


def _decoded_anew(weight: QuantizedWeight, expert: int | None) -> Tensor:
    """Decodes a weight or one expert, and caches the values if the limit allows it."""
    part, place = _part(weight, expert), _place_of(weight)
    before = changes(part)
    reads = [np.asarray(_Memory(tensor)).tobytes for tensor in part if tensor is not None]
    samples = [(read, read()) for read in reads]
    values = _decode(part)
    if expert in _KEPT.get(place, ()) or _takes(values.nbytes):
        _keep(weight, place, expert, _Kept(values, before, samples))
    return values


def in_blocks(weight: QuantizedWeight) -> list[Tensor] | Iterator[Tensor]:
    """Yields rows of a matrix in float32: all if they are cached, else VALUES_AT_ONCE values at a time."""
    values = kept(weight.packed, weight.scales, weight.biases, weight.format.name)
    if values is not None:
        return [values]
    rows, columns = weight.packed.shape[0], weight.format.columns(weight.packed.shape[1])
    if rows * columns <= VALUES_AT_ONCE or _may_keep(weight):
        return [decoded(weight)]
    step = max(1, VALUES_AT_ONCE // columns)
    return (decoded(weight.map(itemgetter(slice(first, first + step)))) for first in range(0, rows, step))


def _may_keep(weight: QuantizedWeight) -> bool:
    if not weight.packed.is_cpu:
        return False
    size = 4 * weight.packed.shape[:-1].numel() * weight.format.columns(weight.packed.shape[-1])
    return _place_of(weight) in _KEPT or _takes(size)


def kept(packed: Tensor, scales: Tensor, biases: Tensor | None, name: str) -> Tensor | None:
    """Cached values of a weight, or None if there are none or it has changed."""
    if not packed.is_cpu:
        return None
    found = _KEPT.get(_place(packed, scales, biases, name), {}).get(None)
    if found is None or not found.is_current(changes((packed, scales, biases))):
        return None
    return found.values


def _decode(weight: QuantizedWeight) -> Tensor:
    rows, columns = weight.packed.shape[0], weight.format.columns(weight.packed.shape[-1])
    if weight.packed.dim() > 2 or rows * columns <= VALUES_AT_ONCE:
        return weight.values(slice(None))
    values = torch.empty(rows, columns)
    step = max(1, VALUES_AT_ONCE // columns)
    for first in range(0, rows, step):
        some = slice(first, first + step)
        values[some] = weight.values(some)
    return values


def _place(packed: Tensor, scales: Tensor, biases: Tensor | None, name: str) -> tuple:
    of_weight = packed.data_ptr(), packed.shape, packed.stride(), name
    of_scales = scales.data_ptr(), scales.stride(), scales.dtype
    return of_weight + of_scales + (() if biases is None else (biases.data_ptr(), biases.stride()))


def _place_of(weight: QuantizedWeight) -> tuple:
    return _place(weight.packed, weight.scales, weight.biases, weight.format.name)


def changes(tensors: Iterable[Tensor | None]) -> list[Any]:
    """Fingerprint of tensors that changes after a write in place."""
    versions = _versions(tensors)
    return [_sums(tensor) for tensor in tensors if tensor is not None] if versions is None else versions


def _versions(tensors: Iterable[Tensor | None]) -> list[Any] | None:
    """torch's version counters of tensors; None for tensors of inference mode."""
    try:
        return [tensor._version for tensor in tensors if tensor is not None]
    except RuntimeError:
        return None


def _sums(tensor: Tensor) -> bytes:
    """Row sums of the elements' bits as integers; they change with any element."""
    return tensor.view(_BITS[tensor.itemsize]).sum(-1, dtype=torch.int32).numpy().tobytes()


@contextlib.contextmanager
def nothing_kept() -> Iterator[None]:
    """Context in which this thread caches nothing, for weights used only once."""
    before, _here.keeps = getattr(_here, "keeps", True), False
    try:
        yield
    finally:
        _here.keeps = before


def _takes(nbytes: int) -> bool:
    """True if the limit allows caching `size` more bytes."""
    return getattr(_here, "keeps", True) and _bytes + nbytes <= memory()


def _keep(weight: QuantizedWeight, place: tuple, expert: int | None, made: _Kept) -> None:
    global _bytes
    with _lock:
        if place not in _KEPT:
            _KEPT[place] = {}
            for tensor in weight:  # another one may lie where one was
                if tensor is not None:
                    weakref.finalize(tensor.untyped_storage(), _drop, place).atexit = False
        if expert not in _KEPT[place]:
            _bytes += made.values.nbytes
        _KEPT[place][expert] = made


def _drop(place: tuple) -> None:
    global _bytes
    with _lock:
        _bytes -= sum(one.values.nbytes for one in _KEPT.pop(place, {}).values())


def memory() -> int:
    """Limit in bytes of cached values: a quarter of initially free memory."""
    global _quarter
    if _bytes == 0:
        _quarter = free_memory() // 4
    return _quarter


def free_memory() -> int:
    """Bytes of available memory, file caches included; 0 if unknown."""
    try:
        if sys.platform == "darwin":
            size, percent = said("sysctl", "-n", "hw.memsize", "kern.memorystatus_level").split()
            return int(size) * int(percent) // 100
        known = _numbers(Path("/proc/meminfo"))
        return min(known["MemAvailable:"] << 10, _free_of_group(Path("/sys/fs/cgroup")))
    except (OSError, ValueError, KeyError):
        return 0


def _free_of_group(group: Path) -> int:
    """Bytes left of the limit of a container's control group."""
    try:
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        return max(0, limit - used + _numbers(group / "memory.stat")["file"])
    except (OSError, ValueError, KeyError):  # none
        return sys.maxsize


def _numbers(file: Path) -> dict[str, int]:
    return {name: int(number) for name, number, *_ in map(str.split, file.read_text().splitlines())}
