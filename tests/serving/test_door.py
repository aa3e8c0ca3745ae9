"""The door of a server: what a request may be, and what it is told where nothing is generated any more."""

import contextlib
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import xgrammar
from support import scripted
from support.jobs import Asked, ids_of, model_of, run

from torch_moe_mps.serving import app
from torch_moe_mps.serving.batch import Batch
from torch_moe_mps.serving.device import Died
from torch_moe_mps.serving.limited import Limited, TooLong
from torch_moe_mps.serving.request import Refused
from torch_moe_mps.serving.served import Served
from torch_moe_mps.serving.structured import Masked
from torch_moe_mps.transformers.upstream.chat import variables_of

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


def test_requests_that_take_long_to_read_delay_no_other(here, monkeypatch):
    """Four are still being read when another one has its answer; the event loop parses no body."""
    goes_on, reading, parsed = threading.Event(), threading.Semaphore(0), []
    own_prepare, own_body = Served.prepare, app.body_of

    def prepare(served, request, show):
        if request.most == 7:
            reading.release()
            assert goes_on.wait(60)
        return own_prepare(served, request, show)

    def body_of(octets):
        parsed.append(threading.current_thread().name)
        return own_body(octets)

    monkeypatch.setattr(Served, "prepare", prepare)
    monkeypatch.setattr(app, "body_of", body_of)
    path, body = "/v1/completions", {"prompt": "a"}
    with ThreadPoolExecutor(4) as clients:
        hostile = [clients.submit(ask, here, path, body | {"max_tokens": 7}) for _ in range(4)]
        try:
            assert all(reading.acquire(timeout=60) for _ in hostile)
            assert ask(here, path, body | {"max_tokens": 3})[0] == 200
            assert not any(each.done() for each in hostile)
        finally:
            goes_on.set()
        assert [each.result()[0] for each in hostile] == [200] * 4
    assert len(parsed) == 5 and all(name.startswith("reader") for name in parsed)


def test_long_texts_take_turns_and_short_ones_wait_for_none(here, monkeypatch):
    """They would take the cores from the answers."""
    entered: list[str] = []

    @contextlib.contextmanager
    def turn():
        entered.append(path)
        yield

    for text, status in (("a", 200), ("a" * 70_000, 400)):
        chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 3}
        bodies = {"/v1/completions": {"prompt": text, "max_tokens": 3}, "/v1/chat/completions": chat}
        for path, body in (bodies | {"/tokenize": {"content": text}}).items():
            monkeypatch.setattr(here.served, "_long", turn())
            assert ask(here, path, body)[0] == (200 if path == "/tokenize" else status)
        assert entered == ([] if status == 200 else [*bodies, "/tokenize"])


def test_a_body_of_too_many_values_is_refused(here, monkeypatch):
    monkeypatch.setattr(app, "_MOST_VALUES", 50)
    status, answer = ask(here, "/v1/completions", {"prompt": [1] * 60})
    assert status == 413 and answer["error"]["message"] == "The body must have at most 50 values."


def test_a_call_that_is_late_goes_on_by_itself():
    limited, goes_on = Limited(), threading.Event()
    assert limited.call(lambda: 5, 60)[0] == 5
    with pytest.raises(KeyError):
        limited.call(lambda: {}["a"], 60)
    for _ in range(4):
        assert not limited.is_busy
        with pytest.raises(TooLong):
            limited.call(goes_on.wait, 0.01)
    assert limited.is_busy and limited.call(lambda: 6, 60)[0] == 6
    late = limited._late
    goes_on.set()
    for thread in late:
        thread.join(60)
    assert not limited.is_busy


class Clocked(Limited):
    """Calls that take as long as they are said to."""

    def __init__(self, *seconds: float):
        super().__init__()
        self.seconds = [*seconds]

    def call(self, function, seconds):
        taken = self.seconds.pop(0) if self.seconds else 0.0
        if taken > seconds:
            raise TooLong
        return function(), taken


@pytest.mark.parametrize(("seconds", "tokens"), [((0.0, 5.0), 2), ((0.3, 0.3), 2), ((0.1,) * 9, 6)])
def test_masks_that_take_too_long_end_their_row(seconds, tokens):
    """One of them, or all together; the answer beside goes on."""
    words = xgrammar.TokenizerInfo([f"{i:02}" for i in range(99)], vocab_size=99, stop_token_ids=[98])
    grammar = xgrammar.GrammarCompiler(words).compile_grammar("root ::= [0-9]*")
    refused = Refused("too long", "grammar")
    masked = Masked(grammar, 99, Clocked(*seconds), refused)
    bad, good = Asked(ids_of(2, 6), 9, processors=[masked]), Asked(ids_of(1, 5), 9)
    run(Batch(model_of(), None, 2), bad, good)
    assert bad.reasons == [refused] and len(bad.tokens) == tokens
    assert good.tokens == good.expected(model_of())


def test_no_schema_begins_while_many_are_late(here, monkeypatch):
    """A late one is refused, and so are those that come while several compile by themselves."""
    limited, goes_on = here.served._grammars._limited, threading.Event()
    own = limited.call
    monkeypatch.setattr(limited, "call", lambda function, seconds: own(goes_on.wait, 0.01))
    body = ASKED["/v1/chat/completions"] | {"json_schema": {"type": "object"}}
    try:
        answers = [ask(here, "/v1/chat/completions", body) for _ in range(5)]
    finally:
        goes_on.set()
    assert [status for status, _ in answers] == [400] * 4 + [503]
    assert "quickly compiled" in answers[0][1]["error"]["message"]
    assert ask(here, "/v1/chat/completions", ASKED["/v1/chat/completions"])[0] == 200


def test_special_tokens_that_are_split_change_no_other_request(here):
    def tokens(**more):
        return ask(here, "/tokenize", {"content": "<|im_end|>", **more})[1]["tokens"]

    whole = tokens()
    assert len(whole) == 1 and len(tokens(parse_special=False)) > 1 and tokens() == whole
    assert not here.served.tokenizer.backend_tokenizer.encode_special_tokens


def test_variables_of_a_chat_template(here):
    """Names that it reads, and none that is a part of a word, a loop's own, or a chat's."""
    template = (
        "{% generation %}{{ deep }}{% endgeneration %}{% set own = 1 %}{% for m in messages %}{{ m.enable }}"
        "{% endfor %}{% if thinking is defined %}enable_thinking{% endif %}{{ raise_exception }}"
    )
    assert variables_of(template) == {"deep", "messages", "thinking"}
    here.served.processor.chat_template = template
    assert here.served._variables == {"deep", "thinking"}
    body = ASKED["/v1/chat/completions"]
    given = {"deep": "b", "enable": "c", "messages": [], "tools": 5, "tokenize": False, "raise_exception": 1}
    assert ask(here, "/v1/chat/completions", body | {"chat_template_kwargs": given})[0] == 200
    assert here.generator.prompts[-1].startswith("b")
