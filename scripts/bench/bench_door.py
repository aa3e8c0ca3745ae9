#!/usr/bin/env python
"""One stream beside one hostile client of a server of `serve`: how long an event is delayed.

The delay is the longest wait for an event of a streamed chat, the first one excluded, beside a client that
sends one request of a kind after the other, over that alone. No request within the limits may delay an event
by more than 0.3 s. The server is a process of its own, with a model of tiny layers that reads --context
tokens, so that a token takes a few milliseconds and whatever holds the server up shows; the client is a
process of the lowest priority that pauses behind each answer. `busy` is no request: a process that computes
for each core shows what a lack of cores alone does.
"""

import argparse
import base64
import contextlib
import http.client
import io
import itertools
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import paths  # noqa: F401  (for support)

PAUSE = 0.5  # seconds between two requests of the hostile client
MOST_DELAY = 0.3  # seconds
CHAT, TEXTS = "/v1/chat/completions", "/v1/completions"
GOOD = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 60, "temperature": 0}


class Kind(NamedTuple):
    """Requests of one kind.

    Args:
        path, body: of a request; the body is made of the model's context.
        pause: seconds between two parts of 64 bytes in which the body is sent; none sends it at once.
        sees: whether the server is one of a model that reads pictures.
    """

    path: str
    body: Callable[[int], dict[str, Any]]
    pause: float = 0.0
    sees: bool = False


def chat(text: Any = "a", **more: Any) -> dict[str, Any]:
    return GOOD | {"messages": [{"role": "user", "content": text}], "max_tokens": 20} | more


def goes_on(text: str) -> dict[str, Any]:
    """A chat whose answer the request begins."""
    said = [*chat()["messages"], {"role": "assistant", "content": f"a{text}"}]
    return chat() | {"messages": said}


def formed(schema: Any) -> dict[str, Any]:
    return chat(response_format={"type": "json_schema", "json_schema": {"schema": schema}})


def nested(depth: int) -> Any:
    return json.loads("[" * depth + "]" * depth)


def tools(count: int) -> list[dict[str, Any]]:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    about = {"description": "d" * 100, "parameters": schema}
    return [{"type": "function", "function": {"name": f"f{n}", **about}} for n in range(count)]


def properties(count: int) -> dict[str, Any]:
    schema = {"type": "string", "enum": [f"v{n}" for n in range(10)]}
    return {"type": "object", "properties": {f"p{n}": schema for n in range(count)}}


def picture(side: int) -> str:
    """A data: URL of a picture whose file is about as large as its pixels."""
    from PIL import Image

    file = io.BytesIO()
    Image.frombytes("RGB", (side, side), secrets.token_bytes(3 * side * side)).save(file, "BMP")
    return "data:image/bmp;base64," + base64.b64encode(file.getvalue()).decode()


def seen(*urls: str) -> dict[str, Any]:
    return chat([{"type": "image_url", "image_url": {"url": url}} for url in urls])


KINDS = {
    "numbers": Kind(TEXTS, lambda context: {"prompt": [1] * (120_000 + 4 * context), "max_tokens": 3}),
    "tokens": Kind(TEXTS, lambda context: {"prompt": [33] * (context - 9), "max_tokens": 3}),
    "objects": Kind(CHAT, lambda context: chat(metadata=[{"a": n} for n in range(32_000 + context)])),
    "deep": Kind(CHAT, lambda context: chat(metadata=[nested(90)] * ((32_000 + context) // 91))),
    "string": Kind(CHAT, lambda context: chat(metadata="x" * (8_000_000 + 32 * context))),
    "escapes": Kind(CHAT, lambda context: chat(metadata="\N{GRINNING FACE}" * 600_000)),
    "text": Kind(CHAT, lambda context: chat("a b " * 500_000)),
    "prompt": Kind(CHAT, lambda context: chat(secrets.token_hex(context // 16))),
    "messages": Kind(CHAT, lambda context: chat() | {"messages": chat()["messages"] * 9900}),
    "prompts": Kind(TEXTS, lambda context: {"prompt": ["a"] * 64, "max_tokens": 3}),
    "tools": Kind(CHAT, lambda context: chat(tools=tools(1000))),
    "blanks": Kind(CHAT, lambda context: goes_on(" \n" * 30_000)),
    "stops": Kind(CHAT, lambda context: chat(stop=["a" * 1023 + c for c in "bcdefghijklmnopq"], n=32)),
    "brackets": Kind(CHAT, lambda context: formed({"pattern": "(" * 8_000_000})),
    "choices": Kind(CHAT, lambda context: formed({"enum": [*range(100_000)]})),
    "parts": Kind(CHAT, lambda context: formed({"a": [{"a": {}}] * 15_000})),
    "schema": Kind(CHAT, lambda context: formed(properties(500))),
    "enum": Kind(CHAT, lambda context: formed({"enum": [*range(4000)]})),
    "pattern": Kind(CHAT, lambda context: formed({"type": "string", "pattern": "^([a-z][a-z]?){1,200}$"})),
    "masks": Kind(CHAT, lambda context: formed({"type": "string", "pattern": "^(([a-z]*)*)*$"})),
    "answers": Kind(CHAT, lambda context: chat(n=32, temperature=1)),
    "logprobs": Kind(CHAT, lambda context: chat(logprobs=True, top_logprobs=20, max_tokens=200)),
    "slow": Kind(CHAT, lambda context: chat("a" * 4000), pause=0.02),
    "picture": Kind(CHAT, lambda context: seen(picture(2800)), sees=True),
    "pictures": Kind(CHAT, lambda context: seen(*[picture(300)] * 60), sees=True),
}  # fmt: skip


# Clients


def ask(port: int, path: str, body: bytes, pause: float = 0.0) -> list[float]:
    """Seconds between the events of an answer, from its request on. Raises: OSError."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    parts = (body[at : at + 64] for at in range(0, len(body), 64))

    def slowly() -> Iterator[bytes]:
        for part in parts:
            yield part
            time.sleep(pause)

    headers = {"content-type": "application/json", "content-length": str(len(body))}
    with contextlib.closing(connection):
        times = [time.perf_counter()]
        connection.request("POST", path, slowly() if pause else body, headers)
        for line in connection.getresponse():
            if line != b"\n":
                times.append(time.perf_counter())
    return [after - before for before, after in itertools.pairwise(times)]


def asks(port: int, name: str, context: int) -> None:
    """Asks again and again until the input ends; says when it begins, and then each status."""
    os.nice(19)
    kind = KINDS[name]
    octets = json.dumps(kind.body(context)).encode()
    print("begun", flush=True)
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException):  # refused before it is sent wholly
            ask(port, kind.path, octets, kind.pause)
        time.sleep(PAUSE)


@contextlib.contextmanager
def beside(name: str | None, port: int, context: int) -> Iterator[None]:
    """Block beside a client of a kind; None for nobody."""
    command = [sys.executable, __file__, "--asks", str(port), str(name), str(context)]
    if name == "busy":
        command = [sys.executable, "-c", "print('begun', flush=True)\nwhile True: pass"]
    count = 0 if name is None else (os.cpu_count() or 1) if name == "busy" else 1
    clients = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    try:
        for client in clients:
            assert client.stdout is not None and client.stdout.readline() == "begun\n"
        yield
    finally:
        for client in clients:
            client.kill()
            client.communicate()


def waits(port: int, seconds: float) -> list[float]:
    """The waits for the events of streams, one after the other, in so many seconds."""
    body, ends, made = json.dumps(GOOD | {"stream": True}).encode(), time.monotonic() + seconds, list[float]()
    while time.monotonic() < ends:
        made += ask(port, CHAT, body)[1:]
    return made


# The server


@contextlib.contextmanager
def server(folder: Path) -> Iterator[int]:
    """The port of `serve` with a checkpoint."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
    command = [
        sys.executable, "-m", "torch_moe_mps", "serve", str(folder), "--device", "cpu", "--port", str(port),
        "--host", "127.0.0.1", "--prompt-disk", "0", "--log-level", "error",
    ]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port)).close()
                break
            if process.poll() is not None:
                raise SystemExit(f"the server has ended: {' '.join(command)}")
            time.sleep(0.1)
        waits(port, 1.0)
        yield port
    finally:
        process.kill()
        process.wait()


def checkpoint(folder: Path, context: int, sees: bool) -> Path:
    from support import scripted, serving
    from support.images import write_llava

    if sees:
        write_llava(folder)
    else:
        serving.printable_checkpoint(folder, chat_template=scripted.TEMPLATE)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config.get("text_config", config)["max_position_embeddings"] = context
    file.write_text(json.dumps(config))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", action="append", choices=["busy", *KINDS], help="may come several times")
    parser.add_argument("--seconds", type=float, default=10.0, help="of streams beside each kind")
    parser.add_argument("--context", type=int, default=32768)
    options = parser.parse_args()
    names, largest = options.kind or ["busy", *KINDS], 0.0
    print("| beside | median | longest wait | delay |")
    print("| --- | --- | --- | --- |")
    for sees in (False, True):
        chosen = [name for name in names if (name != "busy" and KINDS[name].sees) == sees]
        if not chosen:
            continue
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model"
            port = stack.enter_context(server(checkpoint(folder, options.context, sees)))
            alone = 0.0
            for name in [None, *chosen]:
                with beside(name, port, options.context):
                    found = waits(port, options.seconds)
                alone = max(found) if name is None else alone
                delay = max(found) - alone
                cells = [statistics.median(found), max(found), delay]
                shown = " | ".join(f"{1000 * cell:.0f} ms" for cell in cells)
                print(f"| {name or 'nobody'} | {shown} |", flush=True)
                if name not in (None, "busy"):
                    largest = max(largest, delay)
    print(f"largest delay by a request: {largest:.2f} s, of at most {MOST_DELAY} s")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--asks"]:
        asks(int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    else:
        main()
