"""Bodies of requests: their limits, their JSON, and the threads on which requests are read.

Requests that wait for a thread hold none, so no client keeps others out. One client address has a bounded
number of requests in reading; more are told to come again.
"""

import asyncio
import contextlib
import contextvars
import ctypes
import ipaddress
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar

import msgspec
from starlette.requests import Request as Asked

from ..._text import first_line
from . import limits
from .limited import BESIDE
from .request import Refused, read_json

T = TypeVar("T")
_DROPPED = 8  # times as many bytes, at most, of a body that is read and dropped
MOST_OF_CLIENT = 32  # requests of one address that are read, or wait for it
_AT_ONCE = 2  # at a time of one client, on threads of one kind
_RETRY_AFTER, _DRAINS = 1, 5.0  # seconds; the latter for the body of a request that is refused
_SECONDS = 30.0  # for one request on a thread, at most


Kind = Literal["short", "long", "grammar"]


def kind_of(size: int) -> Kind:
    """The kind of thread on which a body of so many bytes is read."""
    return "short" if size <= limits.SHORT_BYTES else "long"


class Reading:
    """Threads that read requests, and who waits for them.

    Short bodies have threads of their own, so that they wait for no long one, and so have grammars, whose
    compilation may take seconds.
    """

    def __init__(self) -> None:
        counts: dict[Kind, int] = {"short": 4, "long": BESIDE, "grammar": 8}
        self.pools = {kind: ThreadPoolExecutor(count, f"reader-{kind}") for kind, count in counts.items()}
        self.clients = dict[str, Client]()

    @contextlib.asynccontextmanager
    async def place(self, asked: Asked) -> AsyncIterator["Client"]:
        """Block that reads a request. Raises: Refused with status 429 for too many from one address."""
        address = client_of(asked.client.host if asked.client is not None else "")
        client = self.clients.setdefault(address, Client(self.pools))
        if client.requests >= MOST_OF_CLIENT:
            with contextlib.suppress(Refused, TimeoutError):
                await asyncio.wait_for(body_of(asked, 0), _DRAINS)
            message = f"This address has {MOST_OF_CLIENT} requests in reading: ask again in {_RETRY_AFTER} s."
            raise Refused(message, None, "too_many_requests", 429, _RETRY_AFTER)
        client.requests += 1
        try:
            yield client
        finally:
            client.requests -= 1
            if not client.requests:
                del self.clients[address]


class Client:
    """An address whose requests are read: few of them at a time, so that those of others wait for no more.

    Attributes:
        requests: that are read, or wait for it.
    """

    def __init__(self, pools: dict[Kind, ThreadPoolExecutor]):
        self.requests, self._pools = 0, pools
        self._turns = {kind: asyncio.Semaphore(_AT_ONCE) for kind in pools}

    async def run(self, kind: Kind, function: Callable[..., T], *arguments: Any) -> T:
        """Result of a function, called on a thread of that kind. It is interrupted when the client leaves.

        Raises: Refused where it takes too long.
        """
        context = contextvars.copy_context()  # the log names the request
        work = _Work(lambda: context.run(function, *arguments))
        async with self._turns[kind]:
            future = asyncio.get_running_loop().run_in_executor(self._pools[kind], work)
            try:
                return await asyncio.wait_for(future, _SECONDS)
            except TimeoutError:
                message = f"A request must be read in {_SECONDS:.0f} s, got one that takes longer."
                raise Refused(message, None, "invalid_value") from None
            finally:
                work.interrupt()


class _Interrupted(BaseException):
    """Nobody waits for the work any more."""


class _Work:
    """A call of a function that another thread may interrupt, between two steps of the interpreter."""

    def __init__(self, function: Callable[[], Any]):
        self._function, self._lock = function, threading.Lock()
        self._thread: int | None = None  # the one that calls it
        self._is_over = False

    def __call__(self) -> Any:
        with self._lock:
            if self._is_over:
                raise _Interrupted
            self._thread = threading.get_ident()
        try:
            return self._function()
        finally:
            with self._lock:
                self._raise(None)  # an exception that comes too late
                self._thread = None

    def interrupt(self) -> None:
        with self._lock:
            self._is_over = True
            self._raise(_Interrupted)

    def _raise(self, kind: type[BaseException] | None) -> None:
        if self._thread is not None:
            raised = None if kind is None else ctypes.py_object(kind)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), raised)


def client_of(address: str) -> str:
    """The address that a client is counted by: of IPv6 its network of 64 bits: a host has all of it."""
    try:
        place = ipaddress.ip_address(address)
    except ValueError:  # a Unix socket, or the name that a proxy gives
        return address
    if isinstance(place, ipaddress.IPv4Address) or place.is_link_local:  # one link shares that network
        return str(place)
    if place.ipv4_mapped is not None:  # a client of IPv4 on a socket of IPv6
        return str(place.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(place), 64), strict=False))


async def body_of(asked: Asked, most: int) -> bytes:
    """The body of a request. Raises: Refused with status 413 for one of more bytes.

    The rest of that is read and dropped, as many clients read no answer before they have sent all.
    """
    declared, count, parts = int(asked.headers.get("content-length") or 0), 0, list[bytes]()
    if declared <= _DROPPED * limits.MEDIA_BYTES:
        async for part in asked.stream():
            parts.append(part)
            count += len(part)
            if max(declared, count) > most:
                parts.clear()
            if count > _DROPPED * limits.MEDIA_BYTES:
                break
    if max(declared, count) > most:
        raise Refused(f"The body must have at most {most >> 20} MiB.", None, "too_large", 413)
    return b"".join(parts)


def object_of(octets: bytes, context: int) -> dict[str, Any]:
    """The object in JSON of a body for a model that reads so many tokens. Raises: Refused."""
    containers, more = octets.count(b"[") + octets.count(b"{"), min(context, limits.CONTEXT)
    for count, most, what in (
        (containers, limits.CONTAINERS + limits.CONTAINERS_OF_TOKEN * more, "objects and lists"),
        (containers + octets.count(b","), limits.VALUES + limits.VALUES_OF_TOKEN * more, "values"),
    ):
        if count > most:
            raise Refused(f"The body must have at most {most} {what}.", None, "too_large", 413)
    try:
        body = read_json(octets.removeprefix(b"\xef\xbb\xbf"))
    except ValueError as error:
        line = f"The body must be an object in JSON: {first_line(error)}."
        raise Refused(line, None, "invalid_value") from None
    if not isinstance(body, dict):
        line = f"The body must be an object in JSON, got {type(body).__name__}."
        raise Refused(line, None, "invalid_value")
    return body


def in_json(value: Any) -> bytes:
    return msgspec.json.encode(value)
