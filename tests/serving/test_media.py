"""Files of pictures and sound: in a request, below a folder, and of URLs."""

import asyncio
import base64
import http.server
import socket
import threading
import time
from typing import Any

import pytest
from support.images import as_url, picture
from support.pages import pages

from torch_moe_mps.serving.http.request import Refused
from torch_moe_mps.serving.media import loading as media
from torch_moe_mps.serving.media.decoding import File, Limits, decoded
from torch_moe_mps.serving.media.loading import Media


def png() -> bytes:
    return base64.b64decode(as_url(picture(0)).partition(",")[2])


def opened(owner: Media, url: str, **how: Any) -> Any:
    """The picture of a URL."""
    part = {"type": "image", "url": url, "field": "image"}
    asyncio.run(owner.fetch([part], **how))
    return decoded([File("image", "image", owner.opened(part))], Limits())[0]


@pytest.mark.parametrize(
    "url", ["/etc/passwd", "cat.png", "file:///etc/passwd", "http://127.0.0.1:9/a.png", "ftp://a"]
)
def test_only_pictures_in_the_request_are_opened(url):
    """And nothing tells whether a file is there."""
    with pytest.raises(
        Refused, match=r"'image' must be a data: URL; --media-folder lets the server open"
    ) as raised:
        opened(Media(), url)
    assert raised.value.field == "image" and raised.value.status == 400
    assert opened(Media(), as_url(picture(0))).size == picture(0).size


def test_files_below_a_folder(tmp_path):
    """A link or a path that leads out of it is refused in the same words as a file that is not there."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "cat.png").write_bytes(png())
    (tmp_path / "secret.png").write_bytes(png())
    (tmp_path / "in" / "link.png").symlink_to(tmp_path / "secret.png")
    own = Media(tmp_path / "in")
    for url in ("cat.png", str(tmp_path / "in" / "cat.png"), f"file://{tmp_path}/in/cat.png"):
        assert opened(own, url).size == picture(0).size
    for url in ("../secret.png", "link.png", "none.png", str(tmp_path / "secret.png"), "a\0b", "/etc/passwd"):
        with pytest.raises(Refused, match=r"^'image' must be a file below the server's --media-folder.$"):
            opened(own, url)


def sends_picture(handler: http.server.BaseHTTPRequestHandler) -> None:
    assert handler.path == "/a.png?b=c"
    handler.send_response(200)
    handler.end_headers()
    handler.wfile.write(png())


def test_base64_may_have_lines_and_no_other_characters():
    for count in range(14):
        octets = bytes(range(count))
        text = base64.b64encode(octets).decode()
        for line in (1, 3, 7):
            lines = "\n".join(text[at : at + line] for at in range(0, len(text), line))
            for kind, url in (("image", f"data:;base64, {lines}\r\n"), ("audio", lines)):
                part = {"type": kind, "url": url, "field": "f"}
                assert Media().opened(part).read() == octets
        for wrong in (f"{text}A", f"{text[:4]}!{text[4:]}", f"AA=={text}" if text else "A"):
            with pytest.raises(Refused, match="must be in base64"):
                Media().opened({"type": "image", "url": f"data:;base64,{wrong}", "field": "f"})
    for wrong in ("data:;base64", "data:image/png,AAAA", "data:,;base64,AAAA"):
        with pytest.raises(Refused, match="must be a data: URL in base64"):
            Media().opened({"type": "image", "url": wrong, "field": "f"})


NAMED = Media(fetches=True, hosts=("127.0.0.1", "localhost"))


def test_urls_by_a_flag():
    with pages(sends_picture) as url:
        assert opened(NAMED, url).size == picture(0).size
        assert opened(NAMED, url.replace("127.0.0.1", "localhost")).size == picture(0).size
        with pytest.raises(Refused, match=r"^'image' cannot be fetched: .*SSL"):
            opened(NAMED, url.replace("http:", "https:"))
    for url in (
        "http://127.0.0.1:9/a.png",
        "http://",
        "http://127.0.0.1:9/a b",
        "http://localhost:99999/",
    ):
        with pytest.raises(Refused, match=r"^'image' cannot be fetched: .+\.$"):
            opened(NAMED, url)
    with pytest.raises(Refused, match=r"^'image' cannot be fetched: .+\.$"):
        opened(NAMED, "http://[")


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "localhost", "2130706433", "0", "[::1]", "[::ffff:127.0.0.1]", "[64:ff9b::7f00:1]",
        "10.1.2.3", "192.168.1.1", "172.16.0.1", "169.254.169.254", "100.64.0.1", "[fe80::1]", "[fd00::1]",
        "[2002:a00:1::]", "224.0.0.1", "0.0.0.0",
    ],
)  # fmt: skip
def test_hosts_of_this_machine_and_its_network_are_asked_by_name_alone(host):
    """By any way to write an address; nothing is sent."""
    asked = []
    with pages(asked.append) as url:
        url = url.replace("127.0.0.1", host)
        with pytest.raises(Refused, match=r"of this machine or its network; --media-host \S+ allows it"):
            opened(Media(fetches=True, hosts=("another",)), url)
    assert asked == []


def test_a_host_is_the_one_whose_addresses_were_checked(monkeypatch):
    """A name that means another address each time: the connection is to the first, with the name in Host."""
    names, own = [], socket.getaddrinfo

    def getaddrinfo(host, port, *given, **named):
        names.append(host)
        return own("127.0.0.1", port, *given, **named)

    def sends_host(handler):
        assert handler.headers["host"] == f"a.example:{handler.server.server_port}"
        sends_picture(handler)

    with pages(sends_host) as url:
        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
        named = Media(fetches=True, hosts=("a.example",))
        assert opened(named, url.replace("127.0.0.1", "a.example")).size == picture(0).size
        assert names == ["a.example"]
        with pytest.raises(Refused, match="of this machine or its network"):
            opened(Media(fetches=True), url.replace("127.0.0.1", "a.example"))


def test_all_files_that_a_request_has_fetched_share_a_limit(monkeypatch):
    monkeypatch.setattr(media, "MOST_BYTES", 2 * len(png()) - 1)
    with pages(sends_picture) as url:
        parts = [{"type": "image", "url": url, "field": f"f{number}"} for number in range(2)]
        with pytest.raises(Refused) as refused:
            asyncio.run(NAMED.fetch(parts))
        assert refused.value.status == 413 and refused.value.field == "f1"


def test_redirects_are_not_followed():
    def leads_on(handler):
        handler.send_response(302)
        handler.send_header("location", "/a.png")
        handler.end_headers()

    with pages(leads_on) as url, pytest.raises(Refused, match="the status is 302, and redirects are not"):
        opened(NAMED, url)


@pytest.mark.parametrize("begun", [b"", b"HTTP/1.0 200 OK\r\n\r\n"])
def test_a_fetch_ends_in_time_however_often_an_octet_comes(begun):
    """In the head of an answer and in its body."""

    def drips(handler):
        handler.wfile.write(begun)
        for _ in range(100):
            handler.wfile.write(b"H")
            time.sleep(0.05)

    with pages(drips) as url:
        before = time.monotonic()
        with pytest.raises(
            Refused, match="'image' cannot be fetched: all that a prompt names must be there in"
        ):
            opened(NAMED, url, seconds=0.3)
        assert time.monotonic() - before < 2


def test_a_fetch_reads_no_more_than_it_may(monkeypatch):
    monkeypatch.setattr(media, "MOST_BYTES", len(png()) - 1)
    with pages(sends_picture) as url, pytest.raises(Refused) as raised:
        opened(NAMED, url)
    assert raised.value.status == 413


def test_what_is_no_picture_is_one_line(monkeypatch):
    """Without an address of memory."""
    nothing = base64.b64encode(b"no picture").decode()
    for url, line in (
        (f"data:image/png;base64,{nothing}", "'image' must be a picture, got 10 bytes that are none."),
    ):
        with pytest.raises(Refused) as raised:
            opened(Media(), url)
        assert str(raised.value) == line
    monkeypatch.setattr(media, "MOST_BYTES", 8)
    with pytest.raises(Refused) as raised:
        opened(Media(), as_url(picture(0)))
    assert raised.value.status == 413


def test_names_that_are_slow_to_look_up_delay_no_other_work(monkeypatch):
    """Forty of them, and a function on another thread of the event loop."""
    goes_on, asked = threading.Event(), []

    def getaddrinfo(host, *given, **named):
        asked.append(host)
        goes_on.wait(60)
        raise OSError("no such name")

    async def others() -> list[Any]:
        parts = [{"type": "image", "url": f"http://a{n}.example/", "field": "image"} for n in range(40)]
        fetches = [asyncio.ensure_future(NAMED.fetch([part])) for part in parts]
        while len(asked) < 40:
            await asyncio.sleep(0.01)
        await asyncio.wait_for(asyncio.to_thread(int), 60)
        goes_on.set()
        return await asyncio.gather(*fetches, return_exceptions=True)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    results = asyncio.run(others())
    assert all(str(result) == "'image' cannot be fetched: no such name." for result in results)
