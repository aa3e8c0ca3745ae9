"""Time of the GPU beside the host's: the engine computes the next token while the host works on this one.

A step of the small model takes the GPU as long as the cost model says of a token of a large one
(docs/speed.md): each launch has the same share of the starts, and one of the reading by the bytes it moves.
"""

import contextlib
import functools
import itertools
import operator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from measured.apple.tokens import TOKENS
from simulator import shaderlib
from simulator.apple.facts import GPUS, START_US
from support import images, tiny_models
from support.models import eager
from support.speculative import Partly
from support.sweep import in_sweep, rows_in_sweep
from transformers import GenerationConfig

import torch_moe_mps
from torch_moe_mps._faults import Mark
from torch_moe_mps.checkpoints import on_disk
from torch_moe_mps.models.attention.attention import NAME
from torch_moe_mps.models.modules.experts_on_disk import expert_pools
from torch_moe_mps.serving.engine import engine as engines
from torch_moe_mps.serving.engine.engine import Engine
from torch_moe_mps.serving.engine.job import Job
from torch_moe_mps.serving.engine.sampling import Sampled
from torch_moe_mps.serving.http.logprobs import Logprobs
from torch_moe_mps.serving.speculative.asked import drafting_of

_TOKEN, _GPU = TOKENS[0], GPUS["M4 Max"]  # of Qwen3-30B-A3B
_COMMAND = 10e-6  # seconds of the host to encode a launch
# Tokens of an answer, and those at which all answers go on: where one joins or ends, the GPU waits once.
_NEW, _STEADY = 20, slice(4, 12)


pytestmark = pytest.mark.usefixtures("captured")


@functools.cache
def model_on_mps():
    model = eager(tiny_models.tiny_model("qwen3_moe")).to("mps")
    torch_moe_mps.accelerate(model)
    model.set_attn_implementation(NAME)
    return model


class Costs:
    """Seconds of the GPU for what the small model launches.

    Attributes:
        a_launch: of the start of each, aten's included, which move next to nothing.
        a_byte: of what a dispatch reads and writes.
    """

    def __init__(self, a_launch: float, a_byte: float):
        self.a_launch, self.a_byte, self.dispatches, self.moved = a_launch, a_byte, 0, 0

    def __call__(self, dispatch: shaderlib.Dispatch) -> float:
        traffic = np.frombuffer(shaderlib.execute(dispatch).buffers, np.uint64).reshape(
            shaderlib.BINDINGS, -1
        )
        moved = int(traffic[:, 2:].sum())  # each byte once
        self.dispatches, self.moved = self.dispatches + 1, self.moved + moved
        return self.a_launch + self.a_byte * moved

    @contextlib.contextmanager
    def timeline(self, simulated, an_event: float = 0.0):
        with simulated.timeline(self, _COMMAND, self.a_launch, an_event) as times:
            yield times


@functools.cache
def costs_on(simulated) -> Costs:
    """A token of the small model takes as long as one of the large model behind few keys."""
    unit = 1e-6  # a whole second a launch would let the watchdog end the command buffers
    counted, numbers = Costs(unit, 0.0), []

    class Counting(Answer):
        def note(self, token: int) -> bool:
            if len(self.tokens) in (_STEADY.start, _STEADY.stop):
                torch.mps.synchronize()
                numbers.append((times.busy, counted.moved))
            return super().note(token)

    generate(Answer(0))  # captures
    with counted.timeline(simulated) as times:
        generate(Counting(0))
    (launches, moved), tokens = map(operator.sub, *reversed(numbers)), _STEADY.stop - _STEADY.start
    a_launch = _TOKEN.launches * START_US[0] * 1e-6 * tokens * unit / launches
    return Costs(a_launch, _TOKEN.bytes_ms(_GPU) * 1e-3 * tokens / moved)


@pytest.fixture
def costs(simulated, captured) -> Costs:
    """Before what a test captures: to accelerate the model that is measured would end it."""
    return costs_on(simulated)


class Answer(Job):
    """A job whose host works for so long on each token, and which notes the clocks when it has one."""

    def __init__(self, number: int, seconds: float = 0.0, times=None, **settings):
        ids = torch.randint(
            2, 90, (1, settings.pop("prompt", 5)), generator=torch.Generator().manual_seed(number)
        )
        letters = SimpleNamespace(decode=lambda tokens: "a" * len(tokens))
        self.logprobs = Logprobs(letters, settings.pop("logprobs")) if "logprobs" in settings else None
        config = GenerationConfig(max_new_tokens=_NEW, pad_token_id=0, eos_token_id=None, **settings)
        super().__init__({"input_ids": ids}, config, self.note, self.end)
        self.times, self.seconds, self.seen, self.reason = times, seconds, [], None
        self.tokens: list[int] = []
        self.processors = [self.logprobs] if self.logprobs is not None else []

    def note(self, token: int) -> bool:
        self.tokens.append(token)
        if self.logprobs is not None:
            self.logprobs.pop(token)
        if self.times is not None:
            self.times.work(self.seconds)
            self.seen.append((self.times.idle, self.times.busy, self.times.now))
        return False

    def end(self, reason) -> None:
        self.reason = reason

    def steady(self) -> tuple[float, float]:
        """Idle and busy microseconds of the GPU a token."""
        idle, busy, _ = (
            (last - first) / (_STEADY.stop - _STEADY.start) * 1e6
            for first, last in zip(self.seen[_STEADY.start], self.seen[_STEADY.stop], strict=True)
        )
        return round(idle), round(busy)


def generate(*answers: Answer, drafting=None, model=None) -> None:
    engine = Engine(model or model_on_mps(), None, len(answers), drafting=drafting)
    engine.submit(*answers)
    while engine.has_work:
        engine.step()


def timed(simulated, costs, many: int, milliseconds: float, *settings: dict) -> tuple[float, float]:
    """`settings`: of the answers, in turn."""

    def run(times=None) -> Answer:
        host = 1e-3 * milliseconds / many
        answers = [Answer(n, host, times, **settings[n % len(settings)]) for n in range(many)]
        generate(*answers)
        assert all(answer.reason == "length" for answer in answers)
        return answers[-1]

    run()  # captures
    with costs.timeline(simulated) as times:
        return run(times).steady()


SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 20}
# {what runs: (sequences, ms of the host on the tokens of a step, settings)}
WAYS = {
    "one, 0.3 ms": (1, 0.3, [{}]),
    "one, 1 ms": (1, 1.0, [{}]),
    "one, sampled": (1, 1.0, [SAMPLING]),
    "eight of each kind": (8, 1.0, [{}, {"logprobs": 3}, SAMPLING]),
    "four, penalties": (4, 1.0, [{"repetition_penalty": 1.3}]),
}
OF_THE_SWEEP = ("one, 0.3 ms", "four, penalties")


@pytest.mark.slow("captures programs in the simulator")
@pytest.mark.parametrize("way", in_sweep(WAYS, [way for way in WAYS if way not in OF_THE_SWEEP]))
def test_the_gpu_is_never_idle_between_steps(simulated, costs, way):
    many, milliseconds, settings = WAYS[way]
    idle, busy = timed(simulated, costs, many, milliseconds, *settings)
    assert idle == 0
    if many == 1:
        assert busy == pytest.approx(1e3 * _TOKEN.ms(_GPU, START_US[0], 1.0), rel=0.05)


def waits_of(seen) -> list[int]:
    """Microseconds for which the GPU waits between tokens, without zeros."""
    waits = (round((after[0] - before[0]) * 1e6) for before, after in itertools.pairwise(seen))
    return [wait for wait in waits if wait]


# What the other answer does when one of the two has nine tokens, ms of the host on a step's tokens, and us
# for which the GPU waits. A copy from the CPU waits for the GPU, which then waits for what the host encodes
# next: behind the ids of a prompt for its chunk, behind the places of rows for a step. The host also reads
# the first token before that step.
CHANGES = [
    ("begins", 0.3, (420, 680)),
    ("begins", 1.0, (420, 1030)),
    ("has its length", 1.0, (250,)),
    ("has a stop string", 0.3, (250,)),
    ("has a stop string", 1.0, (250,)),
]


@pytest.mark.slow("captures programs in the simulator")
@pytest.mark.parametrize(("change", "milliseconds", "waits"), rows_in_sweep(CHANGES, CHANGES[1:4]))
def test_an_answer_goes_on_where_another_one_begins_or_ends(simulated, costs, change, milliseconds, waits):
    """What the host does with the tokens of a step is done while the GPU works."""

    def run(times) -> Answer:
        engine, host = Engine(model_on_mps(), None, 2), 0.5e-3 * milliseconds
        going = Answer(0, host, times)
        other = Answer(1, host, times, prompt=60 if change == "begins" else 5)
        take, stop = going.note, other.note

        def note(token: int) -> bool:
            if change == "begins" and len(going.tokens) == 9:
                engine.submit(other)
            return take(token)

        def ends(token: int) -> bool:
            return stop(token) or (change == "has a stop string" and len(other.tokens) == 9)

        going.on_token, other.on_token = note, ends
        if change == "has its length":
            other.config.max_new_tokens = 9
        engine.submit(going, *([] if change == "begins" else [other]))
        while engine.has_work:
            engine.step()
        assert going.reason == "length" and other.reason in ("length", "stop")
        return going

    run(None)  # captures
    with costs.timeline(simulated) as times:
        seen = run(times).seen
    assert waits_of(seen[5:]) == [*waits]


@functools.cache
def seeing_model_on_mps():
    model = eager(images.llava(layers=3)).to("mps")
    torch_moe_mps.accelerate(model)
    return model


@pytest.mark.slow("captures programs in the simulator")
@pytest.mark.parametrize("milliseconds", in_sweep([0.3, 1.0], [1.0]))
def test_an_answer_goes_on_beside_the_encoder_of_pictures(simulated, costs, milliseconds, monkeypatch):
    """With a step between two of its modules, of which the GPU has one while the host encodes the next."""
    monkeypatch.setattr(engines, "STEPS", 0)
    ids = torch.tensor([[5, *[27] * 24, 6]])
    pixels = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(0))

    def run(times) -> Answer:
        engine = Engine(seeing_model_on_mps(), None, 2)
        going, other = Answer(0, 1e-3 * milliseconds, times), Answer(1)
        going.inputs["input_ids"] %= 20
        other.inputs = {"input_ids": ids, "pixel_values": pixels}

        def note(token: int) -> bool:
            if len(going.tokens) == 9:
                engine.submit(other)
            return take(token)

        take, going.on_token = going.on_token, note
        engine.submit(going)
        while engine.has_work:
            engine.step()
        assert going.reason == other.reason == "length"
        return going

    run(None)  # captures
    with costs.timeline(simulated) as times:
        seen = run(times).seen
    assert waits_of(seen[5:]) == [60, 270]  # after copies of the picture and of the prompt


@pytest.mark.slow("captures programs in the simulator")
def test_a_step_that_verifies_drafts_is_read_before_the_next(simulated, costs):
    """Which tokens the next step has depends on it: the GPU waits while the host works on those of a step."""
    plain = Answer(0)
    generate(plain)
    known = [plain.inputs["input_ids"][0]], [plain.tokens]

    def drafted(times=None) -> Answer:
        answer = Answer(0, 1e-4, times)
        source = Partly(*known, right=1.0)
        generate(answer, drafting=drafting_of(model_on_mps(), source, None, "test", 3))
        assert answer.tokens == plain.tokens and source.accepted_tokens > 8
        return answer

    drafted()  # captures
    with costs.timeline(simulated) as times:
        seen = drafted(times).seen
    assert waits_of(seen) == [450, 550, 550, 650, 650, 550, 650, 550]


@pytest.mark.slow("loads a model, and captures programs in the simulator")
def test_the_gpu_waits_for_a_disk_alone(simulated, costs, tmp_path, monkeypatch):
    """Experts are read while the host works on the token before, and encodes the next one."""
    eager(tiny_models.tiny_model("qwen3_moe")).save_pretrained(tmp_path)
    monkeypatch.setattr(on_disk, "slots_in", lambda layers, memory: 3)
    model = torch_moe_mps.from_pretrained(str(tmp_path), device_map="mps", experts_memory="1GB")
    ssd, an_event, taken = simulated.Ssd(1e-3, 1e9, depth=8), 5e-5, []

    def read(file: int, offset: int, size: int) -> int:
        taken.append(ssd.seconds([size]))
        times.answer(taken[-1])
        return size

    counters = expert_pools(model).counters
    generate(Answer(0, prompt=1), model=model)  # captures; several tokens would stream whole layers
    before = counters.hits + counters.misses
    with costs.timeline(simulated, an_event) as times, simulated.reads(read):
        answer = Answer(0, 1e-3, times, prompt=1)
        generate(answer, model=model)
        torch.mps.synchronize()
        asked = (counters.hits + counters.misses - before) // model.config.num_experts_per_tok
        assert times.waited == pytest.approx(sum(taken) + 2 * an_event * asked)
    idle, _ = answer.steady()
    assert idle == 0 and asked > 2 * _STEADY.stop and max(taken) > 1e-3


@pytest.mark.slow("captures programs in the simulator")
def test_the_clocks_show_a_wait_for_everything(simulated, costs, monkeypatch):
    """A host that also waits for the next step leaves the GPU idle for as long as it works."""
    monkeypatch.setattr(Mark, "wait", lambda self: torch.mps.synchronize())
    idle, _ = timed(simulated, costs, 1, 1.0, {})
    assert idle > 1000


@pytest.mark.slow("captures programs in the simulator")
def test_a_fault_is_raised_where_its_tokens_are_read(simulated, costs, monkeypatch):
    """And nowhere else: the step behind it reads a token that is none. All that was encoded ends with it."""
    alone, raised, read = Answer(0), [], Sampled.read
    generate(alone)  # captures

    def noted(self) -> list:
        try:
            return read(self)
        except torch.AcceleratorError as fault:
            raised.append(fault)
            raise

    monkeypatch.setattr(Sampled, "read", noted)
    for buffer in (15, 16):  # of a step, behind which the next is committed
        with costs.timeline(simulated) as times:
            answer = Answer(0, 1e-3, times)
            with simulated.failing("timeout", buffer):
                generate(answer)
                assert isinstance(answer.reason, torch.AcceleratorError) and answer.reason is raised.pop()
                given, ended = answer.tokens, times.now
                torch.mps.synchronize()
            assert ended == times.now and not raised
        assert 2 < len(given) < _NEW and given == alone.tokens[: len(given)]
