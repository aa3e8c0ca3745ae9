"""Access control middleware, and cancellation when a client disconnects."""

import asyncio
import ipaddress
import secrets
import socket
import uuid
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any
from urllib.parse import urlsplit

from .request import Refused

# The request that is being answered, as its answer's header x-request-id and the lines of the log name it.
REQUEST: ContextVar[str] = ContextVar("request", default="-")


class Guard:
    """ASGI middleware: checks Host, Origin and API key, and cancels requests of disconnected clients.

    A web page can point its own name at this machine (DNS rebinding); only Host headers of this machine are
    accepted. Browsers name the requesting page in Origin, and in Sec-Fetch-Site on trusted connections. A
    plain text body needs no CORS preflight, so bodies must be JSON.

    Args:
        hosts: further accepted Host headers.
        key: API key, as bearer token or `x-api-key`; None for none.
        origins: allowed web origins, "*" for any.
        refuse: makes the error response of a path.
    """

    def __init__(
        self,
        app: Any,
        hosts: Sequence[str],
        key: str | None,
        origins: Sequence[str],
        refuse: Callable[..., Any],
    ):
        self.app, self.key, self.origins, self.refuse = app, key, origins, refuse
        hostname = socket.gethostname().lower()
        self.hosts = {"localhost", hostname, f"{hostname.partition('.')[0]}.local", *map(str.lower, hosts)}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handles a request under an id of its own, or refuses it before its body is read."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        name = f"req_{uuid.uuid4().hex}"
        REQUEST.set(name)

        async def named(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = message | {"headers": [*message["headers"], (b"x-request-id", name.encode())]}
            await send(message)

        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if (refused := self._refusal(scope["method"], scope["path"], headers)) is not None:
            return await self.refuse(scope["path"], refused)(scope, receive, named)
        await _until_left(self.app, scope, receive, named)

    def _refusal(self, method: str, path: str, headers: dict[bytes, str]) -> Refused | None:
        """Why a request is refused by its headers: another host, a page of another origin, a wrong key."""
        host = headers.get(b"host", "")
        if not self._is_own(host):
            message = f"The Host header must name this machine, got {host!r}; --allow-host adds a name."
            return Refused(message, None, "host_not_allowed", 403)
        if "*" not in self.origins and (refused := self._of_page(headers)) is not None:
            return refused
        if self.key is not None and path != "/health" and method != "OPTIONS":
            bearer = headers.get(b"authorization", "")
            shown = bearer[7:] if bearer[:7].lower() == "bearer " else headers.get(b"x-api-key", "")
            if not secrets.compare_digest(shown.encode(), self.key.encode()):
                message = "The key must be that of --api-key, as a bearer or as x-api-key."
                return Refused(message, None, "invalid_api_key", 401)
        return None

    def _of_page(self, headers: dict[bytes, str]) -> Refused | None:
        """Error for a request that a page of another origin may have sent, or None."""
        origin = headers.get(b"origin")
        if origin is not None and origin not in self.origins:
            message = (
                f"A page of another origin must not ask this server, got {origin!r}; --allow-origin lets it."
            )
            return Refused(message, None, "origin_not_allowed", 403)
        if origin is None and headers.get(b"sec-fetch-site") == "cross-site":
            message = "A page of another site must not ask this server; --enable-cors lets it."
            return Refused(message, None, "site_not_allowed", 403)
        kind = headers.get(b"content-type", "").partition(";")[0].strip().lower()
        if kind == "text/plain":
            message = "The content-type of a body must be application/json, got 'text/plain'."
            return Refused(message, None, "content_type_not_allowed", 403)
        return None

    def _is_own(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if name.rstrip(".") in self.hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


async def _until_left(app: Any, scope: Any, receive: Any, send: Any) -> None:
    """Runs an application, and cancels it if the client disconnects."""
    messages, is_answered = asyncio.Queue[Any](), False

    async def watched(message: Any) -> None:
        nonlocal is_answered
        is_answered = message["type"] == "http.response.body" and not message.get("more_body")
        await send(message)

    async def watch() -> None:
        while True:
            messages.put_nowait(message := await receive())
            if message["type"] == "http.disconnect":
                if not is_answered:
                    answer.cancel()
                return

    answer = asyncio.ensure_future(app(scope, messages.get, watched))
    watching = asyncio.ensure_future(watch())
    try:
        await asyncio.shield(answer)
    except asyncio.CancelledError:
        if not answer.cancelled():  # the server ends
            answer.cancel()
            raise
    finally:
        watching.cancel()
