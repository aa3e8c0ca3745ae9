"""The executor of a model that is spread over processes: the engine runs in the first one, the others follow.

Each process has the caches of its own layers, and all change them alike. The first one does to its own what
the engine wants, and queues an order. Orders go out with the next call of the model, so that a step is one
message to each process: see `following` for what they do there.
"""

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from ..models.programs import BatchedCache, NotBatchable, UntrackedState
from ..serving.engine.abilities import Abilities
from ..serving.engine.drafts import Drafts
from ..serving.engine.executor import Executor
from ..serving.engine.groups import Group, Single
from ..serving.engine.prefill import Prefill
from ..serving.prefix_cache.memory import CachedPrefix, Images, PrefixCache
from . import orders
from .peers import PeerError, from_bytes
from .running import Running

_LEADERS: "list[Leader]" = []


class Leader(UntrackedState):
    """Tells the other processes what to do: one for each model.

    Attributes:
        room: bytes of sequences here with which no process has more than it has memory for.
    """

    def __init__(self, running: Running):
        self.running, self._orders = running, list[orders.CacheOrder]()
        self._numbers: weakref.WeakKeyDictionary[Prefill, int] = weakref.WeakKeyDictionary()
        self._count = itertools.count(1)
        layers = len(running.stage.own)
        self.room = min(part["free"] * layers // part["layers"] for part in running.parts)
        _LEADERS.append(self)

    def queue(self, order: orders.CacheOrder) -> None:
        """Queues an order, which is sent with the next call."""
        self._orders.append(order)

    def send(self) -> None:
        """Sends the queued orders."""
        values, self._orders = orders.encode(self._orders), []
        for rank in range(1, self.running.peers.size):
            self.running.peers.send(rank, "orders", "", values)

    def replies(self) -> list[Any]:
        """Sends the queued orders. Returns: each process's reply to the last one."""
        self.send()
        peers = self.running.peers
        limit = self.running.exchange.limit(1)
        return [from_bytes(*peers.receive(rank, "reply", "", limit)) for rank in range(1, peers.size)]

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Block with a call of the model, which begins with the orders. The others need nothing back; a
        failure ends the pipeline.
        """
        try:
            self.send()
            with self.running.without_logits():
                yield
        except BaseException as error:
            self.running.peers.failed(error)
            raise

    def begun(
        self, prefill: Prefill, inputs: dict[str, Tensor], prefix_numbers: list[int] | None, reads_whole: bool
    ) -> None:
        """Registers a new prefill, and drops ended ones."""
        number = self._numbers[prefill] = next(self._count)
        known, cached = sorted(self._numbers.values()), len(prefill.cached.ids)
        self.queue(orders.StartPrefill(inputs, number, known, prefix_numbers, cached, reads_whole))

    def number(self, prefill: Prefill) -> int:
        return self._numbers[prefill]

    def number_of(self, cache: Any) -> int:
        """The number of the prefill that has a cache: the latest one, if several went on with it."""
        return max(n for prefill, n in self._numbers.items() if prefill.cached.cache is cache)

    def end(self) -> None:
        """Lets the others go."""
        self.queue(orders.End())
        with contextlib.suppress(PeerError):
            self.send()
            for rank in range(1, self.running.peers.size):
                self.running.peers.flush(rank)  # this process may end now


def lead(model: Any) -> None:
    """Lets an engine in this process, the first one, generate with all."""
    model.pipeline.executor = functools.partial(PipelineExecutor, Leader(model.pipeline))


def end_all() -> None:
    """Lets the processes go that follow this one."""
    while _LEADERS:
        _LEADERS.pop().end()


class LeadingRows(BatchedCache):
    """Rows of the layers here. The other processes change theirs alike."""

    def __init__(self, leader: Leader, model: Any, deferrable: Mapping[int, Any]):
        super().__init__(model, deferrable)
        self._leader, self._has_states, self._others_have = leader, False, False

    @property
    def are_states(self) -> bool:
        """True if layers of any process have such states."""
        return self._has_states or self._others_have

    @are_states.setter
    def are_states(self, value: bool) -> None:
        self._has_states = value

    def admit(self, cache: Any, tokens: int, moved: int = 0) -> None:
        super().admit(cache, tokens, moved)
        self._leader.queue(orders.Admit(self._leader.number_of(cache)))
        replies = self._leader.replies()
        self._others_have = any(each["are_states"] for each in replies)
        if reason := next(filter(None, (each["reason"] for each in replies)), None):
            super().finish(len(self) - 1)
            self._leader.queue(orders.Unadmit(len(self)))
            raise NotBatchable(reason)

    def finish(self, row: int) -> None:
        super().finish(row)
        self._leader.queue(orders.Finish(row))

    def alone(self, row: int) -> Any:
        copy = super().alone(row)
        self._leader.queue(orders.CopyRow(row))
        return copy

    def reserve(self, tokens: int) -> None:
        if self.is_full(tokens):
            self._leader.queue(orders.Reserve(tokens))
        super().reserve(tokens)

    def hold(self) -> None:
        if self._has_states:  # else those of others are held
            super().hold()
        self._leader.queue(orders.HoldStates())

    def take_back(self, tokens: Any) -> None:
        super().take_back(tokens)
        self._leader.queue(orders.TakeBack([*tokens]))


class PipelineExecutor(Executor):
    """Computes the steps of sequences in all processes."""

    def __init__(
        self, leader: Leader, model: Any, abilities: Abilities, states: Callable[[], tuple[int, ...]]
    ):
        super().__init__(model, abilities, states)
        self._leader = leader

    def room(self, memory: int | None) -> int | None:
        return None if memory is None else min(memory, self._leader.room)

    def rows(self, drafts: Drafts) -> BatchedCache:
        self._leader.queue(orders.NewRows(drafts.drafting is not None))
        return LeadingRows(self._leader, self._model, drafts.deferrable)

    def prefill(self, prefill: Prefill, chunk: int, beside: Callable[[], None]) -> Any:
        """The next chunk of a prompt. `beside` is not called: the others are inside of the same call."""
        self._leader.queue(orders.Chunk(self._leader.number(prefill), chunk))
        with self._leader.calling():
            return prefill.compute(self._call, chunk)

    def step(self, group: Group, ids: Tensor) -> Any:
        tokens = ids.cpu().reshape(-1)
        if isinstance(group, Single):
            number = self._leader.number(group.prefill)
            self._leader.queue(orders.StepSingle(tokens, number, group.lengths[0]))
        else:
            self._leader.queue(orders.Step(tokens))
        with self._leader.calling():
            return super().step(group, ids)

    def keep(self, prefill: Prefill, prefix: CachedPrefix) -> None:
        super().keep(prefill, prefix)
        more = None if prefix is prefill.cached else prefix.ids[prefill.ids.shape[1] :].tolist()
        is_copy, prefix_numbers = prefix.cache is not prefill.cached.cache, _numbers(prefill.prefix_cache)
        self._leader.queue(
            orders.Keep(self._leader.number(prefill), prefix.number, more, is_copy, prefix_numbers)
        )

    def _begun(
        self, inputs: Mapping[str, Tensor], prefix_cache: PrefixCache | None, images: Images | None = None
    ) -> Prefill:
        prefix_numbers = None if prefix_cache is None else _numbers(prefix_cache)
        prefill = super()._begun(inputs, prefix_cache, images)
        tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        self._leader.begun(prefill, tensors, prefix_numbers, self._abilities.reads_whole)
        return prefill


def _numbers(prefix_cache: PrefixCache | None) -> list[int]:
    """The numbers of the prefixes that are cached."""
    return [] if prefix_cache is None else [prefix.number for prefix in prefix_cache.kept]
