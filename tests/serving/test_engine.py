"""The engine: jobs join, end and are cancelled while others go on."""

import itertools
import sys
import threading

import pytest
import torch
from support.jobs import Asked, ids_of, model_of, on_thread, run
from support.sweep import covering
from torch import nn
from transformers import GenerationConfig

from torch_moe_mps.models.caches import growing
from torch_moe_mps.models.caches.batched import BatchedCache
from torch_moe_mps.models.trials import batching, memory
from torch_moe_mps.serving.engine import engine as engine_module
from torch_moe_mps.serving.engine.engine import Engine
from torch_moe_mps.serving.engine.loop import EngineThread
from torch_moe_mps.serving.engine.scheduler import StepTimes
from torch_moe_mps.serving.prefix_cache.memory import PrefixCache
from torch_moe_mps.serving.speculative.asked import drafting_of

MEMORY = 1 << 30


def test_an_error_of_the_model_ends_all_and_the_next_jobs_run(monkeypatch):
    model = model_of()
    jobs, batch = [Asked(ids_of(n, 5), 6) for n in range(3)], Engine(model, None, 2)
    batch.submit(*(each.job for each in jobs))
    for _ in range(3):
        batch.step()
    with monkeypatch.context() as broken:
        broken.setattr(batch.pool.batch.rows, "arguments", lambda: {"input_ids": None})
        batch.step()
    assert [type(each.reasons[0]) for each in jobs[:2]] == [TypeError] * 2
    while batch.has_work:
        batch.step()
    assert jobs[2].reasons == ["length"] and jobs[2].tokens == jobs[2].expected(model)


def test_a_complete_answer_and_a_cancelled_one_leave():
    model = model_of()
    whole = Asked(ids_of(3, 5), 9)
    run(Engine(model, None, 4), whole)
    stops = Asked(ids_of(3, 5), 9, until=lambda token: token == whole.tokens[2])
    gone, late = Asked(ids_of(4, 9), 50), Asked(ids_of(5, 4), 5)
    gone.until = lambda token: len(gone.tokens) == 4 and gone.job.cancel()
    never = Asked(ids_of(6, 4), 5)
    never.job.cancel()
    run(Engine(model, None, 4), stops, gone, never, late)
    assert stops.reasons == ["stop"] and stops.tokens == whole.tokens[:3]
    assert gone.reasons == ["cancelled"] and len(gone.tokens) == 4
    assert never.reasons == ["cancelled"] and not never.tokens
    assert late.tokens == late.expected(model)


@pytest.mark.parametrize(
    "architecture", ["qwen3_moe", pytest.param("qwen3_next", marks=pytest.mark.slow("recurrent"))]
)
def test_a_job_begins_without_a_walk_through_the_model(architecture, monkeypatch):
    """The others wait: what holds for all jobs is asked once. transformers alone copies the settings."""
    monkeypatch.delitem(sys.modules, "peft", raising=False)  # whose layers may be anywhere
    model, own, walked, copied = model_of(architecture), nn.Module.named_modules, [], []
    batch = Engine(model, PrefixCache(MEMORY), 4)
    run(batch, Asked(ids_of(1, 5), 2))

    def named_modules(self, *given, **named):
        for item in own(self, *given, **named):
            walked.append(self is model)
            yield item

    class Settings(GenerationConfig):
        def __deepcopy__(self, memo):
            copied.append(1)
            return GenerationConfig(**vars(self))

    asked = Asked(ids_of(2, 6), 2)
    asked.job.config = Settings(**vars(asked.config))
    monkeypatch.setattr(nn.Module, "named_modules", named_modules)
    batch.submit(asked.job)
    batch._prefill()
    monkeypatch.undo()
    # Who asks where the model is looks at its first parameter alone.
    assert asked.tokens and sum(walked) < len([*model.modules()]) and copied == [1]


@pytest.mark.parametrize(
    "architecture",
    [
        "qwen3_moe",
        pytest.param("qwen3_next", marks=pytest.mark.slow("recurrent")),
        pytest.param("mamba2", marks=pytest.mark.slow("a cache that counts no tokens")),
        *(pytest.param(name, marks=pytest.mark.sweep) for name in ("mamba", "falcon_mamba")),
    ],
)
def test_kept_prompts_go_on(architecture):
    """The second turn of a conversation computes what is new in it; so does who shares its begin."""
    model = model_of(architecture)
    prompts = PrefixCache(MEMORY)
    batch = Engine(model, prompts, 4)
    first, beside = Asked(ids_of(1, 70), 5), Asked(ids_of(2, 6), 9)
    run(batch, first, beside)
    turn = torch.cat((first.job.inputs["input_ids"], torch.tensor([first.tokens]), ids_of(3, 4)), 1)
    second = Asked(turn, 4)
    run(batch, second)
    assert second.tokens == second.expected(model)
    assert second.job.usage.cached_tokens == 74
    assert second.read[0] == (74, 79) and second.read[-1] == (79, 79)
    assert batch.counts.cached == 74 and batch.counts.computed == 70 + 6 + 5
    cached = []
    for shared in (66, 40):
        begins = Asked(torch.cat((turn[:, :shared], ids_of(shared, 9)), 1), 3)
        run(batch, begins)
        assert begins.tokens == begins.expected(model)
        cached.append(begins.job.usage.cached_tokens)
        prompts.kept = prompts.kept[-1:]  # it has for others what the first had for it
    assert cached == ([66, 40] if architecture == "qwen3_moe" else [38, 38])


@pytest.mark.parametrize(("name", "value"), [("cache_implementation", "hybrid"), ("use_cache", False)])
def test_sequences_are_batched_and_cached_whatever_a_checkpoint_says(name, value, monkeypatch):
    """As Gemma 2 and 3 on the Hub say it, which `generate` takes as no wish, and checkpoints of trainings."""
    model = model_of()
    monkeypatch.setattr(model.generation_config, name, value)
    batch, rows = Engine(model, PrefixCache(MEMORY), 4), list[int]()

    def note(token: int) -> None:
        rows.append(len(batch.pool.batch.sequences))

    first, second = (Asked(ids_of(n, 70), 5, until=note) for n in (1, 2))
    again = Asked(ids_of(1, 70), 3)
    for each in (first, second, again):
        setattr(each.config, name, value)
    run(batch, first, second)
    run(batch, again)
    assert max(rows) == 2 and again.job.usage.cached_tokens == 69
    for each in (first, second, again):
        assert each.tokens == each.expected(model)


def test_memory_is_for_answers_first():
    """Of kept prompts the one that was used longest ago goes; who does not fit waits."""
    model, prompts = model_of(), PrefixCache(MEMORY)
    batch = Engine(model, prompts, 8, MEMORY)
    run(batch, Asked(ids_of(1, 60), 2))
    (kept,) = prompts.kept
    batch.budget.memory = int(batch.budget.token * (BatchedCache.capacity(2, 72) + 72))
    jobs = [Asked(ids_of(n, 60), 12) for n in range(2, 6)]
    most = 0
    batch.submit(*(each.job for each in jobs))
    while batch.has_work:
        batch.step()
        most = max(most, len(batch.pool.batch.sequences))
    assert most == 2
    for each in jobs:
        assert each.tokens == each.expected(model)
    assert kept not in prompts.kept


def test_the_cache_of_a_draft_is_planned():
    """Two answers that fit alone do not where a draft of the model's sizes has as much for each."""
    model, most = model_of("llama"), {}
    for speculative in (None, model):
        prompts = PrefixCache(0)
        batch = Engine(model, prompts, 8, MEMORY, drafting=drafting_of(model, speculative, prompts, "a", 3))
        run(batch, Asked(ids_of(1, 60), 12))
        batch.budget.memory = int(1.2 * batch.budget.token * (BatchedCache.capacity(2, 72) + 72))
        jobs = [Asked(ids_of(n, 60), 12) for n in range(2, 5)]
        most[speculative] = 0
        batch.submit(*(each.job for each in jobs))
        while batch.has_work:
            batch.step()
            most[speculative] = max(most[speculative], len(batch.pool.batch.sequences))
        for each in jobs:
            assert each.tokens == each.expected(model)
    assert [*most.values()] == [2, 1]


def test_prompts_are_given_up_as_answers_grow(monkeypatch):
    """Where the rows move to larger memory, not only where one begins."""
    monkeypatch.setattr(growing, "LEAST_SPARE", 8)
    model, prompts = model_of("llama"), PrefixCache(MEMORY)
    batch = Engine(model, prompts, 4, MEMORY)
    run(batch, *(Asked(ids_of(n, 60), 2) for n in range(3)))
    assert len(prompts.kept) == 3
    held = []
    grows = Asked(ids_of(4, 8), 20, until=lambda token: held.append(len(prompts.kept)))
    batch.submit(grows.job)
    batch.step()
    batch.budget.memory = int(50 * batch.budget.token)
    run(batch)
    assert grows.reasons == ["length"] and grows.tokens == grows.expected(model)
    assert held[0] == 4 and held[-1] == 1 and [len(kept.ids) for kept in prompts.kept] == [27]


class Clocked:
    """A model on a clock of its own: a step takes 20 ms, and a token of a prompt 0.5 ms beside."""

    def __init__(self, model):
        self.model, self.seconds, self.pieces = model, 0.0, []

    def __getattr__(self, name):
        return getattr(self.model, name)

    def __call__(self, input_ids, **given):
        took = 0.02 + 0.0005 * (input_ids.shape[1] - 1)
        self.seconds += took
        if input_ids.shape[1] > 1:
            self.pieces.append(took)
        return self.model(input_ids=input_ids, **given)


def test_short_prompts_that_wait_are_read_in_the_time_of_one_piece(monkeypatch):
    """Of 30 ms each, three in that of four steps of 25 ms; no long one is among them."""
    model = model_of()
    clock = Clocked(model)
    monkeypatch.setattr(engine_module.time, "perf_counter", lambda: clock.seconds)
    talks, batch = Asked(ids_of(1, 4), 40), Engine(clock, None, 8)
    batch.submit(talks.job)
    batch.step()
    batch.times.step = 0.025
    short, long = [Asked(ids_of(n, 21), 9) for n in range(2, 7)], Asked(ids_of(9, 65), 9)
    batch.submit(*(each.job for each in (*short, long)))
    begun = []
    for _ in range(4):
        batch.step()
        batch.times.step = 0.025
        begun.append(sum(bool(each.tokens) for each in (*short, long)))
    assert begun == [3, 5, 6, 6]
    run(batch)
    for each in (talks, *short, long):
        assert each.tokens == each.expected(model)


def test_a_long_prompt_is_read_between_tokens(monkeypatch):
    """Between two tokens of the others, one piece at most is read."""
    model = model_of()
    monkeypatch.setattr(StepTimes, "chunk", lambda self, is_decoding: 100)
    events: list[str] = []
    talks = Asked(ids_of(1, 4), 12, until=lambda token: events.append("token"))
    reads = Asked(ids_of(2, 350), 1)
    reads.job.on_progress = lambda read, of: events.append(f"{read}")
    batch = Engine(model, None, 2)
    batch.submit(talks.job)
    batch.step()
    run(batch, reads)
    assert events[1:10] == ["token", "0", "100", "token", "200", "token", "300", "token", "350"]


def told(events: list[str], name: str, asked: Asked) -> Asked:
    """The job, which notes how far its prompt is read."""
    asked.job.on_progress = lambda read, of: events.append(f"{name}{read}")
    return asked


def test_a_short_prompt_overtakes_a_long_one(monkeypatch):
    """One before a long one that waits, and one between two pieces. All answers are those alone."""
    monkeypatch.setattr(StepTimes, "chunk", lambda self, is_decoding: 100)
    model, events = model_of(), list[str]()
    long = [told(events, name, Asked(ids_of(n, 350), 2)) for n, name in enumerate("ab")]
    short = [told(events, name, Asked(ids_of(3 + n, 20), 2)) for n, name in enumerate("xyz")]
    run(Engine(model, None, 8), *long, *short)
    first = ["x0", "x20", "a0", "a100", "y0", "y20", "a200", "z0", "z20", "a300", "a350"]
    assert events == [*first, "b0", "b100", "b200", "b300", "b350"]
    for asked in (*long, *short):
        assert asked.tokens == asked.expected(model) and asked.reasons == ["length"]


@pytest.mark.parametrize(("who", "how"), covering(("long", "short"), ("leaves", "fails", "all end")))
def test_a_prompt_that_ends_while_two_are_read(who, how, monkeypatch):
    """The short one has two pieces, as states are kept before its end; the other answer is that alone."""
    monkeypatch.setattr(StepTimes, "chunk", lambda self, is_decoding: 100)
    model, events = model_of("qwen3_next"), list[str]()
    long = told(events, "a", Asked(ids_of(1, 250), 2))
    short = told(events, "x", Asked(ids_of(2, 90), 2))
    batch = Engine(model, None, 4)
    batch.submit(long.job)
    batch.step()
    batch.submit(short.job)
    while "x58" not in events:
        batch.step()
    assert events == ["a0", "a100", "x0", "x58"] and batch.active == 2
    ends, other = (long, short) if who == "long" else (short, long)
    if how == "leaves":
        ends.job.cancel()
    elif how == "fails":
        ends.job.on_progress = lambda read, of: {}["mine"]
    else:
        batch.end_all()
        assert long.reasons == short.reasons == ["cancelled"] and not batch.has_work
        return
    run(batch)
    assert other.tokens == other.expected(model) and other.reasons == ["length"]
    (reason,) = ends.reasons
    assert (reason == "cancelled" if how == "leaves" else isinstance(reason, KeyError)) and not ends.tokens


def test_many_answers_to_one_request_leave_room_for_others():
    """The first answer to another request is before them, in a place that they leave free."""
    events, most = list[str](), 0
    many = [told(events, f"a{n} ", Asked(ids_of(n, 5), 6, place=n)) for n in range(6)]
    other = [told(events, f"b{n} ", Asked(ids_of(9 + n, 5), 6)) for n in range(2)]
    batch = Engine(model_of(), None, 4)
    batch.submit(*(asked.job for asked in many))
    for _ in range(3):
        batch.step()
        most = max(most, batch.active)
    assert most == 3
    batch.submit(*(asked.job for asked in other))
    while batch.has_work:
        batch.step()
        most = max(most, batch.active)
    begun = [event.split()[0] for event in events if event.endswith(" 0")]
    assert begun == ["a0", "a1", "a2", "b0", "b1", "a3", "a4", "a5"] and most == 4
    for asked in (*many, *other):
        assert asked.tokens == asked.expected(model_of()) and asked.reasons == ["length"]


def test_half_of_the_rows_are_left_by_many_answers_to_several_requests():
    """A first answer passes those that wait for a row, and begins soon; a request alone has more rows."""

    def request(count: int) -> list[Asked]:
        own = object()
        return [Asked(ids_of(n, 5), 9, place=n, request=own) for n in range(count)]

    def later() -> int:
        return sum(each.place > 0 and each.has_begun for each in batch.pool.sequences)

    batch, rows = Engine(model_of(), None, 6), []
    batch.submit(*(each.job for each in request(9)))
    for _ in range(7):
        batch.step()
        rows.append(batch.active)
    assert max(rows) == 5
    batch.end_all()
    hostile, rows, waited, good = [each for _ in range(4) for each in request(5)], [], [], None
    batch.submit(*(each.job for each in hostile))
    for count in range(24):
        if count % 8 == 7:
            (good,) = request(1)
            batch.submit(good.job)
            waited.append(count)
        batch.step()
        rows.append(later())
        if good is not None and good.read:
            waited[-1], good = count + 1 - waited[-1], None
    assert max(rows) == 3 and max(waited) <= 3 and batch.waiting  # one begins in a step
    batch.end_all()


def test_what_is_tried_for_two_answers_is_tried_before_the_first(monkeypatch):
    """On the thread that makes the engine, and only where two have drafts."""
    model, threads = model_of(), []
    monkeypatch.setattr(memory, "_known", {})
    monkeypatch.setattr(batching, "_tried", lambda model: threads.append(threading.current_thread().name))
    for speculative, most, tried in ((None, 4, 0), ("lookup", 1, 0), ("lookup", 4, 1)):
        engine = EngineThread(model, None, most, drafting=drafting_of(model, speculative, None, "a"))
        jobs = [Asked(ids_of(n, 5), 9) for n in range(3)]
        for each in jobs:
            engine.submit(each.job)
        assert all(each.done.wait(60) for each in jobs)
        engine.close()
        assert threads == [threading.current_thread().name] * tried


def test_requests_take_turns():
    """Who asks for many short answers begins one a turn; who comes later has the turn that is on."""
    events = list[str]()

    def request(name: str, count: int) -> list[Asked]:
        return [told(events, f"{name}{n} ", Asked(ids_of(n, 5), 1, place=n)) for n in range(count)]

    batch, asked = Engine(model_of(), None, 4), [*request("a", 4), *request("b", 4)]
    batch.submit(*(each.job for each in asked))
    for _ in range(4):
        batch.step()
    later = request("c", 2)
    run(batch, *later)
    begun = [event.split()[0] for event in events if event.endswith(" 0")]
    assert begun == ["a0", "b0", "a1", "b1", "c0", "a2", "b2", "c1", "a3", "b3"]
    assert all(each.reasons == ["length"] for each in (*asked, *later))


def test_few_jobs_are_submitted_before_a_step(monkeypatch):
    """However many wait; the first answer to a request does not wait for all those to another."""
    events, begun, goes_on = [], threading.Event(), threading.Event()
    submit, step = Engine.submit, Engine.step
    engine = EngineThread(model_of(), None, 2)
    held = threading.Thread(target=on_thread, args=(engine, lambda: begun.set() or goes_on.wait(60)))
    held.start()
    assert begun.wait(60)
    monkeypatch.setattr(Engine, "submit", lambda own, job: events.append(job) or submit(own, job))
    monkeypatch.setattr(Engine, "step", lambda own: events.append(None) or step(own))
    many, other = [Asked(ids_of(n, 5), 1, place=n) for n in range(20)], Asked(ids_of(50, 5), 1)
    for each in (*many, other):
        engine.submit(each.job)
    assert engine.counts.waiting >= 21
    goes_on.set()
    held.join()
    assert all(each.done.wait(60) for each in (*many, other))
    engine.close()
    submitted = [event for event in events if event is not None]
    assert submitted == [many[0].job, other.job, *(each.job for each in many[1:])]
    runs = [
        len([*run]) for is_step, run in itertools.groupby(events, lambda each: each is None) if not is_step
    ]
    assert max(runs) <= 4
    assert [each.reasons for each in (*many, other)] == [["length"]] * 21


def test_the_engine_on_its_thread():
    model = model_of()
    prompts = PrefixCache(MEMORY)
    engine, names = EngineThread(model, prompts, 4), []
    jobs = [Asked(ids_of(n, 3 + n), 4 + n) for n in range(6)]
    for each in jobs:
        engine.submit(each.job)
    assert all(each.done.wait(60) for each in jobs)
    on_thread(engine, lambda: names.append(threading.current_thread().name))
    assert names == ["device"]
    assert [each.reasons for each in jobs] == [["length"]] * 6
    for each in jobs:
        assert each.tokens == each.expected(model)
    assert engine.counts.active == engine.counts.waiting == 0
    assert engine.counts.computed == sum(3 + n for n in range(6))
    count, octets = engine.prompts_held()
    assert count == 6 and octets > 0
    endless = Asked(ids_of(9, 4), 10**6)
    began = threading.Event()
    endless.until = lambda token: began.set()
    engine.submit(endless.job)
    assert began.wait(60)
    engine.close()
    assert endless.reasons == ["cancelled"]
    late = Asked(ids_of(9, 4), 3)
    engine.submit(late.job)
    assert late.reasons == ["cancelled"]
