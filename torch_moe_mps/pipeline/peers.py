"""The processes that a model is spread over: messages, time limits, and errors when one fails.

Messages go through a process group of gloo on the CPU. The head of a message gives its kind, the
shapes of its tensors, and the size of the next message between the two processes, so that a token is one
message on each link.
"""

import contextlib
import functools
import itertools
import json
import math
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor

from .._faults import raise_fault
from .._text import first_line
from ..transformers.capture.exchange import ExchangeError

_HEAD = 512  # bytes
_ALIGNED = 16
# For so many seconds, a failing process looks for a reason that another one has given.
_GRACE = 1.5
_COUNT = itertools.count()
_NAMES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class PeerError(ExchangeError):
    """Names the rank of the other process, its host and what happened."""


class Timeouts(NamedTuple):
    """Seconds that a process waits for another: to load a model, and for each 512 tokens of a call."""

    loading: float = 1800.0
    decoding: float = 60.0


class Peers:
    """All processes of the default process group, in the order of their ranks."""

    def __init__(self, timeouts: Timeouts):
        self.timeouts = timeouts
        limit = timedelta(seconds=timeouts.loading)

        def meet() -> Any:
            if not dist.is_initialized():
                dist.init_process_group("gloo", timeout=limit)
            return dist.new_group(backend="gloo", timeout=limit)

        met = within(timeouts.loading, meet)
        if met is None:
            raise PeerError(f"moe_mps: the processes of the pipeline did not meet within {limit}")
        self.group = met[0]
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.hosts = [""] * self.size
        self._number = next(_COUNT)  # the same in all processes
        self._store: Any = dist.distributed_c10d._get_default_store()
        self._broken: str | None = None
        self._on_the_way: dict[int, list[tuple[Any, Tensor]]] = {rank: [] for rank in range(self.size)}
        self._first = {}, {}  # type: tuple[dict[int, int], dict[int, int]]
        _ALIVE.add(self)
        _tell_of_exceptions()
        self.hosts = [facts["host"] for facts in self.gather({"host": socket.gethostname()})]

    def name(self, rank: int) -> str:
        return f"rank {rank} ({self.hosts[rank] or 'host unknown'})"

    def gather(self, facts: dict[str, Any]) -> list[dict[str, Any]]:
        """The facts of all processes."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        for rank in others:
            self.send(rank, "facts", "", [as_bytes(facts)])
        result = [facts] * self.size
        for rank in others:
            (tensor,) = self.receive(rank, "facts", "", self.timeouts.loading)
            result[rank] = from_bytes(tensor)
        for rank in others:
            self.flush(rank, self.timeouts.loading)
        return result

    def send(
        self, to: int, kind: str, call: str, values: Sequence[Tensor | None], limit: float | None = None
    ) -> None:
        """Sends a message asynchronously, after the previous one was sent.

        Args:
            kind, call: of the message, and the arguments of the model's call.
            values: tensors, or None for an absent one.
        """
        self._check()
        self.flush(to, limit)
        tensors = [None if value is None else on_the_host(value) for value in values]
        sizes = [0 if t is None else _rounded(t.nbytes) for t in tensors]
        first = self._first[0].get(to, _HEAD)
        following = _HEAD + _rounded(math.ceil(sum(sizes) / _length(tensors)))
        head = {
            "kind": kind,
            "call": call,
            "next": following,
            "tensors": [None if t is None else [str(t.dtype), [*t.shape]] for t in tensors],
        }
        data = as_bytes(head)
        if len(data) > _HEAD:
            raise ValueError(f"moe_mps::pipeline: a layer must return fewer tensors, got {len(tensors)}")
        whole = torch.zeros(max(first, _HEAD + sum(sizes)), dtype=torch.uint8, device="cpu")
        whole[: len(data)] = data
        for tensor, part in zip(tensors, _parts(whole, sizes), strict=True):
            if tensor is not None and tensor.numel():
                part[: tensor.nbytes] = tensor.view(-1).view(torch.uint8)
        for part in (whole[:first], whole[first:]):
            if part.numel():
                with self._blames(to, limit or self.timeouts.decoding):
                    self._on_the_way[to].append((dist.isend(part, to, group=self.group), part))
        self._first[0][to] = following

    def flush(self, to: int, limit: float | None = None) -> None:
        """Waits until what was sent to a process has gone."""
        limit = limit or self.timeouts.decoding
        for work, _ in self._on_the_way[to]:
            with self._blames(to, limit):
                work.wait(timedelta(seconds=limit))
        self._on_the_way[to].clear()

    def receive(self, source: int, kind: str, call: str, limit: float) -> list[Tensor | None]:
        """The tensors of a process's next message, which must be of this kind and about the same call.

        Raises: PeerError.
        """
        self._check()
        first = self._first[1].get(source, _HEAD)
        data = self._receive_bytes(source, first, limit)
        head = from_bytes(data[:_HEAD])
        specs = [None if s is None else (_NAMES[s[0]], s[1]) for s in head["tensors"]]
        sizes = [0 if s is None else _rounded(math.prod(s[1]) * s[0].itemsize) for s in specs]
        if _HEAD + sum(sizes) > first:
            data = torch.cat([data, self._receive_bytes(source, _HEAD + sum(sizes) - first, limit)])
        self._first[1][source] = head["next"]
        if head["kind"] != kind:
            self._differ(source, f"sent {head['kind']} where {self.name(self.rank)} expected {kind}")
        if head["call"] != call:
            self._differ(source, f"was called with other inputs than {self.name(self.rank)}")
        return [
            None if s is None else part[: math.prod(s[1]) * s[0].itemsize].view(s[0]).view(s[1])
            for s, part in zip(specs, _parts(data, sizes), strict=True)
        ]

    def _check(self) -> None:
        if self._broken is not None:
            raise PeerError(f"moe_mps: the pipeline has ended, load the model again ({self._broken})")

    def _receive_bytes(self, source: int, count: int, limit: float) -> Tensor:
        data = torch.empty(count, dtype=torch.uint8, device="cpu")
        with self._blames(source, limit):
            # No variable: a traceback would hold the work, and that the connection, which `failed` closes.
            cast(Any, dist.irecv(data, source, group=self.group)).wait(timedelta(seconds=limit))
        return data

    def _differ(self, rank: int, what: str) -> NoReturn:
        raise PeerError(
            f"moe_mps: {self.name(rank)} {what}: call the model in every process, with the same inputs, "
            "options and, to sample, the same seed"
        )

    @contextlib.contextmanager
    def _blames(self, rank: int, limit: float) -> Iterator[None]:
        """Turns an error of gloo into one line about the process that caused it."""
        began = time.monotonic()
        try:
            yield
        except (RuntimeError, ValueError) as error:
            late = time.monotonic() - began >= limit
            what = f"did not answer within {limit:g} s" if late else "closed its connection"
            raise PeerError(self._reason(rank, what, late)) from error

    def _reason(self, rank: int, what: str, late: bool) -> str:
        """Finds the process that failed first, since others may only have waited for it.

        If two blame each other, the late one counts: the other closed the connection because of it.
        """
        self._tell("waits", json.dumps([rank, what, late]))
        seen, until = {self.rank}, time.monotonic() + _GRACE
        while time.monotonic() < until:
            raised, waits = self._told("raised", rank), self._told("waits", rank)
            if self._store is None and 0 not in seen:  # the first process has it, or torchrun on its host
                return f"moe_mps: {self.name(0)} {what if rank == 0 else 'does not answer'}"
            if raised is not None:
                return raised if raised.startswith("moe_mps: ") else f"moe_mps: {self.name(rank)} {raised}"
            if waits is not None:
                seen.add(rank)
                other, of_other, was_late = json.loads(waits)
                if other not in seen or (was_late and not late):
                    rank, what, late = other, of_other, was_late
                if other in seen:
                    break
            time.sleep(0.05)
        return f"moe_mps: {self.name(rank)} {what}"

    def failed(self, error: BaseException) -> None:
        """Tells the others why this process fails, and ends the connections to them."""
        if self._broken is not None:
            return
        line = first_line(error)
        is_peer = isinstance(error, PeerError)
        self._broken = line if is_peer else f"raised {type(error).__name__}: {line}".rstrip(": ")
        if not is_peer or self._told("waits", self.rank) is None:  # else the reason lies elsewhere
            self._tell("raised", self._broken)
        with contextlib.suppress(RuntimeError, ValueError):
            dist.destroy_process_group(self.group)
        self.group = None
        self._on_the_way.clear()
        self._tell("ended", "")
        if self.rank == 0:
            self._outlast_others()

    def _outlast_others(self) -> None:
        """Waits until the others have read why this process fails: their store may end with it."""
        others, until = range(1, self.size), time.monotonic() + _GRACE
        while any(self._told("ended", rank) is None for rank in others):
            if self._store is None or time.monotonic() >= until:
                return
            time.sleep(0.05)

    def _tell(self, what: str, text: str) -> None:
        self._ask(lambda store: store.set(f"moe_mps/{self._number}/{what}/{self.rank}", text))

    def _told(self, what: str, rank: int) -> str | None:
        key = f"moe_mps/{self._number}/{what}/{rank}"
        return self._ask(lambda store: store.get(key).decode() if store.check([key]) else None)

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        """The store's answer; None from the moment on when its process is stopped or has ended."""
        store, answers = self._store, None
        if store is not None:
            with contextlib.suppress(RuntimeError):
                answers = within(_GRACE, lambda: question(store))
            if answers is None:
                self._store = None
        return answers and answers[0]


def within(seconds: float, function: Callable[[], Any]) -> list[Any] | None:
    """[The result] of a function that torch may let wait for ever; None if it takes longer."""
    results: list[Any] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(function())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    return results or None


def on_the_host(tensor: Tensor) -> Tensor:
    """The elements on the CPU, one behind the other: a mask or a row of one column may have other strides."""
    host = tensor.detach().cpu()
    raise_fault()
    if type(host) is not Tensor or host.stride()[-1:] != (1,):
        return host.clone(memory_format=torch.contiguous_format)
    return host.contiguous()


def as_bytes(value: Any) -> Tensor:
    """A value of JSON as a tensor for a message."""
    return torch.frombuffer(bytearray(json.dumps(value, separators=(",", ":")).encode()), dtype=torch.uint8)


def from_bytes(data: Tensor | None) -> Any:
    assert data is not None
    return json.loads(bytes(data.tolist()).rstrip(b"\0"))


def _parts(message: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    """Bytes of each tensor of a message, after its head."""
    return message[_HEAD : _HEAD + sum(sizes)].split(sizes)


def _rounded(size: int) -> int:
    return (size + _ALIGNED - 1) // _ALIGNED * _ALIGNED


def _length(tensors: Sequence[Tensor | None]) -> int:
    """The number of tokens in tensors: their second dimension."""
    return max((t.shape[1] for t in tensors if t is not None and t.dim() > 1), default=1) or 1


_ALIVE: "weakref.WeakSet[Peers]" = weakref.WeakSet()


def tell(error: BaseException) -> None:
    """Tells the processes of all pipelines why this one ends."""
    for peers in _ALIVE:
        peers.failed(error)


@functools.cache
def _tell_of_exceptions() -> None:
    """An exception that ends this process is told to the others."""
    before = sys.excepthook

    def hook(kind: Any, error: BaseException, trace: Any) -> None:
        tell(error)
        before(kind, error, trace)

    sys.excepthook = hook
