"""The door of a server: what a request may be, and what it is told where nothing is generated any more."""

import base64
import contextlib
import functools
import gc
import http.client
import io
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import xgrammar
from support import scripted
from support.jobs import Asked, ids_of, model_of, run
from support.scripted import ask

from torch_moe_mps._text import shown
from torch_moe_mps.serving.engine.batch import Batch
from torch_moe_mps.serving.engine.device import Died
from torch_moe_mps.serving.http import app, json_text, limited, served, structured
from torch_moe_mps.serving.http.json_text import read_json
from torch_moe_mps.serving.http.limited import Limited, TooLong, Turns
from torch_moe_mps.serving.http.request import Refused
from torch_moe_mps.serving.http.served import Served
from torch_moe_mps.serving.http.structured import Masked
from torch_moe_mps.serving.media import loading as media
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

    def body_of(octets, rest):
        parsed.append(threading.current_thread().name)
        return own_body(octets, rest)

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


def test_bodies_take_turns_of_their_length_and_the_shortest_wait_for_none(here, monkeypatch):
    """They would take the cores from the answers. What is not of the text counts, too."""
    entered: list[tuple[str, bool]] = []

    @contextlib.contextmanager
    def turn(is_long):
        entered.append((path, is_long))
        yield

    monkeypatch.setattr(here.served.turns, "turn", turn)
    paths = [*ASKED, "/v1/messages/count_tokens", "/tokenize"]
    for text, more in (("a", ""), ("a", "a" * 5000), ("a" * 70_000, ""), ("a", "a" * 70_000)):
        del entered[:]
        for path in paths:
            body = json.dumps(ASKED.get(path, ASKED["/v1/messages"] | {"content": "a~"})).replace("a~", text)
            found, _ = ask(here, path, json.loads(body) | {"metadata": {"a": more}})
            assert found == (400 if text != "a" and path in ASKED else 200), path
        is_long = len(text + more) > 60_000
        assert entered == [(path, is_long) for path in paths if text + more != "a"]


def test_who_waits_for_others_gives_his_turn_to_another():
    """The one who pauses has a turn again behind it; a turn inside of a turn is the same."""
    turns, order, own = Turns(), list[int](), threading.Lock()
    turns._long, paused = threading.Semaphore(1), threading.Event()

    def first() -> None:
        with turns.turn(), turns.turn():
            with turns.pause():
                paused.set()
                assert own.acquire(timeout=60)  # until the other one is through
            order.append(1)

    def second() -> None:
        assert paused.wait(60)
        with turns.turn():
            order.append(2)
            own.release()
            order.append(3)

    own.acquire()
    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(first), threads.submit(second)]:
            done.result(60)
    assert order == [2, 3, 1]
    with turns.pause(), turns.turn():  # of a thread without a turn
        assert not turns._long.acquire(blocking=False)
    assert turns._long.acquire(blocking=False)


def test_short_work_waits_for_no_long_one():
    """What becomes long gives its short turn to another, and has it again behind."""
    turns, order = Turns(), list[str]()
    turns._long, turns._short = threading.Semaphore(1), threading.Semaphore(1)

    def short(name: str) -> None:
        with turns.turn(is_long=False):
            order.append(name)

    with ThreadPoolExecutor(1) as other:
        with turns.turn(), turns.turn(is_long=False):
            other.submit(short, "beside a long one").result(60)
        with turns.turn(is_long=False), turns.turn():
            other.submit(short, "beside one that became long").result(60)
            assert not turns._long.acquire(blocking=False)
        with turns.turn(is_long=False):
            waits = other.submit(short, "behind a short one")
            order.append("short")
        waits.result(60)
    assert order == ["beside a long one", "beside one that became long", "short", "behind a short one"]


@pytest.mark.parametrize("is_busy", [True, False])
def test_long_work_rests_while_answers_are_generated(is_busy, monkeypatch):
    """Behind each half of a millisecond, in turns and their pauses; no other work does."""
    now, rests = 0.0, list[float]()

    def sleep(seconds):
        nonlocal now
        now += seconds
        rests.append(now)

    monkeypatch.setattr(limited, "time", SimpleNamespace(perf_counter=lambda: now, sleep=sleep))
    turns = Turns(lambda: is_busy)

    def work(seconds):
        nonlocal now
        now += seconds
        turns.rest()

    work(1.0)
    with turns.turn():
        work(0.0004)
        assert rests == []
        work(0.0002)
        with turns.turn(is_long=False), turns.pause():
            work(0.0004)
            work(0.0002)
        work(0.0004)
    work(1.0)
    with turns.turn(is_long=False):
        work(0.0006)
    with turns.pause():
        work(0.0006)
    assert rests == ([pytest.approx(at) for at in (1.0026, 1.0052, 2.0082, 2.0108)] if is_busy else [])


def test_threads_that_rest_go_on_one_after_the_other(monkeypatch):
    now, rests = 0.0, list[float]()
    monkeypatch.setattr(limited, "time", SimpleNamespace(perf_counter=lambda: now, sleep=rests.append))
    turns, began = Turns(lambda: True), threading.Barrier(3)

    def work() -> None:
        with turns.turn(), turns.pause():
            began.wait(60)
            began.wait(60)
            turns.rest()

    turns._long = threading.Semaphore(2)
    with ThreadPoolExecutor(2) as threads:
        done = [threads.submit(work) for _ in range(2)]
        began.wait(60)
        now = 1.0
        began.wait(60)
        for each in done:
            each.result(60)
    assert sorted(rests) == [pytest.approx(0.002), pytest.approx(0.004)]


def test_what_takes_long_to_read_rests_in_all_its_parts(monkeypatch):
    """A body of numbers, of one text, and of many; its Unicode, a file in base64, and a long answer."""
    rests = 0

    def rest():
        nonlocal rests
        rests += 1

    def of(function) -> int:
        nonlocal rests
        rests = 0
        function()
        return rests

    for inside in ([1] * 70_000, "a" * 400_000, [["b"]] * 20_000, [{"c": "d"}] * 20_000):
        octets = json.dumps({"prompt": inside}).encode()
        assert of(lambda octets=octets: app.body_of(octets, rest)) > 60
    assert of(lambda: json_text.is_unicode(["a" * 400_000, "b"], rest)) > 6
    assert of(lambda: app._in_json({"tokens": [5] * 1000}, rest)) > 1000
    data = base64.b64encode(bytes(2_000_000)).decode()
    assert of(lambda: media.of_base64(data, "image", rest)) > 8
    assert of(lambda: media.Media().opened(f"data:a/b;base64,{data}", "image", rest=rest)) > 8


def test_a_body_is_read_with_rests(here, monkeypatch):
    """On each path that has one: those of the server's own turns."""
    rests = list[str]()
    monkeypatch.setattr(here.served.turns, "rest", lambda: rests.append(path))
    for path in (*ASKED, "/v1/messages/count_tokens", "/tokenize"):
        body = ASKED.get(path, ASKED["/v1/messages"] | {"content": "a"})
        before = len(rests)
        ask(here, path, body | {"metadata": {"a": "a" * 70_000}})
        assert len(rests) - before > 10, path


def test_data_urls_are_read_in_a_turn_and_what_is_far_away_without_one(here, monkeypatch):
    """And both with rests, whether or not the thread had a turn."""
    turns, held = here.served.turns, []

    def opened(media, url, field, seconds, rest):
        assert rest == turns.rest and turns._rested is not None
        held.append(turns._held)
        return io.BytesIO(b"a")

    monkeypatch.setattr(media.Media, "opened", opened)
    monkeypatch.setattr(served, "decoded", lambda files, limits: held.append(turns._held) or [None])
    here.served.processor.image_processor = None
    for outside in (contextlib.nullcontext, turns.turn, lambda: turns.turn(is_long=False)):
        with outside():
            for url in ("data:image/png;base64,AAAA", "https://example.com/a.png"):
                part = {"type": "image", "url": url, "field": "image", "as": "image"}
                here.served._with_media([{"content": [part]}])
    assert held == [turns._long, turns._long, None, turns._long] * 3


def beats_beside(function: Callable[[], object]) -> int:
    """How often another thread goes on while a function runs."""
    beats, ended = 0, threading.Event()

    def beat() -> None:
        nonlocal beats
        while not ended.is_set():
            beats += 1
            time.sleep(0)

    thread = threading.Thread(target=beat)
    thread.start()
    before = beats
    function()
    made = beats - before
    ended.set()
    thread.join()
    return made


def test_no_other_thread_waits_for_the_end_of_a_body_that_is_read():
    """Of many values, Python's own reader lets nobody go on until it has read all."""
    body = json.dumps({"prompt": [1] * 300_000}).encode()
    assert beats_beside(lambda: json.loads(body)) < 10
    assert beats_beside(lambda: app.body_of(bytearray(body))) > 20
    assert app.body_of(bytearray(body)) == {"prompt": [1] * 300_000}
    for text in ('{"a": [1, {"b": "é\\n\\u2603"}, -2.5e3, true, null]}', '[{}, [], "", 1e400]'):
        long = f"{text[:-1]}, {' ' * 70_000}{text}]" if text[0] == "[" else f"{' ' * 70_000}{text}"
        assert read_json(long) == json.loads(long)


@pytest.mark.parametrize("text", ["a" * 400_000, "é☃" * 200_000, "\\ud83d\\ude00" * 40_000, '\\"' * 200_000])
def test_no_more_than_a_piece_of_a_string_is_read_at_a_time(text, monkeypatch):
    """As a value, and as the name of one; what looks for half of a pair has pieces, too."""
    lengths, own = list[int](), json_text._scan

    def scan(piece, start, strict):
        value, end = own(piece, start, strict)
        lengths.append(end - start)
        return value, end

    monkeypatch.setattr(json_text, "_scan", scan)
    monkeypatch.setattr(json_text.json.decoder, "scanstring", None)
    for whole in (f'{{"a": ["{text}"]}}', f'{{"{text}": 5}}'):
        assert read_json(whole) == json.loads(whole)
        assert 0 < max(lengths) <= json_text._PIECE + 1


PIECE = json_text._PIECE
ESCAPES = [
    "",
    "é☃",
    "\\n",
    '\\"',
    "\\\\" * 3,
    "\\ud83d\\ude00" * 3,
    "\n",
    "\\x",
    "\\ud83d",
    "\ud83d\\ude00",
    "\\u12",
]


@pytest.mark.parametrize("inside", ESCAPES)
@pytest.mark.parametrize("at", [0, *range(PIECE - 12, PIECE + 2), 3 * PIECE - 5, 70_000])
def test_long_strings_are_as_the_own_reader_has_them(inside, at):
    """With escapes anywhere, at the end of a piece, too, and none that it refuses."""
    text = "a" * 70_000
    whole = f'{{"a": ["{text[:at]}{inside}{text[at:]}", 5, "", "b{inside}"], "c{inside}{text}": "{text}"}}'

    def outcome(read):
        try:
            return read(whole)
        except ValueError as error:
            return str(error)

    assert outcome(read_json) == outcome(json.loads)
    assert outcome(lambda whole: read_json(whole[: at + 8])) == outcome(
        lambda whole: json.loads(whole[: at + 8])
    )


def test_no_other_thread_waits_for_a_long_answer():
    """To /tokenize: what writes the whole holds Python's lock."""
    tokens = {"tokens": [{"id": 5, "piece": "é"}, {"id": 6, "piece": [1]}] * 100_000}
    assert beats_beside(lambda: app._in_json(tokens)) > 10
    assert json.loads(app._in_json(tokens)) == tokens


def test_half_of_a_surrogate_pair_is_found_anywhere():
    """Whole pairs, and a backslash that is written, are no such half."""
    for text in ('{"a": ["\\ud83d\\ude00", {"\\ud83d\\ude00": 5}]}', '{"a": "\\\\ud83d"}'):
        assert app.body_of(text.encode()) == json.loads(text)
    for text in ('{"a": [[{"b": "c\\ud83d"}]]}', '{"a": {"\\ude00": 5}}', '{"a": 5, "b": "\\ude00\\ud83d"}'):
        with pytest.raises(Refused, match="must be text in Unicode") as refused:
            app.body_of(text.encode())
        assert refused.value.field == [*json.loads(text)][-1]


@pytest.mark.parametrize("piece", [1, 4, 7, 8, 1 << 18])
def test_base64_in_pieces(piece, monkeypatch):
    """As in one, with lines in it; what follows the end, or is cut off, is refused."""
    monkeypatch.setattr(media, "_PIECE", piece)
    for count in range(14):
        octets = bytes(range(count))
        text = base64.b64encode(octets).decode()
        for line in (1, 3, 7):
            lines = "\n".join(text[at : at + line] for at in range(0, len(text), line))
            assert media.of_base64(f" {lines}\r\n", "image").read() == octets
        for wrong in (f"{text}A", f"{text[:4]}!{text[4:]}", f"AA=={text}" if text else "A"):
            with pytest.raises(Refused, match="must be in base64"):
                media.of_base64(wrong, "image")


@pytest.mark.parametrize("sees", [False, True])
def test_a_body_that_no_prompt_needs_is_not_read(here, monkeypatch, sees):
    """Whether it says how long it is or not; who has sent it gets the line. Pictures need more."""
    monkeypatch.setattr(app, "_TEXT_BYTES", 0)
    if sees:
        here.served.processor.image_processor = None
    most, port, parsed, own = 32 * here.served.context, int(here.url.rpartition(":")[2]), [], app.body_of
    monkeypatch.setattr(app, "body_of", lambda octets, rest: parsed.append(len(octets)) or own(octets))
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
        client.putheader("content-length", str(4 * app.MOST_BYTES + 1))
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
    monkeypatch.setattr("torch_moe_mps.serving.http.served._MOST_CHARACTERS", 50)
    monkeypatch.setattr("torch_moe_mps.serving.http.served._MOST_MESSAGES", 3)
    for path in ASKED | {"/tokenize": None}:
        body = {"content": "a" * 51} if path == "/tokenize" else ASKED[path]
        status, answer = ask(here, path, json.loads(json.dumps(body).replace("a~", "a" * 51)))
        assert status == 400 and "at most 50 characters, got 51" in answer["error"]["message"], path
    chat = ASKED["/v1/messages"] | {
        "messages": [{"role": role, "content": "a"} for role in ("user", "assistant") * 2]
    }
    status, answer = ask(here, "/v1/messages", chat)
    assert status == 400 and "at most 3 messages, got 4" in answer["error"]["message"]


def test_data_urls_are_read_in_pieces_and_kept_nowhere(monkeypatch):
    """urlsplit keeps the last 128 that it was asked for; base64 would hold Python's lock."""
    octets, lengths, own = bytes(range(256)) * 4000, list[int](), base64.b64decode
    url = "data:image/png;base64," + base64.b64encode(octets).decode()
    monkeypatch.setattr(media, "urlsplit", None)
    monkeypatch.setattr(
        base64, "b64decode", lambda text, **more: lengths.append(len(text)) or own(text, **more)
    )
    assert media.Media().opened(url, "image").read() == octets
    assert lengths == [4]
    for wrong in ("data:;base64", "data:image/png,AAAA", "data:,;base64,AAAA"):
        with pytest.raises(Refused, match="must be a data: URL in base64"):
            media.Media().opened(wrong, "image")


def test_a_body_of_too_many_objects_is_refused(here, monkeypatch):
    """Those in the texts of a prompt are none. Searches for garbage would hold other threads up."""
    monkeypatch.setattr(json_text, "_MOST_CONTAINERS", 50)
    message = "The body must be an object in JSON: it must have at most 50 objects and lists."
    for many in ([[]] * 50, [{}] * 50, [{"a": [5]}] * 25):
        status, answer = ask(here, "/v1/completions", {"prompt": "a", "user": " " * 70_000, "metadata": many})
        assert (status, answer["error"]["message"]) == (400, message)
    body = {"prompt": "a", "max_tokens": 3, "user": "[{" * 40_000, "metadata": [{}] * 48}
    assert ask(here, "/v1/completions", body)[0] == 200


def test_a_body_is_gone_while_its_answer_is_generated(here, monkeypatch):
    class Body(dict):
        """One that a weak reference takes."""

    bodies, alive, own_body, own_submit = [], {}, app.body_of, Served.submit

    def body_of(octets, rest):
        body = Body(own_body(octets, rest))
        bodies.append(weakref.ref(body))
        return body

    def submit(served, answers):
        gc.collect()
        alive[path] = bodies[-1]() is not None
        own_submit(served, answers)

    monkeypatch.setattr(app, "body_of", body_of)
    monkeypatch.setattr(Served, "submit", submit)
    for path, body in ASKED.items():
        assert ask(here, path, json.loads(json.dumps(body).replace("a~", "a")))[0] == 200
    assert alive == dict.fromkeys(ASKED, False)


def test_a_body_of_too_many_values_is_refused(here, monkeypatch):
    monkeypatch.setattr(app, "_MOST_VALUES", 50)
    status, answer = ask(here, "/v1/completions", {"prompt": [1] * 60})
    assert status == 413 and answer["error"]["message"] == "The body must have at most 50 values."


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


def test_compiled_grammars_take_few_threads_and_bounded_memory(here, monkeypatch):
    """A client may ask for a new one each time."""
    threads, own = [], xgrammar.GrammarCompiler
    monkeypatch.setattr(
        xgrammar, "GrammarCompiler", lambda *a, **k: threads.append(k["max_threads"]) or own(*a, **k)
    )
    monkeypatch.setattr(structured, "_KEPT_BYTES", 1 << 16)
    for number in range(40):
        body = ASKED["/v1/chat/completions"] | {"json_schema": {"enum": [f"{number} {n}" for n in range(20)]}}
        assert ask(here, "/v1/chat/completions", body)[0] == 200
    (compiler,) = here.served._grammars._compilers.values()
    assert 0 < compiler.get_cache_size_bytes() <= 1 << 16
    assert threads == [max(1, os.cpu_count() // 4)]


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
