"""A server that is killed, as by `kill -9`."""

import contextlib
import http.client
import json
import signal
import threading
import time
import urllib.request

import pytest
from support.serving import QUANTISED, expected_text, process_at, said


@pytest.mark.slow("servers in processes of their own")
def test_a_server_that_is_killed_loses_no_prompt_that_was_written(checkpoint, tmp_path):
    """By SIGKILL while it answers and writes; those that follow are right, and read what is there."""
    folder = tmp_path / "kept"
    texts = [letter * 60 + "thequickbrownfox" for letter in "abcdefghij"]

    def ask(url: str, text: str) -> int:
        """Tokens of the disk; the answer is that of a model that keeps nothing."""
        body = {"messages": said(text), "temperature": 0, "max_tokens": 5}
        request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            told = json.load(answer)
        assert told["choices"][0]["message"]["content"] == expected_text(checkpoint, text, 5)
        return told["usage"]["prompt_tokens_details"]["disk_tokens"]

    def asks(url: str) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            for text in texts[1:]:
                ask(url, text)

    for turn in range(2):
        with process_at(checkpoint, "--prompt-folder", folder, *QUANTISED) as (process, url):
            found = [ask(url, text) for text in texts[: 1 + 9 * turn]]
            assert bool(turn) == (found[0] == 75), found
            client = threading.Thread(target=asks, args=(url,))
            client.start()
            while not [*folder.glob("*/*.state")]:
                assert client.is_alive()
                time.sleep(0.01)
            process.kill()
            assert process.wait(60) == -signal.SIGKILL
            client.join()
