"""The processes that follow: each does to its layers' caches what the first process orders."""

import functools
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from ..models.programs import BatchedCache, NotBatchable
from ..serving.engine.executor import call_model, prefill_of, step_of
from ..serving.engine.inputs import images_of
from ..serving.engine.prefill import Prefill, modules_with_rope_deltas
from ..serving.prefix_cache.memory import PrefixCache
from ..transformers.deferrable import deferrable_layers
from . import orders
from .peers import as_bytes
from .running import Running

_FOREVER = 1e9  # seconds


class Follower:
    """The state of a process that follows: its prefills by number, its rows, and its prefix cache."""

    def __init__(self, running: Running):
        self._running, self._model = running, running.model
        self._prefills: dict[int, Prefill] = {}
        self._rows = BatchedCache(self._model)
        self._copy: Any = None
        self._prefix_cache = PrefixCache(sys.maxsize)  # the first process decides what is evicted
        self._rope_modules = modules_with_rope_deltas(self._model)
        self._call = functools.partial(call_model, self._model)

    @torch.no_grad()
    def run(self) -> None:
        """Executes orders until the first process releases this one. A failure ends the pipeline."""
        peers = self._running.peers
        try:
            while self._do(orders.decode(peers.receive(0, "orders", "", _FOREVER))):
                pass
        except BaseException as error:
            peers.failed(error)
            raise

    def _do(self, message: Iterable[orders.CacheOrder]) -> bool:
        """Executes the orders of a message. Returns: False once the first process releases this one."""
        for order in message:
            if isinstance(order, orders.End):
                return False
            HANDLERS[type(order)](self, order)
        return True

    def _start_prefill(self, order: orders.StartPrefill) -> None:
        """Starts a prefill after the cached prefix that the first process found."""
        self._prefills = {n: prefill for n, prefill in self._prefills.items() if n in order.known}
        prefix_cache = None if order.held is None else self._prefix_cache
        if order.held is not None:
            self._evict(order.held)
        images = images_of(self._model, order.inputs)
        how = prefix_cache, images, self._rope_modules, order.reads_whole
        prefill = prefill_of(self._model, order.inputs, *how)
        if len(prefill.cached.ids) != order.cached:
            here = f"{len(prefill.cached.ids)} tokens here, {order.cached} in the first process"
            raise RuntimeError(
                f"moe_mps::pipeline: a prefix must be cached in all processes alike, got {here}"
            )
        self._prefills[order.number] = prefill

    def _chunk(self, order: orders.Chunk) -> None:
        with self._running.without_logits():
            self._prefills[order.number].compute(self._call, order.tokens)

    def _single(self, order: orders.StepSingle) -> None:
        with self._running.without_logits():
            self._prefills[order.number].decode(self._call, order.ids[None], order.start)

    def _step(self, order: orders.Step) -> None:
        ids = order.ids.reshape(len(self._rows), -1).to(self._model.device)
        with self._running.without_logits():
            step_of(self._rows, self._call, ids)

    def _new_rows(self, order: orders.NewRows) -> None:
        """Begins an empty batch; with `defers`, layers that can do so defer updates of their states."""
        self._rows = BatchedCache(self._model, deferrable_layers(self._model) if order.defers else {})

    def _admit(self, order: orders.Admit) -> None:
        prefill, reason = self._prefills[order.number], ""
        try:
            self._rows.admit(prefill.cached.cache, len(prefill.cached.ids), prefill.moved)
        except NotBatchable as error:
            reason = str(error)
        reply = {"reason": reason, "are_states": self._rows.are_states}
        self._running.peers.send(0, "reply", "", [as_bytes(reply)])

    def _unadmit(self, order: orders.Unadmit) -> None:
        if len(self._rows) > order.rows:
            self._rows.finish(order.rows)

    def _finish(self, order: orders.Finish) -> None:
        self._rows.finish(order.row)

    def _alone(self, order: orders.CopyRow) -> None:
        self._copy = self._rows.alone(order.row)

    def _reserve(self, order: orders.Reserve) -> None:
        self._rows.reserve(order.count)

    def _hold(self, order: orders.HoldStates) -> None:
        if self._rows.are_states:  # else their update is deferred, and taken back so
            self._rows.hold()

    def _take_back(self, order: orders.TakeBack) -> None:
        self._rows.take_back(order.counts)

    def _keep(self, order: orders.Keep) -> None:
        prefill = self._prefills[order.number]
        prefix = prefill.cached
        if order.more is not None:
            ids = torch.cat((prefill.ids[0], prefill.ids.new_tensor(order.more)))
            prefix = replace(prefix, ids=ids, cache=self._copy if order.is_copy else prefix.cache)
        self._copy = None
        self._prefix_cache.put(prefix)
        prefix.number = order.kept
        self._evict(order.held)

    def _evict(self, prefix_numbers: list[int]) -> None:
        """Evicts the prefixes that the first process does not hold."""
        self._prefix_cache.kept = [each for each in self._prefix_cache.kept if each.number in prefix_numbers]


# The handler of each kind of order; `End` ends the loop.
HANDLERS: dict[type[orders.CacheOrder], Callable[[Follower, Any], None]] = {
    orders.StartPrefill: Follower._start_prefill,
    orders.Chunk: Follower._chunk,
    orders.StepSingle: Follower._single,
    orders.Step: Follower._step,
    orders.NewRows: Follower._new_rows,
    orders.Admit: Follower._admit,
    orders.Unadmit: Follower._unadmit,
    orders.Finish: Follower._finish,
    orders.CopyRow: Follower._alone,
    orders.Reserve: Follower._reserve,
    orders.HoldStates: Follower._hold,
    orders.TakeBack: Follower._take_back,
    orders.Keep: Follower._keep,
}
