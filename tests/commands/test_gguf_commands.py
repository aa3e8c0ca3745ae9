"""The commands with GGUF files: what they read is packed and exact, and what is wrong is one line."""

import json
from pathlib import Path

import pytest
import torch
from support.gguf_files import write_file
from support.serving import client_of
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

import torch_moe_mps
from torch_moe_mps.commands import main

KINDS = ("q4_0", "q8_0", "q5_0")


def run(*arguments) -> int:
    return main([str(argument) for argument in arguments])


def logits(model, ids) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    return write_file(folder / "model.gguf", "qwen3moe", KINDS, tokenizer=True)


def test_convert_and_fit(file, tmp_path, capsys):
    """A folder with the file's blocks, its tokenizer and its template; `fit` says what it takes."""
    new = tmp_path / "new"
    assert run("convert", file, new, "--dtype", "float32") == 0
    ids = torch.arange(5)[None]
    dense = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True)
    )
    model, expected = torch_moe_mps.from_pretrained(str(new)), logits(dense, ids)
    assert (logits(model, ids) - expected).abs().max() <= 2e-5 * expected.abs().max()
    assert str(file.parent) not in (new / "README.md").read_text()  # a path of the user's
    assert (new / "model.safetensors").stat().st_mode & 0o777 == 0o644
    modules = json.loads((new / "config.json").read_text())["quantization_config"]["modules"]
    assert {*modules.values()} == {*KINDS}
    tokenizer = AutoTokenizer.from_pretrained(new)
    said = [{"role": "user", "content": "ab c"}]
    assert (
        tokenizer.apply_chat_template(said, tokenize=False) == "ab c"
        and len(tokenizer("ab")["input_ids"]) == 1
    )
    halves = (
        parameter.nbytes // (1 + (parameter.dtype == torch.float32)) for parameter in model.parameters()
    )
    size = sum(halves)
    assert run("fit", file, "--json", tmp_path / "fit.json") == 0
    stored = json.loads((tmp_path / "fit.json").read_text())["sizes"][0]
    assert stored["bytes"] == size and "as it is" in capsys.readouterr().out


def test_what_runs_a_model(file, tmp_path, capsys):
    device = ("--device", "cpu")
    text = tmp_path / "text"
    text.write_text("abc " * 20)
    assert run("generate", file, "-p", "abc", "--max-tokens", 3, *device) == 0
    assert run("generate", f"{file.parent}:{file.name}", "-p", "abc", "--max-tokens", 3, *device) == 0
    first, _, second = capsys.readouterr().out.strip().partition("\n")
    assert first and first == second
    found = tmp_path / "found.json"
    options = ["--text", text, "--against", file, "--window", 32, "--json", found]
    assert run("perplexity", file, *device, *options) == 0
    assert json.loads(found.read_text())["divergence"] == 0
    sizes = ["--prompt", 4, "--generate", 2, "--turn", 2, "--depth", 0, "--repeats", 1]
    assert run("bench", file, *sizes, *device) == 0


def test_the_server_reads_the_tokenizer_of_the_file(file):
    name = f"{file.parent}:{file.name}"
    asked = {"messages": [{"role": "user", "content": "abc"}], "temperature": 0, "max_tokens": 3}
    with client_of(file) as client:
        assert [model.id for model in client.models.list()] == [name]
        assert client.chat.completions.create(model=name, **asked).usage.completion_tokens == 3


def test_names_on_the_hub(file, monkeypatch, capsys):
    """The one file is downloaded; `fit` does not download gigabytes."""
    asked = []

    def download(name, name_in, revision, local_files_only):
        asked.append((name, name_in, revision, local_files_only))
        return str(file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    name = "org/name-GGUF:model.gguf"
    assert run("fit", name, "--revision", "v2") == 0
    assert run("generate", name, "-p", "a", "--max-tokens", 1, "--device", "cpu") == 0
    assert asked == [
        ("org/name-GGUF", "model.gguf", "v2", True),
        ("org/name-GGUF", "model.gguf", None, False),
    ]


def test_what_is_wrong_is_one_line(file, tmp_path, capsys):
    bare = write_file(tmp_path / "bare.gguf")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:-4000])
    for arguments, message in (
        (("convert", file, tmp_path / "a", "--bits", 4), "a GGUF file is converted as it is"),
        (("convert", file, tmp_path / "a", "--to", "mlx"), "--to must be moe_mps for a GGUF file"),
        (("convert", bare, tmp_path / "a"), "bare.gguf has no tokenizer that transformers reads"),
        (("generate", bare, "-p", "a"), "bare.gguf has no tokenizer that transformers reads"),
        (("generate", file, "-p", "a", "--bits", 7), "bits must be 2 or 3 or"),
        (("fit", cut), "cut.gguf is damaged or not in GGUF (blk."),
        (("fit", tmp_path / "none.gguf"), "none.gguf must be a file, got none"),
        (("fit", file, "--revision", "v2"), "--revision needs a name on the Hub"),
    ):
        assert run(*arguments) == 1, arguments
        lines = capsys.readouterr().err.strip().splitlines()
        assert message in lines[-1] and not any("Traceback" in line for line in lines), (arguments, lines)
