"""generate_batch: answers to many prompts are those of generate() for one."""

import functools
import logging

import pytest
import torch
from support import tiny_models
from support.checkpoints import tokenizer_of
from support.launches import Launches
from support.models import eager
from tokenizers import decoders
from transformers import GenerationConfig, LogitsProcessor, T5Config, T5ForConditionalGeneration

import torch_moe_mps
from torch_moe_mps.models.modules import sampling
from torch_moe_mps.serving.engine.job import Job
from torch_moe_mps.serving.engine.sampling import Sampler, sample

LENGTHS = (3, 20, 9, 5, 14, 7, 4, 11, 6, 8, 12, 10)


@functools.cache
def model_of(architecture: str = "qwen3_moe"):
    model = eager(tiny_models.tiny_model(architecture))
    torch_moe_mps.accelerate(model)
    return model


def prompts(count: int = 6) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, 90, (length,), generator=generator) for length in LENGTHS[:count]]


def config(new: int = 6, **settings) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=new, eos_token_id=None, pad_token_id=0, **settings)


def alone(model, ids: torch.Tensor, seed: int = 0, **options) -> torch.Tensor:
    torch.manual_seed(seed)
    return model.generate(ids[None], **options)[0, len(ids) :]


class Answers:
    """A streamer for each prompt, which notes in which order answers end."""

    def __init__(self, count: int):
        self.ended, self.tokens = [], {}
        self.streamers = [Answers.One(self, number) for number in range(count)]

    class One:
        def __init__(self, answers, number):
            self.answers, self.number = answers, number

        def put(self, value):
            self.answers.tokens.setdefault(self.number, []).extend(value.tolist())

        def end(self):
            self.answers.ended.append(self.number)


def of_prompt(number: int) -> GenerationConfig:
    """Settings that differ from prompt to prompt: drawn or not, penalties, the token that ends it."""
    kinds = (
        {},
        {"do_sample": True, "temperature": 0.8, "top_k": 20},
        {"do_sample": True, "temperature": 0.8, "top_k": 20},
        {"repetition_penalty": 1.3},
        {"do_sample": True, "top_p": 0.7, "no_repeat_ngram_size": 2},
    )
    return config(3 + 2 * number, **kinds[number % len(kinds)])


@pytest.mark.slow("ten answers of generate(), and of a batch")
def test_each_answer_is_that_of_generate():
    """More prompts than rows, each with its own settings and seed."""
    model, many = model_of(), prompts(10)
    configs = [of_prompt(number) for number in range(10)]
    configs[4].eos_token_id = 5
    answers = Answers(10)
    found = torch_moe_mps.generate_batch(
        model, many, configs, seed=7, streamer=answers.streamers, progress=False
    )
    for number, (ids, own) in enumerate(zip(many, configs, strict=True)):
        expected = alone(model, ids, 7 + number, generation_config=own)
        assert torch.equal(found[number], expected), number
        assert answers.tokens[number] == expected.tolist()
    assert {*answers.ended} == {*range(10)}


@pytest.mark.parametrize("end", [999, -1, [999, 5]])
def test_an_end_of_a_model_beyond_its_vocabulary_ends_nothing(end, monkeypatch):
    """As transformers has it: tokens are drawn as without one."""
    model, ids = model_of(), prompts(1)
    settings = config(4, do_sample=True, top_k=20)
    (expected,) = torch_moe_mps.generate_batch(model, ids, settings, seed=3, progress=False)
    monkeypatch.setattr(model.generation_config, "eos_token_id", end)
    (found,) = torch_moe_mps.generate_batch(model, ids, settings, seed=3, progress=False)
    assert 5 not in expected and len(expected) == 4 and torch.equal(found, expected)


def test_a_model_that_is_not_accelerated_and_counts_positions_itself():
    """Bamba's own code counts positions from the first token of a call: decode tells them, too."""
    model, many = eager(tiny_models.tiny_model("bamba")), prompts(3)
    found = torch_moe_mps.generate_batch(model, many, config(6), progress=False)
    for ids, tokens in zip(many, found, strict=True):
        assert torch.equal(tokens, alone(model, ids, generation_config=config(6)))


def test_no_short_answer_waits_for_a_long_one():
    many, lengths = prompts(10), [30, *[2] * 9]
    answers = Answers(10)
    torch_moe_mps.generate_batch(
        model_of(), many, [config(new) for new in lengths], streamer=answers.streamers, progress=False
    )
    assert answers.ended[-1] == 0


def test_texts_and_stop_strings():
    model = model_of()
    tokenizer = tokenizer_of([chr(33 + number) for number in range(97)], unk_token="!")
    texts = ["*+,-.", "789", "PQRST"]
    whole = torch_moe_mps.generate_batch(model, texts, config(8), tokenizer=tokenizer, progress=False)
    for text, answer in zip(texts, whole, strict=True):
        assert torch.equal(
            answer, alone(model, torch.tensor(tokenizer(text)["input_ids"]), generation_config=config(8))
        )
    stop = tokenizer.decode(whole[1][2:4])
    found = torch_moe_mps.generate_batch(
        model, texts, config(8, stop_strings=[stop]), tokenizer=tokenizer, progress=False
    )
    assert torch.equal(found[1], whole[1][:4])


@functools.cache
def own_of(architecture: str = "qwen3_moe"):
    return eager(tiny_models.tiny_model(architecture))


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
def test_an_answer_is_as_long_as_that_of_generate():
    """Also where the model's positions end."""
    settings = [
        *[None] * 4,
        GenerationConfig(pad_token_id=0),
        GenerationConfig(max_length=29, pad_token_id=0),  # which counts the prompt
        GenerationConfig(max_length=70, max_new_tokens=3, pad_token_id=0),
        GenerationConfig(max_length=29, forced_eos_token_id=5, pad_token_id=0),
        GenerationConfig(forced_eos_token_id=[5], pad_token_id=0),
        GenerationConfig(max_new_tokens=9, max_time=1e-9, pad_token_id=0),
    ]
    many = [torch.arange(length) % 90 + 2 for length in (5, 25, 60, 250, *[25] * 6)]
    found = torch_moe_mps.generate_batch(model_of(), many, settings, progress=False)
    for ids, answer, own in zip(many, found, settings, strict=True):
        assert torch.equal(answer, alone(own_of(), ids, generation_config=own))


def test_a_prompt_that_is_too_long_says_so():
    settings = GenerationConfig(max_length=9, pad_token_id=0)
    with pytest.raises(ValueError, match="Input length of input_ids is 14, but `max_length` is set to 9"):
        torch_moe_mps.generate_batch(model_of(), [torch.arange(14)], settings, progress=False)


@pytest.mark.slow("nine answers of generate()")
def test_a_stop_string_may_begin_in_the_prompt():
    """And end in the first token, or a later one, or within one; one that the prompt has ends nothing."""
    tokens = [chr(33 + number) + "~" * (number < 60) for number in range(97)]
    tokenizer = tokenizer_of(tokens, unk_token="!~")
    tokenizer.backend_tokenizer.decoder = decoders.Fuse()
    ids = prompts(2)[1]
    text = tokenizer.decode(torch.cat((ids, alone(own_of(), ids, generation_config=config(8)))))
    end = len(tokenizer.decode(ids))
    for start, length in ((-2, 3), (-1, 2), (-1, 1), (-3, 3), (-1, 5), (2, 1), (3, 2), (4, 4)):
        stop = text[end + start : end + start + length]
        settings = config(8, stop_strings=[stop])
        expected = alone(own_of(), ids, generation_config=settings, tokenizer=tokenizer)
        (found,) = torch_moe_mps.generate_batch(
            model_of(), [ids], settings, tokenizer=tokenizer, progress=False
        )
        assert torch.equal(found, expected)


class Only(LogitsProcessor):
    def __init__(self, token):
        self.token = token

    def __call__(self, ids, scores):
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([self.token]), 0.0)


def test_processors_are_of_one_prompt():
    model, many = model_of(), prompts(3)
    found = torch_moe_mps.generate_batch(
        model, many, config(4), logits_processor=[[], [Only(9)], []], progress=False
    )
    assert found[1].tolist() == [9] * 4
    assert torch.equal(found[2], alone(model, many[2], generation_config=config(4)))


@pytest.mark.sweep
def test_a_model_that_cannot_be_batched_runs_sequentially(caplog):
    model, many = model_of("unlimited_ocr"), prompts(3)
    with caplog.at_level(logging.WARNING, "torch_moe_mps"):
        found = torch_moe_mps.generate_batch(model, many, config(4), progress=False)
    for ids, answer in zip(many, found, strict=True):
        assert torch.equal(answer, alone(model, ids, generation_config=config(4)))
    (line,) = [record.getMessage() for record in caplog.records if "sequentially" in record.getMessage()]
    assert "cannot be batched" in line


def test_a_model_that_only_its_generate_runs_is_refused():
    own = tiny_models.tiny_model("qwen3_moe")
    own.generate = print
    seq2seq = T5ForConditionalGeneration(
        T5Config(vocab_size=97, d_model=8, d_ff=8, num_layers=1, num_heads=1)
    )
    for model, reason in (
        (model_of("rwkv"), "RwkvForCausalLM has states that are in no cache"),
        (model_of("recurrent_gemma"), "RecurrentGemmaForCausalLM has states that are in no cache"),
        (seq2seq, "T5ForConditionalGeneration is an encoder with a decoder"),
        (own, r"Qwen3MoeForCausalLM has a generate\(\) of its own"),
    ):
        with pytest.raises(ValueError, match=f"^torch_moe_mps: {reason}: call model.generate$"):
            torch_moe_mps.generate_batch(model, prompts(1), config(4), progress=False)


@pytest.mark.parametrize("settings", [{}, {"do_sample": True}, {"repetition_penalty": 1.1}], ids=str)
def test_logits_without_a_likeliest_token_end_the_answer(settings):
    """However it is chosen; of others +inf is the likeliest, as by generate()."""
    job = Job({"input_ids": torch.arange(3)[None]}, config(**settings), lambda token: False, print)
    logits = torch.randn(4, 97, generator=torch.Generator().manual_seed(0))
    logits[1, 7] = torch.nan
    logits[2] = -torch.inf
    logits[3, 5] = torch.inf if not settings else 100.0
    token, nan, nothing, most = sample([Sampler(model_of(), job) for _ in logits], logits).read()
    assert isinstance(token, int) and most == 5
    for error in (nan, nothing):
        assert isinstance(error, RuntimeError) and "got NaN, +inf or -inf alone" in str(error)


@pytest.mark.parametrize(("seeds", "fills"), [((None,) * 4, 1), ((None, 5, None, 5), 4)])
def test_rows_without_a_seed_are_drawn_in_one_launch(seeds, fills):
    """Equal rows draw differently, but those with the same seed draw the same."""
    ids = prompts(1)[0][None]
    jobs = [
        Job({"input_ids": ids}, config(do_sample=True), lambda token: False, print, seed=seed)
        for seed in seeds
    ]
    samplers = [Sampler(model_of(), job) for job in jobs]
    logits = torch.randn(1, 96, generator=torch.Generator().manual_seed(0)).expand(4, 96)
    with Launches() as counted:
        draws = [sample(samplers, logits).read() for _ in range(8)]
    assert counted.counts["exponential_"] == 8 * fills
    first, second, third, fourth = map(list, zip(*draws, strict=True))
    assert first != second and first != third and (second == fourth) == (seeds[1] == 5)


def test_a_masked_token_whose_draw_is_minus_zero(monkeypatch):
    """As torch's numbers on mps may be: 0 / -0 is NaN, which argmax takes for the largest."""
    monkeypatch.setattr(sampling, "MAX_VOCABULARY", 8)  # the operator does not take it
    monkeypatch.setattr(Sampler, "draw", lambda self, numbers: numbers.fill_(-0.0))
    settings = config(do_sample=True, top_k=2)
    job = Job({"input_ids": torch.arange(3)[None]}, settings, lambda token: False, print)
    logits = torch.arange(97.0).roll(40)[None]
    assert sample([Sampler(model_of(), job)], logits).read() == [39]


@pytest.mark.parametrize("draws", [True, False])
def test_what_a_sampled_token_launches(simulated, draws):
    """Its numbers, the operator, and one copy to the host, which has the token and whether it is one."""
    job = Job({"input_ids": torch.arange(3)[None]}, config(do_sample=draws), lambda token: False, print)
    samplers = [Sampler(model_of().to("mps"), job) for _ in range(4)]
    logits = torch.randn(4, 97, generator=torch.Generator().manual_seed(0)).to("mps")
    with Launches() as counted, simulated.trace() as commands:
        sample(samplers, logits).read()
    assert counted.counts == {"exponential_": 1, "copy_": 1} if draws else {"copy_": 1}
    assert [line.split()[0] for line in commands if " grid " in line] == ["sample_rows_f32"]


def test_numbers_of_a_seed_are_those_of_its_answer():
    """They depend on no neighbour, and leave torch's numbers alone."""
    model, many, drawn = model_of(), prompts(2), config(9, do_sample=True, temperature=2.0)
    found = [torch_moe_mps.generate_batch(model, many, drawn, seed=[4, n], progress=False) for n in (6, None)]
    assert torch.equal(found[0][0], found[1][0]) and not torch.equal(found[0][1], found[1][1])


BAD = [
    ({"prompts": "a text"}, "prompts must be a list, got a str"),
    ({"prompts": ["a text"]}, r"tokenizer must be there for texts, got None for prompts\[0\]"),
    ({"prompts": [torch.ones(3)]}, r"prompts\[0\] must be a text or tokens .*, got torch.float32 \[3\]"),
    ({"prompts": [torch.ones(2, 2).long()]}, r"got torch.int64 \[2, 2\]"),
    ({"prompts": [torch.ones(0).long()]}, r"got torch.int64 \[0\]"),
    ({"prompts": [[1, 2]]}, "got a list"),
    ({"seed": [1]}, "seed must be a list of 2, one for each prompt, got 1"),
    ({"generation_config": [config()]}, "generation_config must be a list of 2"),
    ({"generation_config": {}}, "generation_config must be a list of 2, .* got a dict"),
    (
        {"generation_config": config(num_beams=2)},
        r"num_beams must be 1 \(model.generate searches beams\), got 2",
    ),
    ({"generation_config": config(prompt_lookup_num_tokens=2)}, "assisted_generation is generate"),
    ({"generation_config": config(cache_implementation="quantized")}, "the cache 'quantized' is generate"),
    ({"generation_config": config(stop_strings="a")}, "tokenizer must be there for stop_strings"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_wrong_arguments_are_one_line(changes, message):
    given = {"prompts": prompts(2), "progress": False} | changes
    with pytest.raises(ValueError, match=message):
        torch_moe_mps.generate_batch(model_of(), **given)


def test_what_a_processor_raises_is_raised():
    class Fails(LogitsProcessor):
        def __call__(self, ids, scores):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        torch_moe_mps.generate_batch(
            model_of(), prompts(2), config(3), logits_processor=[[], [Fails()]], progress=False
        )
