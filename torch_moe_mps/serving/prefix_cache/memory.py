"""Cached prefixes in memory: a prompt computes only its new part.

Sequences share what they begin with, such as a system prompt, and the least recently used prefix makes room
for others.
"""

import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from ..._text import first_line
from ...transformers.basics.interface import experts_of, weights_in
from ...transformers.caches.prompt_cache import (
    adapters_of,
    can_be_cut,
    load_with_states,
    prefix,
    save_prompt_cache,
)
from ...transformers.caches.state import storages_of
from ...transformers.checkpoints.quantize.sizes import top_k
from .disk import Disk, Restoring, tensors_of

log = logging.getLogger(__name__)

LONGEST = 1 << 24  # tokens of models that read any number: longer than any window or context
_WORTH = 256  # tokens that are worth a new file
_MOST = 512  # cached prefixes: a new one is compared with each of them
_BETWEEN_PARTS, _BETWEEN_LOOKS = 0.01, 1.0  # seconds: parts of a prompt for the disk; looks at the memory


@dataclass(frozen=True)
class Images:
    """The images of a prompt.

    Args:
        digest: of the tensors that they are given as.
        start, end: of their first token, and behind their last.
        moved: {module: how far the positions of later tokens are moved}, once they are computed.
    """

    digest: str
    start: int
    end: int
    moved: dict[str, Tensor] = field(default_factory=dict, compare=False)


@dataclass(eq=False)
class CachedPrefix:
    """A prompt with what was generated: its tokens [T], their cache, and states for shorter prefixes.

    Attributes:
        number: counts all that were put.
        storages: its memory when it was put, {address: bytes}.
        octets: of these.
        adapters: active when it was computed; None of a file means the active ones.
    """

    ids: Tensor
    cache: DynamicCache
    states: dict[int, dict[int, dict[str, Any]]] = field(default_factory=dict)
    images: Images | None = None
    number: int = 0
    storages: dict[int, int] = field(default_factory=dict)
    octets: int = 0
    adapters: Any = None

    def usable(self, ids: Tensor, images: Images | None = None) -> int:
        """How many tokens another prompt shares, with states for so many; one of it is always computed.

        All of its images are among them, or none is and it has none: models compute the images of a prompt
        together.
        """
        most = min(len(self.ids), len(ids) - 1)
        if images is None and self.images is not None:
            most = min(most, self.images.start)
        different = (self.ids[:most] != ids[:most]).nonzero()
        shared = int(different[0]) if len(different) else most
        if shared != len(self.ids) and not all(map(can_be_cut, self.cache.layers)):
            shared = max((position for position in self.states if position <= shared), default=0)
        return shared if images is None or (images == self.images and shared >= images.end) else 0

    @property
    def tensors(self) -> list[Tensor]:
        return tensors_of(self.cache, self.states)


class PrefixCache:
    """The prefixes that one model has computed, the latest last.

    Args:
        memory: bytes that they may take together; the latest stays in any case.
        file: where `read` and `write` have the latest prompt, if any.
        disk: has what memory has no room for, and all of them behind a restart.
    """

    def __init__(self, memory: int, file: str | None = None, disk: Disk | None = None):
        self.memory, self.kept, self.file, self.disk = memory, list[CachedPrefix](), file, disk
        self.computed = 0  # tokens of prompts that no cached prefix had
        self.put_so_far = 0
        self._is_read = self._is_in_file = False
        self._adapters: Any = ()

    def take(self, ids: Tensor, new: DynamicCache, images: Images | None = None) -> CachedPrefix:
        """The longest cached prefix of a prompt [T]: its caller computes the rest, and puts it back.

        Args:
            new: an empty cache.
            images: of the prompt.
        """
        best = max(reversed(self.kept), key=lambda kept: kept.usable(ids, images), default=None)
        tokens = 0 if best is None else best.usable(ids, images)
        self.computed += len(ids) - tokens
        if best is None or tokens == 0:
            return CachedPrefix(ids[:0], new, adapters=self._adapters)
        whole = tokens == len(best.ids)
        # A part is copied when it is added to: if there is no memory for both, the other is given up.
        if whole or best.octets * 2 > self.memory:
            self.kept.remove(best)
        if whole:
            return best
        states = {position: state for position, state in best.states.items() if position <= tokens}
        seen = None if images is None else best.images
        cache = prefix(best.cache, tokens, best.states)
        return CachedPrefix(best.ids[:tokens], cache, states, seen, adapters=self._adapters)

    def put(self, kept: CachedPrefix) -> None:
        """Caches a prefix, for which those that it begins with and the oldest ones make room before.

        One that was begun with other adapters than the model adds now is not cached.
        """
        if kept.adapters not in (None, self._adapters):
            return
        for layer in kept.cache.layers:
            if getattr(layer, "record_past", False):  # for draft tokens, which are cut off again
                layer.record_past = False
        self.kept = [other for other in self.kept if not _begins(kept, other)]
        del self.kept[: max(0, len(self.kept) + 1 - _MOST)]
        kept.storages = storages_of(kept.tensors)
        kept.octets = sum(kept.storages.values())
        self._give_up(self.memory - kept.octets)
        self.kept.append(kept)
        self.put_so_far += 1
        kept.number = self.put_so_far
        if self.disk is not None and kept.images is None:
            self.disk.note(kept.ids, kept.cache, kept.states)
        self.shrink(self.memory, 1)

    def shrink(self, memory: int, least: int = 0) -> None:
        """Evicts the least recently used prefixes until the rest takes at most so many bytes, or is so few.

        What waits for the disk counts, too.
        """
        self._give_up(memory, least)
        if self.disk is not None:
            self.disk.shrink(
                memory, {place: size for kept in self.kept for place, size in kept.storages.items()}
            )

    @property
    def octets(self) -> int:
        """Bytes of all prefixes; memory that several share counts in each."""
        return sum(kept.octets for kept in self.kept)

    def _give_up(self, memory: int, least: int = 0) -> None:
        octets, first = self.octets, 0
        while len(self.kept) - first > least and octets > memory:
            octets -= self.kept[first].octets
            first += 1
        del self.kept[:first]

    def halve(self) -> None:
        """Evicts the older half of the cached prefixes and the unwritten ones: memory ran out."""
        if self.disk is not None:
            self.disk.forget()
        self.shrink(self.octets // 2)

    def restoring(self, model: Any, inputs: dict[str, Any]) -> Restoring | None:
        """Begins to read what the disk has of a prompt and memory has not; None where that is nothing.

        Args:
            inputs: of the model, on the CPU. Prompts with more than text are not on the disk.
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
        """Caches the prefix that was read."""
        if len(restored.ids):
            self.put(CachedPrefix(restored.ids, restored.cache, adapters=self._adapters))

    def read(self, model: Any) -> None:
        """Reads the file, once, and gives up what was computed with other adapters than the model adds now.

        One that is damaged, is something else, or is of another model is named on stderr and ignored.
        """
        if (adapters := adapters_of(model)) != self._adapters:
            self.kept, self._adapters = [], adapters
        if self.disk is not None:
            self.disk.use(model, adapters)
        if self._is_read:
            return
        self._is_read = True
        if self.file is None:
            return
        try:
            ids, cache, states = load_with_states(self.file, model)
        except FileNotFoundError:
            return
        except (ValueError, OSError) as error:
            print(f"torch-moe-mps: {error}; it is ignored", file=sys.stderr)
            return
        self.put(CachedPrefix(ids[0].cpu(), cache, states))
        self._is_in_file = True

    def write(self, model: Any) -> None:
        """Writes the file, and what the disk has not yet; what fails is named on stderr.

        The file is written unless little of the last prompts was not in it.
        """
        if self.file is not None and self.kept and (self.computed >= _WORTH or not self._is_in_file):
            _write(Path(self.file), model, self.kept[-1])
        if self.disk is not None:
            self.disk.close()

    @property
    def is_storing(self) -> bool:
        """Whether there is something to copy for the disk."""
        return self.disk is not None and self.disk.is_storing

    def store(self, is_short: bool = False) -> None:
        """Copies a part of a prompt for the disk, between two steps.

        Args:
            is_short: whether the system lacks memory: prompts are given up, behind the disk if there is one.
        """
        if self.disk is not None:
            self.disk.store()
        if self.kept and is_short and not self.is_storing:
            self.kept = []
            log.warning("the system is short of memory: the prefix cache in it is given up")
            if torch.backends.mps.is_available():
                torch.mps.empty_cache()

    def pause(self, is_watched: bool) -> float | None:
        """Seconds after which `store` has something to do, though nobody asks; None where it has nothing.

        Args:
            is_watched: whether the system tells when it is short of memory.
        """
        if self.is_storing:
            return _BETWEEN_PARTS
        return _BETWEEN_LOOKS if self.kept and is_watched else None


def _write(file: Path, model: Any, kept: CachedPrefix) -> None:
    try:
        if kept.images is not None:
            raise ValueError("files cache only text, but it has images")
        save_prompt_cache(file, model, kept.ids, kept.cache, kept.states)
    except (ValueError, OSError) as error:
        print(f"torch-moe-mps: the prefix is not cached in {file}: {error}", file=sys.stderr)


def _begins(kept: CachedPrefix, other: CachedPrefix) -> bool:
    """Whether a prompt begins with another, images included."""
    same = other.images in (None, kept.images) and len(other.ids) <= len(kept.ids)
    return same and torch.equal(kept.ids[: len(other.ids)], other.ids)


def prompt_bytes(model: Any, tokens: int) -> int:
    """Bytes of the activations of a layer for so many tokens, at most.

    They are counted as if the inputs and outputs of all matrices of a layer lived at the same time. Those of
    experts have a row for each pair of token and slot; the router's logits and routing weights are float32.

    Raises: ValueError for a model without layers.
    """
    text, count = model.get_decoder(), model.config.get_text_config().num_hidden_layers
    if count < 1:
        raise ValueError(f"the config's num_hidden_layers must be at least 1, got {count}")
    lists = [part for part in text.modules() if isinstance(part, nn.ModuleList) and len(part) == count]
    itemsize = next(model.parameters()).element_size()
    return tokens * max(map(_row, lists[0] if lists else [text])) * itemsize


def _row(layer: nn.Module) -> int:
    """The numbers that a layer computes for a token."""
    experts = experts_of(nn.ModuleList([layer]))
    inside = {id(part) for module in experts.values() for part in module.modules()}
    row = sum(
        module.in_features + module.out_features
        for module in layer.modules()
        if isinstance(module, nn.Linear) and id(module) not in inside
    )
    for module in experts.values():
        matrices = [weight for weight in weights_in(module) if weight.dim() == 3]
        row += top_k(module) * sum(sum(parameter.shape[1:]) for parameter in matrices)
    return row
