"""Isolation: an error of one sequence ends that sequence; the tokens of those beside it are as alone."""

import functools
import itertools
import shutil
import threading

import pytest
import torch
from support.jobs import Asked, ids_of, model_of, on_thread, run
from support.sweep import covering, in_sweep
from transformers import LogitsProcessor
from transformers.generation import TopKLogitsWarper

from torch_moe_mps.models.caches import batched
from torch_moe_mps.models.caches.buffer import Buffer
from torch_moe_mps.serving.engine import engine as engine_module
from torch_moe_mps.serving.engine.engine import Engine
from torch_moe_mps.serving.engine.job import Job
from torch_moe_mps.serving.engine.loop import EngineThread
from torch_moe_mps.serving.engine.prefill import Prefill
from torch_moe_mps.serving.engine.sampling import Sampler
from torch_moe_mps.serving.prefix_cache import disk as disk_module
from torch_moe_mps.serving.prefix_cache.disk import Disk, Restoring
from torch_moe_mps.serving.prefix_cache.memory import PrefixCache

MEMORY = 1 << 30
ARCHITECTURES = ("qwen3_moe", "gpt_oss", "qwen3_next")  # windows with sinks, recurrent states


@functools.cache
def alone(number: int, length: int, new: int, architecture: str = "qwen3_moe") -> list[int]:
    return Asked(ids_of(number, length), new).expected(model_of(architecture))


class Process(LogitsProcessor):
    """Does something with the logits behind some tokens."""

    def __init__(self, does, behind: int = 0):
        self.does, self.behind = does, behind

    def __call__(self, ids, scores):
        return self.does(ids, scores) if ids.shape[1] >= self.behind else scores


def _raise(error):
    raise error


def _settings(**values):
    def change(asked):
        for name, value in values.items():
            setattr(asked.config, name, value)

    return change


def _processors(*made):
    return lambda asked: asked.job.processors.extend(made)


def _function(name, does):
    return lambda asked: setattr(asked.job, name, does)


# {what is wrong with a job: how it becomes so}
WRONG = {
    **{
        f"{name} {value}"[:40]: _settings(do_sample=True, **{name: value})
        for name, value in [
            ("top_k", 10**30),
            ("top_k", 1 << 63),
            ("temperature", 1e300),
            ("temperature", float("inf")),
            ("eos_token_id", [500, -7]),
            ("eos_token_id", 2.5),
            ("eos_token_id", "a"),
            ("num_beams", "two"),
            ("bad_words_ids", "a"),
            ("max_new_tokens", "a"),
        ]
    },
    "seed": _function("seed", 1 << 80),
    "no prompt": _function("inputs", {}),
    "a token beyond the vocabulary": _function("inputs", {"input_ids": torch.tensor([[5, 10**6]])}),
    "progress": _function("on_progress", lambda read, of: _raise(KeyError("mine"))),
    "progress later": _function("on_progress", lambda read, of: read and _raise(KeyError("mine"))),
    "token": _function("on_token", lambda token: _raise(KeyError("mine"))),
    "token exits": _function("on_token", lambda token: _raise(SystemExit(3))),
    "no truth": _function("on_token", lambda token: torch.zeros(2)),
    "processor exits": _processors(Process(lambda ids, scores: _raise(SystemExit(3)), 8)),
    "wide scores": _processors(Process(lambda ids, scores: torch.cat((scores, scores), 1), 8)),
    "scores of two": _processors(Process(lambda ids, scores: scores[[0, 0]], 8)),
    "scores of NaN": _processors(Process(lambda ids, scores: scores.fill_(torch.nan), 8)),
    "scores of a list": _processors(Process(lambda ids, scores: scores.tolist(), 8)),
    "another k": lambda asked: (
        _settings(do_sample=True, top_k=0)(asked),
        _processors(TopKLogitsWarper(1 << 70))(asked),
    ),
}


MANY = 3  # wrong jobs in one batch, each between two others
TOGETHER = [[*WRONG][begin : begin + MANY] for begin in range(0, len(WRONG), MANY)]


@functools.cache
def drawn_alone(architecture: str) -> list[int]:
    run(Engine(model_of(architecture), None, 1), drawn := drawn_job())
    return drawn.tokens


def drawn_job() -> Asked:
    asked = Asked(ids_of(4, 7), 9, seed=5)
    _settings(do_sample=True, top_k=20)(asked)
    return asked


@pytest.mark.parametrize("architecture", in_sweep(ARCHITECTURES, ARCHITECTURES[:1]))
@pytest.mark.parametrize("wrong", TOGETHER, ids=lambda wrong: wrong[0])
def test_what_raises_in_one_row_ends_that_row(wrong, architecture):
    """Beside others, of which one has processors, and one is drawn; the next job is generated."""
    model = model_of(architecture)
    every_bad = {what: Asked(ids_of(10 + number, 6), 6) for number, what in enumerate(wrong)}
    for what, bad in every_bad.items():
        WRONG[what](bad)
    plain, drawn, late = Asked(ids_of(1, 5), 9), drawn_job(), Asked(ids_of(1, 5), 9)
    masked = Asked(ids_of(3, 4), 9, processors=[Process(lambda ids, scores: scores)])
    batch = Engine(model, PrefixCache(MEMORY), 3 + len(wrong))  # the last job waits
    between = itertools.zip_longest((plain, masked, drawn), every_bad.values())
    run(batch, *filter(None, itertools.chain(*between)), late)
    for what, bad in every_bad.items():
        assert len(bad.reasons) == 1 and isinstance(bad.reasons[0], Exception), (what, bad.reasons)
    for number, length, each in ((1, 5, plain), (3, 4, masked), (1, 5, late)):
        assert (each.reasons, each.tokens) == (["length"], alone(number, length, 9, architecture))
    assert (drawn.reasons, drawn.tokens) == (["length"], drawn_alone(architecture))


def test_scores_of_another_dtype_and_tokens_that_a_processor_changes():
    """float64 changes no other row's draw; a prompt is kept for what was computed."""

    def spoils(ids, scores):
        ids.fill_(7)
        return scores.double()

    def drawn(*processors):
        asked = Asked(ids_of(1, 5), 9, seed=5, processors=list(processors))
        _settings(do_sample=True, top_k=0, temperature=2.0)(asked)
        return asked

    expected, victim, bad = drawn(), drawn(Process(lambda ids, scores: scores)), drawn(Process(spoils))
    run(Engine(model_of(), None, 1), expected)
    prompts = PrefixCache(MEMORY)
    batch = Engine(model_of(), prompts, 2)
    run(batch, victim, bad)
    assert victim.tokens == expected.tokens == bad.tokens
    same = Asked(torch.full((1, 6), 7), 6)
    run(batch, same)
    assert same.tokens == same.expected(model_of())


def test_an_end_that_raises_ends_no_other():
    bad, good = Asked(ids_of(2, 6), 3), Asked(ids_of(1, 5), 9)
    bad.job.on_end = lambda reason: bad.reasons.append(reason) or _raise(SystemExit("mine"))
    run(Engine(model_of(), None, 3), bad, good)
    assert bad.reasons == ["length"] and good.tokens == alone(1, 5, 9)


@pytest.mark.parametrize(
    ("home", "part", "number"),
    [
        (batched, "_admit", 1),
        (batched, "_count", 0),
        (Buffer, "view", 2),
        (batched.BatchedCache, "_changed", 0),
    ],
)
def test_a_sequence_that_cannot_be_admitted_leaves_the_others_as_they_were(home, part, number, monkeypatch):
    """At the first layer, at another, and behind all."""
    bad, good, late = Asked(ids_of(2, 16), 5), Asked(ids_of(1, 5), 9), Asked(ids_of(3, 30), 5)
    batch, own, left = Engine(model_of(), None, 3), getattr(home, part), [number]
    batch.submit(good.job)
    batch.step()
    own_admit = batch.pool.batch.rows.admit

    def fails(*given):
        left[0] -= 1
        if left[0] == -1:
            raise MemoryError(part)
        return own(*given)

    def admit(*given):
        with monkeypatch.context() as broken:
            broken.setattr(home, part, fails)
            own_admit(*given)

    monkeypatch.setattr(batch.pool.batch.rows, "admit", admit)
    run(batch, bad, late)
    assert left[0] < 0 and isinstance(bad.reasons[0], MemoryError)
    assert good.tokens == alone(1, 5, 9) and late.tokens == alone(3, 30, 5)


def test_a_fault_of_the_gpu_ends_all():
    fault = torch.AcceleratorError("GPU Timeout Error")

    def fails(ids, scores):
        raise fault

    bad, good, late = Asked(ids_of(2, 6), 6), Asked(ids_of(1, 5), 20), Asked(ids_of(1, 5), 9)
    bad.job.processors.append(Process(fails, 8))
    batch = Engine(model_of(), None, 2)
    run(batch, good, bad)
    assert good.reasons == bad.reasons == [fault]
    run(batch, late)
    assert late.tokens == alone(1, 5, 9)


# The calls that the engine makes for one sequence: (class, method, whether it is for this sequence).
def _of_prompt(length):
    """Whether a call has the prompt of the sequence that fails, which alone has so many tokens."""

    def fits(self, *given):
        for value in (self, *given):
            for name in ("_all", "ids", "_ids"):
                if isinstance(ids := getattr(value, name, None), torch.Tensor):
                    return ids.numel() >= length
            if isinstance(value, dict) and "input_ids" in value:
                return value["input_ids"].numel() == length
        return False

    return fits


_LONG = 40  # tokens of the prompt that fails; the others have fewer
# Calls without which an answer is whole.
OPTIONAL = (
    "look up on the disk", "read a part from the disk", "restore", "copy out of the batch", "keep",
)  # fmt: skip
CALLS = {
    "look up on the disk": (PrefixCache, "restoring", _of_prompt(_LONG)),
    "read a part from the disk": (Restoring, "step", _of_prompt(_LONG - 8)),
    "restore": (PrefixCache, "take_back", _of_prompt(_LONG - 8)),
    "prefill chunk": (Prefill, "compute", _of_prompt(_LONG)),
    "settings": (Sampler, "__init__", lambda self, model, job: job.inputs["input_ids"].numel() == _LONG),
    "sample": (Sampler, "processed", lambda self, logits: self.max_tokens == 5),
    "admit": (batched.BatchedCache, "admit", lambda self, cache, tokens, moved: tokens == _LONG),
    "copy out of the batch": (batched.BatchedCache, "alone", lambda self, row: self.lengths[row] > _LONG),
    "keep": (PrefixCache, "put", lambda self, kept: len(kept.ids) > _LONG),
    "progress": (Job, "report_progress", lambda self, *given: self.inputs["input_ids"].numel() == _LONG),
    "hand out": (Job, "append", lambda self, token: self.inputs["input_ids"].numel() == _LONG),
}
KINDS = (lambda: RuntimeError(NO_MEMORY), lambda: RuntimeError("mine"), KeyboardInterrupt)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The prompt that fails, on a disk."""
    where = tmp_path_factory.mktemp("prompts")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(disk_module, "BLOCK", 16)
        prompts = PrefixCache(MEMORY, disk=Disk(where, MEMORY))
        batch = Engine(model_of(), prompts, 1)
        run(batch, Asked(ids_of(2, _LONG), 2))
        while prompts.is_storing:
            prompts.store()
        prompts.close()
    return where


@pytest.mark.parametrize("call", CALLS)
def test_an_error_in_any_call_for_one_sequence_leaves_the_others(call, folder, tmp_path, monkeypatch):
    """Out of memory, an error, and an interrupt on the thread of the device, with two sequences beside it."""
    monkeypatch.setattr(disk_module, "BLOCK", 16)
    home, name, is_for = CALLS[call]
    own = getattr(home, name)
    for number, kind in enumerate(KINDS):
        raised = []

        def fails(self, *given, raised=raised, kind=kind, **named):
            if is_for(self, *given) and not raised:
                raised.append(kind())
                raise raised[0]
            return own(self, *given, **named)

        disk = Disk(shutil.copytree(folder, tmp_path / str(number)), MEMORY)
        batch = Engine(model_of(), PrefixCache(MEMORY, disk=disk), 3)
        first, bad, last = Asked(ids_of(1, 5), 6), Asked(ids_of(2, _LONG), 5), Asked(ids_of(3, 4), 6)
        with monkeypatch.context() as broken:
            broken.setattr(home, name, fails)
            died = []
            thread = threading.Thread(target=_run, args=(died, batch, first, bad, last))
            thread.start()
            thread.join(60)
        assert raised and died == [], (call, raised, died)
        for length, which, each in ((5, 1, first), (4, 3, last)):
            assert (each.reasons, each.tokens) == (["length"], alone(which, length, 6)), (call, kind)
        (reason,) = bad.reasons
        if call in OPTIONAL:
            assert reason == "length" and bad.tokens == alone(2, _LONG, 5)
        else:
            assert isinstance(reason, Exception), (call, reason)
            assert raised[0] in (reason, reason.__cause__)


def _run(died, batch, *asked):
    try:
        run(batch, *asked)
    except BaseException as error:
        died.append(error)


NO_MEMORY = "MPS backend out of memory (MPS allocated: 20.00 GB, max allowed: 22.90 GB)"


def fails_once(batch: Engine, fits) -> None:
    """Lets the first call of the model that fits fail behind its layers, which then have its tokens."""
    own, left = batch.executor._call, [1]

    def called(cache, **inputs):
        out = own(cache, **inputs)
        if left[0] and fits(inputs["input_ids"]):
            left[0] = 0
            raise RuntimeError(NO_MEMORY)
        return out

    batch.executor._call = called


@pytest.mark.parametrize(("architecture", "at"), covering(("qwen3_moe", "qwen3_next"), (2, 5)))
def test_a_step_without_memory_ends_the_answer_with_the_fewest_tokens(architecture, at, monkeypatch):
    """The others are read again, and go on; half of the kept prompts are given up."""
    monkeypatch.setattr(engine_module, "STEPS", 0)  # one begins in a step, so that the last has the fewest
    model, prompts = model_of(architecture), PrefixCache(MEMORY)
    batch = Engine(model, prompts, 3)
    run(batch, Asked(ids_of(4, 40), 2), Asked(ids_of(5, 40), 2))
    first, drawn, last = Asked(ids_of(1, 5), 9), Asked(ids_of(2, 6), 9), Asked(ids_of(3, 9), 9)
    for each in (drawn, twin := Asked(ids_of(2, 6), 9)):
        each.job.seed, each.config.do_sample = 5, True
    run(Engine(model, None, 1), twin)
    fails_once(batch, lambda ids: len(ids) == 3 and len(last.tokens) == at)
    run(batch, first, drawn, last)
    assert [str(reason) for reason in last.reasons] == [NO_MEMORY] and len(last.tokens) == at
    assert first.reasons == drawn.reasons == ["length"]
    assert first.tokens == first.expected(model) and drawn.tokens == twin.tokens
    assert [kept.ids[:40].tolist() for kept in prompts.kept].count(ids_of(4, 40)[0].tolist()) == 0
    run(batch, late := Asked(ids_of(4, 41), 5))
    assert late.tokens == late.expected(model)


def test_a_prompt_without_memory_ends_alone(monkeypatch):
    """And half of the cached prefixes are evicted, once."""
    halved = list[PrefixCache]()
    monkeypatch.setattr(PrefixCache, "halve", lambda cache: halved.append(cache))
    good, bad, late = Asked(ids_of(1, 5), 9), Asked(ids_of(2, 16), 9), Asked(ids_of(2, 16), 5)
    batch = Engine(model_of(), PrefixCache(MEMORY), 3)
    fails_once(batch, lambda ids: ids.shape[1] == 16)
    run(batch, good, bad, late)
    assert str(bad.reasons[0]) == NO_MEMORY and bad.tokens == []
    assert good.tokens == alone(1, 5, 9) and late.tokens == alone(2, 16, 5)
    assert halved == [batch.prefix_cache]


def test_an_answer_alone_without_memory_ends_alone(monkeypatch):
    good, bad, late = Asked(ids_of(1, 5), 9), Asked(ids_of(2, 6), 9), Asked(ids_of(2, 6), 5)
    batch = Engine(model_of(), PrefixCache(MEMORY), 3)
    monkeypatch.setattr(
        batch.pool.batch.rows, "admit", lambda *given: _raise(batched.NotBatchable("it has none"))
    )
    fails_once(batch, lambda ids: len(bad.tokens) == 4 and ids[0].tolist() == bad.tokens[-1:])
    run(batch, bad, good, late)
    assert str(bad.reasons[0]) == NO_MEMORY and len(bad.tokens) == 4
    assert good.tokens == alone(1, 5, 9) and late.tokens == alone(2, 6, 5)


@pytest.mark.parametrize("at", ["end_cancelled", "fail_all"])
def test_the_thread_of_an_engine_outlives_an_error_or_says_why_it_died(at, monkeypatch):
    """Nobody waits for ever: what is generated, what waits and what comes later end with the reason."""
    engine = EngineThread(model_of(), PrefixCache(MEMORY), 1)
    jobs = [Asked(ids_of(n, 5), 10**6) for n in (1, 2)]
    began = threading.Event()
    jobs[0].until = lambda token: began.set()

    def fails(*given):
        raise RuntimeError("of the host")

    engine.submit(jobs[0].job)
    assert began.wait(60)
    engine.submit(jobs[1].job)

    def break_it():
        monkeypatch.setattr(engine._engine.pool, at, fails)
        if at == "fail_all":
            monkeypatch.setattr(engine._engine.decoding, "_step", fails)

    on_thread(engine, break_it)
    assert all(each.done.wait(60) for each in jobs[: 1 if at == "end_cancelled" else 2])
    if at == "end_cancelled":
        monkeypatch.undo()
        assert isinstance(jobs[0].reasons[0], RuntimeError) and engine.death is None
        jobs[1].job.cancel()
        assert jobs[1].done.wait(60)
        engine.close()
        return
    late = Asked(ids_of(3, 5), 3)
    engine._thread.join(60)
    engine.submit(late.job)
    for each in (*jobs, late):
        assert [str(reason) for reason in each.reasons] == [str(engine.death)], each.reasons
    assert "RuntimeError: of the host" in str(engine.death)
    engine.close()
