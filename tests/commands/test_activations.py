"""Activations beside quantised weights: float16 where a model stays in its range, else bfloat16."""

import argparse
import json

import openai
import pytest
import torch
from safetensors.torch import load_file
from support import serving, trained, trained_models
from support.serving import chat_checkpoint
from support.sweep import in_sweep, rows_in_sweep
from support.tiny_models import tiny_model
from transformers import AutoModelForCausalLM

import torch_moe_mps
from torch_moe_mps.checkpoints import activations
from torch_moe_mps.checkpoints.activations import largest
from torch_moe_mps.commands import main
from torch_moe_mps.commands.perplexity import SAMPLE
from torch_moe_mps.commands.sources import load
from torch_moe_mps.models.basics.logits import wide_logits


def loaded(model, device: str, **own):
    options = {"bits": 4, "group_size": 32, "kv_bits": None, "dtype": "auto", "shares": None}
    options |= {"model": str(model), "trust_remote_code": False, "experts_memory": None, **own}
    return load(argparse.Namespace(**options), str(model), device)


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    return chat_checkpoint(tmp_path_factory.mktemp("activations") / "model")


def with_factor(source, target, name: str, factor: float):
    """A copy of a checkpoint, in bfloat16, one of whose weights is larger by a factor."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    model.get_parameter(name).data.mul_(factor)
    return saved(model, source, target)


def saved(model, source, target):
    """The folder of a model, with the tokenizer of another."""
    model.save_pretrained(target)
    for file in source.glob("*token*"):
        (target / file.name).write_bytes(file.read_bytes())
    return target


EMBEDDING, OUTPUT = "model.embed_tokens.weight", "model.layers.0.self_attn.o_proj.weight"


RANGES = [
    (EMBEDDING, 3.05e4, torch.float16, "they reach 3"),
    (EMBEDDING, 4.1e4, torch.bfloat16, "in float16 they reach 4"),
    (OUTPUT, 6e4, torch.bfloat16, "in float16 they overflow their end"),
    (EMBEDDING, 1e6, torch.bfloat16, "weights that float16 does not hold"),
]


@pytest.mark.parametrize("weight, largest_one, dtype, why", rows_in_sweep(RANGES, RANGES[:1]))
def test_a_model_runs_in_float16_up_to_half_of_its_range(
    weight, largest_one, dtype, why, letters, tmp_path, capsys
):
    """Behind that it runs in bfloat16, and one line has what was measured."""
    plain = AutoModelForCausalLM.from_pretrained(letters).get_parameter(weight).abs().max().item()
    folder = with_factor(letters, tmp_path / "model", weight, largest_one / plain)
    model = loaded(folder, "mps")
    assert model.dtype == dtype
    assert str(model.hf_quantizer.report).count(line := model.hf_quantizer.report.activations) == 1
    assert line in capsys.readouterr().err.splitlines()
    assert line.startswith(f"activations in {str(dtype).removeprefix('torch.')}: {why}")


MEASURED = [(None, torch.float16), (4.1e4, torch.bfloat16)]


@pytest.mark.parametrize("largest_one, dtype", rows_in_sweep(MEASURED, MEASURED[:1]))
def test_python_runs_a_converted_checkpoint_as_the_commands_do(
    largest_one, dtype, letters, tmp_path, monkeypatch
):
    """In the dtype that was measured, which the commands then need not do if it is float16."""
    plain = AutoModelForCausalLM.from_pretrained(letters).get_parameter(EMBEDDING).abs().max().item()
    factor = 1.0 if largest_one is None else largest_one / plain
    source, folder = with_factor(letters, tmp_path / "model", EMBEDDING, factor), tmp_path / "converted"
    assert main(["convert", str(source), str(folder), "--bits", "8", "--group-size", "32"]) == 0
    assert torch_moe_mps.from_pretrained(folder).dtype == dtype
    if dtype == torch.float16:
        monkeypatch.setattr(activations, "largest", None)
    assert loaded(folder, "mps", bits=None, group_size=None).dtype == dtype


def with_a_token_that_overflows(source, target):
    """A copy in which float16 suffices for all letters but "z", which the text does not have."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    output = model.get_parameter(OUTPUT).data
    output.mul_(2e4 / (output.float().abs().sum(1).max().item()))
    model.get_input_embeddings().weight.data[25] = 6.5e4
    return saved(model, source, target)


@pytest.mark.parametrize("samples", in_sweep([False, True], [False]))
def test_an_overflow_names_the_dtype_that_has_its_range(samples, letters, tmp_path, refused, monkeypatch):
    monkeypatch.setenv("MOE_MPS_CAPTURE", "1")
    folder = with_a_token_that_overflows(letters, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": samples}))
    options = ["generate", str(folder), "--raw", "--device", "mps", "--bits", "4", "--group-size", "32"]
    options += ["--max-tokens", "4", "-p", "zzz"]
    line = refused(*options, progress=True)
    assert line.endswith("float16 is too small for its activations: load it with dtype bfloat16"), line
    assert main([*options, "--dtype", "bfloat16"]) == 0


def test_a_server_says_that_float16_overflows(letters, tmp_path, caplog):
    """To the request whose answer it ends, and in its log; other answers go on."""
    folder = with_a_token_that_overflows(letters, tmp_path / "model")
    how = ("--device", "mps", *serving.QUANTISED)
    with serving.client_of(folder, *how) as client:
        with pytest.raises(openai.APIError, match="float16 is too small for its activations"):
            client.completions.create(model="model", prompt="zzz", max_tokens=4)
        assert (
            client.completions.create(model="model", prompt="abc", max_tokens=4).usage.completion_tokens == 4
        )
    assert "float16 is too small for its activations" in caplog.text


def test_on_a_cpu_activations_are_in_float32(letters, capsys):
    assert loaded(letters, "cpu").dtype == torch.float32
    assert "activations in float32: " in capsys.readouterr().err


def test_without_a_tokenizer_nothing_is_measured(letters, tmp_path):
    folder = with_factor(letters, tmp_path / "model", EMBEDDING, 1.0)
    for file in folder.glob("*token*"):
        file.unlink()
    assert loaded(folder, "mps").dtype == torch.bfloat16


def test_what_is_asked_for_and_dense_weights_stay(letters, tmp_path):
    folder = with_factor(letters, tmp_path / "model", EMBEDDING, 1.0)
    assert loaded(folder, "cpu", dtype="bfloat16").dtype == torch.bfloat16
    assert loaded(folder, "cpu", bits=None).dtype == torch.bfloat16


def test_the_largest_activation_is_the_one_of_the_hidden_states():
    model = tiny_model("llama")
    model.get_input_embeddings().weight.data.mul_(100)
    ids = torch.arange(40) % model.config.vocab_size
    states = model.double()(ids[None], output_hidden_states=True).hidden_states
    expected = max(state.abs().max().item() for state in states)
    before = {name: [*module._forward_hooks] for name, module in model.named_modules()}
    found = largest(model.float(), ids)
    assert found.tokens == 40 and abs(found.value / expected - 1) < 1e-5
    assert before == {name: [*module._forward_hooks] for name, module in model.named_modules()}


def test_converted_weights_have_scales_in_float16(letters, tmp_path):
    """And config.json names it; mlx-lm computes in the dtype of the scales, so that those stay bfloat16."""
    source = with_factor(letters, tmp_path / "model", EMBEDDING, 1.0)
    for layout, dtype in (("moe_mps", torch.float16), ("mlx", torch.bfloat16)):
        target = tmp_path / layout
        options = ["--bits", "8", "--group-size", "32", "--to", layout]
        assert main(["convert", str(source), str(target), *options]) == 0
        tensors = load_file(target / "model.safetensors")
        assert {t.dtype for name, t in tensors.items() if t.is_floating_point()} == {dtype}, layout
        assert json.loads((target / "config.json").read_text())["dtype"] == str(dtype).partition(".")[2]


@pytest.fixture(scope="module")
def smollm2():
    return trained.smollm2() or pytest.skip(trained.MISSING)


@pytest.mark.sweep
def test_8_bits_lose_what_they_lose(smollm2):
    """At most 0.0019 nats a token, of which activations are no part."""
    ids = trained_models.tokenizer_of(smollm2)(
        SAMPLE.read_text(), return_tensors="pt", verbose=False
    ).input_ids
    ids = ids[:, :512]
    with torch.no_grad(), wide_logits():
        expected = torch_moe_mps.from_pretrained(smollm2, dtype=torch.float32, device_map="cpu")(
            ids
        ).logits.log_softmax(-1)
        found = loaded(smollm2, "cpu", bits=8)(ids).logits.float().log_softmax(-1)
    assert (expected.exp() * (expected - found)).sum(-1).mean().item() <= 0.0019


@pytest.mark.sweep
def test_a_file_of_trained_weights_says_paris(smollm2, capsys):
    options = ["-p", trained_models.QUESTION, "--max-tokens", "8", "--device", "cpu"]
    assert main(["generate", str(smollm2), *options]) == 0
    assert capsys.readouterr().out == "The capital of France is Paris.\n"


@pytest.mark.parametrize("architecture", in_sweep(["bert", "qwen3_next"], ["bert"]))
def test_encoders_and_recurrent_models_are_measured(architecture, tmp_path):
    assert loaded(chat_checkpoint(tmp_path / "model", architecture), "mps").dtype == torch.float16
