"""Limits of requests: what one may be, what it gets from a server that has stopped, and that hostile ones
change and delay no other answer.
"""

import asyncio
import contextlib
import functools
import gc
import http.client
import json
import os
import re
import subprocess
import sys
import threading
import time
import types
import urllib.error
import urllib.request
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
import xgrammar
from bench_door import KINDS
from support import scripted
from support.jobs import Asked, ids_of, model_of, run
from support.processes import REPOSITORY
from support.scripted import ask, until

from torch_moe_mps._text import shown
from torch_moe_mps.models.upstream.models import variables_of
from torch_moe_mps.serving.engine.engine import Engine
from torch_moe_mps.serving.engine.loop import DeviceThreadError
from torch_moe_mps.serving.engine.memory import memory_in_use
from torch_moe_mps.serving.http import app, limits, reading, structured
from torch_moe_mps.serving.http.answers import Answers
from torch_moe_mps.serving.http.limited import Limited, TooLong
from torch_moe_mps.serving.http.request import Refused
from torch_moe_mps.serving.http.structured import Masked

ASKED = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a~"}], "max_tokens": 3},
    "/v1/completions": {"prompt": "a~", "max_tokens": 3},
    "/v1/responses": {"input": "a~", "max_output_tokens": 3},
    "/v1/messages": {"messages": [{"role": "user", "content": "a~"}], "max_tokens": 3},
}


def form(schema: dict) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


@pytest.fixture
def here() -> Iterator[scripted.Here]:
    with scripted.server() as server:
        yield server


def test_beams_of_a_checkpoint_refuse_no_request(here):
    """They were refused as if the client had asked for them."""
    here.served.model.generation_config.update(num_beams=4, num_return_sequences=2)
    for path, body in ASKED.items():
        assert ask(here, path, body)[0] == 200, path


def test_ends_of_a_checkpoint_beyond_its_vocabulary_refuse_no_request(here):
    """They cannot come; those that can, and the tokenizer's, end an answer."""
    here.served.model.generation_config.eos_token_id = [1, 10**6]
    assert ask(here, "/v1/completions", ASKED["/v1/completions"])[0] == 200
    (job,) = here.generator.jobs
    assert job.config.eos_token_id == [1, here.served.template.tokenizer.eos_token_id]


def test_stop_strings_of_a_checkpoint_end_answers(here):
    here.served.model.generation_config.stop_strings = ["cd"]
    here.generator.says = ["abcdef"]
    body = ASKED["/v1/completions"] | {"max_tokens": 9}
    for more, text in (({}, "ab"), ({"stop": "b"}, "a")):
        status, answer = ask(here, "/v1/completions", body | more)
        assert status == 200 and answer["choices"][0]["text"] == text
        assert answer["choices"][0]["finish_reason"] == "stop"


def test_a_token_beyond_the_vocabulary_is_refused_by_every_path(here):
    """A tokenizer may know more than the embedding of its model."""
    config, last = here.served.model.config, here.served.template.tokenizer("~")["input_ids"][0]
    config.vocab_size = last
    for path, body in ASKED.items():
        status, answer = ask(here, path, body)
        assert status == 400 and f"must be of tokens below {last}, got " in answer["error"]["message"], path
    assert not here.generator.jobs
    config.image_token_id = max(here.served.template.tokenizer.get_vocab().values())  # stands for an image
    config.vocab_size = config.image_token_id
    assert ask(here, "/v1/completions", {"prompt": [config.image_token_id], "max_tokens": 1})[0] == 200
    assert ask(here, "/v1/completions", {"prompt": [10**30]})[0] == 400


def test_a_server_that_generates_nothing_any_more_says_why(here, monkeypatch):
    died = DeviceThreadError("the thread of the device has died: MemoryError: of the host")
    here.generator.death = died
    here.generator.submit = lambda job: job.end(died)
    for path, body in ASKED.items():
        status, answer = ask(here, path, body)
        assert (status, answer["error"]["message"]) == (503, str(died)), path
    status, answer = ask(here, "/health")
    assert status == 503 and answer["status"] == "died" and answer["reason"] == str(died)


WRONG = {
    b"": "Input data was truncated",
    b"nothing": "JSON is malformed",
    b"[1]": "got list",
    b'{"prompt": NaN}': "JSON is malformed",
    b'{"prompt": "\\ud83d"}': "must be an object in JSON",
    b'{"prompt": "\xff"}': "must be an object in JSON",
    b'{"prompt": ' + b"[" * 30_000 + b"]" * 30_000 + b"}": "nests too deep",
}


@pytest.mark.parametrize("body", WRONG, ids=lambda body: repr(body[:20]))
def test_what_is_no_object_in_json_is_one_line(here, body):
    for path in ASKED:
        status, answer = ask(here, path, body)
        assert status == 400 and WRONG[body] in answer["error"]["message"], (path, answer)
        assert answer["error"]["message"].count("\n") == 0


@pytest.mark.parametrize("depth", [90, 300, 700])
def test_values_that_nest_deep_are_answered_or_refused(here, depth):
    """In the arguments of a call, which the chat template writes, in a schema, and in what nobody reads."""
    inside = json.loads("[" * depth + "]" * depth)
    call = {"id": "a", "function": {"name": "f", "arguments": json.dumps({"a": inside})}}
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"enum": [inside]}}}
    for more in (
        {"messages": said},
        {"tools": [tool]},
        {"metadata": inside},
        {"response_format": form({"enum": [inside]})},
    ):
        status, answer = ask(here, "/v1/chat/completions", ASKED["/v1/chat/completions"] | more)
        assert status in (200, 400), answer


def test_a_body_may_begin_with_a_byte_order_mark(here):
    assert ask(here, "/v1/completions", b'\xef\xbb\xbf{"prompt": "a", "max_tokens": 1}')[0] == 200


@contextlib.contextmanager
def held(here, monkeypatch, count: int, body: dict) -> Iterator[list[Future]]:
    """Block beside so many clients that ask for a completion of 7 tokens, none of which is tokenised before
    its end, when all have their answers.
    """
    goes_on, own = threading.Event(), app.prepare

    def prepare(served, request, show):
        assert request.max_tokens != 7 or goes_on.wait(60)
        return own(served, request, show)

    with monkeypatch.context() as patched, ThreadPoolExecutor(count) as clients:
        patched.setattr(app, "prepare", prepare)
        asked = [clients.submit(ask, here, "/v1/completions", body) for _ in range(count)]
        try:
            until(lambda: in_reading(here) == count)
            yield asked
        finally:
            goes_on.set()


def in_reading(here) -> int:
    """How many requests of this machine are read, or wait for it."""
    client = here.reading.clients.get("127.0.0.1")
    return 0 if client is None else client.requests


LONG = {"prompt": "a", "user": "a" * 70_000, "max_tokens": 7}


def test_long_bodies_wait_without_a_thread_and_delay_no_short_one(here, monkeypatch):
    """Thirty of them: as many threads read as there are for long bodies."""
    monkeypatch.setattr(reading, "MOST_OF_CLIENT", 64)
    with held(here, monkeypatch, 30, LONG) as clients:
        assert ask(here, "/v1/completions", {"prompt": "a", "max_tokens": 3})[0] == 200
        assert len(here.reading.pools["long"]._threads) == reading.BESIDE
        assert here.reading.pools["long"]._work_queue.qsize() < 2  # for those of other addresses
        assert not any(client.done() for client in clients)
    assert [client.result()[0] for client in clients] == [200] * 30


def test_an_address_that_has_many_requests_in_reading_is_told_to_come_again(here, monkeypatch):
    """Another address is answered, and so is the same one once they are read."""
    monkeypatch.setattr(reading, "MOST_OF_CLIENT", 3)
    short = {"prompt": "a", "max_tokens": 3}
    with held(here, monkeypatch, 3, LONG) as clients:
        for path, body in ASKED.items():
            status, answer = ask(here, path, body)
            assert status == 429 and "requests in reading" in answer["error"]["message"], path
        asked = urllib.request.Request(here.url + "/v1/completions", b"{}")
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(asked, timeout=60)
        assert refused.value.headers["retry-after"] == "1"
        asked.add_header("x-forwarded-for", "192.0.2.1")  # as a proxy of this machine says it
        with pytest.raises(urllib.error.HTTPError) as read:
            urllib.request.urlopen(asked, timeout=60)
        assert read.value.code == 400
    assert [client.result()[0] for client in clients] == [200] * 3
    assert ask(here, "/v1/completions", short)[0] == 200 and not here.reading.clients


@contextlib.contextmanager
def half_sent(here, count: int) -> Iterator[list[http.client.HTTPConnection]]:
    """Block beside clients whose bodies pause, the first one for the longest time."""
    port = int(here.url.rpartition(":")[2])
    with contextlib.ExitStack() as stack:
        clients = []
        for number in range(count):
            client = stack.enter_context(
                contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60))
            )
            client.putrequest("POST", "/v1/completions")
            client.putheader("content-length", "100")
            client.endheaders(b'{"prompt": "a", ')
            until(lambda number=number: in_reading(here) == number + 1)
            clients.append(client)
        yield clients


REST = b'"max_tokens": 3}'.ljust(84)


def test_bodies_that_pause_take_no_place_from_others(here, monkeypatch):
    """The one with the longest pause is refused where there is no other place; the next goes on."""
    monkeypatch.setattr(reading, "MOST_OF_CLIENT", 3)
    with half_sent(here, 3) as clients:
        pauses = here.reading.clients["127.0.0.1"]._pauses
        first = next(iter(pauses))
        clients[0].send(REST[:10])
        until(lambda: next(iter(pauses)) is not first)
        for path, body in ASKED.items():
            if path == "/v1/completions":
                continue
            assert ask(here, path, body)[0] == 200, path
        statuses = []
        for client in clients:
            with contextlib.suppress(ConnectionError):  # refused before it is sent
                client.send(REST[10:] if client is clients[0] else REST)
            statuses.append(client.getresponse().status)
    assert statuses == [200, 429, 200]
    until(lambda: not here.reading.clients)


class Leaping(asyncio.SelectorEventLoop):
    """A loop whose clock leaps to the next timer where nothing else is to be done."""

    def __init__(self) -> None:
        super().__init__()
        self.now, own = 0.0, self._selector.select

        def select(timeout):
            events = own(0)
            if not events and timeout:
                self.now += timeout
            return events

        self._selector.select = select

    def time(self) -> float:
        return self.now


@pytest.mark.parametrize(("pauses", "ends"), [((29.0,) * 9, 261.0), ((29.0, 29.0, 31.0), None), ((), 0.0)])
def test_a_body_may_not_pause_for_long(pauses, ends):
    """However long it takes in all."""

    async def stream():
        for pause in pauses:
            await asyncio.sleep(pause)
            yield b"a"

    async def read() -> bytes:
        asked = types.SimpleNamespace(headers={}, stream=stream)
        return await reading.Client({}, lambda: None).body(asked, 99)

    with contextlib.closing(Leaping()) as loop:
        if ends is None:
            with pytest.raises(Refused, match="without a pause of 30 s, got one") as refused:
                loop.run_until_complete(read())
            assert refused.value.status == 408 and loop.now == pytest.approx(2 * 29.0 + 30.0)
        else:
            assert loop.run_until_complete(read()) == b"a" * len(pauses)
            assert loop.now == pytest.approx(ends)


def test_clients_of_ipv6_are_counted_by_their_network_of_64_bits(here, monkeypatch):
    """A host has 2^64 addresses. Those of IPv4 on a socket of IPv6 are counted each, and neighbours are."""
    monkeypatch.setattr(reading, "MOST_OF_CLIENT", 1)

    def status(address: str) -> int:
        count, body = "/v1/messages/count_tokens", b'{"messages": [{"role": "user", "content": "a"}]}'
        asked = urllib.request.Request(here.url + count, body, {"x-forwarded-for": address})
        try:
            return urllib.request.urlopen(asked, timeout=60).status
        except urllib.error.HTTPError as refused:
            return refused.code

    taken = ("2001:db8:1:2::1", "::ffff:192.0.2.1", "fe80::1")
    for address in taken:
        here.reading.clients[reading.client_of(address)] = client = reading.Client(here.reading.pools, dict)
        client.requests = 1
    assert [status(f"2001:db8:1:{number}") for number in ("2::1", "2:ffff::2", "3::1")] == [429, 429, 200]
    assert [status(address) for address in ("192.0.2.1", "::ffff:192.0.2.1", "::ffff:192.0.2.2")] == [
        429, 429, 200
    ]  # fmt: skip
    assert [status(address) for address in ("fe80::1", "fe80::2")] == [429, 200]


def test_a_client_that_leaves_while_its_request_is_read_gives_its_place_back(here, monkeypatch):
    port = int(here.url.rpartition(":")[2])
    with held(here, monkeypatch, 1, LONG):
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as client:
            client.request("POST", "/v1/completions", json.dumps(LONG))
            until(lambda: in_reading(here) == 2)
        until(lambda: in_reading(here) == 1)


@pytest.mark.parametrize("leaves", [True, False])
def test_a_client_keeps_its_turn_until_its_work_has_ended(here, monkeypatch, leaves):
    """The client has left, or has been answered: its next request of that kind waits for the thread."""
    begun, go, own = [], threading.Event(), app.prepare

    def prepare(served, request, show):
        begun.append(request)
        assert go.wait(60)
        return own(served, request, show)

    port = int(here.url.rpartition(":")[2])
    monkeypatch.setattr(reading, "_AT_ONCE", 1)
    with monkeypatch.context() as patched, ThreadPoolExecutor(1) as clients:
        patched.setattr(app, "prepare", prepare)
        if leaves:
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as client:
                client.request("POST", "/v1/completions", json.dumps(LONG))
                until(lambda: len(begun) == 1)
        else:
            patched.setattr(reading, "_SECONDS", 0.2)
            status, answer = ask(here, "/v1/completions", LONG)
            assert status == 400 and "got one that takes longer" in answer["error"]["message"]
            patched.setattr(reading, "_SECONDS", 30.0)
        later = clients.submit(ask, here, "/v1/completions", LONG)
        until(lambda: in_reading(here) > 0)
        time.sleep(0.2)
        assert len(begun) == 1 and not later.done()
        go.set()
        assert later.result(60)[0] == 200 and len(begun) == 2
    until(lambda: not here.reading.clients)


@pytest.mark.parametrize("sees", [False, True])
def test_a_body_that_no_prompt_needs_is_not_read(here, monkeypatch, sees):
    """Whether it says how long it is or not; who has sent it gets the line. Pictures need more."""
    monkeypatch.setattr(limits, "TEXT_BYTES", 0)
    if sees:
        here.served.template.processor.image_processor = None
    most, port, parsed, own = 32 * here.served.context, int(here.url.rpartition(":")[2]), [], app.object_of
    monkeypatch.setattr(
        app, "object_of", lambda octets, context: parsed.append(len(octets)) or own(octets, context)
    )
    for length in (most, most + 1, 20 * most):
        for parts in (b'{"prompt": "a"}'.ljust(length), iter([b'{"prompt": "a"}', b" " * (length - 15)])):
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as client:
                client.request("POST", "/v1/completions", parts, encode_chunked=not isinstance(parts, bytes))
                answer = client.getresponse()
                assert answer.status == (413 if length > most and not sees else 200), answer.read()
    lengths = (most, most + 1, 20 * most) if sees else (most,)
    assert parsed == [length for length in lengths for _ in range(2)]


def test_a_body_that_no_model_reads_is_refused_before_it_comes(here):
    port = int(here.url.rpartition(":")[2])
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as client:
        client.putrequest("POST", "/v1/completions")
        client.putheader("content-length", str(8 * limits.MEDIA_BYTES + 1))
        client.endheaders()
        assert client.getresponse().status == 413


def test_what_is_too_long_is_refused_before_it_is_read_whole(here, monkeypatch):
    """An error shows the beginning of a value; a prompt longer than the context is no tensor first."""

    class Counted:
        shown = 0

        def __repr__(self) -> str:
            Counted.shown += 1
            return "x"

    assert shown([Counted()] * 1000) == f"[{'x, ' * 25}x..." and Counted.shown <= 80
    for value in ("a", "a" * 79, {"a": [1, None]}, [[]], 5, -1e300):
        assert shown(value) == (repr(value) if len(repr(value)) <= 80 else f"{repr(value)[:77]}...")
    status, answer = ask(here, "/v1/completions", {"prompt": [10**9] * 5000})
    assert status == 400 and "maximum context length is 4096 tokens" in answer["error"]["message"]
    monkeypatch.setattr("torch_moe_mps.serving.http.limits.CHARACTERS", 50)
    monkeypatch.setattr("torch_moe_mps.serving.http.limits.MESSAGES", 3)
    for path, body in ASKED.items():
        status, answer = ask(here, path, json.loads(json.dumps(body).replace("a~", "a" * 51)))
        assert status == 400 and "at most 50 characters, got 51" in answer["error"]["message"], path
    chat = ASKED["/v1/messages"] | {
        "messages": [{"role": role, "content": "a"} for role in ("user", "assistant") * 2]
    }
    status, answer = ask(here, "/v1/messages", chat)
    assert status == 400 and "at most 3 messages, got 4" in answer["error"]["message"]


def test_a_body_of_too_many_values_is_refused(here, monkeypatch):
    """They hold other threads up while they are made."""
    monkeypatch.setattr(limits, "CONTAINERS", 40)
    monkeypatch.setattr(limits, "CONTEXT", 10)
    monkeypatch.setattr(limits, "VALUES", 80)
    for many, what in (
        ([[]] * 50, "50 objects and lists"),
        ([{}] * 50, "50 objects and lists"),
        ([1] * 120, "120 values"),
    ):
        status, answer = ask(here, "/v1/completions", {"prompt": "a", "metadata": many})
        assert (status, answer["error"]["message"]) == (413, f"The body must have at most {what}.")
    assert ask(here, "/v1/completions", {"prompt": "a", "max_tokens": 3, "metadata": [{}] * 48})[0] == 200


def test_a_body_is_gone_while_its_answer_is_generated(here, monkeypatch):
    class Body(dict):
        """One that a weak reference takes."""

    bodies, alive, own_body, own_submit = [], {}, app.object_of, Answers.submit

    def object_of(octets, context):
        body = Body(own_body(octets, context))
        bodies.append(weakref.ref(body))
        return body

    def submit(answers, generator):
        gc.collect()
        alive[path] = bodies[-1]() is not None
        own_submit(answers, generator)

    monkeypatch.setattr(app, "object_of", object_of)
    monkeypatch.setattr(Answers, "submit", submit)
    for path, body in ASKED.items():
        assert ask(here, path, json.loads(json.dumps(body).replace("a~", "a")))[0] == 200
    assert alive == dict.fromkeys(ASKED, False)


def test_calls_are_on_one_thread_as_long_as_none_is_late():
    """It ends with who calls; what a call raises, or holds, does not stay there."""

    class Held:
        """One that a weak reference takes."""

    calls, held = Limited(), Held()
    (first, _), (second, _) = (calls.call(threading.current_thread, 60) for _ in range(2))
    assert first is second is not threading.current_thread() and first.daemon
    with pytest.raises(KeyError):
        calls.call(lambda: {}["a"], 60)
    left = weakref.ref(held)
    assert calls.call(functools.partial(isinstance, held, Held), 60)[0] is True
    del held
    assert left() is None
    del calls
    first.join(60)
    assert not first.is_alive()


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
    masked = Masked(grammar, "", 99, Clocked(*seconds), refused)
    bad, good = Asked(ids_of(2, 6), 9, processors=[masked]), Asked(ids_of(1, 5), 9)
    run(Engine(model_of(), None, 2), bad, good)
    assert bad.reasons == [refused] and len(bad.tokens) == tokens
    assert good.tokens == good.expected(model_of())


def test_no_schema_begins_while_many_are_late(here, monkeypatch):
    """A late one is refused, and so are those that come while several compile by themselves."""
    limited, goes_on = here.served.grammars._limited, threading.Event()
    own = limited.call
    monkeypatch.setattr(limited, "call", lambda function, seconds: own(goes_on.wait, 0.01))
    body = ASKED["/v1/chat/completions"] | {"response_format": form({"type": "object"})}
    try:
        answers = [ask(here, "/v1/chat/completions", body) for _ in range(5)]
    finally:
        goes_on.set()
    assert [status for status, _ in answers] == [400] * 4 + [503]
    assert "quickly compiled" in answers[0][1]["error"]["message"]
    assert ask(here, "/v1/chat/completions", ASKED["/v1/chat/completions"])[0] == 200


def test_compiled_grammars_take_few_threads_and_bounded_memory(here, monkeypatch):
    """A client may ask for a new one each time."""
    threads, own = [], xgrammar.GrammarCompiler
    monkeypatch.setattr(
        xgrammar, "GrammarCompiler", lambda *a, **k: threads.append(k["max_threads"]) or own(*a, **k)
    )
    monkeypatch.setattr(structured, "_KEPT_BYTES", 1 << 18)
    for number in range(40):
        schema = {"enum": [f"{number} {n}" for n in range(20)]}
        body = ASKED["/v1/chat/completions"] | {"response_format": form(schema)}
        assert ask(here, "/v1/chat/completions", body)[0] == 200
    (compiler,) = here.served.grammars._compilers.values()
    assert 0 < compiler.get_cache_size_bytes() <= 1 << 18
    assert threads == [max(1, os.cpu_count() // 4)]


def test_the_memory_in_use_has_buffers_and_counts_shared_tensors_once():
    """Packed weights are buffers."""
    model = torch.nn.Linear(4, 4, bias=False)
    model.register_buffer("packed", torch.zeros(100, dtype=torch.uint8))
    model.register_buffer("tied", model.packed)
    assert memory_in_use(model) == 4 * 16 + 100


def test_variables_of_a_chat_template(here):
    """Names that it reads, and none that is a part of a word, a loop's own, or a chat's."""
    template = (
        "{% generation %}{{ deep }}{% endgeneration %}{% set own = 1 %}{% for m in messages %}{{ m.enable }}"
        "{% endfor %}{% if thinking is defined %}enable_thinking{% endif %}{{ raise_exception }}"
    )
    assert variables_of(template) == {"deep", "messages", "thinking"}
    here.served.template.processor.chat_template = template
    assert here.served.template.variables == {"deep", "thinking"}
    body = ASKED["/v1/chat/completions"]
    given = {"deep": "b", "enable": "c", "messages": [], "tools": 5, "tokenize": False, "raise_exception": 1}
    assert ask(here, "/v1/chat/completions", body | {"chat_template_kwargs": given})[0] == 200
    assert here.generator.prompts[-1].startswith("b")


WIDE = {"enum": [0] * 4097}
LONGER = {
    "'stop' must be a text of 1 to 1024 characters": {"stop": "a" * 1025},
    "at most 1024 token ids": {"logit_bias": {str(n): 1 for n in range(1025)}},
    "'logit_bias' must be an object of at most": {"logit_bias": {"1" * 5000: 1}},
    "'n' must be an integer from 1 to 64, got 65": {"n": 65},
    "must be of at most 262144 characters, got 8000015": {
        "response_format": form({"pattern": "(" * 8_000_000})
    },
    "'response_format' must have at most 4096 choices in one place": {"response_format": form(WIDE)},
    "at most 16384 objects and lists": {"response_format": form({"a": [[{}] * 4000] * 5})},
    "'tool_choice' must have at most 4096 choices in one place": {
        "tools": [{"function": {"name": "f", "parameters": WIDE}}],
        "tool_choice": "required",
    },
}


@pytest.mark.parametrize("message", LONGER)
def test_what_takes_long_is_refused_by_its_length(here, message):
    chat, began = "/v1/chat/completions", time.process_time()
    status, answer = ask(here, chat, ASKED[chat] | LONGER[message])
    assert status == 400 and message in answer["error"]["message"], answer
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize("stops", [["a"] * 17, ["a" * 1025], "a" * 1025, [""], [5]])
def test_a_field_has_the_same_limits_in_each_protocol(here, stops):
    for path, field in (("/v1/completions", "stop"), ("/v1/messages", "stop_sequences")):
        status, answer = ask(here, path, ASKED[path] | {field: stops})
        assert status == 400, path
        assert (
            f"'{field}' must be a text of 1 to 1024 characters, or a list of at most 16 of these"
            in (answer["error"]["message"])
        )


def test_the_answers_to_one_request_are_limited(here):
    """Whether prompts or `n` make them many."""
    for prompts, count, status in ((64, 1, 200), (2, 32, 200), (64, 2, 400), (3, 32, 400)):
        body = {"prompt": ["a"] * prompts, "n": count, "max_tokens": 1}
        got, answer = ask(here, "/v1/completions", body)
        assert got == status, body
        if status == 400:
            line = f"'n' times the number of prompts must be at most 64, got {prompts * count}."
            assert answer["error"]["message"] == line and answer["error"]["param"] == "n"
        else:
            assert len(answer["choices"]) == prompts * count


# Hostile requests beside a stream

# Kinds that are answered by a model that says nothing and reads 4,096 tokens; the others are refused.
ANSWERED = {
    "numbers": 400, "text": 400, "messages": 400, "string": 200, "escapes": 200, "objects": 200, "deep": 200,
    "tools": 400, "enum": 200, "tokens": 200, "stops": 200,
    "brackets": 400, "choices": 400, "parts": 400,
}  # fmt: skip


@pytest.mark.sweep
def test_hostile_requests_are_what_they_are_called():
    """Large ones are read to where their name says, and refused for the length of the prompt, or answered."""
    found = dict[str, int]()
    with scripted.server() as here:
        for name, kind in KINDS.items():
            if kind.sees or name not in ANSWERED:
                continue
            asked = urllib.request.Request(here.url + kind.path, json.dumps(kind.body(4096)).encode())
            asked.add_header("content-type", "application/json")
            try:
                with urllib.request.urlopen(asked, timeout=120) as answer:
                    found[name] = answer.status
            except urllib.error.HTTPError as error:
                found[name] = error.code
    assert found == ANSWERED


@pytest.mark.sweep
def test_each_kind_has_a_row():
    script = REPOSITORY / "scripts" / "bench" / "bench_door.py"
    command = [sys.executable, str(script), "--seconds", "1", "--kind", "busy", "--kind", "slow"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    rows = re.findall(r"^\| (\w+) \| \d+ ms \| \d+ ms \| -?\d+ ms \|$", result.stdout, re.MULTILINE)
    assert rows == ["nobody", "busy", "slow"]
    assert re.search(r"largest delay by a request: -?\d+\.\d\d s, of at most 0.3 s$", result.stdout)
