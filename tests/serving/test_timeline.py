"""Time of the GPU beside the host's: the engine computes the next token while the host works on this one.

A dispatch takes the GPU 100 us here, and a step of the small model a few ms, more than the host's work.
"""

import functools
import itertools

import pytest
import torch
from simulator import shaderlib
from support import tiny_models
from support.models import eager
from support.speculative import Partly
from transformers import GenerationConfig

import torch_moe_mps
from torch_moe_mps._faults import Mark
from torch_moe_mps.serving.engine.engine import Engine
from torch_moe_mps.serving.engine.job import Job
from torch_moe_mps.serving.speculative.asked import drafting_of
from torch_moe_mps.transformers.attention.attention import NAME
from torch_moe_mps.transformers.capture import calls

_DISPATCH, _COMMAND = 100e-6, 2e-6  # seconds: of the GPU, and of the host to encode it
# Tokens of an answer, and those at which all answers go on: where one joins or ends, the GPU waits once.
_NEW, _STEADY = 20, slice(4, 12)


@pytest.fixture(autouse=True)
def captured(monkeypatch):
    monkeypatch.setenv(calls.SWITCH, "1")


@functools.cache
def model_on_mps():
    model = eager(tiny_models.tiny_model("qwen3_moe")).to("mps")
    torch_moe_mps.accelerate(model)
    model.set_attn_implementation(NAME)
    return model


def executed(dispatch: shaderlib.Dispatch) -> float:
    shaderlib.execute(dispatch)
    return _DISPATCH


class Answer(Job):
    """A job whose host works for so long on each token, and which notes the clocks when it has one."""

    def __init__(self, number: int, seconds: float = 0.0, times=None, **settings):
        ids = torch.randint(
            2, 90, (1, settings.pop("prompt", 5)), generator=torch.Generator().manual_seed(number)
        )
        config = GenerationConfig(max_new_tokens=_NEW, pad_token_id=0, eos_token_id=None, **settings)
        super().__init__({"input_ids": ids}, config, self.note, self.end)
        self.times, self.seconds, self.seen, self.reason = times, seconds, [], None
        self.tokens: list[int] = []

    def note(self, token: int) -> bool:
        self.tokens.append(token)
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


def generate(*answers: Answer, drafting=None) -> None:
    engine = Engine(model_on_mps(), None, len(answers), drafting=drafting)
    engine.submit(*answers)
    while engine.has_work:
        engine.step()


def timed(simulated, many: int, milliseconds: float, **settings) -> tuple[float, float]:
    generate(*(Answer(number, **settings) for number in range(many)))  # captures
    with simulated.timeline(executed, _COMMAND) as times:
        answers = [Answer(number, 1e-3 * milliseconds / many, times, **settings) for number in range(many)]
        generate(*answers)
    assert all(answer.reason == "length" for answer in answers)
    return answers[-1].steady()


SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 20}
# {what runs: (sequences, ms of the host on the tokens of a step, settings, busy us of the GPU a step)}
WAYS = {
    "one, 0.3 ms": (1, 0.3, {}, 1500),
    "one, 1 ms": (1, 1.0, {}, 1500),
    "eight, 1 ms": (8, 1.0, {}, 1500),
    "one, sampled": (1, 1.0, SAMPLING, 1600),
    "eight, penalties": (8, 1.0, {"repetition_penalty": 1.3}, 1500),
}


@pytest.mark.slow("captures programs in the simulator")
@pytest.mark.parametrize("way", WAYS)
def test_the_gpu_is_never_idle_between_steps(simulated, way):
    many, milliseconds, settings, busy = WAYS[way]
    assert timed(simulated, many, milliseconds, **settings) == (0, busy)


@pytest.mark.slow("captures programs in the simulator")
def test_a_prompt_is_prefilled_between_steps(simulated):
    """Its chunk waits in the GPU's queue behind a step. Where it is admitted, one step is read first."""
    host = 1e-3

    def joined(times) -> Answer:
        engine = Engine(model_on_mps(), None, 2)
        going, more = Answer(0, host, times), Answer(1, prompt=60)

        def note(token: int) -> bool:
            if len(going.tokens) == 9:
                engine.submit(more)
            return going.note(token)

        going.on_token = note
        engine.submit(going)
        while engine.has_work:
            engine.step()
        assert going.reason == more.reason == "length"
        return going

    joined(None)  # captures
    with simulated.timeline(executed, _COMMAND) as times:
        seen = joined(times).seen
    waits = [round((b[0] - a[0]) * 1e6) for a, b in itertools.pairwise(seen[5:])]
    assert [wait for wait in waits if wait > 10] == [1006]


@pytest.mark.slow("captures programs in the simulator")
def test_a_step_that_verifies_drafts_is_read_before_the_next(simulated):
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
    with simulated.timeline(executed, _COMMAND) as times:
        seen = drafted(times).seen
    waits = [round((b[0] - a[0]) * 1e6) for a, b in itertools.pairwise(seen)]
    assert [wait for wait in waits if wait] == [106, 206, 206, 306, 306, 206, 306, 206]


@pytest.mark.slow("captures programs in the simulator")
def test_the_clocks_show_a_wait_for_everything(simulated, monkeypatch):
    """A host that also waits for the next step leaves the GPU idle for as long as it works."""
    monkeypatch.setattr(Mark, "wait", lambda self: torch.mps.synchronize())
    idle, _ = timed(simulated, 1, 1.0)
    assert idle > 1000


@pytest.mark.slow("captures programs in the simulator")
def test_a_fault_is_raised_where_its_tokens_are_read(simulated):
    """The step behind it was committed when the fault is raised; it is not waited for."""
    alone = Answer(0)
    generate(alone)  # captures
    goes_on = set()
    for buffer in range(60, 64):  # two of them end a step, behind which the next is committed
        with simulated.timeline(executed, _COMMAND) as times:
            answer = Answer(0, 1e-3, times)
            with simulated.failing("timeout", buffer):
                generate(answer)
                assert isinstance(answer.reason, torch.AcceleratorError)
                given, ended = answer.tokens, times.now
                torch.mps.synchronize()
            goes_on.add(ended < times.now)  # the GPU had work left
        assert 2 < len(given) < _NEW and given == alone.tokens[: len(given)]
    assert True in goes_on
