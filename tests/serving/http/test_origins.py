"""Pages of other sites in a browser: none of them reaches the server."""

import json
import logging
import urllib.error
import urllib.request
from http.client import HTTPConnection

import pytest
from support import scripted
from support.serving import said


def named(name: str) -> dict:
    return {"type": "function", "function": {"name": name}}


def test_pages_of_other_sites_are_refused(here):
    asked = urllib.request.Request(f"{here.url}/v1/models", headers={"sec-fetch-site": "cross-site"})
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(asked)
    with scripted.server(origins=("*",)) as open_to_all:
        request = urllib.request.Request(
            f"{open_to_all.url}/v1/models",
            headers={"sec-fetch-site": "cross-site", "origin": "http://a.example"},
        )
        with urllib.request.urlopen(request) as answer:
            assert answer.headers["access-control-allow-origin"] == "*"


def test_pages_of_other_origins_are_refused_where_a_browser_sends_nothing_else(here, caplog):
    """Browsers leave Sec-Fetch-Site out towards http: hosts of a network."""
    body = json.dumps({"messages": said("a"), "max_tokens": 1})

    def status_of(url: str, **headers: str) -> tuple[int, dict]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = asked(url, "POST", named)
        return answer.status, json.load(answer)

    def asked(url: str, method: str, headers: dict):
        connection = HTTPConnection(url.removeprefix("http://"), timeout=60)
        connection.request(method, "/v1/chat/completions", body, headers)
        return connection.getresponse()

    json_type = {"content_type": "application/json"}
    here.says(*["ok"] * 2)
    assert status_of(here.url, **json_type)[0] == 200
    assert status_of(here.url)[0] == 200  # programs that name no type
    foreign = ("http://evil.example", "null", here.url, "http://localhost", "")
    for origin in foreign:
        caplog.clear()
        with caplog.at_level(logging.INFO, "torch_moe_mps.serving.http.app"):
            status, told = status_of(here.url, origin=origin, **json_type)
        assert status == 403 and told["error"]["code"] == "origin_not_allowed", origin
        (line,) = [record.getMessage() for record in caplog.records]
        assert " /v1/chat/completions: 403, " in line and repr(origin) in line
    for kind in ("text/plain", "Text/Plain;charset=UTF-8"):
        status, told = status_of(here.url, content_type=kind)
        assert status == 403 and told["error"]["code"] == "content_type_not_allowed", kind
    with scripted.server(origins=("https://app.example", "null")) as some:
        some.says(*["ok"] * 3)
        for origin in ("https://app.example", "null"):
            allowed = {"origin": origin, "sec_fetch_site": "cross-site"}
            assert status_of(some.url, **allowed, **json_type)[0] == 200
        assert status_of(some.url, origin="https://app.example.evil.example", **json_type)[0] == 403
        headers = {"origin": "https://app.example", "access-control-request-method": "POST"}
        answer = asked(some.url, "OPTIONS", headers)
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
