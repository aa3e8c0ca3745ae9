"""The processes that follow: each does to its layers' caches what the first process orders."""

import functools
import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..serving.engine.executor import call_model, prefill_of, step_of
from ..serving.engine.inputs import images_of
from ..serving.engine.prefill import Prefill, turning
from ..serving.prefix_cache.memory import PrefixCache
from ..transformers.caches.batched import BatchedCache, NotBatchable
from ..transformers.deferrable import deferrable_layers
from .peers import as_bytes, from_bytes
from .running import Running

_FOREVER = 1e9  # seconds


class Following:
    """The state of a process that follows: its prefills by number, its rows, and its prefix cache."""

    def __init__(self, running: Running):
        self._running, self._model = running, running.model
        self._prefills: dict[int, Prefill] = {}
        self._rows = BatchedCache(self._model)
        self._copy: Any = None
        self._prefix_cache = PrefixCache(sys.maxsize)  # the first process decides what is evicted
        self._turning, self._call = turning(self._model), functools.partial(call_model, self._model)

    @torch.no_grad()
    def run(self) -> None:
        """Executes orders until the first process releases this one. A failure ends the pipeline."""
        peers = self._running.peers
        try:
            while self._do(*peers.receive(0, "orders", "", _FOREVER)):
                pass
        except BaseException as error:
            peers.failed(error)
            raise

    def _do(self, orders: Tensor | None, *values: Tensor | None) -> bool:
        """Does what a message orders. Returns: whether to go on."""
        tensors = iter(values)
        for order in from_bytes(orders):
            if (do := order.pop("do")) == "end":
                return False
            given = {name: next(tensors) for name in order.pop("tensors")}
            getattr(self, f"_{do}")(given, **order)
        return True

    def _begin(
        self,
        inputs: dict[str, Tensor],
        number: int,
        known: list[int],
        held: list[int] | None,
        cached: int,
        reads_whole: bool,
    ) -> None:
        self._prefills = {n: prefill for n, prefill in self._prefills.items() if n in known}
        if held is not None:
            self._evict(held)
        images, prefix_cache = images_of(self._model, inputs), None if held is None else self._prefix_cache
        prefill = prefill_of(self._model, inputs, prefix_cache, images, self._turning, reads_whole)
        if len(prefill.cached.ids) != cached:
            here = f"{len(prefill.cached.ids)} tokens here, {cached} in the first process"
            raise RuntimeError(
                f"moe_mps::pipeline: a prefix must be cached in all processes alike, got {here}"
            )
        self._prefills[number] = prefill

    def _chunk(self, tensors: dict[str, Tensor], number: int, tokens: int) -> None:
        with self._running.without_logits():
            self._prefills[number].compute(self._call, tokens)

    def _single(self, tensors: dict[str, Tensor], number: int, start: int) -> None:
        with self._running.without_logits():
            self._prefills[number].decode(self._call, tensors["ids"][None], start)

    def _step(self, tensors: dict[str, Tensor]) -> None:
        ids = tensors["ids"].reshape(len(self._rows), -1).to(self._model.device)
        with self._running.without_logits():
            step_of(self._rows, self._call, ids)

    def _new_rows(self, tensors: dict[str, Tensor], defers: bool) -> None:
        self._rows = BatchedCache(self._model, deferrable_layers(self._model) if defers else {})

    def _admit(self, tensors: dict[str, Tensor], number: int) -> None:
        prefill, reason = self._prefills[number], ""
        try:
            self._rows.admit(prefill.cached.cache, len(prefill.cached.ids), prefill.moved)
        except NotBatchable as error:
            reason = str(error)
        reply = {"reason": reason, "are_states": self._rows.are_states}
        self._running.peers.send(0, "reply", "", [as_bytes(reply)])

    def _unadmit(self, tensors: dict[str, Tensor], rows: int) -> None:
        if len(self._rows) > rows:
            self._rows.finish(rows)

    def _finish(self, tensors: dict[str, Tensor], row: int) -> None:
        self._rows.finish(row)

    def _alone(self, tensors: dict[str, Tensor], row: int) -> None:
        self._copy = self._rows.alone(row)

    def _reserve(self, tensors: dict[str, Tensor], count: int) -> None:
        self._rows.reserve(count)

    def _hold(self, tensors: dict[str, Tensor]) -> None:
        if self._rows.are_states:  # else their update is deferred, and taken back so
            self._rows.hold()

    def _take_back(self, tensors: dict[str, Tensor], counts: list[int]) -> None:
        self._rows.take_back(counts)

    def _keep(
        self,
        tensors: dict[str, Tensor],
        number: int,
        kept: int,
        more: list[int] | None,
        is_copy: bool,
        held: list[int],
    ) -> None:
        prefill = self._prefills[number]
        prefix = prefill.cached
        if more is not None:
            ids = torch.cat((prefill.ids[0], prefill.ids.new_tensor(more)))
            prefix = replace(prefix, ids=ids, cache=self._copy if is_copy else prefix.cache)
        self._copy = None
        self._prefix_cache.put(prefix)
        prefix.number = kept
        self._evict(held)

    def _evict(self, held: list[int]) -> None:
        """Evicts the prefixes that the first process does not hold."""
        self._prefix_cache.kept = [each for each in self._prefix_cache.kept if each.number in held]
