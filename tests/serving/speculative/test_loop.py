"""Draft tokens: whatever is drafted, answers are those without drafts, in fewer steps."""

import functools
import itertools
import logging

import peft
import pytest
import torch
from support import tiny_models
from support.models import eager
from support.speculative import Answered, Partly, prompts, settings
from support.sweep import in_sweep
from transformers import LogitsProcessor

import torch_moe_mps
from torch_moe_mps import _environment
from torch_moe_mps.models.caches.batched import BatchedCache
from torch_moe_mps.models.caches.prompt_cache import new_cache
from torch_moe_mps.models.capture.classes import captures_of
from torch_moe_mps.models.upstream.calls import cache_argument
from torch_moe_mps.serving.engine import drafts as drafts_of
from torch_moe_mps.serving.engine.engine import Engine
from torch_moe_mps.serving.engine.job import Job
from torch_moe_mps.serving.engine.sampling import Sampler
from torch_moe_mps.serving.engine.verify import verified
from torch_moe_mps.serving.prefix_cache.memory import PrefixCache
from torch_moe_mps.serving.speculative.asked import drafting_of
from torch_moe_mps.transformers.deferrable import deferrable_layers

# No logits of text, and a cache of its own.
OTHERS = {"diffusion_gemma", "muse_spark", "qwen3_omni_moe", "openai_privacy_filter"}
ARCHITECTURES = sorted({*tiny_models.architectures(), *tiny_models.DENSE_ARCHITECTURES} - OTHERS)
# Mamba-2 beside attention, and recurrent states alone.
ARCHITECTURES += ["zamba2", "mamba", "falcon_mamba", "mamba2"]
OFTEN = ("gpt_oss", "qwen3_next")  # windows and sinks; recurrent states


@functools.cache
def model_of(architecture: str = "qwen3_moe"):
    short = {"sliding_window": 6} if architecture == "gpt_oss" else {}  # which moves on within an answer
    states = tiny_models.WITH_STATES.get(architecture, {})
    model = eager(tiny_models.tiny_model(architecture, **short, **states))
    torch_moe_mps.accelerate(model)
    return model


def compared(model, configs, most=1, width=3, **options) -> Answered:
    """The answers with drafts, which are those without; the latter are in its `plain`."""
    many = prompts(len(configs))
    plain = Answered(model, many, configs, most=most, **options)
    source = Partly(many, plain.answers)
    found = Answered(model, many, configs, source, most, width=width, **options)
    assert found.answers == plain.answers
    assert found.reasons == plain.reasons
    assert sum(job.usage.accepted_tokens for job in found.jobs) == source.accepted_tokens
    found.plain = plain
    return found


@pytest.mark.slow("twice three answers of two models")
@pytest.mark.parametrize("architecture", in_sweep(ARCHITECTURES, OFTEN))
def test_answers_are_those_without_drafts(architecture):
    """Likeliest and drawn, alone and beside others that join and leave."""
    model = model_of(architecture)
    model.generation_config.eos_token_id = None  # some of these have one beyond their vocabulary
    configs = [settings(10), settings(15, do_sample=True, temperature=1.5), settings(20)]
    found = compared(model, configs, most=2, width=5, seeds=[1, 2, 3])
    if architecture in OFTEN:
        assert found.batch.drafts.drafting.accepted > 8 and found.steps < 0.85 * found.plain.steps


@pytest.mark.parametrize("architecture", ["qwen3_moe", "qwen3_next"])
def test_answers_end_inside_of_drafts(architecture):
    """By a token, by what takes them, and by their length; the turn behind goes on from what is kept."""
    model, many = model_of(architecture), prompts(1)
    (whole,) = Answered(model, many, [settings(12)]).answers
    for new, more, until in (
        (12, {"eos_token_id": whole[5]}, lambda tokens: False),
        (12, {}, lambda tokens: tokens == whole[:7]),
        (4, {}, lambda tokens: False),
    ):
        found = Answered(
            model, many, [settings(new, **more)], Partly(many, [whole], 1.0), width=7, until=until
        )
        (answer,), (kept,), (job,) = found.answers, found.batch.prefix_cache.kept, found.jobs
        assert answer == whole[: len(answer)] and len(answer) < 12
        # The prompt gives a token, and each step one that is not drafted.
        assert 1 + found.steps + job.usage.accepted_tokens + job.usage.rejected_tokens <= new
        known = [*many[0].tolist(), *answer]
        assert kept.ids.tolist() == known[: len(kept.ids)] and len(kept.ids) >= len(many[0])
        assert kept.cache.get_seq_length() == len(kept.ids)
        rest = torch.tensor([*known[len(kept.ids) :], 9])
        expected = model(torch.tensor([[*known, 9]]), use_cache=False).logits[0, -1]
        logits = model(rest[None], past_key_values=kept.cache).logits[0, -1]
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


class NotTwice(LogitsProcessor):
    """Forbids the token before, and notes what it was called with: once a token, in their order."""

    def __init__(self):
        self.seen = []

    def __call__(self, ids, scores):
        self.seen.append(ids[0].tolist())
        return scores.index_fill(1, ids[0, -1:], -torch.inf)


def test_processors_are_asked_as_without_drafts():
    """Grammars and logarithms of probabilities count on it."""
    own = NotTwice()
    config = settings(12, do_sample=True, repetition_penalty=1.2)
    compared(model_of(), [config], processors=[[own]], seeds=[1])
    assert own.seen[:12] == own.seen[12:] and [*map(len, own.seen[:12])] == [*range(5, 17)]


@pytest.mark.slow("two models")
def test_eight_bits_of_keys_and_adapters():
    wide = eager(tiny_models.tiny_model("gemma3", head_dim=32, sliding_window=6))
    torch_moe_mps.accelerate(wide, kv_bits=8)
    compared(wide, [settings(14), settings(9)], most=2)
    own = eager(tiny_models.tiny_model("qwen3_moe"))
    how = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    adapted = peft.get_peft_model(own, peft.LoraConfig(r=4, lora_alpha=64, **how)).eval()
    torch_moe_mps.accelerate(adapted)
    compared(adapted.base_model.model, [settings(14), settings(9)], most=2)


@pytest.mark.slow("captures two programs")
@pytest.mark.parametrize("architecture", in_sweep(["qwen3_moe", "qwen3_next"], ["qwen3_next"]))
@pytest.mark.parametrize("rows", in_sweep([1, 2], [2]))
def test_one_capture_more(architecture, rows, monkeypatch):
    """Steps of any number of tokens are one program, however far rows go on, and wherever their states lie:
    those of one token are another, as without drafts.
    """
    monkeypatch.setenv(_environment.CAPTURE, "1")
    model = eager(tiny_models.tiny_model(architecture))
    torch_moe_mps.accelerate(model)
    many, configs = prompts(rows), [settings(40)] * rows
    plain = Answered(model, many, configs, most=rows)
    alone = len(captures_of(model).programs)
    found = Answered(model, many, configs, Partly(many, plain.answers), most=rows, width=5)
    assert found.answers == plain.answers
    assert (alone, len(captures_of(model).programs)) == (1, 2)


class OfEach(Partly):
    """Drafts as many tokens as it may, all right for some prompts, and all wrong for others."""

    def __init__(self, prompts, answers, right):
        super().__init__(prompts, answers, 1.0)
        self.rights = {tuple(ids.tolist()): each for ids, each in zip(prompts, right, strict=True)}
        self.chance.randint = lambda least, most: most

    def _of(self, row):
        tokens, is_right = super()._of(row), self.rights[tuple(row.tokens[: row.prompt])]
        return tokens if is_right else [(token + 1) % 90 for token in tokens]


def steps_of(model, right) -> list[list[int]]:
    """New tokens of each of two answers in the first steps, where so many of their drafts are right."""
    many, configs, done = prompts(2), [settings(21)] * 2, list[dict[int, int]]()

    class Counted(OfEach):
        def accepted(self, rows, counts):
            done.append({row.prompt: len(row.tokens) - row.prompt for row in rows})

    plain = Answered(model, many, configs, most=2)
    found = Answered(model, many, configs, Counted(many, plain.answers, right), 2, width=3)
    assert found.answers == plain.answers
    both = [each for each in done if len(each) == 2][:4]
    return [[b[len(ids)] - a[len(ids)] for ids in many] for a, b in itertools.pairwise(both)]


@pytest.mark.slow("four pairs of answers")
@pytest.mark.parametrize("architecture", in_sweep(["qwen3_moe", "qwen3_next"], ["qwen3_next"]))
def test_wrong_drafts_of_one_answer_leave_the_others_alone(architecture):
    for right, expected in (((True, False), [4, 1]), ((False, True), [1, 4])):
        assert steps_of(model_of(architecture), right) == [expected] * 3


def test_answers_go_on_together_where_keys_need_their_order(caplog):
    with caplog.at_level(logging.WARNING, "torch_moe_mps"):
        steps = steps_of(model_of("gpt_neo"), (True, False))
    assert sum(map(max, steps)) < 9
    (line,) = [each.getMessage() for each in caplog.records if "as many draft tokens" in each.getMessage()]
    assert line.endswith("as all others do: attention of GPTNeoForCausalLM goes by the places of keys")


@pytest.mark.parametrize(
    ("architecture", "lags", "right", "wrong"),
    [
        ("lfm2_moe", False, ["held"] * 3, ["held", [4]] * 6),
        ("qwen3_next", True, [], [[3]] * 8),
        ("nemotron_h", True, [], [[3]] * 8),
        ("lfm2_moe", True, [], [[3]] * 8),
    ],
)
def test_states_are_copied_for_drafts_alone(architecture, lags, right, wrong, monkeypatch):
    """Once a step, where it has drafts behind what is known; their tokens stay if all are right.

    Of four steps of four tokens whose drafts are wrong, the last has those that are known, and no draft.
    States that lag are never copied, and each step has drafts.
    """
    model, many, copies = model_of(architecture), prompts(1), []
    if not lags:
        monkeypatch.setattr(drafts_of, "deferrable_layers", lambda model: {})
    (answer,) = Answered(model, many, [settings(13)]).answers
    hold, take_back = BatchedCache.hold, BatchedCache.take_back
    monkeypatch.setattr(BatchedCache, "hold", lambda rows: copies.append("held") or hold(rows))
    monkeypatch.setattr(BatchedCache, "take_back", lambda rows, n: copies.append(n) or take_back(rows, n))
    for rate, expected in ((1.0, right), (0.0, wrong)):
        copies.clear()
        source = Partly(many, [answer], rate)
        source.chance.randint = lambda least, most: most
        assert Answered(model, many, [settings(13)], source, width=3).answers == [answer]
        assert copies[: len(expected)] == expected and len(copies) <= 1.5 * len(expected)


@pytest.mark.parametrize("architecture", ["granitemoehybrid", "jamba", "qwen3_moe"])
def test_an_answer_waits_until_there_is_room_for_what_is_pending(architecture):
    """Of three rows, whose memory has four; a model without states needs none."""
    model, many = model_of(architecture), prompts(1)
    batch = Answered(model, many, [settings(3)], Partly(many, [[1, 2, 3]]), width=2).batch
    rows, cache = BatchedCache(model, deferrable_layers(model)), new_cache(model)
    with torch.no_grad():
        model(many[0][None], **cache_argument(model, cache))
    rows.admit(cache, len(many[0]))
    layers = [vars(layer).get("uncommitted", {}).values() for layer in rows.cache.layers]
    pending = sum(p.nbytes for p in itertools.chain(*layers) if p.is_floating_point())
    assert (pending > 0) == (architecture != "qwen3_moe")
    batch.budget.token = batch.budget.drafts = 0.0  # what tokens take counts apart
    batch.budget.memory = 4 * pending
    assert batch.budget.needed(3, 20, 0) <= batch.budget.memory
    batch.budget.memory -= 1
    assert batch.budget.needed(3, 20, 0) > batch.budget.memory


def test_a_model_that_reads_prompts_whole_is_named(caplog):
    model, many = eager(tiny_models.tiny_model("mamba")), prompts(2)
    with caplog.at_level(logging.WARNING, "torch_moe_mps"):
        found = Answered(model, many, [settings(4)] * 2, Partly(many, [[1], [1]]))
    (line,) = [record.getMessage() for record in caplog.records if "drafted" in record.getMessage()]
    assert line.endswith("any more: MambaForCausalLM does not read several tokens behind a cache rightly")
    assert found.reasons == ["length"] * 2


@pytest.mark.parametrize("draft", [lambda rows: [[90000]], lambda rows: [], lambda rows: [["a"]]])
def test_a_source_that_fails_ends_no_answer(draft, caplog):
    source = Partly([], [])
    source.draft = draft
    with caplog.at_level(logging.WARNING, "torch_moe_mps"):
        found = Answered(model_of(), prompts(1), [settings(4)], source, width=2)
    (line,) = [record.getMessage() for record in caplog.records if "drafts no" in record.getMessage()]
    assert "Partly drafts no tokens for a sequence: " in line and "\n" not in line
    assert found.answers == Answered(model_of(), prompts(1), [settings(4)]).answers


BAD = [
    (
        {"speculative": "looked"},
        "batch: speculative must be None, 'lookup', 'mtp', a draft model or .*, got 'looked'",
    ),
    ({"speculative": 3}, "got a int"),
    ({"speculative": "lookup", "draft_width": 0}, "batch: draft_width must be from 1 to 7, got 0"),
    ({"speculative": "lookup", "draft_width": 100}, "got 100"),
]


@pytest.mark.parametrize(("given", "message"), BAD)
def test_wrong_arguments_are_one_line(given, message):
    with pytest.raises(ValueError, match=message):
        torch_moe_mps.generate_batch(model_of(), prompts(1), settings(2), progress=False, **given)


@pytest.mark.slow("50,000 draws")
@pytest.mark.parametrize("draws", in_sweep((50_000, 100_000), (50_000,)))
def test_drawn_tokens_have_the_distribution_of_the_model(draws):
    """With temperature and top-k, of a token that is drafted, and of the one behind it."""
    model, rows, draft = model_of(), 5000, 3
    config = settings(8, do_sample=True, temperature=0.7, top_k=5)
    job = Job({"input_ids": torch.tensor([[5, 6]])}, config, lambda token: False, lambda reason: None)
    torch.manual_seed(0)
    sampler = Sampler(model, job)
    logits = torch.randn(2, 8)
    expected = (logits.double() / 0.7).softmax(-1)
    expected[expected < expected.topk(5).values[:, -1:]] = 0
    expected /= expected.sum(-1, keepdim=True)
    counts = torch.zeros(2, 8, dtype=torch.float64)
    for _ in range(draws // rows):
        made = verified([sampler] * rows, logits.expand(rows, 2, 8), [1] * rows, [[draft]] * rows)
        assert all(len(own) == 1 + (own[0] == draft) for own in made)
        counts[0] += torch.tensor([own[0] for own in made]).bincount(minlength=8)
        counts[1] += torch.tensor([own[1] for own in made if len(own) > 1]).bincount(minlength=8)
    total = counts.sum(-1, keepdim=True)
    assert total[0] == draws and total[1] > draws // 20
    spread = (expected * (1 - expected) / total).sqrt()
    assert ((counts / total - expected).abs() <= 4.5 * spread + 1e-12).all()


@pytest.mark.parametrize("most", [1, 3])
def test_a_source_is_told_of_each_answer_that_has_ended(most):
    """By its length, an error, a client that leaves within the prompt or the answer; kept or not."""

    class Told(Partly):
        def left(self, row):
            left.append(row.tokens[: row.prompt])

    class Fails(LogitsProcessor):
        def __call__(self, ids, scores):
            raise KeyError("mine")

    model, many, left = model_of(), prompts(5), list[list[int]]()
    (answer,) = Answered(model, many[:1], [settings(6)]).answers
    source, ended = Told(many, [answer] * 5), list[int]()

    def ends(number, reason):
        assert left.count(many[number].tolist()) == 1
        ended.append(number)

    kept = PrefixCache(1 << 30)
    batch = Engine(model, kept, most, None, drafting=drafting_of(model, source, kept, "a", None))
    jobs = [
        Job({"input_ids": ids[None]}, settings(6), lambda token: False, functools.partial(ends, number))
        for number, ids in enumerate(many)
    ]
    jobs[1].processors.append(Fails())
    jobs[2].on_progress = lambda read, of: jobs[2].cancel() if read == 0 else None
    jobs[3].on_token = lambda token: jobs[3].cancel()
    batch.submit(*jobs)
    while batch.has_work:
        batch.step()
    assert sorted(ended) == [0, 1, 2, 3, 4] and len(left) == 5
