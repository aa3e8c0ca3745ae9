"""The server's page in a browser: Debian's packages chromium and chromium-driver."""

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import scripted, serving
from support.serving import said

from torch_moe_mps.serving.http import app

ENTER, ESCAPE, TAB = "\ue007", "\ue00c", "\ue004"
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = (
    "headless", "no-sandbox", "disable-gpu", "no-first-run", "disable-background-networking",
    "disable-component-update", "disable-sync", "window-size=900,700",
)  # fmt: skip
needs_browser = pytest.mark.skipif(
    not BROWSER or not shutil.which("chromedriver"),
    reason="no browser: `apt-get install chromium chromium-driver` brings it on Debian",
)


class Browser:
    """A browser without a window, by the W3C's WebDriver."""

    def __init__(self, url: str, arguments: list[str]):
        self._url = url
        asked = {"goog:chromeOptions": {"args": arguments, "binary": BROWSER}}
        session = self._post("/session", {"capabilities": {"alwaysMatch": asked}})
        self._url = f"{url}/session/{session['sessionId']}"

    def _post(self, path: str, body: dict) -> Any:
        content = json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, content, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()[:2000]) from None

    def reload(self) -> None:
        self._post("/refresh", {})

    def click(self, selector: str) -> None:
        """The last that is found."""
        self.run(f"[...document.querySelectorAll({selector!r})].at(-1).click()")

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
    port, profile = serving.free_port(), tempfile.mkdtemp()
    process = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://localhost:{port}/status")
                break
            assert time.monotonic() < end
            time.sleep(0.1)
        flags = [f"--{flag}" for flag in FLAGS]
        made = Browser(f"http://localhost:{port}", [*flags, f"--user-data-dir={profile}"])
        yield made
        made.close()
    finally:
        process.terminate()
        process.wait(30)
        shutil.rmtree(profile, ignore_errors=True)


TEXT = "document.querySelector('#talk').innerText"
DONE = "document.querySelector('#stop').disabled && document.querySelector('.figures')"
FIGURES = "[...document.querySelectorAll('.figures')].at(-1).textContent"
CONTRAST = """
const light = (text) => {
  const [r, g, b] = text.match(/[\\d.]+/g).map((part) => part / 255)
    .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ground = light(getComputedStyle(document.body).backgroundColor);
const shown = document.querySelectorAll("h1, #state, .figures, .text, .text a, .soft, label, summary");
return [...shown].map((element) => {
  const ink = light(getComputedStyle(element).color);
  return (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05);
});
"""


# A text that a model, or a page that it has read, may hold: none of it runs or reaches another machine.
HOSTILE = """
<script>window.hit = 1</script> <img src=x onerror="window.hit = 2"> <svg onload="window.hit = 3"></svg>
[link](javascript:window.hit=4) <a href="javascript:window.hit=5" id="form">raw</a> ![](javascript:hit=6)
<iframe srcdoc="<script>parent.hit = 7</script>"></iframe> <math><mi xlink:href="data:x,<script>8</script>">
<style>body { display: none }</style> <form action=/health><button form=form>go</button></form>
<img src="http://127.0.0.2/pixel"> <details open ontoggle="window.hit = 9"> `<img src=x onerror=hit=10>`

```"><img src=x onerror="window.hit = 11">
<script>window.hit = 12</script>
```
[ok](https://example.org "\" onmouseover=\"window.hit = 13")
"""
SAFE = r"""
const text = document.querySelector(".assistant .text");
text.querySelectorAll("*").forEach((element) => element.dispatchEvent(new Event("error")));
text.querySelectorAll("a").forEach((element) => element.href || element.click());
const bad = [...text.querySelectorAll("*")].filter((element) => /^(script|style|iframe|form)$/i
  .test(element.tagName) || [...element.attributes].some((one) => /^on|^style$|^id$|^form/.test(one.name)
  || /javascript:/i.test(one.value)));
return [typeof window.hit, bad.map((element) => element.outerHTML), getComputedStyle(document.body).display];
"""
TABLE = "Yes:\n\n| a | b |\n|---|---|\n| 1 | **2** |\n\n```python\nprint('<b>')\n```\n"
SETTINGS = "return [document.querySelector('#system').value, document.querySelector('#temperature').value]"


@pytest.mark.parametrize(
    "file, version, digest",
    [
        ("marked.js", "marked v18.2.1", "bb95d4c15f1289f78486eaacebf3bb18688475ed58a040ef762ed49337090542"),
        ("purify.js", "DOMPurify 3.4.18", "8053ee2a6a09f9d50f7fcd6fb7f07072f52c7f3fa9aa12147cab4feaf65ee970"),
    ],
)
def test_the_libraries_are_as_they_are_published(file, version, digest):
    content = (app.PAGE / file).read_bytes()
    assert hashlib.sha256(content).hexdigest() == digest and version.encode() in content
    assert version.replace(" v", " ") in (app.PAGE / "LICENSES.txt").read_text()


def test_usage_in_each_part_of_a_stream():
    with scripted.server() as here:
        here.says("abc")
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = {"model": "m", "messages": said("x"), "stream": True, "stream_options": options}
        content, kind = json.dumps(body).encode(), {"content-type": "application/json"}
        asked = urllib.request.Request(f"{here.url}/v1/chat/completions", content, kind)
        with urllib.request.urlopen(asked) as answer:
            events = [json.loads(line[6:]) for line in answer if line.startswith(b"data: {")]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert len(counts) >= 5 and counts == sorted(counts) and counts[-1] == 4


@needs_browser
@pytest.mark.sweep
def test_markdown_edits_and_a_reload():
    """Nothing hostile runs; a table, code, its button; system prompt, temperature, retry, edit; a reload."""
    with scripted.server() as here, browser() as page:
        page.open(here.url)
        page.wait_for("document.title === 'scripted'")
        assert "Ask scripted something" in page.run(f"return {TEXT}")
        here.says(HOSTILE)
        page.type("hostile" + ENTER)
        page.wait_for(DONE)
        assert page.run(SAFE) == ["undefined", [], "grid"]
        page.click("#new")

        here.says(TABLE)
        page.run("document.querySelector('#settings').open = true; document.querySelector('#system').focus()")
        page.type("Be short." + TAB + "0.5" + TAB)
        page.run("document.querySelector('#said').focus()")
        page.type("first" + ENTER)
        page.wait_for(DONE)
        assert here.generator.prompts[-1].startswith("<|im_start|>system\nBe short.<|im_end|>")
        assert here.generator.jobs[-1].config.temperature == 0.5
        cells = page.run("return [...document.querySelectorAll('.text td')].map((cell) => cell.innerHTML)")
        assert cells == ["1", "<strong>2</strong>"]
        page.run("document.execCommand = () => { window.copied = document.activeElement.value; }")
        page.run("delete Navigator.prototype.clipboard")
        page.click(".code button")
        page.wait_for("window.copied === \"print('<b>')\\n\"")
        assert page.run("return document.querySelector('.code').innerText").startswith("python")
        page.picture("markdown")

        here.says("again")
        page.click(".assistant .under button")  # Retry
        page.wait_for(f"{DONE} && {TEXT}.includes('again')")
        assert here.generator.prompts[-1].count("first") == 1 and "Yes" not in here.generator.prompts[-1]
        here.says("edited")
        page.click(".user .under button")
        page.type(" and more" + ENTER)
        page.wait_for(f"{DONE} && {TEXT}.includes('edited')")
        assert "first and more<|im_end|>" in here.generator.prompts[-1]
        assert "again" not in page.run(f"return {TEXT}")

        page.reload()
        page.wait_for(f"{TEXT}.includes('edited')")
        assert page.run(SETTINGS) == ["Be short.", "0.5"]
        page.click("#chats-button")
        assert page.run("return document.querySelectorAll('#list li').length") == 2
        page.picture("chats")
        page.run("document.querySelector('#list li button:last-child').click()")  # Delete
        page.wait_for("!document.querySelector('#first').hidden")
        assert page.run("return document.querySelectorAll('#list li').length") == 1


@needs_browser
@pytest.mark.sweep
def test_a_chat_by_the_keyboard():
    """Reasoning, text and figures; Escape stops an answer; light and dark, nothing from elsewhere."""
    with scripted.server() as here, browser() as page:
        here.says("<think>\nhm\n</think>\n\nThe sky is blue.", "second", cached=4)
        page.open(here.url)
        page.wait_for("document.title === 'scripted'")
        page.type("why?" + ENTER)
        page.wait_for(f"{FIGURES}.includes('prompt tokens cached')")
        shown = page.run(f"return {TEXT}")
        assert "why?" in shown and "The sky is blue." in shown and "4 of " in shown and "tokens/s" in shown
        assert page.run("return document.querySelector('.thought').textContent") == "Reasoninghm"
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
        assert focused[:2] == ["said", "send"]  # Stop cannot be pressed
        page.click("#new")
        page.wait_for("!document.querySelector('#first').hidden")
        page.picture("first")
        addresses = page.run("return performance.getEntriesByType('resource').map((entry) => entry.name)")
        assert addresses and all(address.startswith(here.url) for address in addresses)


@needs_browser
@pytest.mark.sweep
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
        page.wait_for(f"{FIGURES}.includes('prompt tokens cached')")
        assert page.run("return [innerWidth, document.documentElement.scrollWidth]") == [360, 360]
        assert page.run(
            "return [...document.querySelectorAll('button, textarea')].every((element) => {"
            "const {left, right, bottom} = element.getBoundingClientRect();"
            "return left >= 0 && right <= innerWidth && bottom <= innerHeight; })"
        )
        page.picture("phone")
