"""Images and audio in messages: data: URLs, permitted files and permitted URLs."""

import asyncio
import io
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from ..http.request import Refused

MOST_BYTES = 32 << 20  # in one picture, one sound, and in all that a request has fetched
_SECONDS = 20.0  # for all that one request lets the server fetch
_HOW = "--media-folder lets the server open files, --media-urls http: URLs"


@dataclass(frozen=True)
class Media:
    """Files and URLs that requests may use beside data: URLs.

    Args:
        folder: files below it are permitted; None for none.
        fetches: True to fetch http: and https: URLs.
        hosts: permitted hosts with private addresses.
    """

    folder: Path | None = None
    fetches: bool = False
    hosts: tuple[str, ...] = ()

    async def fetch(self, parts: Iterable[dict[str, Any]], seconds: float = _SECONDS) -> None:
        """Fetches the URLs in message parts into their `content`. Raises: Refused."""
        from .fetching import fetched

        left = MOST_BYTES
        try:
            async with asyncio.timeout(seconds):
                for part in parts:
                    field = part["field"]
                    if not part["url"][:6].lower().startswith(("http:", "https:")):
                        continue
                    if not self.fetches:
                        raise Refused(f"'{field}' must be a data: URL; {_HOW}.", field)
                    part["content"] = await fetched(part["url"], field, self.hosts, left)
                    left -= len(part["content"])
        except OverflowError:
            raise _too_large(field) from None
        except TimeoutError:
            line = f"'{field}' cannot be fetched: all that a prompt names must be there in {seconds:g} s."
            raise Refused(line, field, "invalid_value") from None

    def opened(self, part: dict[str, Any]) -> io.BytesIO:
        """Opened file of a message part. Raises: Refused if it is not permitted."""
        if "content" in part:
            return io.BytesIO(part["content"])
        url, field = part["url"], part["field"]
        if part["type"] == "audio" and ":" not in url[:8]:
            return io.BytesIO(_of_base64(url, field))
        if url.startswith("data:"):
            comma = url.find(",")
            if not url.endswith(";base64", 0, max(comma, 0)):
                raise Refused(f"'{field}' must be a data: URL in base64.", field, "invalid_value")
            return io.BytesIO(_of_base64(url[comma + 1 :], field))
        if _scheme(url, field) in ("", "file") and self.folder is not None:
            return self._of_file(url, field, self.folder)
        raise Refused(f"'{field}' must be a data: URL; {_HOW}.", field)

    def _of_file(self, url: str, field: str, folder: Path) -> io.BytesIO:
        path = unquote(urlsplit(url).path) if url.startswith("file:") else url
        refused = Refused(f"'{field}' must be a file below the server's --media-folder.", field)
        try:
            file = (folder / path).resolve()
            if not file.is_relative_to(folder.resolve()) or not file.is_file():
                raise refused
            if file.stat().st_size > MOST_BYTES:
                raise _too_large(field)
            return io.BytesIO(file.read_bytes())
        except (OSError, ValueError):
            raise refused from None


def _scheme(url: str, field: str) -> str:
    """Scheme of a URL, or "" for a path. Raises: Refused."""
    if url.startswith("data:"):
        return "data"
    if url.startswith("/"):
        return ""
    try:
        return urlsplit(url[:4096]).scheme
    except ValueError as error:
        raise Refused(f"'{field}' must be a URL: {error}.", field, "invalid_value") from None


def _too_large(field: str) -> Refused:
    return Refused(f"'{field}' must have at most {MOST_BYTES >> 20} MiB.", field, "too_large", 413)


def _of_base64(text: str, field: str) -> bytes:
    if len(text) > MOST_BYTES * 4 // 3 + 4:
        raise _too_large(field)
    import pybase64

    try:
        return pybase64.b64decode("".join(text.split()), validate=True)
    except ValueError:
        raise Refused(f"'{field}' must be in base64.", field, "invalid_value") from None
