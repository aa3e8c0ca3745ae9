"""Pictures and sound in messages: what comes in the request, and what the server's owner lets it open."""

import base64
import binascii
import io
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from .request import Refused, wrong

MOST_BYTES = 32 << 20  # of one picture, one sound
MOST_PIXELS = 1 << 26
_SECONDS = 20


@dataclass(frozen=True)
class Media:
    """The files and URLs that may be opened beside data: URLs.

    Args:
        folder: files below it; None for none.
        fetches: whether http: and https: URLs are fetched.
    """

    folder: Path | None = None
    fetches: bool = False

    def picture(self, url: str, field: str) -> Any:
        """The picture of a URL. Raises: Refused for one that may not be opened, or is none."""
        from PIL import Image, UnidentifiedImageError

        octets = self.octets(url, field)
        try:
            picture = Image.open(io.BytesIO(octets))
            width, height = picture.size
            if width * height > MOST_PIXELS:
                raise wrong(field, f"a picture of at most {MOST_PIXELS} pixels", f"{width} x {height}")
            return picture.convert("RGB")
        except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            raise Refused(
                f"'{field}' must be a picture, got {len(octets)} bytes that are none.", field
            ) from None

    def octets(self, url: str, field: str) -> bytes:
        scheme = urlsplit(url).scheme if not url.startswith("/") else ""
        if scheme == "data":
            return _of_data(url, field)
        if scheme in ("http", "https") and self.fetches:
            return _fetched(url, field)
        if scheme in ("", "file") and self.folder is not None:
            return self._of_file(url, field)
        how = "--media-folder lets the server open files, --media-urls http: URLs"
        raise Refused(f"'{field}' must be a data: URL; {how}.", field)

    def _of_file(self, url: str, field: str) -> bytes:
        assert self.folder is not None
        path = unquote(urlsplit(url).path) if url.startswith("file:") else url
        refused = Refused(f"'{field}' must be a file below the server's --media-folder.", field)
        try:
            file, folder = (self.folder / path).resolve(), self.folder.resolve()
            if not file.is_relative_to(folder) or not file.is_file():
                raise refused
            if file.stat().st_size > MOST_BYTES:
                raise _too_large(field)
            return file.read_bytes()
        except (OSError, ValueError):
            raise refused from None


def _of_data(url: str, field: str) -> bytes:
    head, comma, data = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise Refused(f"'{field}' must be a data: URL in base64.", field, "invalid_value")
    return decoded(data, field)


def decoded(data: str, field: str) -> bytes:
    """The octets of a text in base64. Raises: Refused."""
    if len(data) > MOST_BYTES * 4 // 3 + 4:
        raise _too_large(field)
    try:
        return base64.b64decode("".join(data.split()), validate=True)
    except (binascii.Error, ValueError):
        raise Refused(f"'{field}' must be in base64.", field, "invalid_value") from None


def _fetched(url: str, field: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=_SECONDS) as answer:
            octets: bytes = answer.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise Refused(f"'{field}' cannot be fetched: {error}.", field, "invalid_value") from None
    if len(octets) > MOST_BYTES:
        raise _too_large(field)
    return octets


def _too_large(field: str) -> Refused:
    return Refused(f"'{field}' must have at most {MOST_BYTES >> 20} MiB.", field, "too_large", 413)
