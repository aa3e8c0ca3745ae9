"""Pictures and sound in a request."""

import base64
from typing import Any

import pytest
from support.images import as_url, picture

from torch_moe_mps.serving.http.media import loading
from torch_moe_mps.serving.http.media.decoding import Limits, MediaFile, decoded
from torch_moe_mps.serving.http.request import Refused


def opened(url: str) -> Any:
    """The picture of a URL."""
    return decoded(
        [MediaFile("image", "image", loading.opened({"type": "image", "url": url, "field": "image"}))],
        Limits(),
    )[0]


@pytest.mark.parametrize(
    "url", ["/etc/passwd", "cat.png", "file:///etc/passwd", "http://127.0.0.1:9/a.png", "ftp://a"]
)
def test_only_pictures_in_the_request_are_opened(url):
    """And nothing tells whether a file is there."""
    line = "'image' must be a data: URL: this server fetches nothing."
    with pytest.raises(Refused, match=f"^{line}$") as raised:
        opened(url)
    assert raised.value.field == "image" and raised.value.status == 400
    assert opened(as_url(picture(0))).size == picture(0).size


def test_base64_may_have_lines_and_no_other_characters():
    for count in range(14):
        octets = bytes(range(count))
        text = base64.b64encode(octets).decode()
        for line in (1, 3, 7):
            lines = "\n".join(text[at : at + line] for at in range(0, len(text), line))
            for kind, url in (("image", f"data:;base64, {lines}\r\n"), ("audio", lines)):
                assert loading.opened({"type": kind, "url": url, "field": "f"}).read() == octets
        for wrong in (f"{text}A", f"{text[:4]}!{text[4:]}", f"AA=={text}" if text else "A"):
            with pytest.raises(Refused, match="must be in base64"):
                opened(f"data:;base64,{wrong}")
    for wrong in ("data:;base64", "data:image/png,AAAA", "data:,;base64,AAAA"):
        with pytest.raises(Refused, match="must be a data: URL in base64"):
            opened(wrong)


def test_what_is_no_picture_is_one_line(monkeypatch):
    """Without an address of memory."""
    nothing = base64.b64encode(b"no picture").decode()
    with pytest.raises(Refused, match=r"^'image' must be a picture, got 10 bytes that are none\.$"):
        opened(f"data:image/png;base64,{nothing}")
    monkeypatch.setattr(loading, "MOST_BYTES", 8)
    with pytest.raises(Refused) as raised:
        opened(as_url(picture(0)))
    assert raised.value.status == 413
