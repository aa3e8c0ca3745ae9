"""Slots in memory for some of a layer's experts, which are read from their file as they are needed.

`csrc/slots/` reads and looks up, for a GPU and for the CPU. Without the compiled extension the CPU runs
`reference.py`.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._environment import KEEP_WARM, is_on
from .._extension import host_library
from .._faults import Mark, follow_stream
from ..ops.families.slots import LIMIT, host_view, new_number, register_pool
from . import reference
from .file import ALIGNMENT, ExpertsFile, Layer, dtype_of
from .stored import BlockExperts, StoredExperts

DEPTH = 16  # reads at once. Untuned: SSDs of Macs are said to want 8 to 32
PIECE = 2 << 20  # bytes of a read: a block is several reads at once. Untuned
CONVERTED = 512 << 10  # the same for blocks of GGUF, which a core converts at some GB/s. Untuned
TABLE_ROWS, TABLE_MEMORY = 1 << 16, 1 << 28  # rows and bytes of a table in memory, at most
SILENT = 20.0  # seconds without a read that ends: the disk is late
BEAT = 0.5e-3, 64  # seconds between beats for a GPU that waits, steps of their kernel. Untuned
TICK = 0.1  # seconds after which a thread that waits for reads sees an interrupt


class Counters:
    """Counts of what a model asked of its pools.

    Attributes:
        hits, misses: experts, or rows of embeddings, that were in their slots, or were read into them.
        layers: layers that were streamed for a call with many tokens.
        bytes_read: for both.
        seconds: that requests waited for the disk.
    """

    NAMES = ("hits", "misses", "layers", "bytes_read", "seconds")
    hits: int
    misses: int
    layers: int
    bytes_read: int
    seconds: float

    def __init__(self, read: Callable[[], Sequence[float]]):
        self._read = read

    def __getattr__(self, name: str) -> Any:
        if name not in self.NAMES:
            raise AttributeError(name)
        return self.as_dict()[name]

    def as_dict(self) -> dict[str, float]:
        return dict(zip(self.NAMES, self._read(), strict=True))

    def __str__(self) -> str:
        requests = self.hits + self.misses
        return (
            f"{self.hits / max(1, requests):.1%} of {requests:,} were in memory, {self.layers:,} layers were "
            f"streamed, {self.bytes_read / 1e9:.2f} GB were read in {1e3 * self.seconds:,.0f} ms"
        )


class DiskTimeout(TimeoutError):
    """A disk that answers late: reads go on."""


class ExpertReader:
    """A file of experts, and what reads it."""

    def __init__(self, file: ExpertsFile | StoredExperts):
        self.file = file
        if host_library() is None:
            self.disk: Any = reference.Disk(file)
        else:
            names, files = zip(*file.opened.items(), strict=True)
            piece = CONVERTED if isinstance(file, BlockExperts) else PIECE
            self.disk = torch.classes.moe_mps.ExpertDisk(str(file.path), [*names], [*files], DEPTH, piece)
            for layer, places in zip(file.layers, file.places(), strict=True):
                like = [torch.empty(s, dtype=dtype_of(d), device="meta") for d, s in layer.tensors.values()]
                stored = [torch.empty(0, dtype=dtype) for dtype in places.dtypes]
                rows, checksums = _integers(places.rows), _integers(places.checksums)
                types, blocks = [kind for kind, _ in places.blocks], [place for _, place in places.blocks]
                self.disk.add_layer(
                    layer.name, layer.experts, like, stored, rows, checksums, types, _integers(blocks)
                )
        self.counters = Counters(self.disk.counters)

    def wait(self, pool: Any, reading: Any) -> Tensor:
        """Waits for what a pool reads. An interrupt, and an error, give it up.

        The disk is late where nothing ends of what it was asked for: a GPU that works before may take longer.

        Returns: the slots. Raises: OSError, ValueError for an expert that cannot be read, DiskTimeout.
        """
        before, heard = None, time.monotonic()
        while not reading.wait(TICK):
            ended, asked = pool.reads()
            if ended != before or ended == asked:
                before, heard = ended, time.monotonic()
            elif time.monotonic() - heard >= SILENT:
                raise DiskTimeout(f"the disk of {self.file.path} is silent for {SILENT:g} s")
        why, error, slots = reading.result()
        if why:
            raise OSError(error, why) if error else ValueError(why)
        return torch.tensor(slots, dtype=torch.int32)


def _integers(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


class ExpertPool:
    """The slots of one layer: the experts that were needed last, of all sequences together.

    Args:
        reader, layer: the file, and the number of the layer in it.
        slots: how many experts are in memory.
        device: where the tensors are.
        limit: seconds that an answer to a GPU may take.

    Attributes:
        tensors: {name: [slots, ...]}, the weights that operators read.
        number: what the operator `_expert_slots` calls this pool.
    """

    def __init__(
        self, reader: ExpertReader, layer: int, slots: int, device: torch.device, limit: float = LIMIT
    ):
        self.reader, self.layer, self.size = reader, layer, slots
        self.about = reader.file.layers[layer]
        self.tensors = {
            name: torch.empty(slots, *shape, dtype=dtype_of(dtype), device=device)
            for name, (dtype, shape) in self.about.tensors.items()
        }
        tensors, self.number = [*self.tensors.values()], new_number()
        if host_library() is None:
            self.host: Any = reference.SlotPool(reader.disk, layer, tensors)
        else:
            if device.type == "mps":
                every, steps = BEAT
                torch.ops.moe_mps._keep_warm(every if is_on(KEEP_WARM) else 0.0, steps)
            views = [host_view(tensor) for tensor in tensors]
            self.host = torch.classes.moe_mps.SlotPool(reader.disk, self.number, layer, tensors, views, limit)
        register_pool(self, self.number)

    def slots(self, ids: Tensor) -> Tensor:
        """The slots of some experts [N], which are there when this returns; ids of no expert stay.

        Raises: ValueError for more experts than slots, and for a file that has changed; OSError for a disk
        that fails or is late. The next call may succeed.
        """
        return self.reader.wait(self.host, self.host.ask(ids.int().contiguous()))


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
        self._ahead: tuple[int, Any] | None = None
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
        host = self._pools[layer].host
        self._reader.wait(host, ahead[1])
        host.note_layer(time.perf_counter() - begun)
        if needed is None and layer + 1 < len(self._pools):
            self._ahead = self._begun(layer + 1, None)

    def _begun(self, layer: int, needed: set[int] | None) -> tuple[int, Any]:
        """A layer that is read behind those before it, whether or not somebody still waits for them."""
        stream, number = Mark(self._device, commits=True).place or (0, 0)
        pool = self._pools[layer]
        tensors = [*self.tensors[layer].values()]
        views = [host_view(tensor) for tensor in tensors]
        experts = sorted(needed or range(pool.about.experts))
        return layer, pool.host.stage(tensors, views, experts, stream, number)


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
