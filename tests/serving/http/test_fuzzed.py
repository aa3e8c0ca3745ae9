"""Requests of every protocol with wrong values anywhere: none of them is the server's own error."""

import json
import random
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support import scripted, serving
from support.fuzzed import fuzzed


def checkpoint_of_2048(folder: Path) -> Path:
    """A checkpoint of a model that reads 2,048 tokens, and calls tools."""
    serving.printable_checkpoint(folder, chat_template=scripted.TEMPLATE)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    return folder


def ask(url: str, body: Any, leaves: bool = False) -> tuple[int, str]:
    """Status and text of an answer; a client that leaves reads none of it."""
    asked = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return answer.status, "" if leaves else answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.slow("asks a server 40 times")
@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.sweep)])
def test_no_request_is_an_error_of_the_server(count, tmp_path):
    """Each is answered, or refused with one line."""
    draws, statuses = random.Random(5), []
    with serving.server_at(checkpoint_of_2048(tmp_path)) as url:
        for _ in range(count):
            path, body = fuzzed(draws)
            status, text = ask(url + path, body)
            statuses.append(status)
            assert status < 500, (path, body, text)
            assert "server_error" not in text and "api_error" not in text, (path, body, text)
            if status != 200:
                line = json.loads(text)["error"]["message"]
                assert line and "\n" not in line, (path, body, text)
    assert min(statuses.count(200), sum(status != 200 for status in statuses)) > count / 10


# Grammars, biases, and a stream that its client leaves.
_HOSTILE: list[dict[str, Any]] = [
    *({"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}} for schema in (
        {"$ref": "#"}, {"enum": ["a"]}, {"enum": [*range(5000)]}
    )),
    {"logit_bias": {"5": -100, "6": 100}}, {"stream": True, "max_tokens": 2000},
]  # fmt: skip


@pytest.mark.slow("a server and many clients")
@pytest.mark.parametrize("count", [16, pytest.param(600, marks=pytest.mark.sweep)])
def test_what_others_ask_changes_no_answer(count, tmp_path):
    """Hostile requests beside others, which have the answers that they have alone."""
    draws, path = random.Random(7), "/v1/chat/completions"
    victims = [
        {"messages": serving.said(text), "max_tokens": 60, "temperature": temperature, "seed": number}
        for number, (text, temperature) in enumerate((("a", 0), ("the sky", 2), ("a long text " * 9, 0)))
    ]
    ended = threading.Event()

    def choice(text: str) -> Any:
        return json.loads(text)["choices"][0]

    server = serving.process_at(checkpoint_of_2048(tmp_path), "--prompt-disk", 0, "--log-level", "error")
    with server as (_, url), ThreadPoolExecutor(8) as clients:
        expected = [choice(ask(url + path, body)[1]) for body in victims]

        def keeps_asking(number: int) -> int:
            times = 0
            while not ended.is_set() or times < 2:
                status, text = ask(url + path, victims[number])
                assert status == 200 and choice(text) == expected[number], text
                times += 1
            return times

        asking = [clients.submit(keeps_asking, number) for number in range(len(victims))]
        hostile = []
        for _ in range(count):
            if draws.random() < 0.6:
                body = victims[0] | {"max_tokens": 20} | draws.choice(_HOSTILE)
                leaves = "stream" in body or draws.random() < 0.3
                hostile.append(clients.submit(ask, url + path, body, leaves))
            else:
                other, body = fuzzed(draws)
                hostile.append(clients.submit(ask, url + other, body))
        statuses = [each.result()[0] for each in hostile]
        ended.set()
        assert all(each.result() >= 2 for each in asking)
        assert {200, 400} <= {*statuses}
        assert not [status for status in statuses if status >= 500], statuses
        with urllib.request.urlopen(f"{url}/health") as answer:
            assert json.load(answer)["status"] == "ok"
