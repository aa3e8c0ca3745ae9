"""Connections that wait for a request: a time limit for its headers, and a bound for each client address.

A process has few files, 256 on macOS, and each connection is one of them.
"""

import asyncio
from collections import defaultdict
from typing import Any

import uvicorn

from .reading import client_of

HEADERS = 10.0  # seconds for the headers of a request, at most, from the connection or the last response on
MOST_IDLE, MOST_IDLE_OF_CLIENT = 128, 64  # connections without a request, of all addresses and of one

_GRACE = 0.1  # seconds above a bound


class Idle:
    """Connections without a request, each with a time limit. Beyond a bound, the oldest one is closed."""

    def __init__(self) -> None:
        self._all = dict[asyncio.Transport, asyncio.TimerHandle]()  # the oldest one first
        self._of_client = defaultdict[str, dict[asyncio.Transport, None]](dict)

    def add(self, transport: asyncio.Transport) -> None:
        loop, of_client = asyncio.get_running_loop(), self._of_client[_client_of(transport)]
        self._all[transport] = loop.call_later(HEADERS, self._close, transport)
        of_client[transport] = None
        for idle, most in ((of_client, MOST_IDLE_OF_CLIENT), (self._all, MOST_IDLE)):
            if len(idle) > most:  # requests that have come already are read first
                loop.call_later(_GRACE, self._trim, idle, most)

    def remove(self, transport: asyncio.Transport) -> None:
        if (timer := self._all.pop(transport, None)) is None:
            return
        timer.cancel()
        client = _client_of(transport)
        del self._of_client[client][transport]
        if not self._of_client[client]:
            del self._of_client[client]

    def _trim(self, idle: dict[asyncio.Transport, Any], most: int) -> None:
        while len(idle) > most:
            self._close(next(iter(idle)))

    def _close(self, transport: asyncio.Transport) -> None:
        self.remove(transport)
        transport.close()


def config_of(application: Any, **settings: Any) -> uvicorn.Config:
    """uvicorn's configuration of an application whose connections are bounded."""
    config = uvicorn.Config(application, access_log=False, lifespan="off", **settings)
    config.load()
    config.http_protocol_class = _bounded(config.http_protocol_class)
    return config


def _bounded(protocol: Any) -> Any:
    """uvicorn's protocol of a connection, with bounds while it has no request."""
    idle = Idle()

    class Bounded(protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            idle.add(transport)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                idle.remove(self.transport)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if not self.transport.is_closing():
                idle.remove(self.transport)
                idle.add(self.transport)

        def connection_lost(self, error: Exception | None) -> None:
            super().connection_lost(error)
            idle.remove(self.transport)

    return Bounded


def _client_of(transport: asyncio.Transport) -> str:
    peer = transport.get_extra_info("peername")
    return client_of(peer[0]) if isinstance(peer, tuple) else ""
