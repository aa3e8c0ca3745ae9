"""Who may ask the server, and errors in OpenAI's form; a client that leaves frees its place."""

import asyncio
import ipaddress
import secrets
import socket
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from ..ops._checks import first_line
from .requests import Refused


class Guard:
    """In front of a server: checks the Host header and the token, and ends what nobody waits for.

    A page of the web can let its own name mean this machine, and a browser then takes the server's answers
    for the page's. The Host header has that name: only addresses and names of this machine are answered.

    Args:
        hosts: names that are answered beside those.
        token: that `POST /reset` needs as a bearer; without one it is refused.
    """

    def __init__(self, app: Any, hosts: Sequence[str], token: str | None):
        self.app, self.token = app, token
        own = socket.gethostname().lower()
        self.hosts = {"localhost", own, f"{own.partition('.')[0]}.local", *map(str.lower, hosts)}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if (refused := self._refusal(scope["path"], headers)) is not None:
            response = await error_response(None, refused)
            return await response(scope, receive, send)
        await _until_left(self.app, scope, receive, send)

    def _refusal(self, path: str, headers: dict[bytes, str]) -> Refused | None:
        host = headers.get(b"host", "")
        if not self._is_own(host):
            message = f"The Host header must name this machine, got {host!r}; --allow-host adds a name."
            return Refused(message, None, "host_not_allowed", 403)
        if path.rstrip("/") == "/reset":
            bearer = headers.get(b"authorization", "").removeprefix("Bearer ").encode()
            if self.token is None or not secrets.compare_digest(bearer, self.token.encode()):
                message = "/reset needs the token of --token as a bearer."
                return Refused(message, None, "invalid_api_key", 401)
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
    """Runs an application until the client leaves, which cancels it."""
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


async def error_response(request: Any, error: Any) -> Any:
    """Errors in OpenAI's form, those of transformers and of a chat template, too."""
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
    from jinja2 import TemplateError

    is_asked_wrongly = isinstance(error, (Refused, RequestValidationError, TemplateError, ValueError))
    status = getattr(error, "status_code", 400 if is_asked_wrongly else 500)
    status = 400 if status == 422 else status
    message = getattr(error, "detail", f"{type(error).__name__}: {first_line(error)}")
    if isinstance(error, RequestValidationError):
        message = f"The body must be an object in JSON: {error.errors()[0]['msg']}."
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = {"message": str(message), "type": kind, "param": None, "code": None}
    return JSONResponse({"error": error.body if isinstance(error, Refused) else body}, status_code=status)
