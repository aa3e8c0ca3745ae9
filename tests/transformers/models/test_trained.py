"""Trained weights: SmolLM2 from its GGUF file, and a Mixture of Experts that has its function."""

import copy
import itertools
import json

import pytest
import torch
from support import trained, trained_models
from support.llama_cpp import check_log_probabilities
from support.models import eager
from support.oracles_experts import dequantise
from support.serving import client_of

import torch_moe_mps
from torch_moe_mps.commands import main
from torch_moe_mps.commands.perplexity import SAMPLE
from torch_moe_mps.quantization import quantize

pytestmark = pytest.mark.slow("30 layers of trained weights")
TOKENS = 8


@pytest.fixture(scope="module")
def parts():
    """(transformers' own model with the file's values, its tokenizer, ids of a question)"""
    file = trained.smollm2()
    if file is None:
        pytest.skip(trained.MISSING)
    model, tokenizer = trained_models.dense(file), trained_models.tokenizer_of(file)
    return model, tokenizer, trained_models.asked(tokenizer)


@pytest.fixture(scope="module")
def expected(parts):
    """What transformers' own model answers."""
    model, _, ids = parts
    return generated(model, ids)


def generated(model, ids: torch.Tensor, **options) -> torch.Tensor:
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False} | options
    return model.generate(input_ids=ids, max_new_tokens=TOKENS, **options)[0, ids.shape[1] :].cpu()


@torch.no_grad()
def logits(model, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids.to(model.device)).logits.float().cpu()


def differ(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


def divergence(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The mean Kullback-Leibler divergence of the next token, in nats."""
    found, expected = found.log_softmax(-1), expected.log_softmax(-1)
    return (expected.exp() * (expected - found)).sum(-1).mean().item()


def test_the_file_is_whole(smollm2):
    assert smollm2.stat().st_size == 98_362_432 and smollm2.open("rb").read(4) == b"GGUF"


def test_without_the_package_there_is_no_file(monkeypatch):
    monkeypatch.setattr(trained, "find_spec", lambda name: None)
    assert trained.smollm2.__wrapped__() is None


@pytest.fixture(scope="module")
def packed(parts):
    return torch_moe_mps.from_pretrained(str(trained.smollm2()), dtype=torch.float32, device_map="cpu")


@pytest.mark.sweep
def test_packed_weights_give_the_tokens_of_dequantised_ones(parts, packed, expected):
    own, tokenizer, ids = parts
    assert differ(logits(packed, ids), logits(own, ids)) <= 1e-5
    assert torch.equal(generated(packed, ids), expected)
    assert "capital of France is Paris" in tokenizer.decode(expected)


@pytest.mark.sweep
@pytest.mark.parametrize("layers", [2, 30])
def test_a_token_on_the_gpu_is_that_of_the_cpu(parts, packed, simulated, layers):
    own, _, ids = parts
    model, own = copy.deepcopy(packed), trained_models.first_layers(own, layers)
    model.model.layers = model.model.layers[:layers]
    model.to("mps")
    assert differ(logits(model, ids[:, :1]), logits(own, ids[:, :1])) <= 1e-5


@pytest.mark.sweep
def test_log_probabilities_are_those_of_llama_cpp(parts, packed):
    check_log_probabilities(trained.smollm2(), packed, parts[2])


@pytest.mark.sweep
@torch.no_grad()
def test_importance_of_trained_weights(parts):
    """What errs of the outputs of matrices, in float64, on tokens that did not calibrate."""
    own, tokenizer, *_ = parts
    model = trained_models.first_layers(own, 1)
    ids = tokenizer(SAMPLE.read_text()[:8000], return_tensors="pt").input_ids[0, :1024]
    importance = torch_moe_mps.collect_importance(model, ids[:512], progress=False)
    inputs: dict[str, torch.Tensor] = {}
    layers = {name: m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    for name, layer in layers.items():
        layer.register_forward_pre_hook(lambda _, args, n=name: inputs.update({n: args[0][0].double()}))
    model(input_ids=ids[:512][None])
    for name, x in inputs.items():
        torch.testing.assert_close(importance.means[name].double(), x.square().mean(0), rtol=1e-4, atol=0)
    model(input_ids=ids[512:][None])

    def error(name: str, bits: int, given: torch.Tensor | None) -> float:
        weight, x = layers[name].weight[:256], inputs[name][::4]
        found = quantize(weight.half(), bits, importance=given)
        values = dequantise(found.packed, found.scales, found.zeros, f"affine{bits}_64")
        return float((x @ (torch.from_numpy(values) - weight.double()).mT).square().sum())

    for bits, name in zip(itertools.cycle((3, 4, 8)), layers, strict=False):
        assert error(name, bits, importance.means[name]) < 0.7 * error(name, bits, None), (bits, name)


def run(*arguments) -> int:
    return main([*map(str, arguments)])


@pytest.mark.sweep
@pytest.mark.parametrize(
    "options", [[], ["--speculative", "lookup"], ["--kv-bits", 8], ["--prompt-folder", "prompts"]]
)
def test_the_command_answers_as_transformers_does(parts, expected, options, tmp_path, monkeypatch, capsys):
    """Twice: the second time with the prompt that is kept."""
    _, tokenizer, _ = parts
    monkeypatch.chdir(tmp_path)
    arguments = ["-p", trained_models.QUESTION, "--max-tokens", TOKENS, "--dtype", "float32", *options]
    for _ in range(2):
        assert run("generate", trained.smollm2(), *arguments, "--device", "cpu") == 0
        answer = tokenizer.decode(expected, skip_special_tokens=True)
        assert capsys.readouterr().out == answer + "\n"


@pytest.mark.sweep
def test_the_server_answers_as_transformers_does(parts, expected):
    _, tokenizer, _ = parts
    asked = {"messages": [{"role": "user", "content": trained_models.QUESTION}], "temperature": 0}
    file = trained.smollm2()
    with client_of(file, "--dtype", "float32") as client:
        answer = client.chat.completions.create(model=str(file), max_tokens=TOKENS, **asked)
    found = answer.choices[0].message.content
    assert found == tokenizer.decode(expected, skip_special_tokens=True)


@pytest.mark.sweep
def test_the_command_measures_the_perplexity_of_transformers(parts, tmp_path):
    own, tokenizer, _ = parts
    (tmp_path / "text").write_text(SAMPLE.read_text()[:3000])
    found = tmp_path / "found.json"
    options = ["--text", tmp_path / "text", "--window", 4096, "--dtype", "float32", "--device", "cpu"]
    assert run("perplexity", trained.smollm2(), *options, "--json", found) == 0
    ids = tokenizer((tmp_path / "text").read_text(), return_tensors="pt").input_ids
    loss = torch.nn.functional.cross_entropy(logits(own, ids)[0, :-1], ids[0, 1:])
    assert abs(json.loads(found.read_text())["models"][0]["perplexity"] / loss.exp().item() - 1) <= 1e-4


@pytest.mark.sweep
@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("layers", [2, 30])
def test_a_mixture_of_experts_has_the_function(parts, layers, bits):
    """The router, experts and combine kernels carry trained activations."""
    own, tokenizer, ids = parts
    own = trained_models.first_layers(own, layers)
    model = eager(trained_models.mixture(own))
    before = logits(own, ids)
    assert differ(logits(model, ids), before) <= 1e-5  # in transformers' own code
    report = str(torch_moe_mps.accelerate(model, bits=bits))
    assert "moe_experts" in report and "moe_router (softmax)" in report
    found = logits(model, ids)
    if bits is None:
        assert differ(found, before) <= 1e-5 and torch.equal(generated(model, ids), generated(own, ids))
    else:
        assert divergence(found, before) <= {8: 0.01, 4: 1.0}[bits]
    if layers == 30:
        assert "Paris" in tokenizer.decode(generated(model, ids))
