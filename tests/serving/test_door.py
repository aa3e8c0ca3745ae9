"""The door of a server: what a request may be, and what it is told where nothing is generated any more."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from support import scripted

from torch_moe_mps.serving.device import Died

ASKED = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a~"}], "max_tokens": 3},
    "/v1/completions": {"prompt": "a~", "max_tokens": 3},
    "/v1/responses": {"input": "a~", "max_output_tokens": 3},
    "/v1/messages": {"messages": [{"role": "user", "content": "a~"}], "max_tokens": 3},
}


@pytest.fixture
def here() -> Iterator[scripted.Here]:
    with scripted.server() as server:
        yield server


def ask(here: scripted.Here, path: str, body: object = None) -> tuple[int, dict]:
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(here.url + path, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_a_token_beyond_the_vocabulary_is_refused_by_every_path(here):
    """A tokenizer may know more than the embedding of its model."""
    config, last = here.served.model.config, here.served.tokenizer("~")["input_ids"][0]
    config.vocab_size = last
    for path, body in ASKED.items():
        status, answer = ask(here, path, body)
        assert status == 400 and f"must be of tokens below {last}, got " in answer["error"]["message"], path
    assert not here.generator.jobs
    config.image_token_id = max(here.served.tokenizer.get_vocab().values())  # stands for an image
    config.vocab_size = config.image_token_id
    assert ask(here, "/v1/completions", {"prompt": [config.image_token_id], "max_tokens": 1})[0] == 200
    assert ask(here, "/v1/completions", {"prompt": [10**30]})[0] == 400


def test_a_server_that_generates_nothing_any_more_says_why(here, monkeypatch):
    died = Died("the thread of the device has died: MemoryError: of the host")
    here.generator.death = died
    here.generator.submit = lambda job: job.end(died)
    for path, body in ASKED.items():
        status, answer = ask(here, path, body)
        assert (status, answer["error"]["message"]) == (503, str(died)), path
    status, answer = ask(here, "/health")
    assert status == 503 and answer["status"] == "died" and answer["reason"] == str(died)
