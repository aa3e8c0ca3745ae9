"""Slots in memory for some of a layer's experts, which are read from their file as they are needed."""

import itertools
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from .._faults import Mark, follow_stream
from ..ops.families.slots import LIMIT, host_view, register_pool
from .file import ALIGNMENT, ExpertsFile, Layer, bytes_of, dtype_of
from .stored import StoredExperts
from .threads import Threads

DEPTH = 16  # reads at once. Untuned: SSDs of Macs are said to want 8 to 32
PIECE = 2 << 20  # bytes of a read: a block is several reads at once. Untuned
TABLE_ROWS, TABLE_MEMORY = 1 << 16, 1 << 28  # rows and bytes of a table in memory, at most
SILENT = 20.0  # seconds without a read that ends: the disk is late
Views = Sequence[memoryview]


@dataclass
class Counters:
    """Counts of what a model asked of its pools.

    Attributes:
        hits, misses: experts, or rows of embeddings, that were in their slots, or were read into them.
        layers: layers that were streamed for a call with many tokens.
        bytes_read: for both.
        seconds: that calls waited for the disk.
    """

    hits: int = 0
    misses: int = 0
    layers: int = 0
    bytes_read: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        requests = self.hits + self.misses
        return (
            f"{self.hits / max(1, requests):.1%} of {requests:,} were in memory, {self.layers:,} layers were "
            f"streamed, {self.bytes_read / 1e9:.2f} GB were read in {1e3 * self.seconds:,.0f} ms"
        )


class Late(TimeoutError):
    """A disk that answers late: reads go on."""


class Patience:
    """When reads are late: once the disk is silent for SILENT; where a GPU waits, at LIMIT in any case."""

    def __init__(self, reader: "ExpertReader", is_awaited_by_gpu: bool = False):
        self._reader, self._begun, self._is_short = reader, time.monotonic(), is_awaited_by_gpu

    def left(self) -> float:
        """Seconds until then; none or fewer if the reads are late."""
        if self._is_short:
            return self._begun + LIMIT - time.monotonic()
        return max(self._begun, self._reader.heard) + SILENT - time.monotonic()

    def late(self) -> Late:
        said = f"has not answered within {LIMIT:g} s" if self._is_short else f"is silent for {SILENT:g} s"
        return Late(f"the disk of {self._reader.file.path} {said}")


class ExpertRead:
    """Reads of some experts that have begun.

    Attributes:
        reads: several of one expert, or one of several small experts.
    """

    def __init__(self, reader: "ExpertReader", layer: int, experts: Mapping[int, Views]):
        self._reader, self._layer, self._experts = reader, layer, experts
        self._size = sum(len(view) for views in experts.values() for view in views)
        if len(experts) > 1:
            self.reads = [reader.submit(reader.threads, self._read)]
            return
        self.reads, begin = [], 0
        for expert, views in experts.items():
            for piece in _pieces(views):
                self.reads.append(reader.submit(reader.threads, reader.read, layer, expert, piece, begin))
                begin += sum(map(len, piece))

    def _read(self) -> None:
        for expert, views in self._experts.items():
            self._reader.read(self._layer, expert, views)

    def finish(self, patience: Patience) -> None:
        """Waits for the experts.

        Raises: OSError, ValueError for an expert that cannot be read, Late.
        """
        finish(self.reads, patience)
        for read in self.reads:
            read.result()
        for expert, views in self._experts.items():
            self._reader.file.check(self._layer, expert, views)
        self._reader.counters.bytes_read += self._size


class ExpertReader:
    """A file of experts, the threads that read it, and what they have read."""

    def __init__(self, file: ExpertsFile | StoredExperts):
        self.file, self.counters = file, Counters()
        self.threads = Threads(DEPTH, "experts")
        self.callers = Threads(1, "slots of experts")  # the main thread calls them
        self.layers = Threads(1, "layers of experts")
        self.heard = time.monotonic()  # when a read has ended last
        self._process = os.getpid()

    def read(self, layer: int, expert: int, views: Views, begin: int = 0) -> None:
        """Reads an expert, or a piece of it, as the file does."""
        try:
            self.file.read(layer, expert, views, begin)
        finally:
            self.heard = time.monotonic()

    def submit(self, threads: Threads, *call: Any) -> Future:
        """A call by one of these threads. Raises: RuntimeError in a fork, which has no threads."""
        if os.getpid() != self._process:
            raise RuntimeError(
                f"{self.file.path}: a fork cannot read experts on the disk: load the model in it"
            )
        return threads.submit(*call)

    def close(self) -> None:
        for threads in (self.layers, self.callers, self.threads):
            threads.close()


def finish(reads: Iterable[Future], patience: Patience) -> None:
    """Waits until reads have ended. Raises: Late."""
    reads = [*reads]
    while wait(reads, max(0.0, patience.left())).not_done:
        if patience.left() <= 0:
            raise patience.late()


def _pieces(views: Views) -> Iterable[list[memoryview]]:
    """Views of at most PIECE bytes together, in order."""
    piece: list[memoryview] = []
    room = PIECE
    for view in views:
        while len(view):
            piece.append(view[:room])
            view, room = view[room:], room - len(piece[-1])
            if not room:
                yield piece
                piece, room = [], PIECE
    if piece:
        yield piece


class ExpertPool:
    """The slots of one layer: the experts that were needed last, of all sequences together.

    Args:
        reader, layer: the file, and the number of the layer in it.
        slots: how many experts are in memory.
        device: where the tensors are.

    Attributes:
        tensors: {name: [slots, ...]}, the weights that operators read.
        number: what the operator `_expert_slots` calls this pool.
    """

    def __init__(self, reader: ExpertReader, layer: int, slots: int, device: torch.device):
        self.reader, self.layer, self.size = reader, layer, slots
        self.about = reader.file.layers[layer]
        self.tensors = {
            name: torch.empty(slots, *shape, dtype=dtype_of(dtype), device=device)
            for name, (dtype, shape) in self.about.tensors.items()
        }
        self._views = views_of(self.tensors.values(), slots)
        self._free = [*range(slots)]
        self._slots: OrderedDict[int, int] = OrderedDict()  # {expert: slot}, least recently used first
        self.lock = threading.Lock()
        self._is_of_gpu = device.type == "mps"
        self.number = register_pool(self, self.about.name, file=str(reader.file.path))

    def slots(self, ids: Tensor) -> Tensor:
        """The slots of some experts [N], which are there when this returns; -1 for ids of no expert.

        Raises: ValueError for more experts than slots, and for a file that has changed; OSError for a disk
        that fails or is late. The next call may succeed.
        """
        if threading.current_thread() is threading.main_thread():  # an interrupt leaves nothing half done
            return self.reader.submit(self.reader.callers, self._slots_of, ids.tolist()).result()
        return self._slots_of(ids.tolist())

    def _slots_of(self, asked: Sequence[int]) -> Tensor:
        needed = {expert for expert in asked if 0 <= expert < self.about.experts}
        with self.lock:
            if len(needed) > self.size:
                expected = f"at most {self.size} experts, the slots of {self.about.name}"
                raise ValueError(f"moe_mps::_expert_slots: ids must name {expected}, got {len(needed)}")
            missing = [expert for expert in needed if expert not in self._slots]
            for expert in needed.difference(missing):
                self._slots.move_to_end(expert)
            counters = self.reader.counters
            counters.hits += len(needed) - len(missing)
            counters.misses += len(missing)
            if missing:
                begun = time.perf_counter()
                try:
                    self._read(missing, len(needed) - len(missing))
                finally:
                    counters.seconds += time.perf_counter() - begun
            return torch.tensor([self._slots.get(expert, -1) for expert in asked], dtype=torch.int32)

    def _read(self, missing: Sequence[int], hits: int) -> None:
        patience = Patience(self.reader, self._is_of_gpu)
        if len(self._free) + len(self._slots) - hits < len(missing):  # reads before are late still
            raise patience.late()
        while len(self._free) < len(missing):
            self._free.append(self._slots.popitem(last=False)[1])
        into = [(expert, self._free.pop()) for expert in missing]
        together = max(1, min(PIECE // sum(self.about.sizes), -(-len(into) // DEPTH)))
        readings = []
        for first in range(0, len(into), together):
            slots = dict(into[first : first + together])
            views = {expert: self._views[slot] for expert, slot in slots.items()}
            readings.append((slots, ExpertRead(self.reader, self.layer, views)))
        errors = []
        for slots, reading in readings:
            try:
                reading.finish(patience)
            except Exception as error:  # reads go on behind it
                errors.append(error)
                self._free_behind(reading.reads, [*slots.values()])
            else:
                self._slots.update(slots)
        note_written(self.tensors.values())
        if errors:
            raise errors[0]

    def _free_behind(self, reads: Sequence[Future], slots: Sequence[int]) -> None:
        """Frees slots once no read writes into them any more."""
        ended = itertools.count(1)  # counts for several threads

        def free(read: Future) -> None:
            if next(ended) == len(reads):
                self._free.extend(slots)

        for read in reads:
            read.add_done_callback(free)

    def copy(self, expert: int, views: Views) -> bool:
        """Copies an expert that is in a slot; its lock is held. Returns: False for any other expert."""
        slot = self._slots.get(expert)
        if slot is not None:
            for to, source in zip(views, self._views[slot], strict=True):
                to[:] = source
        return slot is not None


def views_of(tensors: Iterable[Tensor], count: int) -> list[list[memoryview]]:
    """The memory of each row of some tensors [count, ...]."""
    whole = [bytes_of(host_view(tensor)) for tensor in tensors]
    sizes = [len(view) // count for view in whole]
    return [
        [view[row * size : (row + 1) * size] for view, size in zip(whole, sizes, strict=True)]
        for row in range(count)
    ]


def note_written(tensors: Iterable[Tensor]) -> None:
    """Tells torch that tensors were written: what was computed from their content is not used any more."""
    increment_version([tensor for tensor in tensors if not tensor.is_inference()])


class Staging:
    """Memory for all experts of a layer, twice: one layer is read while the one before is computed.

    Args:
        pools: of all layers, in the model's order.
    """

    def __init__(self, pools: Sequence[ExpertPool], device: torch.device):
        self._pools, self._device, self._reader = pools, device, pools[0].reader
        size = max(bytes_of_layer(pool.about) for pool in pools)
        self._memories = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
        self.tensors = [_laid_out(pool.about, self._memories[n % 2]) for n, pool in enumerate(pools)]
        self._ahead: tuple[int, Future] | None = None
        self._late: list[Future] = []  # the last reads, which an error leaves behind
        self._stream = 0  # the stream that has read the memory last

    def read(self, layer: int, needed: set[int] | None = None) -> None:
        """Reads the experts of a layer into its tensors: all and then those of the next, or the needed ones.

        What was encoded with the memory of the layer before the last is awaited on mps.

        Raises: as `ExpertPool.slots`.
        """
        begun = time.perf_counter()
        self._stream = follow_stream(self._stream, self._device)
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead[0] != layer:
            ahead = self._begun(layer, needed)
        ahead[1].result()
        counters = self._reader.counters
        counters.seconds += time.perf_counter() - begun
        counters.layers += 1
        if needed is None and layer + 1 < len(self._pools):
            self._ahead = self._begun(layer + 1, None)

    def _begun(self, layer: int, needed: set[int] | None) -> tuple[int, Future]:
        """A layer that is read behind those before it, whether or not somebody still waits for them."""
        mark = Mark(self._device, commits=True)
        return layer, self._reader.submit(self._reader.layers, self._fill, layer, needed, mark)

    def _fill(self, layer: int, needed: set[int] | None, mark: Mark) -> None:
        mark.wait()
        pool, patience = self._pools[layer], Patience(self._reader)
        finish(self._late, patience)  # they write into this memory
        views = views_of(self.tensors[layer].values(), pool.about.experts)
        with pool.lock:
            readings = [
                ExpertRead(pool.reader, pool.layer, {expert: views[expert]})
                for expert in sorted(needed or range(pool.about.experts))
                if not pool.copy(expert, views[expert])
            ]
        self._late = [read for reading in readings for read in reading.reads]
        note_written([self._memories[layer % 2]])
        for reading in readings:
            reading.finish(patience)


def bytes_of_layer(layer: Layer) -> int:
    """Bytes of all experts of a layer in the memory of `Staging`."""
    return sum(-(-size * layer.experts // ALIGNMENT) * ALIGNMENT for size in layer.sizes)


def _laid_out(layer: Layer, memory: Tensor) -> dict[str, Tensor]:
    """{name: [experts, ...]} views of a memory of bytes."""
    tensors, offset = {}, 0
    for (name, (dtype, shape)), size in zip(layer.tensors.items(), layer.sizes, strict=True):
        whole = memory[offset : offset + size * layer.experts]
        tensors[name] = whole.view(dtype_of(dtype)).view(layer.experts, *shape)
        offset += -(-size * layer.experts // ALIGNMENT) * ALIGNMENT
    return tensors


def least_memory(layers: Sequence[Layer], slots: int) -> int:
    """Bytes of so many slots in each layer, and of the staging that they need."""
    staging = 2 * max((bytes_of_layer(layer) for layer in layers if layer.experts > slots), default=0)
    return staging + slots * sum(sum(layer.sizes) for layer in layers)


def most_experts(layers: Sequence[Layer]) -> int:
    return max(layer.experts for layer in layers)


def slots_in(layers: Sequence[Layer], memory: int) -> int:
    """Number of slots of each layer that fit in `memory` bytes, the same for all layers."""
    every = most_experts(layers)
    if memory >= least_memory(layers, every):
        return every
    return max(
        0, min(every - 1, (memory - least_memory(layers, 0)) // sum(sum(layer.sizes) for layer in layers))
    )


def _rows_in_memory(table: Layer) -> int:
    return min(table.experts, TABLE_ROWS, TABLE_MEMORY // sum(table.sizes))


class Pools:
    """The pools of a model's experts, or of the rows of its embeddings.

    Args:
        slots: of each layer of experts that has more; the others need no pool. None for embeddings.

    Attributes:
        counters: of all pools together.
        layers: the pools, in the order of the file.
        staging: of experts.
    """

    def __init__(self, file: ExpertsFile | StoredExperts, slots: int | None, device: torch.device):
        reader = ExpertReader(file)
        self.counters = reader.counters
        self.layers = [
            ExpertPool(reader, number, slots or _rows_in_memory(layer), device)
            for number, layer in enumerate(file.layers)
            if slots is None or layer.experts > slots
        ]
        self.staging = None if slots is None else Staging(self.layers, device)
        weakref.finalize(self, reader.close)
