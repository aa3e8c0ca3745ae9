"""The processes that a model is spread over: messages, time limits, and errors when one fails.

Messages go through a process group of gloo on the CPU. The head of a message gives its kind, the
shapes of its tensors, and the size of the next message between the two processes, so that a token is one
message on each link.
"""

import contextlib
import json
import math
import socket
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor

from .._faults import raise_fault
from .._text import first_line
from ..models.programs import ExchangeError

_HEAD = 512  # bytes
_ALIGNED = 16
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
        try:
            if not dist.is_initialized():
                dist.init_process_group("gloo", timeout=limit)
            self.group = dist.new_group(backend="gloo", timeout=limit)
        except RuntimeError as error:
            line = first_line(error)
            raise PeerError(f"moe_mps: the processes of the pipeline did not meet: {line}") from error
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.hosts = [""] * self.size
        self._broken: str | None = None
        self._on_the_way: dict[int, list[tuple[Any, Tensor]]] = {rank: [] for rank in range(self.size)}
        self._first = {}, {}  # type: tuple[dict[int, int], dict[int, int]]
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
            raise ValueError(
                f"moe_mps::pipeline: {kind} must be tensors that {_HEAD} bytes describe, got {len(tensors)} "
                f"tensors in {len(data)} bytes: run this model in one process"
            )
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
        """Turns an error of gloo into one line about the process that it waited for."""
        began = time.monotonic()
        try:
            yield
        except (RuntimeError, ValueError) as error:
            late = time.monotonic() - began >= limit
            what = f"did not answer within {limit:g} s" if late else "closed its connection"
            raise PeerError(f"moe_mps: {self.name(rank)} {what}") from error

    def failed(self, error: BaseException) -> None:
        """Ends the connections to the others, whose next message fails then."""
        if self._broken is None:
            self._broken = first_line(error) or type(error).__name__
            self._on_the_way.clear()
            with contextlib.suppress(RuntimeError, ValueError):
                dist.destroy_process_group(self.group)
            self.group = None


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
