"""Small files of experts, and their tensors."""

import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import torch

from torch_moe_mps.disk.file import ExpertsFile, Layer, written
from torch_moe_mps.disk.pool import ExpertPool, ExpertReader
from torch_moe_mps.ops.families.slots import host_view

EXPERTS, LAYERS = 8, 3
# Of one expert: their sizes are no multiples of a page, and a block is several reads with PIECE = 1000.
SHAPES = {"codes": ("int32", (12, 40)), "scales": ("bfloat16", (12, 5)), "kinds": ("uint8", (7,))}

# A Qwen4 with a table of pairs of tokens, in four tensors.
NGRAMS = {
    "eos_token_id": 2,
    "ple_layer_ids": [1],
    "ngram_vocab_size_base": 50,
    "heads_per_ngram": 1,
    "split_ngram_parts": 4,
}


def layers(count: int = LAYERS, experts: int = EXPERTS) -> list[Layer]:
    return [Layer(f"layers.{number}.experts", experts, SHAPES, ("codes",)) for number in range(count)]


def draw(seed: int = 0, count: int = LAYERS, experts: int = EXPERTS) -> list[dict[str, torch.Tensor]]:
    """Random bytes as tensors [experts, ...] of each layer."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for layer in layers(count, experts):
        own = {}
        for name, (dtype, shape) in layer.tensors.items():
            size = torch.empty(experts, *shape, dtype=getattr(torch, dtype)).nbytes
            drawn = torch.randint(256, (size,), dtype=torch.uint8, generator=generator)
            own[name] = drawn.view(getattr(torch, dtype)).view(experts, *shape)
        result.append(own)
    return result


def write(
    path: Path, key: str = "key", seed: int = 0, sources: Sequence[str] = ()
) -> list[dict[str, torch.Tensor]]:
    """Writes a file. Returns: its tensors."""
    tensors = draw(seed)
    with written(path, key, layers(), sources) as new:
        for number in [*new.left]:
            new.add(number, tensors[number])
    return tensors


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True for equal bytes: random ones are NaN at times."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


class NumberedPool(ExpertPool):
    """A pool of a layer whose expert n is the number n; tests delay and fail its reads by `read_of`.

    Attributes:
        read: the experts that were read.
        error: of the system, which reads fail with.
        before: called in front of each read, by its thread.
        may_answer: what reads wait for.
    """

    _every: ClassVar["weakref.WeakValueDictionary[int, NumberedPool]"] = weakref.WeakValueDictionary()

    def __init__(
        self,
        name: str = "layer 3",
        limit: float = 60.0,
        slots: int = 16,
        device: str = "mps",
        experts: int = 32,
    ):
        self.folder = tempfile.TemporaryDirectory()
        path, layer = Path(self.folder.name, "experts"), Layer(name, experts, {"numbers": ("float32", (8,))})
        with written(path, "key", [layer]) as new:
            new.add(0, {"numbers": torch.arange(float(experts))[:, None].expand(-1, 8)})
        file = ExpertsFile(path)
        self._places = file._places
        super().__init__(ExpertReader(file), 0, slots, torch.device(device), limit)
        self.read: list[int] = []
        self.error = 0
        self.before: Callable[[], object] = lambda: None
        self.may_answer = threading.Event()
        self.may_answer.set()
        self._every[os.stat(path).st_ino] = self

    @property
    def weights(self) -> torch.Tensor:
        return self.tensors["numbers"]

    def holds(self, slots: torch.Tensor, ids: Sequence[int]) -> bool:
        """True if the experts lie in their slots, by the host's memory."""
        found = host_view(self.weights)[host_view(slots).flatten().long()]
        return found.equal(torch.tensor(ids).float()[:, None].expand(-1, 8))

    @staticmethod
    def read_of(file: int, offset: int, size: int) -> int:
        """For `simulator.reads`."""
        pool = NumberedPool._every.get(os.fstat(file).st_ino)
        if pool is not None:
            pool.read.append((offset - pool._places.starts[0]) // pool.about.block)
            may_answer, before, error = pool.may_answer, pool.before, pool.error
            del pool
            before()
            assert may_answer.wait(60)
            if error:
                raise OSError(error, "")
        return size
