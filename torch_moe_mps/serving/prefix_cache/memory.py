"""Prefix cache in memory: a prompt computes only the part after its longest cached prefix.

Sequences share common prefixes, such as a system prompt. The least recently used prefix is evicted first.
"""

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ..._faults import release_cache
from ..._text import first_line
from ...models.programs import PrefixState, adapters_of
from .disk import Disk, Restoring

log = logging.getLogger(__name__)

LONGEST = 1 << 24  # tokens of models that read any number: longer than any window or context
_MOST = 512  # cached prefixes: a new one is compared with each of them
_BETWEEN_PARTS, _BETWEEN_LOOKS = 0.01, 1.0  # seconds: parts of a prompt for the disk; looks at the memory


@dataclass(frozen=True)
class Images:
    """Images of a prompt.

    Args:
        digest: of their input tensors.
        start, end: token range that they cover.
        moved: {module: M-RoPE offset of later positions}, once computed.
    """

    digest: str
    start: int
    end: int
    moved: dict[str, Tensor] = field(default_factory=dict, compare=False)


@dataclass(eq=False)
class CachedPrefix(PrefixState):
    """A cached prefix: its tokens [T], their KV cache, and recurrent states at shorter prefixes.

    Attributes:
        number: sequence number of its insertion.
        storages: {address: bytes} of its tensors at insertion.
        nbytes: their total size.
        adapters: active adapters when it was computed; None for a drafter's, which have none.
    """

    ids: Tensor
    cache: DynamicCache
    states: dict[int, dict[int, dict[str, Any]]] = field(default_factory=dict)
    images: Images | None = None
    number: int = 0
    storages: dict[int, int] = field(default_factory=dict)
    nbytes: int = 0
    adapters: Any = None

    def usable(self, ids: Tensor, images: Images | None = None) -> int:
        """Number of tokens that a prompt can reuse; at least one of its tokens is left to compute.

        Reused tokens include all images of the prompt or none, because models compute images together.
        """
        limit = min(len(self.ids), len(ids) - 1)
        if images is None and self.images is not None:
            limit = min(limit, self.images.start)
        different = (self.ids[:limit] != ids[:limit]).nonzero()
        shared = int(different[0]) if len(different) else limit
        if shared != len(self.ids):
            shared = self.longest(shared)
        return shared if images is None or (images == self.images and shared >= images.end) else 0


class PrefixCache:
    """Prefix cache of one model, in order of insertion.

    Args:
        memory: capacity in bytes; the latest prefix always stays.
        disk: second tier, which survives a restart.
    """

    def __init__(self, memory: int, disk: Disk | None = None):
        self.memory, self.kept, self.disk = memory, list[CachedPrefix](), disk
        self.put_so_far = 0
        self._adapters: Any = ()

    def take(self, ids: Tensor, new: DynamicCache, images: Images | None = None) -> CachedPrefix:
        """Longest cached prefix of a prompt [T]. The caller computes the rest and puts the result back.

        Args:
            new: an empty cache.
            images: of the prompt.
        """
        best = max(reversed(self.kept), key=lambda kept: kept.usable(ids, images), default=None)
        tokens = 0 if best is None else best.usable(ids, images)
        if best is None or tokens == 0:
            return CachedPrefix(ids[:0], new, adapters=self._adapters)
        whole = tokens == len(best.ids)
        # A part is copied when it is added to: if there is no memory for both, the other is given up.
        if whole or best.nbytes * 2 > self.memory:
            self.kept.remove(best)
        if whole:
            return best
        seen, cut = None if images is None else best.images, best.cut(tokens)
        return CachedPrefix(best.ids[:tokens], cut.cache, cut.states, seen, adapters=self._adapters)

    def put(self, kept: CachedPrefix) -> None:
        """Inserts a prefix, replacing its own prefixes and evicting the oldest ones as needed.

        A prefix computed with other than the current adapters is not cached.
        """
        if kept.adapters not in (None, self._adapters):
            return
        for layer in kept.cache.layers:
            if getattr(layer, "record_past", False):  # for draft tokens, which are cut off again
                layer.record_past = False
        self.kept = [other for other in self.kept if not _begins(kept, other)]
        del self.kept[: max(0, len(self.kept) + 1 - _MOST)]
        kept.storages = kept.count_storages()
        kept.nbytes = sum(kept.storages.values())
        self._give_up(self.memory - kept.nbytes)
        self.kept.append(kept)
        self.put_so_far += 1
        kept.number = self.put_so_far
        if self.disk is not None and kept.images is None:
            self.disk.note(kept.ids, kept)
        self.shrink(self.memory, 1)

    def shrink(self, memory: int, least: int = 0) -> None:
        """Evicts the least recently used prefixes until at most `memory` bytes or `least` prefixes remain.

        Prefixes queued for the disk count, too.
        """
        self._give_up(memory, least)
        if self.disk is not None:
            self.disk.shrink(
                memory, {place: size for kept in self.kept for place, size in kept.storages.items()}
            )

    @property
    def nbytes(self) -> int:
        """Bytes of all prefixes; shared storage counts for each of them."""
        return sum(kept.nbytes for kept in self.kept)

    def _give_up(self, memory: int, least: int = 0) -> None:
        total, first = self.nbytes, 0
        while len(self.kept) - first > least and total > memory:
            total -= self.kept[first].nbytes
            first += 1
        del self.kept[:first]

    def halve(self) -> None:
        """Evicts the older half of the cached prefixes, and those queued for the disk."""
        if self.disk is not None:
            self.disk.forget()
        self.shrink(self.nbytes // 2)

    def restoring(self, model: Any, inputs: dict[str, Any]) -> Restoring | None:
        """Starts reading a prompt's prefix from the disk; None if the disk has no longer one than memory.

        Args:
            inputs: of the model, on the CPU. Prompts with images or audio are not on the disk.
        """
        if self.disk is None or {*inputs} - {"input_ids", "attention_mask"}:
            return None
        self.read(model)
        ids = inputs["input_ids"][0]
        try:
            return self.disk.find(model, ids, max((kept.usable(ids) for kept in self.kept), default=0))
        except Exception as error:  # the prompt is computed
            log.warning("no prompt is read from %s: %s", self.disk.files.folder, first_line(error))
            return None

    def take_back(self, restored: Restoring) -> None:
        """Inserts a prefix that was read from the disk."""
        if len(restored.ids):
            self.put(CachedPrefix(restored.ids, restored.cache, adapters=self._adapters))

    def read(self, model: Any) -> None:
        """Selects the model, and drops prefixes computed with other than its current adapters."""
        if (adapters := adapters_of(model)) != self._adapters:
            self.kept, self._adapters = [], adapters
        if self.disk is not None:
            self.disk.use(model, adapters)

    def close(self) -> None:
        """Writes the prefixes queued for the disk; failures are reported on stderr."""
        if self.disk is not None:
            self.disk.close()

    @property
    def is_storing(self) -> bool:
        """True if prefixes are queued for the disk."""
        return self.disk is not None and self.disk.is_storing

    def store(self, is_short: bool = False) -> None:
        """Copies the next part of a queued prefix for the disk. Called between steps.

        Args:
            is_short: True under memory pressure: prefixes are dropped once the disk has them.
        """
        if self.disk is not None:
            self.disk.store()
        if self.kept and is_short and not self.is_storing:
            self.kept = []
            log.warning("the system is short of memory: the prefix cache in it is given up")
            release_cache()

    def pause(self, is_watched: bool) -> float | None:
        """Seconds until `store` should be called by an idle thread; None if it has nothing to do.

        Args:
            is_watched: True if the system reports memory pressure.
        """
        if self.is_storing:
            return _BETWEEN_PARTS
        return _BETWEEN_LOOKS if self.kept and is_watched else None


def _begins(kept: CachedPrefix, other: CachedPrefix) -> bool:
    """True if a prefix starts with another one, images included."""
    same = other.images in (None, kept.images) and len(other.ids) <= len(kept.ids)
    return same and torch.equal(kept.ids[: len(other.ids)], other.ids)
