"""The server's page in a browser: Debian's packages chromium and chromium-driver."""

import contextlib
import json
import os
import shutil
import subprocess
import time
import urllib.request
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import scripted, serving

pytestmark = pytest.mark.sweep
ENTER, ESCAPE, TAB = "\ue007", "\ue00c", "\ue004"


class Browser:
    """A browser without a window, by the W3C's WebDriver."""

    def __init__(self, url: str, arguments: list[str]):
        self._url = url
        asked = {"goog:chromeOptions": {"args": arguments, "binary": shutil.which("chromium")}}
        session = self._post("/session", {"capabilities": {"alwaysMatch": asked}})
        self._url = f"{url}/session/{session['sessionId']}"

    def _post(self, path: str, body: dict) -> Any:
        content = json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, content, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["value"]

    def open(self, url: str) -> None:
        self._post("/url", {"url": url})

    def run(self, script: str) -> Any:
        return self._post("/execute/sync", {"script": script, "args": []})

    def type(self, text: str) -> None:
        """With the keyboard, wherever the focus is."""
        keys = [{"type": kind, "value": key} for key in text for kind in ("keyDown", "keyUp")]
        self._post("/actions", {"actions": [{"type": "key", "id": "keys", "actions": keys}]})

    def _emulate(self, name: str, **params: object) -> None:
        self._post("/goog/cdp/execute", {"cmd": f"Emulation.{name}", "params": params})

    def set_scheme(self, name: str) -> None:
        self._emulate("setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def set_phone(self, width: int, height: int) -> None:
        """A window is at least 500 pixels wide; the screen of a phone is not."""
        self._emulate(
            "setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2, mobile=True
        )

    def wait_for(self, script: str, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not self.run(f"return {script}"):
            assert time.monotonic() < end, (script, self.run("return document.body.innerText"))
            time.sleep(0.05)

    def picture(self, name: str) -> None:
        """Writes a picture of the page where PAGE_PICTURES says."""
        if folder := os.environ.get("PAGE_PICTURES"):
            with urllib.request.urlopen(f"{self._url}/screenshot") as answer:
                Path(folder, f"{name}.png").write_bytes(b64decode(json.load(answer)["value"]))

    def close(self) -> None:
        urllib.request.urlopen(urllib.request.Request(self._url, method="DELETE"))


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    driver = shutil.which("chromedriver")
    assert driver and shutil.which("chromium"), (
        "`apt-get install chromium chromium-driver` brings the browser"
    )
    port = serving.free_port()
    process = subprocess.Popen([driver, f"--port={port}"], stdout=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://localhost:{port}/status")
                break
            assert time.monotonic() < end
            time.sleep(0.1)
        made = Browser(f"http://localhost:{port}", ["--headless", "--no-sandbox", "--window-size=900,700"])
        yield made
        made.close()
    finally:
        process.terminate()
        process.wait(30)


TEXT = "document.querySelector('#talk').innerText"
FIGURES = "[...document.querySelectorAll('.figures')].at(-1).textContent"
CONTRAST = """
const light = (text) => {
  const [r, g, b] = text.match(/[\\d.]+/g).map((part) => part / 255)
    .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ground = light(getComputedStyle(document.body).backgroundColor);
const shown = document.querySelectorAll("h1, #state, .figures, .assistant > div, label, details");
return [...shown].map((element) => {
  const ink = light(getComputedStyle(element).color);
  return (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05);
});
"""


def test_a_chat_by_the_keyboard():
    """Reasoning, text and figures; Escape stops an answer; light and dark, nothing from elsewhere."""
    with scripted.server() as here, browser() as page:
        here.says("<think>\nhm\n</think>\n\nThe sky is blue.", "second", cached=4)
        page.open(here.url)
        page.wait_for("document.title === 'scripted'")
        page.type("why?" + ENTER)
        page.wait_for(f"{FIGURES}.includes('tokens of the prompt were kept')")
        shown = page.run(f"return {TEXT}")
        assert "why?" in shown and "The sky is blue." in shown and "4 of " in shown and "tokens/s" in shown
        assert page.run("return document.querySelector('details').textContent") == "Reasoninghm"
        page.wait_for("document.querySelector('#state').textContent.includes('GB in use')")
        for scheme in ("light", "dark"):
            page.set_scheme(scheme)
            assert min(page.run(CONTRAST)) >= 4.5, scheme
            page.picture(scheme)
        page.type("and?" + ENTER)
        page.wait_for(f"{TEXT}.includes('second')")
        assert "The sky is blue." in here.generator.prompts[1]
        generator = here.says("x" * 50)
        generator.wait = lambda job: job._cancelled.wait(30)
        page.wait_for("!document.querySelector('#send').disabled")
        page.type("long" + ENTER)
        page.wait_for("!document.querySelector('#stop').disabled")
        page.type(ESCAPE)
        page.wait_for(f"{FIGURES} === 'stopped'")
        assert generator.jobs[0].is_cancelled or generator.jobs[0]._cancelled.wait(10)
        focused = []
        for _ in range(4):
            focused.append(page.run("return document.activeElement.id"))
            page.type(TAB)
        assert focused[:3] == ["said", "send", "new"]  # Stop cannot be pressed
        page.run("document.querySelector('#new').click()")
        page.wait_for(f"{TEXT} === ''")
        addresses = page.run("return performance.getEntriesByType('resource').map((entry) => entry.name)")
        assert addresses and all(address.startswith(here.url) for address in addresses)


def test_a_server_with_a_key_on_a_phone():
    """It asks for the key; nothing is wider than the screen, and all buttons are on it."""
    with scripted.server(key="secret") as here, browser() as page:
        page.set_phone(360, 640)
        here.says("hello " + "long" * 40)
        page.open(here.url)
        page.wait_for("!document.querySelector('#locked').hidden")
        page.run("document.querySelector('#key').focus()")
        page.type("secret" + ENTER)
        page.wait_for("document.title === 'scripted'")
        page.run("document.querySelector('#said').focus()")
        page.type("hi" + ENTER)
        page.wait_for(f"{FIGURES}.includes('tokens of the prompt were kept')")
        assert page.run("return [innerWidth, document.documentElement.scrollWidth]") == [360, 360]
        assert page.run(
            "return [...document.querySelectorAll('button, textarea')].every((element) => {"
            "const {left, right, bottom} = element.getBoundingClientRect();"
            "return left >= 0 && right <= innerWidth && bottom <= innerHeight; })"
        )
        page.picture("phone")
