"""Float32 values of quantised weights, for the CPU references.

An operator is a function of its arguments: whoever calls `torch.ops.moe_mps.*` has weights decoded in that
call. Decoding a matrix takes several times as long as multiplying it with one row, so a layer that owns a
weight caches its values (`with_decoded_weights`).
"""

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..macs import output_of
from ._formats import QuantizedWeight
from ._registry import PLAIN

VALUES_AT_ONCE = 1 << 22  # decoded of a matrix: temporaries take a few times 16 MiB, whatever its size

_here = threading.local()  # `cache`: the Cache that the operators of this thread read, or None
_lock = threading.RLock()  # a finalizer may run wherever memory is asked for
_bytes = 0
_quarter = 0


class Cache:
    """Decoded values of a layer's weights as they are now; another state of them has another cache.

    Args:
        tensors: codes, scales, zeros and whatever else the weights are views of.
    """

    def __init__(self, tensors: Iterable[Tensor]):
        own = weakref.ref(self)

        def clear(_: object) -> None:
            if (cache := own()) is not None:
                cache._values.clear()

        self._state = [(weakref.ref(tensor), tensor.data_ptr(), tensor._version) for tensor in tensors]
        storages = [tensor.untyped_storage() for tensor in tensors]
        self._alive = [weakref.ref(storage, clear) for storage in storages]
        self._memories = {storage.data_ptr() for storage in storages}
        # {where codes, scales and zeros are: {number of an expert, or None for the whole: its values}}
        self._values: dict[tuple, dict[int | None, Tensor]] = {}

    def is_current(self, tensors: list[Tensor]) -> bool:
        """True if these are the tensors of the cache, and neither were written nor lie elsewhere."""
        if len(tensors) != len(self._state):
            return False
        for tensor, (known, address, version) in zip(tensors, self._state, strict=True):
            if known() is not tensor or tensor.data_ptr() != address or tensor._version != version:
                return False
        return True

    def whole(self, weight: QuantizedWeight) -> Tensor | None:
        """All values of a weight, if they are cached."""
        found = self._values.get(_place(weight))
        return None if found is None else found.get(None)

    def of(self, weight: QuantizedWeight) -> Callable[[int | None], Tensor]:
        """Values of a weight's experts by number, or of the whole by None; cached if the limit allows it."""
        place = _place(weight)
        found = self._values.get(place, {})

        def values(expert: int | None) -> Tensor:
            known = found.get(expert)
            if known is None:
                known = _decode(weight, expert)
                if self.may_hold(weight, known.nbytes):
                    self._values.setdefault(place, found)[expert] = _counted(known)
            return known

        return values

    def may_hold(self, weight: QuantizedWeight, nbytes: int) -> bool:
        """True if a weight is of this cache, and the limit allows `nbytes` more."""
        memories = {tensor.untyped_storage().data_ptr() for tensor in weight if tensor is not None}
        return memories <= self._memories and _bytes + nbytes <= memory()


_CACHES: "weakref.WeakKeyDictionary[Any, Cache]" = weakref.WeakKeyDictionary()  # {layer: its cache}


def with_decoded_weights(compute: Callable[[], Tensor], owner: Any, *tensors: Tensor | None) -> Tensor:
    """Result of `compute`, whose operators read values that they decoded in a layer's calls before.

    The values are freed with the layer, and with the memory of its weights, which `to` and
    `load_state_dict(assign=True)` replace. A weight that is written in place, as `load_state_dict` does, gets
    another version and is decoded again. torch counts no writes through `.data`. Copies and pickles of the
    layer have no values. All layers together cache at most `memory()` bytes.

    Operators decode in each call if a tensor was made in inference mode, since it has no version, and under
    torch.compile, torch.export and torch.func, where an operator runs outside the layer's call. So do a
    backward, and programs of captured calls, which replay on mps alone. Fake tensors never reach a reference.
    Layers on mps call `compute` themselves.

    Args:
        compute: calls operators with the weights.
        owner: the layer.
        tensors: all of its weights that the operators read. Where a weight has the memory of several
            parameters, which are views of it, these.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return compute()
    present = [tensor for tensor in tensors if tensor is not None]
    cache = _CACHES.get(owner)
    if cache is None or not cache.is_current(present):
        if not present or not all(map(_is_counted, present)):
            return compute()
        _CACHES[owner] = cache = Cache(present)
    before = getattr(_here, "cache", None)
    _here.cache = cache
    try:
        return compute()
    finally:
        _here.cache = before


def _is_counted(tensor: Tensor) -> bool:
    """True for a plain tensor on the CPU whose writes torch counts."""
    return type(tensor) in PLAIN and tensor.is_cpu and not tensor.is_inference()


def decoded(weight: QuantizedWeight) -> Tensor:
    """All values of a weight in float32, read-only."""
    return decoded_experts(weight)(None)


def decoded_experts(weight: QuantizedWeight) -> Callable[[int | None], Tensor]:
    """Matrices of a stack in float32 by index, or all by None, read-only."""
    cache: Cache | None = getattr(_here, "cache", None)
    return partial(_decode, weight) if cache is None else cache.of(weight)


def in_blocks(weight: QuantizedWeight) -> list[Tensor] | Iterator[Tensor]:
    """Yields rows of a matrix in float32: all if they are cached, else VALUES_AT_ONCE values at a time."""
    cache: Cache | None = getattr(_here, "cache", None)
    if cache is not None and (known := cache.whole(weight)) is not None:
        return [known]
    rows, columns = weight.packed.shape[0], weight.format.columns(weight.packed.shape[1])
    is_small = rows * columns <= VALUES_AT_ONCE
    if is_small or (cache is not None and cache.may_hold(weight, 4 * rows * columns)):
        return [decoded(weight)]
    step = max(1, VALUES_AT_ONCE // columns)
    parts = (weight.map(itemgetter(slice(first, first + step))) for first in range(0, rows, step))
    return (_decode(part, None) for part in parts)


def _decode(weight: QuantizedWeight, expert: int | None) -> Tensor:
    if expert is not None:
        return weight.values(expert)
    rows, columns = weight.packed.shape[0], weight.format.columns(weight.packed.shape[-1])
    if weight.packed.dim() > 2 or rows * columns <= VALUES_AT_ONCE:
        return weight.values(slice(None))
    values = torch.empty(rows, columns, dtype=torch.float32, device=weight.packed.device)
    step = max(1, VALUES_AT_ONCE // columns)
    for first in range(0, rows, step):
        some = slice(first, first + step)
        values[some] = weight.values(some)
    return values


def _place(weight: QuantizedWeight) -> tuple:
    packed, scales, zeros = weight.packed, weight.scales, weight.zeros
    of_weight = packed.data_ptr(), packed.shape, packed.stride(), weight.format.name
    of_scales = scales.data_ptr(), scales.stride(), scales.dtype
    return of_weight + of_scales + (() if zeros is None else (zeros.data_ptr(), zeros.stride()))


def _counted(values: Tensor) -> Tensor:
    """The values, whose bytes count until they are freed."""
    global _bytes
    with _lock:
        _bytes += values.nbytes
    weakref.finalize(values, _release, values.nbytes).atexit = False
    return values


def _release(nbytes: int) -> None:
    global _bytes
    with _lock:
        _bytes -= nbytes


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
            size, percent = output_of("sysctl", "-n", "hw.memsize", "kern.memorystatus_level").split()
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
