"""Request bodies: limits, JSON, and the threads that parse requests.

Queued requests hold no thread, so no client blocks others. Each client address has a bounded number of
requests in reading; more are rejected with status 429. A body that pauses ends at a time limit, and earlier
where its place is needed, because all programs of a machine share its address.
"""

import asyncio
import contextlib
import contextvars
import functools
import ipaddress
import json
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, TypeVar

import msgspec
from starlette.requests import Request as HTTPRequest

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
_PAUSE = 30.0  # seconds without a byte of a body, at most


Kind = Literal["short", "long", "grammar"]


def kind_of(size: int) -> Kind:
    """Kind of thread that parses a body of `length` bytes."""
    return "short" if size <= limits.SHORT_BYTES else "long"


class RequestReading:
    """Thread pools that parse requests.

    Short bodies, long bodies and grammars have separate threads, so that short requests do not wait for long
    ones.
    """

    def __init__(self) -> None:
        counts: dict[Kind, int] = {"short": 4, "long": BESIDE, "grammar": 8}
        self.pools = {kind: ThreadPoolExecutor(count, f"reader-{kind}") for kind, count in counts.items()}
        self.clients = dict[str, Client]()

    @contextlib.asynccontextmanager
    async def place(self, http_request: HTTPRequest) -> AsyncIterator["Client"]:
        """Context of parsing a request. Raises: Refused with status 429 for too many from one address."""
        address = client_of(http_request.client.host if http_request.client is not None else "")
        if (client := self.clients.get(address)) is None:
            forget = functools.partial(self.clients.pop, address, None)
            client = self.clients[address] = Client(self.pools, forget)
        if client.requests >= MOST_OF_CLIENT and not client.end_pause():
            with contextlib.suppress(Refused, TimeoutError):
                await asyncio.wait_for(body_of(http_request, 0), _DRAINS)
            raise _too_many()
        client.requests += 1
        try:
            yield client
        finally:
            client.requests -= 1
            client.forget_if_idle()


class Client:
    """A client address with a bounded number of requests in parsing.

    Attributes:
        requests: number of requests whose bodies come, or are parsed or queued.
        threads: number of threads that work for it, also for requests that have ended.
    """

    def __init__(self, pools: dict[Kind, ThreadPoolExecutor], forget: Callable[[], object]):
        self.requests = self.threads = 0
        self._pools, self._forget = pools, forget
        self._turns = {kind: asyncio.Semaphore(_AT_ONCE) for kind in pools}
        self._pauses = dict[asyncio.Timeout, None]()  # bodies that come, the longest pause first

    def forget_if_idle(self) -> None:
        """Drops the address if nothing of it is parsed and no thread works for it."""
        if not (self.requests or self.threads):
            self._forget()

    async def body(self, http_request: HTTPRequest, limit: int) -> bytes:
        """Body of a request, see `body_of`. Raises: Refused if it pauses too long."""
        now = asyncio.get_running_loop().time

        def go_on() -> None:
            self._pauses.pop(pause, None)
            self._pauses[pause] = None
            pause.reschedule(now() + _PAUSE)

        try:
            async with asyncio.timeout(None) as pause:
                go_on()
                return await body_of(http_request, limit, go_on)
        except TimeoutError:
            if pause not in self._pauses:
                raise _too_many() from None
            line = f"The body must come without a pause of {_PAUSE:.0f} s, got one."
            raise Refused(line, None, "timeout", 408) from None
        finally:
            self._pauses.pop(pause, None)

    def end_pause(self) -> bool:
        """Refuses the request whose body pauses for the longest time. Returns: False if no body pauses."""
        if (pause := next(iter(self._pauses), None)) is None:
            return False
        del self._pauses[pause]
        pause.reschedule(0.0)
        return True

    async def run(self, kind: Kind, function: Callable[..., T], *arguments: Any) -> T:
        """Result of a function run on a thread of a kind.

        A client that disconnects, or whose time is over, keeps its turn until the thread has ended: Python
        cannot interrupt a thread safely.

        Raises: Refused if it takes too long.
        """
        context = contextvars.copy_context()  # the log names the request
        loop, turns = asyncio.get_running_loop(), self._turns[kind]

        def end() -> None:
            self.threads -= 1
            turns.release()
            self.forget_if_idle()

        def ended(work: Future[T]) -> None:
            with contextlib.suppress(RuntimeError):  # the server has stopped
                loop.call_soon_threadsafe(end)

        await turns.acquire()
        self.threads += 1
        work = self._pools[kind].submit(context.run, function, *arguments)
        work.add_done_callback(ended)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(work), _SECONDS)
        except TimeoutError:
            message = f"A request must be read in {_SECONDS:.0f} s, got one that takes longer."
            raise Refused(message, None, "invalid_value") from None


def _too_many() -> Refused:
    message = f"This address has {MOST_OF_CLIENT} requests in reading: ask again in {_RETRY_AFTER} s."
    return Refused(message, None, "too_many_requests", 429, _RETRY_AFTER)


def client_of(address: str) -> str:
    """Address that identifies a client; for IPv6 its /64 network, which belongs to one host."""
    try:
        place = ipaddress.ip_address(address)
    except ValueError:  # a Unix socket, or the name that a proxy gives
        return address
    if isinstance(place, ipaddress.IPv4Address) or place.is_link_local:  # one link shares that network
        return str(place)
    if place.ipv4_mapped is not None:  # a client of IPv4 on a socket of IPv6
        return str(place.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(place), 64), strict=False))


async def body_of(http_request: HTTPRequest, limit: int, go_on: Callable[[], object] = lambda: None) -> bytes:
    """Body of a request. Raises: Refused with status 413 for more than `limit` bytes.

    The rest of a larger body is read and dropped, because many clients send all before they read a response.

    Args:
        go_on: called with each part.
    """
    declared, count, parts = int(http_request.headers.get("content-length") or 0), 0, list[bytes]()
    if declared <= _DROPPED * limits.MEDIA_BYTES:
        async for part in http_request.stream():
            go_on()
            parts.append(part)
            count += len(part)
            if max(declared, count) > limit:
                parts.clear()
            if count > _DROPPED * limits.MEDIA_BYTES:
                break
    if max(declared, count) > limit:
        raise Refused(f"The body must have at most {limit >> 20} MiB.", None, "too_large", 413)
    return b"".join(parts)


def object_of(data: bytes, context: int) -> dict[str, Any]:
    """JSON object of a body, within limits that follow from the context length. Raises: Refused."""
    containers, more = data.count(b"[") + data.count(b"{"), min(context, limits.CONTEXT)
    for count, limit, what in (
        (containers, limits.CONTAINERS + limits.CONTAINERS_OF_TOKEN * more, "objects and lists"),
        (containers + data.count(b","), limits.VALUES + limits.VALUES_OF_TOKEN * more, "values"),
    ):
        if count > limit:
            raise Refused(f"The body must have at most {limit} {what}.", None, "too_large", 413)
    try:
        body = read_json(data.removeprefix(b"\xef\xbb\xbf"))
    except ValueError as error:
        line = f"The body must be an object in JSON: {first_line(error)}."
        raise Refused(line, None, "invalid_value") from None
    if not isinstance(body, dict):
        line = f"The body must be an object in JSON, got {type(body).__name__}."
        raise Refused(line, None, "invalid_value")
    return body


def in_json(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:  # half of a pair, which has no UTF-8
        return json.dumps(value).encode()
