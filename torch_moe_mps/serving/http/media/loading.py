"""Images and audio in messages, as data: URLs."""

import io
from typing import Any

import pybase64

from ..request import Refused

MOST_BYTES = 32 << 20  # in one picture or sound


def opened(part: dict[str, Any]) -> io.BytesIO:
    """Opened file of a message part. Raises: Refused."""
    text, field = part["url"], part["field"]
    if text.startswith("data:"):
        comma = text.find(",")
        if not text.endswith(";base64", 0, max(comma, 0)):
            raise Refused(f"'{field}' must be a data: URL in base64.", field, "invalid_value")
        text = text[comma + 1 :]
    elif part["type"] != "audio" or ":" in text[:8]:  # sound may come without the URL's head
        raise Refused(f"'{field}' must be a data: URL: this server fetches nothing.", field)
    if len(text) > MOST_BYTES * 4 // 3 + 4:
        raise Refused(f"'{field}' must have at most {MOST_BYTES >> 20} MiB.", field, "too_large", 413)
    try:
        return io.BytesIO(pybase64.b64decode("".join(text.split()), validate=True))
    except ValueError:
        raise Refused(f"'{field}' must be in base64.", field, "invalid_value") from None
