"""Connections that wait for a request lock nobody out."""

import contextlib
import http.client
import socket
import time
from collections.abc import Iterator

import pytest
from support.scripted import ask, until
from support.serving import said

from torch_moe_mps.serving.http import connections

GET = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n"


@contextlib.contextmanager
def sockets(here, count: int) -> Iterator[list[socket.socket]]:
    """Connections that have sent nothing."""
    port = int(here.url.rpartition(":")[2])
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
            for _ in range(count)
        ]


def is_closed(connection: socket.socket) -> bool:
    """True once the server has closed a connection."""
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_silent_connections_take_no_place_from_others(here, monkeypatch):
    """The oldest ones are closed; those with a request stay, however many come later."""
    monkeypatch.setattr(connections, "MOST_IDLE_OF_CLIENT", 8)
    waiting = here.says("Hi")
    with sockets(here, 1) as (busy,):
        body = b'{"prompt": "a", "max_tokens": 3}'
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
        busy.sendall(head + body[:10])
        with sockets(here, 20) as silent:
            until(lambda: all(map(is_closed, silent[:12])))
            assert ask(here, "/v1/chat/completions", {"messages": said("a")})[0] == 200
            assert not any(map(is_closed, silent[14:]))
            busy.sendall(body[10:])
            assert busy.recv(100).startswith(b"HTTP/1.1 200")
    assert len(waiting.jobs) == 2


def test_all_connections_without_a_request_are_bounded(here, monkeypatch):
    monkeypatch.setattr(connections, "MOST_IDLE", 4)
    with sockets(here, 9) as silent:
        until(lambda: all(map(is_closed, silent[:5])))
        assert not any(map(is_closed, silent[5:]))


@pytest.mark.parametrize("sent", [b"", GET, GET + b"\r\n" + GET], ids=["nothing", "a part", "a second part"])
def test_headers_have_a_time(here, monkeypatch, sent):
    """After the last response, too; bytes that drip in make it no longer."""
    monkeypatch.setattr(connections, "HEADERS", 0.3)
    with sockets(here, 1) as (connection,):
        connection.sendall(sent)
        if sent.count(b"GET") == 2:
            response = http.client.HTTPResponse(connection)
            response.begin()
            assert response.status == 200 and response.read()
        sends = iter(lambda: connection.send(b"a"), None) if sent else iter(())

        def ends() -> bool:
            with contextlib.suppress(BlockingIOError, ConnectionError):
                next(sends, None)
            return is_closed(connection)

        until(ends)


def test_a_request_may_take_longer_than_its_headers(here, monkeypatch):
    monkeypatch.setattr(connections, "HEADERS", 0.05)
    here.says("Hi").wait = lambda job: time.sleep(0.2)
    assert ask(here, "/v1/chat/completions", {"messages": said("a")})[0] == 200
