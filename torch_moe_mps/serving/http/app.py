"""The ASGI application: routes, errors, metrics and logs."""

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from ..._faults import is_out_of_memory
from ..._text import first_line
from ..engine.loop import DeviceThreadError
from ..engine.memory import RETRY_AFTER, Level
from ..prefix_cache.memory import LONGEST
from . import limits
from .answer import Event, Item
from .answers import Answers
from .guard import REQUEST, Guard
from .metrics import Metrics
from .preparing import count_tokens, media_parts, prepare
from .protocols.chat import ChatCompletions
from .protocols.completions import Completions
from .protocols.messages import Messages, anthropic_error
from .protocols.protocol import AnswerWriter, Protocol, openai_error
from .protocols.responses import Responses
from .reading import Client, Kind, RequestReading, in_json, kind_of, object_of
from .request import Chat, Refused, Request
from .served import Served

log = logging.getLogger(__name__)
Reads = Callable[[dict[str, Any]], Request]  # the request of a body
PING = 5.0  # seconds without a part of an answer, behind which its client is told that it comes


@dataclass(frozen=True)
class Access:
    """Access control of the server.

    Args:
        hosts: accepted Host headers beside this machine's.
        key: API key that requests need; None for none.
        origins: web origins allowed by CORS, "*" for any.
    """

    hosts: tuple[str, ...] = ()
    key: str | None = None
    origins: tuple[str, ...] = ()


class Server:
    """Routes of one served model."""

    def __init__(self, served: Served, access: Access):
        self.served, self.access = served, access
        self.metrics, self.reading = Metrics(served), RequestReading()

    def application(self) -> Any:
        """Routes of each protocol behind the guard, with CORS where origins are allowed."""
        routes = [
            Route("/health", self._health),
            Route("/metrics", self._metrics),
        ]
        for start in ("/v1", ""):  # clients whose base URL lacks it are answered, too
            routes += [
                Route(f"{start}/models", self._models),
                Route(f"{start}/models/{{name:path}}", self._model),
            ]
            for protocol in (ChatCompletions(), Completions(), Responses(), Messages()):
                answer = functools.partial(self._answer, protocol)
                path = start + protocol.path.removeprefix("/v1")
                routes.append(self._counted(path, answer))
            routes.append(Route(f"{start}/messages/count_tokens", self._count, methods=["POST"]))
        access = self.access
        guard = Middleware(Guard, hosts=access.hosts, key=access.key, origins=access.origins, refuse=refusal)
        cors = Middleware(
            CORSMiddleware, allow_origins=access.origins, allow_methods=["*"], allow_headers=["*"]
        )
        handlers = {Refused: _handled, HTTPException: _handled, Exception: _handled}
        return Starlette(
            routes=routes,
            middleware=[cors, guard] if access.origins else [guard],
            exception_handlers=handlers,
        )

    # Answers

    def _counted(self, path: str, answer: Callable[[HTTPRequest], Awaitable[Response]]) -> Route:
        """Wraps a route so that its requests are counted by status, protocol errors included."""

        async def counted(http_request: HTTPRequest) -> Response:
            try:
                response, status = await answer(http_request), 200
            except Exception as error:
                refused = refused_by(error)
                response, status = refusal(protocol_path, refused), refused.status
            self.metrics.requests.labels(protocol_path, status).inc()
            return response

        protocol_path = path if path.startswith("/v1") else f"/v1{path}"
        return Route(path, counted, methods=["POST"])

    async def _answer(self, protocol: Protocol, http_request: HTTPRequest) -> Response:
        self._check_memory()
        coming = _Coming()
        read = functools.partial(protocol.read, served=self.served)
        async with self.reading.place(http_request) as client:
            kind, request = await self._requested(http_request, client, read)
            if request.form is not None or request.forced is not None:
                kind = "grammar"
            coming.answers = await client.run(kind, prepare, self.served, request, coming.show)
        _say("%s: begins, prompt %d tokens", protocol.path, coming.answers.prompt_tokens)
        if request.stream:
            return self._streamed(protocol, request, coming)
        return await self._whole(protocol, request, coming)

    async def _requested(
        self, http_request: HTTPRequest, client: Client, read: Reads
    ) -> tuple[Kind, Request]:
        """(kind of thread that prepares it, parsed request). Raises: Refused."""
        context = self.served.context
        limit = limits.TEXT_BYTES + limits.TOKEN_BYTES * context
        if self.served.reads_media:
            limit = limits.MEDIA_BYTES
        data = await client.body(http_request, min(limit, 2 * limits.MEDIA_BYTES))
        kind = kind_of(len(data))
        request = await client.run(kind, lambda: read(object_of(data, context)))
        chats = [prompt for prompt in request.prompts if isinstance(prompt, Chat)]
        has_media = any(True for chat in chats for _ in media_parts(chat.messages))
        return "long" if has_media else kind, request

    async def _whole(self, protocol: Protocol, request: Request, coming: "_Coming") -> Response:
        try:
            coming.answers.submit(self.served.generator)
            while await coming.next(None) is not None:
                pass
            self._check_ended(coming.answers)
            return await _in_json(lambda: protocol.whole(request, coming.answers, self.served))
        finally:
            self._ended(protocol, coming.answers)

    def _streamed(self, protocol: Protocol, request: Request, coming: "_Coming") -> Response:
        """Response that streams the events of answers as they are generated."""

        async def events() -> AsyncIterator[str]:
            writer = protocol.writer(request, coming.answers, self.served)
            try:
                coming.answers.submit(self.served.generator)
                yield writer.opening()
                while True:
                    try:
                        part = await coming.next(PING)
                    except TimeoutError:
                        yield writer.ping()
                        continue
                    if part is None:
                        break
                    if written := _written(writer, *part):
                        yield written
                self._check_ended(coming.answers)
                yield writer.end()
            except Exception as error:
                yield writer.failed(refused_by(error))
            finally:
                self._ended(protocol, coming.answers)

        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        return StreamingResponse(events(), media_type="text/event-stream", headers=headers)

    def _check_ended(self, answers: Answers) -> None:
        if (error := answers.error) is not None:
            raise error
        if any(answer.reason == "cancelled" for answer in answers.answers):
            raise Refused("The server ends.", None, "server_ends", 503)

    def _ended(self, protocol: Protocol, answers: Answers) -> None:
        answers.cancel()
        self.metrics.ended(answers)
        _say("%s: %s", protocol.path, answers)

    def _check_memory(self) -> None:
        """Raises: Refused while memory pressure is critical."""
        memory = self.served.generator.memory
        if memory is not None and memory.level is Level.CRITICAL:
            raise _no_memory()

    async def _count(self, http_request: HTTPRequest) -> Response:
        async with self.reading.place(http_request) as client:
            read = functools.partial(Messages().read_prompt, served=self.served)
            kind, request = await self._requested(http_request, client, read)
            count = await client.run(kind, count_tokens, self.served, request)
        return JSONResponse({"input_tokens": count})

    # The server itself

    async def _health(self, http_request: HTTPRequest) -> Response:
        generator = self.served.generator
        counts = generator.counts
        load = "full" if counts.waiting else "busy" if counts.active else "ready"
        rows = {"active": counts.active, "waiting": counts.waiting, "most": generator.max_sequences}
        if (death := generator.death) is not None:
            return JSONResponse({"status": "died", "reason": first_line(death), **rows}, status_code=503)
        return JSONResponse({"status": "ok", "load": load, **rows})

    async def _models(self, http_request: HTTPRequest) -> Response:
        entry = self._entry()
        ends = {"first_id": entry["id"], "last_id": entry["id"], "has_more": False}
        return JSONResponse({"object": "list", "data": [entry], **ends})

    async def _model(self, http_request: HTTPRequest) -> Response:
        name = http_request.path_params["name"]
        if name != self.served.name:
            message = f"The model must be {self.served.name}, got {name}."
            raise Refused(message, "model", "model_not_found", 404)
        return JSONResponse(self._entry())

    def _entry(self) -> dict[str, Any]:
        """Entry of the model in `/v1/models`, for OpenAI and Anthropic clients."""
        name, created = self.served.name, self.served.created
        openai = {"id": name, "object": "model", "created": created, "owned_by": "torch-moe-mps"}
        at = datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z")
        return openai | {
            "type": "model",
            "display_name": name,
            "created_at": at,
            "context_length": None if self.served.context == LONGEST else self.served.context,
        }

    async def _metrics(self, http_request: HTTPRequest) -> Response:
        return PlainTextResponse(self.metrics.text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)


class _Coming:
    """Queue of answer events from the device thread to the event loop."""

    answers: Answers

    def __init__(self) -> None:
        self._queue: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def show(self, number: int, event: Event) -> None:
        """Adds an event, from any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (number, event))

    async def next(self, seconds: float | None) -> tuple[int, list[Item]] | None:
        """(answer index, next items), or None once all answers have ended.

        Raises: TimeoutError if no event comes in time.
        """
        answers = self.answers.answers
        if all(answer.reason is not None for answer in answers):
            return None
        number, event = await asyncio.wait_for(self._queue.get(), seconds)
        return number, answers[number].read(event)


async def _in_json(value: Callable[[], Any]) -> Response:
    """JSON response of a value that may be large, serialized outside of the event loop."""
    return Response(await asyncio.to_thread(lambda: in_json(value())), media_type="application/json")


def _say(line: str, *values: object) -> None:
    """Logs a line about the current request."""
    log.info(f"%s {line}", REQUEST.get(), *values)


def _written(writer: AnswerWriter, number: int, items: list[Item]) -> str:
    shown = "".join(writer.item(number, item) for item in items)
    return shown + (writer.ended(number) if writer.answers.answers[number].reason is not None else "")


def refused_by(error: Exception) -> Refused:
    """Refused error that a client gets for an exception."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, HTTPException):
        return Refused(str(error.detail), None, None, error.status_code)
    if isinstance(error, DeviceThreadError):
        return Refused(first_line(error), None, "died", 503)
    if isinstance(error, ClientDisconnect):
        return Refused("The client has left.", None, None, 499)
    if is_out_of_memory(error):
        _say("%s", first_line(error))
        return _no_memory()
    if isinstance(error, RecursionError):
        return Refused("The body nests too deep.", None, "invalid_value")
    log.error("%s %s: %s", REQUEST.get(), type(error).__name__, first_line(error), exc_info=error)
    return Refused(f"{type(error).__name__}: {first_line(error)}", None, None, 500)


def _no_memory() -> Refused:
    message = f"This machine is out of memory; ask again after {RETRY_AFTER} s."
    return Refused(message, None, "out_of_memory", 503, RETRY_AFTER)


def refusal(path: str, refused: Refused) -> Response:
    """Error response in the form of the path's protocol."""
    if refused.status < 500:
        _say("%s: %d, %s", path, refused.status, first_line(refused.message))
    form = anthropic_error if path.startswith("/v1/messages") else openai_error
    headers = None if refused.retry_after is None else {"retry-after": str(refused.retry_after)}
    return JSONResponse(form(refused), status_code=refused.status, headers=headers)


async def _handled(http_request: HTTPRequest, error: Exception) -> Response:
    return refusal(http_request.url.path, refused_by(error))
