"""`serve MODEL`: a server of a model for clients of OpenAI and Anthropic."""

import argparse
import contextlib
import gc
import logging
import os
import socket
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

from .._environment import API_KEY, api_key

if TYPE_CHECKING:
    import uvicorn


def run(options: argparse.Namespace) -> None:
    """Raises: ValueError, OSError, ImportError, or the RuntimeError that ended the device thread."""
    key = key_of(options)
    sockets = sockets_of(options.host, options.port)  # one in use is said before torch is imported
    try:
        from .serving import served_by

        with _log(options.log_level), served_by(options) as served:
            server = server_of(served, options, key)
            port = sockets[0].getsockname()[1]
            print(f"{served.name} answers at http://{_in_url(options.host)}:{port}/v1", file=sys.stderr)
            with _frozen():
                server.run(sockets)
            if (death := served.generator.death) is not None:
                raise death
    finally:
        for listener in sockets:
            listener.close()


@contextlib.contextmanager
def _frozen() -> Iterator[None]:
    """Block whose garbage collection skips the objects of the model."""
    is_frozen = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not is_frozen:
            gc.unfreeze()


def key_of(options: argparse.Namespace) -> str | None:
    """API key of the server. Raises: ValueError for characters that no HTTP header can carry."""
    key = options.api_key or api_key()
    if key is not None and not (key.isascii() and key.isprintable()):
        name = "--api-key" if options.api_key else API_KEY
        raise ValueError(f"{name} must have only printable ASCII characters, got {key!a}")
    return key


def server_of(served: Any, options: argparse.Namespace, key: str | None) -> "uvicorn.Server":
    """Server that ends all answers on shutdown; says at once what its requests cannot have."""
    import uvicorn

    from ..serving.http.app import Access, Server
    from ..serving.http.connections import config_of

    class Ending(uvicorn.Server):
        def handle_exit(self, number: int, frame: FrameType | None) -> None:
            if not self.should_exit:  # answers end within a step, before uvicorn waits for them
                threading.Thread(target=served.generator.close, daemon=True).start()
            super().handle_exit(number, frame)

    if (warning := served.template.tools_warning) is not None:
        print(f"{served.name}: {warning}", file=sys.stderr)
    origins = ("*",) if options.enable_cors else tuple(options.allow_origin)
    access = Access(tuple(options.allow_host), key, origins)
    level = "warning" if options.log_level == "info" else options.log_level  # its lines are not of requests
    application = Server(served, access).application()
    server = Ending(config_of(application, log_level=level, timeout_graceful_shutdown=5))

    def end() -> None:
        server.should_exit = True

    served.generator.on_death = end  # who started the server may start it again
    if served.generator.death is not None:
        end()
    return server


def sockets_of(host: str, port: int) -> list[socket.socket]:
    """The sockets that listen: for localhost at both of its addresses.

    Raises: OSError in one line for an address that is in use, or none of this machine.
    """
    listeners: list[socket.socket] = []
    for address in ("127.0.0.1", "::1") if host == "localhost" else (host,):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listen_port = listeners[0].getsockname()[1] if listeners else port
        try:
            listeners.append(socket.create_server((address, listen_port), family=family, backlog=128))
        except OSError as error:
            if listeners:  # a machine without IPv6
                continue
            reason = os.strerror(error.errno) if error.errno else error
            raise OSError(f"--host and --port must be free, got {host}:{port}: {reason}") from None
    return listeners


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


@contextlib.contextmanager
def _log(level: str) -> Iterator[None]:
    """Context where the server's log goes to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("torch_moe_mps.serving")
    handlers, propagate, number = logger.handlers, logger.propagate, logger.level
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(level.upper())
    try:
        yield
    finally:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(number)
