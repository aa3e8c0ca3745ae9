"""Parts of the server: text of tokens, stops, penalties, pictures, and where it listens."""

import base64
import contextlib
import http.server
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from support.images import as_url, picture
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from torch_moe_mps.commands.serve import sockets_of
from torch_moe_mps.serving.engine.penalties import Penalties
from torch_moe_mps.serving.http.answer import Cut, Decoder
from torch_moe_mps.serving.http.request import Refused
from torch_moe_mps.serving.media import loading as media
from torch_moe_mps.serving.media.decoding import File, Limits, decoded
from torch_moe_mps.serving.media.loading import Media


@pytest.fixture(scope="module")
def octets():
    """A tokenizer whose tokens are octets, as vocabularies of GPT-2 write them."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    level = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    level.pre_tokenizer, level.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=level)


@pytest.mark.parametrize("text", ["a € and 👩‍👩‍👧 é", "日本語\ufffd!", ""])
def test_text_comes_character_by_character(octets, text):
    """And wherever the answer is cut off, no part of a character is shown."""
    ids = octets(text).input_ids
    for end in range(len(ids) + 1):
        decoder = Decoder(octets, skips_special=True)
        shown = [decoder.add(token) for token in ids[:end]]
        whole = text.encode()[:end].decode(errors="ignore")
        assert "".join(shown) in (whole, whole.removesuffix("\ufffd"))
        assert all("\ufffd" not in piece for piece in shown) or "\ufffd" in text


def test_octets_that_are_no_characters_do_not_wait_for_ever(octets):
    broken = octets.convert_tokens_to_ids("ÿ")  # the octet 255
    decoder = Decoder(octets, skips_special=True)
    shown = [decoder.add(broken) for _ in range(40)]
    assert len("".join(shown)) >= 32 and max(map(len, shown)) <= 8


@pytest.mark.parametrize("stops", [("bc",), ("bcd", "cx"), ("zz", "e")])
def test_a_text_ends_before_its_first_stop(stops):
    """However it is cut into pieces."""
    text = "aabcdbcxe"
    ends = [text.find(stop) for stop in stops if stop in text]
    for size in range(1, len(text)):
        cut = Cut(stops)
        shown = "".join(cut.add(text[at : at + size]) for at in range(0, len(text), size)) + cut.rest()
        assert shown == text[: min(ends)] and cut.stop in stops


def test_penalties_are_openais():
    """The formula in float64, of the answer alone."""
    ids = torch.tensor([[4, 4, 1, 2, 2, 2, 0]])
    scores = torch.randn(1, 6, generator=torch.Generator().manual_seed(0))
    got = Penalties(3, 0.7, -0.3)(ids, scores)
    counts = torch.tensor([1, 0, 3, 0, 0, 0], dtype=torch.float64)
    expected = scores.double() - 0.7 * counts + 0.3 * (counts > 0)
    assert torch.allclose(got.double(), expected, atol=1e-6)


def png() -> bytes:
    return base64.b64decode(as_url(picture(0)).partition(",")[2])


def opened(owner: Media, url: str, **how: Any) -> Any:
    """The picture of a URL."""
    file = File("image", "image", owner.opened(url, "image", **how))
    return decoded([file], Limits())[0]


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


@contextlib.contextmanager
def pages(answer: Callable[[http.server.BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """The URL of a server of this machine whose answers these are."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            with contextlib.suppress(OSError):  # the one that asked leaves
                answer(self)

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/a.png?b=c"
        server.shutdown()


def sends_picture(handler: http.server.BaseHTTPRequestHandler) -> None:
    assert handler.path == "/a.png?b=c"
    handler.send_response(200)
    handler.end_headers()
    handler.wfile.write(png())


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
    with pytest.raises(Refused, match=r"^'image' must be a URL: Invalid IPv6 URL\.$"):
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
        ("data:image/png;base64,a", "'image' must be in base64."),
        ("data:image/png;base64,é", "'image' must be in base64."),
        ("data:image/png,a", "'image' must be a data: URL in base64."),
    ):
        with pytest.raises(Refused) as raised:
            opened(Media(), url)
        assert str(raised.value) == line
    monkeypatch.setattr(media, "MOST_BYTES", 8)
    with pytest.raises(Refused) as raised:
        opened(Media(), as_url(picture(0)))
    assert raised.value.status == 413


def test_localhost_is_both_of_its_addresses():
    sockets = sockets_of("localhost", 0)
    try:
        addresses = {listener.getsockname()[:2] for listener in sockets}
        port = sockets[0].getsockname()[1]
        assert {("127.0.0.1", port)} <= addresses <= {("127.0.0.1", port), ("::1", port)}
        with pytest.raises(
            OSError, match=r"--host and --port must be free, got localhost:.*: Address already in use"
        ):
            sockets_of("localhost", port)
    finally:
        for listener in sockets:
            listener.close()
