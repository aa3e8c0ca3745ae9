"""Several answers on mps: captured, joining and leaving, and no token waits for the one before it."""

import copy
from types import SimpleNamespace

import pytest
import torch
from support import tiny_models
from support.models import eager
from support.speculative import Partly
from support.sweep import in_sweep
from support.waits import Waits
from transformers import GenerationConfig

import torch_moe_mps
from torch_moe_mps.models.attention.attention import NAME
from torch_moe_mps.models.capture.classes import captures_of
from torch_moe_mps.serving.engine.engine import Engine
from torch_moe_mps.serving.engine.job import Job
from torch_moe_mps.serving.http.logprobs import Logprobs
from torch_moe_mps.serving.prefix_cache.memory import PrefixCache
from torch_moe_mps.serving.speculative.asked import drafting_of

# {architecture: its prompts}: windows and sinks, latents, recurrent states.
PROMPTS = {"qwen3_moe": 9, "gpt_oss": 3, "deepseek_v3": 3, "qwen3_next": 3}
# States that take tokens in otherwise: with a decay for each channel, Mamba-2, a convolution alone, a
# constant decay, and Mamba-1, without keys.
OF_OTHER_STATES = ("kimi_linear", "granitemoehybrid", "lfm2_moe", "minimax", "mamba")


pytestmark = [pytest.mark.usefixtures("captured"), pytest.mark.own_gpu]


class Asked(Job):
    """A job that notes its tokens, its reason, and how often the host has waited so far."""

    def __init__(self, number: int, config: GenerationConfig, waits: Waits | None = None):
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(2, 90, (1, 3 + 5 * number % 17), generator=generator)
        super().__init__({"input_ids": ids}, config, self.note, self.end)
        self.tokens, self.reason, self.waits, self.waited = [], None, waits, []

    def note(self, token: int) -> bool:
        self.tokens.append(token)
        self.waited.append(self.waits and self.waits.count)
        return False

    def end(self, reason) -> None:
        self.reason = reason


def settings(new: int, **more) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=new, pad_token_id=0, **{"eos_token_id": None} | more)


def models(architecture: str):
    """A model by transformers alone, on the CPU, and the same one on mps."""
    with tiny_models.groups_of_32():
        plain = eager(tiny_models.tiny_model(architecture))
    model = copy.deepcopy(plain).to("mps")
    torch_moe_mps.accelerate(model)
    model.set_attn_implementation(NAME)
    return plain, model


def expected(plain, job: Job) -> list[int]:
    ids = job.inputs["input_ids"]
    return plain.generate(ids, generation_config=job.config)[0, ids.shape[1] :].tolist()


@pytest.mark.slow("captures two programs in the simulator")
@pytest.mark.parametrize("architecture", in_sweep([*PROMPTS], ["qwen3_moe"]))
def test_rows_of_the_engine(architecture, simulated):
    """One to eight rows: more prompts than places, an end by a token, one that leaves, turns that go on."""
    plain, model = models(architecture)
    count = PROMPTS[architecture]
    jobs = [Asked(number, settings(9 + number % 3)) for number in range(count)]
    whole = expected(plain, jobs[1])
    jobs[1].config.eos_token_id = whole[2]
    gone = Asked(20, settings(60))
    gone.on_token = lambda token: gone.note(token) or (len(gone.tokens) == 3 and gone.cancel())
    batch = Engine(model, PrefixCache(1 << 30), 8)
    batch.submit(*jobs, gone)
    rows = set()
    while batch.has_work:
        batch.step()
        rows.add(len(batch.pool.batch.sequences))
    assert {1, min(8, count)} <= rows and gone.reason == "cancelled"
    for job in jobs:
        assert job.tokens == expected(plain, job), job.inputs
    assert jobs[1].reason == "stop"
    assert captures_of(model).programs
    # All that was computed is kept, the token that the host had not read among it.
    first = jobs[1]
    turn = torch.cat((first.inputs["input_ids"], torch.tensor([first.tokens]), torch.tensor([[7, 8]])), 1)
    again = Asked(0, settings(5))
    again.inputs = {"input_ids": turn}
    batch.submit(again)
    while batch.has_work:
        batch.step()
    assert again.usage.cached_tokens >= turn.shape[1] - 3 and again.tokens == expected(plain, again)


@pytest.mark.slow("captures two programs in the simulator")
def test_no_token_of_several_waits(simulated):
    """Greedy and drawn, with penalties: the host reads a token when the next one is on its way."""
    _, model = models("qwen3_moe")
    ways = ({}, {"do_sample": True, "temperature": 0.8, "top_k": 20}, {"repetition_penalty": 1.3})
    for way in ways:
        batch = Engine(model, None, 4)
        with simulated.dropped(), Waits() as waits:  # which do not depend on what is computed
            jobs = [Asked(number, settings(20, **way), waits) for number in range(4)]
            batch.submit(*jobs)
            while batch.has_work:
                batch.step()
        for job in jobs:
            assert len({*job.waited[9:15]}) == 1, (way, job.waited)


@pytest.mark.slow("captures programs in the simulator")
def test_log_probabilities_of_two_answers(simulated):
    """As transformers has them on the CPU: a copy that the host reads too early is poison, and a finding."""
    plain, model = models("qwen3_moe")
    letters, entries = SimpleNamespace(decode=lambda tokens: "a" * len(tokens)), []
    jobs = [Asked(number, settings(8)) for number in range(2)]
    for job in jobs:
        job.processors = [own := Logprobs(letters, 3)]
        entries.append(kept := [])
        job.on_token = lambda token, job=job, own=own, kept=kept: (
            job.note(token) or kept.append(own.pop(token))
        )
    batch = Engine(model, None, 2)
    batch.submit(*jobs)
    while batch.has_work:
        batch.step()
    for job, kept in zip(jobs, entries, strict=True):
        assert job.reason == "length" and len(kept) == 8
        ids = torch.cat((job.inputs["input_ids"], torch.tensor([job.tokens])), 1)
        with torch.no_grad():
            logits = plain(ids).logits[0, -9:-1].double()
        wanted = logits.log_softmax(-1)
        chosen = wanted[torch.arange(8), torch.tensor(job.tokens)]
        found = torch.tensor([entry.logprob for entry in kept]).double()
        torch.testing.assert_close(found, chosen, atol=1e-4, rtol=0)
        top = torch.tensor([[entry.logprob for entry in each.top] for each in kept]).double()
        torch.testing.assert_close(top, wanted.topk(3).values, atol=1e-4, rtol=0)


@pytest.mark.slow("captures a program in the simulator")
@pytest.mark.parametrize("architecture", in_sweep([*PROMPTS, *OF_OTHER_STATES], ["qwen3_moe"]))
def test_drafts_are_verified_by_few_programs(architecture, simulated):
    """Tokens are the model's own, of two conversations that go on by their own numbers of them.

    Steps of any number of tokens are one program for one row, one for two, and one from where their first
    keys have moved on.
    """
    plain, model = models(architecture)
    jobs = [Asked(number, settings(20)) for number in range(3)]
    answers = [expected(plain, job) for job in jobs]
    source = Partly([job.inputs["input_ids"][0] for job in jobs], answers, 0.8)
    prompts = PrefixCache(1 << 30)
    batch = Engine(model, prompts, 2, drafting=drafting_of(model, source, prompts, "a", 3))
    batch.submit(*jobs)
    while batch.has_work:
        batch.step()
    assert [job.tokens for job in jobs] == answers
    assert batch.drafts.drafting.accepted > 8 and batch.drafts.drafting.rejected > 2
    assert 1 <= len(captures_of(model).programs) <= 3, str(captures_of(model))
