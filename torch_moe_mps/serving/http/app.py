"""The application: paths, errors, metrics and logs."""

import asyncio
import contextlib
import functools
import json
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as Asked
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from ..._text import first_line
from ..engine.device import Died
from ..engine.memory import RETRY_AFTER, Level, is_out_of_memory
from ..prefix_cache.memory import LONGEST
from .answer import Item
from .guard import REQUEST, Guard
from .json_text import LONG, is_unicode, read_json
from .protocols.chat import ChatCompletions
from .protocols.completions import Completions
from .protocols.embeddings import EMBEDDINGS, RERANK, Texts
from .protocols.messages import Messages, anthropic_error
from .protocols.protocol import Protocol, event, openai_error
from .protocols.responses import Responses
from .protocols.text import PATHS
from .request import Refused, Request
from .served import Answers, Served, Show

log = logging.getLogger(__name__)
T = TypeVar("T")
PING = 5.0  # seconds without a part of an answer, behind which its client is told that it comes
MOST_BYTES = 64 << 20  # in a body
_DROPPED = 4  # times as many bytes, at most, of a body that is read and dropped
# In one for a model that reads text alone: for what is beside the prompt, and for each token of the context.
_TEXT_BYTES, _TOKEN_BYTES = 8 << 20, 32
_MOST_VALUES = 1 << 20
_PIECE = 1 << 16  # bytes that are looked at without a pause for other threads
_AT_ONCE = 1 << 12  # bytes of a body that is read without a turn
_READERS = 32  # requests that are read at a time
PAGE = Path(__file__).with_name("page")
# Policy for an answer's Markdown: it runs no script and asks no other machine for a picture.
_POLICY = (
    "default-src 'none'; connect-src 'self'; img-src data:; script-src 'self'; style-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify"
)


@dataclass(frozen=True)
class Access:
    """Who may ask.

    Args:
        hosts: names in the Host header beside this machine's.
        key: that requests need; None lets in all.
        only_model: whether requests for a model of another name are refused.
        origins: of pages of the web whose scripts are answered, "*" for any.
    """

    hosts: tuple[str, ...] = ()
    key: str | None = None
    only_model: bool = False
    origins: tuple[str, ...] = ()


class Server:
    """The paths of one served model."""

    def __init__(self, served: Served, access: Access):
        self.served, self.access = served, access
        self.requests: Counter[tuple[str, int]] = Counter()
        self.generated_tokens = 0
        self._computed, self._seconds = 0, 0.0  # tokens of prompts whose time is known, and that time
        # Readers tokenise and compile without Python's lock: a long prompt or a large schema delays no other.
        self._reader = ThreadPoolExecutor(_READERS, thread_name_prefix="reader")

    def application(self) -> Any:
        routes = [
            Route("/", self._page),
            Mount("/page", StaticFiles(directory=PAGE)),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
            Route("/load_model", self._load, methods=["POST"]),
        ]
        for path, reads in PATHS.items():
            routes.append(Route(path, functools.partial(self._text, reads), methods=["POST"]))
        for start in ("/v1", ""):  # clients whose base URL lacks it are answered, too
            routes += [
                Route(f"{start}/models", self._models),
                Route(f"{start}/models/{{name:path}}", self._model),
            ]
            for path in (EMBEDDINGS, RERANK):
                encode = functools.partial(self._encode, path)
                routes.append(Route(start + path.removeprefix("/v1"), encode, methods=["POST"]))
            for protocol in (ChatCompletions(), Completions(), Responses(), Messages()):
                answer = functools.partial(self._answer, protocol)
                path = start + protocol.path.removeprefix("/v1")
                routes.append(Route(path, answer, methods=["POST"]))
                if protocol.counts is not None:
                    count = functools.partial(self._count, protocol)
                    routes.append(Route(f"{path}/{protocol.counts}", count, methods=["POST"]))
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

    async def _answer(self, protocol: Protocol, asked: Asked) -> Response:
        status = 500
        try:
            self._check_memory()
            coming = _Coming()
            request, coming.answers = await self._on_reader(asked, self._read, protocol, coming.show)
            _say("%s: begins, prompt %d tokens", protocol.path, coming.answers.prompt_tokens)
            if not request.stream:
                result = await self._whole(protocol, request, coming)
            status = 200
            return self._streamed(protocol, request, coming) if request.stream else JSONResponse(result)
        except Exception as error:
            refused = refused_by(error)
            status = refused.status
            return refusal(protocol.path, refused)
        finally:
            self.requests[protocol.path, status] += 1

    def _read(self, body: dict[str, Any], protocol: Protocol, show: Show) -> tuple[Request, Answers]:
        """The request of a body, with its prompts read."""
        self._check_model(body)
        self.served.turns.rest()
        request = protocol.read(body, self.served)
        self.served.turns.rest()
        return request, self.served.prepare(request, show)

    async def _whole(self, protocol: Protocol, request: Request, coming: "_Coming") -> dict[str, Any]:
        try:
            self.served.submit(coming.answers)
            while await coming.next(None) is not None:
                pass
            self._check_ended(coming.answers)
            return protocol.whole(request, coming.answers, self.served)
        finally:
            self._ended(protocol, coming.answers)

    def _streamed(self, protocol: Protocol, request: Request, coming: "_Coming") -> Response:
        async def events() -> AsyncIterator[str]:
            writer = protocol.writer(request, coming.answers, self.served)
            try:
                self.served.submit(coming.answers)
                yield writer.begin()
                while (part := await coming.next(PING)) is not None:
                    yield writer.ping() if part == () else _written(writer, *part)
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
        self.generated_tokens += answers.tokens
        if seconds := answers.read_seconds:
            self._computed += answers.prompt_tokens - answers.cached_tokens
            self._seconds += seconds
        _say("%s: %s", protocol.path, answers)

    def _check_model(self, body: dict[str, Any]) -> None:
        name = body.get("model", self.served.name)
        if self.access.only_model and name != self.served.name:
            message = f"The model must be {self.served.name}, got {name}."
            raise Refused(message, "model", "model_not_found", 404)

    def _check_memory(self) -> None:
        """Raises: Refused while the system is so short of memory that one more answer might end all."""
        memory = self.served.generator.memory
        if memory is not None and memory.level is Level.CRITICAL:
            raise _no_memory()

    async def _on_reader(self, asked: Asked, function: Callable[..., T], *arguments: Any) -> T:
        """Result of a function of a request's body as an object, on a thread of its own. Raises: Refused."""
        octets = await self._octets(asked)

        def read() -> T:
            turns = self.served.turns
            with turns.turn(len(octets) > LONG) if len(octets) > _AT_ONCE else contextlib.nullcontext():
                return function(body_of(octets, turns.rest), *arguments)

        return await asyncio.get_running_loop().run_in_executor(self._reader, read)

    async def _octets(self, asked: Asked) -> bytearray:
        """The body of a request. Raises: Refused for one that is too large.

        Its rest is read and dropped, as many clients read no answer before they have sent all. It grows as
        it comes: putting it together at its end would hold other threads up.
        """
        served, most = self.served, MOST_BYTES
        if not served.reads_media:
            most = min(most, _TEXT_BYTES + _TOKEN_BYTES * served.context)
        declared, count, octets = int(asked.headers.get("content-length") or 0), 0, bytearray()
        if declared <= _DROPPED * MOST_BYTES:
            async for chunk in asked.stream():
                octets += chunk
                count += len(chunk)
                if max(declared, count) > most:
                    octets.clear()
                if count > _DROPPED * MOST_BYTES:
                    break
        if max(declared, count) > most:
            raise Refused(f"The body must have at most {most >> 20} MiB.", None, "too_large", 413)
        return octets

    async def _count(self, protocol: Protocol, asked: Asked) -> Response:
        def count(body: dict[str, Any]) -> int:
            return self.served.count(protocol.read_prompt(body, self.served))

        counted: dict[str, Any] = {"input_tokens": await self._on_reader(asked, count)}
        if isinstance(protocol, Responses):
            counted["object"] = "response.input_tokens"
        return JSONResponse(counted)

    async def _text(self, reads: Callable[..., Any], asked: Asked) -> Response:
        def text(body: dict[str, Any]) -> bytes:
            return _in_json(reads(body, self.served), self.served.turns.rest)

        return Response(await self._on_reader(asked, text), media_type="application/json")

    def _read_texts(self, body: dict[str, Any], path: str) -> Texts:
        self._check_model(body)
        return Texts(path, body, self.served)

    async def _encode(self, path: str, asked: Asked) -> Response:
        status = 500
        try:
            texts = await self._on_reader(asked, self._read_texts, path)
            begun = time.monotonic()
            result = await asyncio.wrap_future(self.served.generator.run(texts.compute))
            count, seconds = sum(map(len, texts.ids)), time.monotonic() - begun
            _say("%s: %d texts of %d tokens in %.2f s", path, len(texts.ids), count, seconds)
            status = 200
            return JSONResponse(texts.answer(result))
        except Exception as error:
            refused = refused_by(error)
            status = refused.status
            return refusal(path, refused)
        finally:
            self.requests[path, status] += 1

    # The server itself

    async def _page(self, asked: Asked) -> Response:
        return FileResponse(PAGE / "index.html", headers={"content-security-policy": _POLICY})

    async def _health(self, asked: Asked) -> Response:
        generator = self.served.generator
        load = "full" if generator.waiting else "busy" if generator.active else "ready"
        rows = {"active": generator.active, "waiting": generator.waiting, "most": generator.most}
        if (death := generator.death) is not None:
            return JSONResponse({"status": "died", "reason": first_line(death), **rows}, status_code=503)
        return JSONResponse({"status": "ok", "load": load, **rows})

    async def _models(self, asked: Asked) -> Response:
        entry = self._entry()
        ends = {"first_id": entry["id"], "last_id": entry["id"], "has_more": False}
        return JSONResponse({"object": "list", "data": [entry], **ends})

    async def _model(self, asked: Asked) -> Response:
        name = asked.path_params["name"]
        if name != self.served.name:
            message = f"The model must be {self.served.name}, got {name}."
            raise Refused(message, "model", "model_not_found", 404)
        return JSONResponse(self._entry())

    def _entry(self) -> dict[str, Any]:
        """The model, for OpenAI's clients and Anthropic's."""
        name, created = self.served.name, self.served.created
        openai = {"id": name, "object": "model", "created": created, "owned_by": "torch-moe-mps"}
        at = datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z")
        return openai | {
            "type": "model",
            "display_name": name,
            "created_at": at,
            "context_length": None if self.served.context == LONGEST else self.served.context,
        }

    async def _load(self, asked: Asked) -> Response:
        """`transformers chat` waits for the model: it is there."""
        return Response(
            event({"status": "ready", "model": self.served.name, "cached": True}),
            media_type="text/event-stream",
        )

    async def _metrics(self, asked: Asked) -> Response:
        """Prometheus' text."""
        generator = self.served.generator
        prompts, octets = generator.prompts_held()
        accepted, rejected = generator.draft_tokens
        values: list[tuple[str, str, str, float]] = [
            ("prompt_tokens_total", "counter", "tokens of prompts that were computed", generator.read_tokens),
            ("cached_tokens_total", "counter", "tokens of prompts that were kept", generator.cached_tokens),
            ("accepted_draft_tokens_total", "counter", "draft tokens that were accepted", accepted),
            ("rejected_draft_tokens_total", "counter", "draft tokens that were rejected", rejected),
            ("generated_tokens_total", "counter", "tokens of answers", self.generated_tokens),
            ("rows_active", "gauge", "answers that are generated now", generator.active),
            ("rows_most", "gauge", "answers that are generated together, at most", generator.most),
            ("requests_waiting", "gauge", "answers that wait", generator.waiting),
            ("kept_prompts", "gauge", "prompts that are kept", prompts),
            ("kept_prompts_bytes", "gauge", "memory of the prompts that are kept", octets),
            ("memory_bytes", "gauge", "memory of the device in use", _memory(self.served.model)),
        ]
        if (memory := generator.memory) is not None:
            values += [
                ("memory_budget_bytes", "gauge", "memory that all may take together", memory.total),
                ("memory_room_bytes", "gauge", "memory for answers and kept prompts", memory.free),
                ("memory_level", "gauge", "1 where the system is short of memory, 2 without", memory.level),
            ]
        if (disk := generator.disk) is not None:
            saved = disk.tokens * self._seconds / max(1, self._computed) - disk.seconds
            values += [
                ("disk_hits_total", "counter", "prompts that were read from the disk", disk.hits),
                ("disk_tokens_total", "counter", "tokens of these", disk.tokens),
                ("disk_read_bytes_total", "counter", "bytes of these", disk.read_bytes),
                ("disk_written_bytes_total", "counter", "bytes of prompts written", disk.written_bytes),
                ("disk_bytes", "gauge", "bytes of prompts on the disk", disk.nbytes),
                (
                    "disk_seconds_saved",
                    "gauge",
                    "time that computing these would have taken",
                    max(0.0, saved),
                ),
            ]
        lines = []
        for name, kind, text, value in values:
            lines += [
                f"# HELP moe_mps_{name} {text}",
                f"# TYPE moe_mps_{name} {kind}",
                f"moe_mps_{name} {value}",
            ]
        lines += ["# HELP moe_mps_requests_total requests by path and status"]
        lines += ["# TYPE moe_mps_requests_total counter"]
        for (path, status), count in sorted(self.requests.items()):
            lines.append(f'moe_mps_requests_total{{path="{path}",status="{status}"}} {count}')
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")


class _Coming:
    """The parts of answers as they come from the thread of the device."""

    answers: Answers

    def __init__(self) -> None:
        self._queue: asyncio.Queue[tuple[int, Item | None]] = asyncio.Queue()
        self._loop, self._ended = asyncio.get_running_loop(), 0

    def show(self, number: int, item: Item | None) -> None:
        """Takes a part, on any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (number, item))

    async def next(self, seconds: float | None) -> Any:
        """The number of an answer and its next part, None behind its last; () where none has come for so many
        seconds; None where all answers have ended.
        """
        if self._ended == len(self.answers.jobs):
            return None
        try:
            number, item = await asyncio.wait_for(self._queue.get(), seconds)
        except TimeoutError:
            return ()
        self._ended += item is None
        return number, item


def _say(line: str, *values: object) -> None:
    """Logs a line on the request that is being answered."""
    log.info(f"%s {line}", REQUEST.get(), *values)


def _written(writer: Any, number: int, item: Item | None) -> str:
    return str(writer.ended(number) if item is None else writer.item(number, item))


def _in_json(value: Any, rest: Callable[[], None] = lambda: None) -> bytes:
    """The text of a value that may be long: other threads go on meanwhile, as it is not written in C."""
    parts = list[str]()
    for part in json.JSONEncoder(ensure_ascii=False).iterencode(value):
        parts.append(part)
        rest()
    return "".join(parts).encode()


def body_of(octets: bytes | bytearray, rest: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """The object in JSON of a body; large ones take a while. Raises: Refused.

    Args:
        rest: called now and then.
    """
    pieces, values = [(at, at + _PIECE) for at in range(0, len(octets), _PIECE)], 0
    for piece in pieces:
        values += sum(octets.count(mark, *piece) for mark in (b",", b"[", b"{"))
        rest()
    if values > _MOST_VALUES:
        raise Refused(f"The body must have at most {_MOST_VALUES} values.", None, "too_large", 413)
    try:
        body = read_json(octets.decode("utf-8-sig"), rest)
    except ValueError as error:
        line = f"The body must be an object in JSON: {first_line(error)}."
        raise Refused(line, None, "invalid_value") from None
    if not isinstance(body, dict):
        raise Refused(
            f"The body must be an object in JSON, got {type(body).__name__}.", None, "invalid_value"
        )
    has_escapes = any(octets.find(b"\\u", at, end + 1) >= 0 for at, end in pieces)
    for name, value in body.items() if has_escapes else ():
        if not is_unicode([name, value], rest):
            field = name.encode(errors="replace").decode()
            message = f"'{field}' must be text in Unicode, got half of a surrogate pair."
            raise Refused(message, field, "invalid_value") from None
    return body


def refused_by(error: Exception) -> Refused:
    """The error as a client is told it."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, HTTPException):
        return Refused(str(error.detail), None, None, error.status_code)
    if isinstance(error, Died):
        return Refused(first_line(error), None, "died", 503)
    if isinstance(error, ClientDisconnect):
        return Refused("The client has left.", None, None, 499)
    if is_out_of_memory(error):
        _say("%s", first_line(error))
        return _no_memory()
    log.error("%s %s: %s", REQUEST.get(), type(error).__name__, first_line(error), exc_info=error)
    return Refused(f"{type(error).__name__}: {first_line(error)}", None, None, 500)


def _no_memory() -> Refused:
    message = f"This machine is out of memory; ask again after {RETRY_AFTER} s."
    return Refused(message, None, "out_of_memory", 503, RETRY_AFTER)


def refusal(path: str, refused: Refused) -> Response:
    """The response of an error, as the protocol of the path has it."""
    if refused.status < 500:
        _say("%s: %d, %s", path, refused.status, first_line(refused.message))
    form = anthropic_error if path.startswith("/v1/messages") else openai_error
    headers = None if refused.retry_after is None else {"retry-after": str(refused.retry_after)}
    return JSONResponse(form(refused), status_code=refused.status, headers=headers)


async def _handled(asked: Asked, error: Exception) -> Response:
    return refusal(asked.url.path, refused_by(error))


def _memory(model: Any) -> int:
    import torch

    device = getattr(model, "device", None)
    if device is not None and device.type == "mps":
        return int(torch.mps.driver_allocated_memory())
    return sum(parameter.nbytes for parameter in model.parameters())
