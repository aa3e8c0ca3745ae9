"""Pictures and sound in messages: what comes in the request, and what the server's owner lets it open."""

import base64
import contextlib
import io
import itertools
import socket
import ssl
import string
import tempfile
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, BinaryIO, cast
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

import numpy as np

from ..._text import first_line
from ..http.request import Refused
from .addresses import is_public

MOST_BYTES = 32 << 20  # in one picture, one sound
_PIECE = 1 << 18  # characters in base64, or octets of an answer, that are read at a time
SECONDS = 20  # for all that one prompt lets the server fetch
_TOO_LATE = f"all that a prompt names must be there in {SECONDS} s"


@dataclass(frozen=True)
class Media:
    """The files and URLs that may be opened beside data: URLs.

    Args:
        folder: files below it; None for none.
        fetches: whether http: and https: URLs are fetched.
        hosts: of this machine or its network that are asked, too.
    """

    folder: Path | None = None
    fetches: bool = False
    hosts: tuple[str, ...] = ()

    def opened(
        self, url: str, field: str, seconds: float = SECONDS, rest: Callable[[], None] = lambda: None
    ) -> BinaryIO:
        """The file that a URL names. Raises: Refused for one that may not be opened.

        Args:
            seconds: in which it must be there.
            rest: called now and then while it is fetched or decoded.
        """
        if url.startswith("data:"):  # urlsplit would copy it several times, and keep it
            return _of_data(url, field, rest)
        try:
            scheme = urlsplit(url).scheme if not url.startswith("/") else ""
        except ValueError as error:
            raise Refused(f"'{field}' must be a URL: {error}.", field, "invalid_value") from None
        if scheme in ("http", "https") and self.fetches:
            return _fetched(url, field, self.hosts, seconds, rest)
        if scheme in ("", "file") and self.folder is not None:
            return self._of_file(url, field)
        how = "--media-folder lets the server open files, --media-urls http: URLs"
        raise Refused(f"'{field}' must be a data: URL; {how}.", field)

    def _of_file(self, url: str, field: str) -> BinaryIO:
        assert self.folder is not None
        path = unquote(urlsplit(url).path) if url.startswith("file:") else url
        refused = Refused(f"'{field}' must be a file below the server's --media-folder.", field)
        try:
            file, folder = (self.folder / path).resolve(), self.folder.resolve()
            if not file.is_relative_to(folder) or not file.is_file():
                raise refused
            if file.stat().st_size > MOST_BYTES:
                raise _too_large(field)
            return file.open("rb")
        except (OSError, ValueError):
            raise refused from None


def _of_data(url: str, field: str, rest: Callable[[], None]) -> BinaryIO:
    comma = url.find(",")
    if not url.endswith(";base64", 0, max(comma, 0)):
        raise Refused(f"'{field}' must be a data: URL in base64.", field, "invalid_value")
    return of_base64(url, field, rest, comma + 1)


def of_base64(data: str, field: str, rest: Callable[[], None] = lambda: None, first: int = 0) -> BinaryIO:
    """A file of what a text in base64 says.

    Args:
        rest: called for each piece.
        first: character of the text; a copy without those in front would hold other threads up.

    Raises: Refused.
    """
    if len(data) - first > MOST_BYTES * 4 // 3 + 4:
        raise _too_large(field)
    try:
        return _gathered(_pieces(data, first), rest)
    except ValueError:
        raise Refused(f"'{field}' must be in base64.", field, "invalid_value") from None


def _gathered(pieces: Iterable[bytes], rest: Callable[[], None]) -> BinaryIO:
    """A file of these pieces: memory that grows by them would be copied, and hold other threads up."""
    with contextlib.ExitStack() as opened:
        file = opened.enter_context(tempfile.SpooledTemporaryFile(4 * _PIECE))
        for piece in pieces:
            file.write(piece)
            rest()
        file.seek(0)
        opened.pop_all()  # its reader closes it
    return cast(BinaryIO, file)


def _pieces(data: str, first: int) -> Iterator[bytes]:
    """The octets of a text in base64, by operations of numpy, which hold no other thread up.

    Raises: ValueError.
    """
    rest = np.empty(0, np.uint8)  # characters behind the last whole piece; the end may be padded
    for start in range(first, len(data), _PIECE):
        characters = np.frombuffer(data[start : start + _PIECE].encode("ascii"), np.uint8)
        if (characters <= 32).any():
            characters = characters[~_IS_BLANK[characters]]
        characters = np.concatenate((rest, characters))
        whole = max(0, len(characters) - 1) & ~3
        codes = np.take(_CODES, characters[:whole].view("<u2")).reshape(-1, 2)
        if (codes == _NO_CODE).any():
            raise ValueError("a character is none of base64")
        octets = np.empty((len(codes), 3), np.uint8)
        octets[:, 0] = codes[:, 0] >> 4
        octets[:, 1] = codes[:, 0] << 4 | codes[:, 1] >> 8
        octets[:, 2] = codes[:, 1]
        yield octets.tobytes()
        rest = characters[whole:]
    yield base64.b64decode(rest.tobytes(), validate=True)


def _codes() -> Any:
    """The twelve bits of each two characters in base64, by their octets as a number."""
    own = np.full(256, _NO_CODE, np.uint16)
    own[[*(string.ascii_uppercase + string.ascii_lowercase + string.digits + "+/").encode()]] = range(64)
    second, first = np.meshgrid(own, own, indexing="ij")
    return np.where(np.maximum(first, second) < 64, first * 64 + second, _NO_CODE).astype(np.uint16).ravel()


_NO_CODE = 1 << 12
_CODES = _codes()
_IS_BLANK = np.isin(np.arange(256), [*string.whitespace.encode()])


def _fetched(
    url: str, field: str, hosts: Container[str], seconds: float, rest: Callable[[], None]
) -> BinaryIO:
    """The body of a URL. Redirects, which may lead anywhere, are not followed.

    Args:
        hosts: may have any address.
        seconds: in which the whole must be there.
    """
    ends = time.monotonic() + seconds
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        if seconds <= 0:
            raise TimeoutError(_TOO_LATE)
        is_secure = parts.scheme == "https"
        bare = _connected(host, parts.port or (443 if is_secure else 80), host in hosts, seconds)
        with _secured(bare, host) if is_secure else bare as connection:
            # A server that sends an octet now and then never keeps a read waiting for long.
            timer = threading.Timer(ends - time.monotonic(), _shut, [connection])
            timer.start()
            try:
                made = _answered(connection, parts, ends, rest)
            except (OSError, HTTPException) as error:
                raise TimeoutError(_TOO_LATE) if time.monotonic() >= ends else error from None
            finally:
                timer.cancel()
    except (OSError, ValueError, HTTPException) as error:
        reason = first_line(error) or type(error).__name__
        raise Refused(f"'{field}' cannot be fetched: {reason}.", field, "invalid_value") from None
    if made.seek(0, io.SEEK_END) > MOST_BYTES:
        made.close()
        raise _too_large(field)
    made.seek(0)
    return made


def _connected(host: str, port: int, is_named: bool, seconds: float) -> socket.socket:
    """A connection to an address of a host, which is checked itself: a name may mean another one each time.

    Raises: OSError.
    """
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for *_, address in addresses:
        if not is_named and not is_public(str(address[0])):
            raise OSError(f"{host} is of this machine or its network; --media-host {host} allows it")
    error: OSError | None = None
    for *_, address in addresses:
        try:
            return socket.create_connection((str(address[0]), port), seconds / len(addresses))
        except OSError as failed:
            error = failed
    raise error or OSError(f"{host} has no address")


def _secured(bare: socket.socket, host: str) -> ssl.SSLSocket:
    """A connection by TLS, which has not begun."""
    secure = ssl.create_default_context()
    return secure.wrap_socket(bare, server_hostname=host, do_handshake_on_connect=False)


def _answered(bare: socket.socket, parts: SplitResult, ends: float, rest: Callable[[], None]) -> BinaryIO:
    """The body of an answer, or its beginning where that is too large. Raises: OSError, HTTPException."""
    bare.settimeout(max(ends - time.monotonic(), 0.01))
    connection = HTTPConnection(parts.netloc.rpartition("@")[2])
    connection.sock = bare
    if isinstance(bare, ssl.SSLSocket):
        bare.do_handshake()
    with contextlib.closing(connection):
        connection.request("GET", urlunsplit(("", "", parts.path or "/", parts.query, "")))
        answer = connection.getresponse()
        if answer.status != 200:
            more = ", and redirects are not followed" if 300 <= answer.status < 400 else ""
            raise OSError(f"the status is {answer.status}{more}")
        pieces = itertools.islice(iter(lambda: answer.read(_PIECE), b""), MOST_BYTES // _PIECE + 1)
        made = _gathered(pieces, rest)
    if time.monotonic() >= ends:  # else what was cut off would be taken for the whole
        raise TimeoutError(_TOO_LATE)
    return made


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _too_large(field: str) -> Refused:
    return Refused(f"'{field}' must have at most {MOST_BYTES >> 20} MiB.", field, "too_large", 413)
