"""Pools of slots in plain Python, where the compiled extension is not loaded: one read after the other."""

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.autograd.graph import increment_version

from .file import ExpertsFile, bytes_of
from .stored import StoredExperts

Views = Sequence[memoryview]


class Disk:
    """A file of experts, as `ExpertDisk` of `csrc/slots/classes.mm`."""

    def __init__(self, file: ExpertsFile | StoredExperts):
        self.file, self.lock = file, threading.RLock()
        self.hits = self.misses = self.layers = self.bytes_read = 0
        self.seconds = 0.0

    def counters(self) -> tuple[float, ...]:
        return self.hits, self.misses, self.layers, self.bytes_read, self.seconds

    def read(self, layer: int, expert: int, views: Views) -> None:
        begun = time.perf_counter()
        self.file.read(layer, expert, views)
        self.bytes_read += sum(map(len, views))
        self.seconds += time.perf_counter() - begun


class SlotReading:
    """Slots that are there, or why they are not."""

    def __init__(self, slots: Sequence[int] = (), why: str = "", error: int = 0):
        self._result = why, error, slots

    def wait(self, seconds: float) -> bool:
        return True

    def result(self) -> tuple[str, int, Sequence[int]]:
        return self._result


class SlotPool:
    """The slots of a layer, as `SlotPool` of `csrc/slots/classes.mm`."""

    def __init__(self, disk: Disk, layer: int, tensors: Sequence[Tensor]):
        self._disk, self._layer, self._tensors = disk, layer, tensors
        self._views = views_of(tensors)
        self._slots: OrderedDict[int, int] = OrderedDict()  # {expert: slot}, least recently used first
        self._free = [*reversed(range(len(self._views)))]

    def reads(self) -> tuple[int, int]:
        return 0, 0

    def ask(self, ids: Tensor) -> SlotReading:
        """The slots of experts [K], after reading those that have none; why not, if a read fails."""
        about, asked = self._disk.file.layers[self._layer], ids.tolist()
        needed = dict.fromkeys(expert for expert in asked if 0 <= expert < about.experts)
        if len(needed) > len(self._views):
            expected = f"at most {len(self._views)} experts, the slots of {about.name}"
            return SlotReading(why=f"moe_mps::_expert_slots: ids must name {expected}, got {len(needed)}")
        with self._disk.lock:
            missing = [expert for expert in needed if expert not in self._slots]
            for expert in needed.keys() - missing:
                self._slots.move_to_end(expert)
            self._disk.hits += len(needed) - len(missing)
            self._disk.misses += len(missing)
            try:
                for expert in missing:
                    self._read(expert)
            except OSError as error:
                return SlotReading(why=error.strerror or str(error), error=error.errno or 5)
            except ValueError as error:
                return SlotReading(why=str(error))
            return SlotReading([self._slots.get(expert, expert) for expert in asked])

    def _read(self, expert: int) -> None:
        if not self._free:
            self._free.append(self._slots.popitem(last=False)[1])
        slot = self._free[-1]
        bump_versions(self._tensors)
        self._disk.read(self._layer, expert, self._views[slot])
        self._slots[expert] = slot
        self._free.pop()

    def stage(
        self, tensors: Sequence[Tensor], on_host: Sequence[Tensor], experts: Sequence[int], *mark: int
    ) -> SlotReading:
        """Copies experts, from their slots or the disk, into rows of tensors; why not, if a read fails."""
        views = views_of(on_host)
        with self._disk.lock:
            bump_versions(tensors[:1])  # views of one memory
            try:
                for expert in experts:
                    if (slot := self._slots.get(expert)) is None:
                        self._disk.read(self._layer, expert, views[expert])
                        continue
                    for into, source in zip(views[expert], self._views[slot], strict=True):
                        into[:] = source
            except OSError as error:
                return SlotReading(why=error.strerror or str(error), error=error.errno or 5)
            except ValueError as error:
                return SlotReading(why=str(error))
        return SlotReading()

    def note_layer(self, seconds: float) -> None:
        self._disk.layers += 1


def views_of(tensors: Iterable[Tensor]) -> list[list[memoryview]]:
    """The memory of each row of some tensors [count, ...] on the CPU."""
    whole = [(bytes_of(tensor), len(tensor)) for tensor in tensors]
    return [
        [view[row * len(view) // count : (row + 1) * len(view) // count] for view, count in whole]
        for row in range(whole[0][1])
    ]


def bump_versions(tensors: Iterable[Tensor]) -> None:
    """Tells torch that tensors were written: what was computed from their content is not used any more."""
    increment_version([tensor for tensor in tensors if not tensor.is_inference()])
