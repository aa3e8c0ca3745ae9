"""The commands with GGUF files: what they read is packed and exact, and what is wrong is one line."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support import gguf_files
from support.gguf_files import write_file
from support.models import stored as tensors_of
from support.serving import client_of
from transformers import AutoTokenizer

import torch_moe_mps
from torch_moe_mps.commands import main, sources
from torch_moe_mps.commands.arguments import parser
from torch_moe_mps.quantization import Format, QuantizedWeight, dequantize, quantize

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
    dense = gguf_files.dense(file)
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
    size = sum(tensor.nbytes // (1 + (tensor.dtype == torch.float32)) for tensor in tensors_of(model))
    assert run("fit", file, "--json", tmp_path / "fit.json") == 0
    stored = json.loads((tmp_path / "fit.json").read_text())["sizes"][0]
    assert stored["bytes"] == size and "as it is" in capsys.readouterr().out


@pytest.mark.parametrize("layout", ["moe_mps", "mlx"])
def test_convert_in_other_bits(file, layout, tmp_path):
    """As of what transformers makes of the file: its values are quantised again."""
    dense = gguf_files.dense(file)
    recipe = ("--bits", 4, "--group-size", 32, "--to", layout)
    assert run("convert", file, tmp_path / "new", *recipe, "--dtype", "float32") == 0
    model = torch_moe_mps.from_pretrained(str(tmp_path / "new"))
    weight = dense.model.layers[1].mlp.experts.down_proj.detach()
    experts = model.model.layers[1].mlp.experts
    parts = experts.down_proj_packed, experts.down_proj_scales, experts.down_proj_biases
    packed = QuantizedWeight(*parts, Format(4, 32))
    assert torch.equal(dequantize(packed), dequantize(quantize(weight, 4, 32)))
    assert (tmp_path / "new" / "tokenizer.json").exists()
    ids = torch.arange(5)[None]
    torch_moe_mps.accelerate(dense, bits=4, group_size=32)
    assert torch.equal(logits(model, ids), logits(dense, ids))


@pytest.mark.sweep
def test_mlx_lm_reads_what_was_a_gguf_file(file, tmp_path):
    load = pytest.importorskip("mlx_lm.utils").load_model
    mx = pytest.importorskip("mlx.core")
    recipe = ("--bits", 4, "--group-size", 32, "--to", "mlx")
    assert run("convert", file, tmp_path / "new", *recipe, "--dtype", "float32") == 0
    theirs, _ = load(tmp_path / "new")
    ids = torch.arange(5)[None]
    expected = logits(torch_moe_mps.from_pretrained(str(tmp_path / "new")), ids)
    found = torch.from_numpy(np.array(theirs(mx.array(ids.numpy())).astype(mx.float32)))
    assert (found - expected).abs().max() <= 1e-3 * expected.abs().max()


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
    assert json.loads(found.read_text())["models"][0]["divergence"] == 0
    sizes = ["--prompt", 4, "--max-tokens", 2, "--turn", 2, "--depth", 0, "--repeats", 1]
    assert run("bench", file, *sizes, *device) == 0


def test_the_server_reads_the_tokenizer_of_the_file(file):
    name = file.name
    asked = {"messages": [{"role": "user", "content": "abc"}], "temperature": 0, "max_tokens": 3}
    with client_of(file) as client:
        assert [model.id for model in client.models.list()] == [name]
        assert client.chat.completions.create(model=name, **asked).usage.completion_tokens == 3


def test_names_on_the_hub(file, monkeypatch, capsys):
    """It is looked for, then the one file is downloaded; `fit` does not download gigabytes."""
    asked = []

    def download(name, name_in, revision, **how):
        asked.append((name, name_in, revision, how))
        return str(file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    name = "org/name-GGUF:model.gguf"
    assert run("fit", name, "--revision", "v2") == 0
    assert run("generate", name, "-p", "a", "--max-tokens", 1, "--device", "cpu") == 0
    assert asked == [
        ("org/name-GGUF", "model.gguf", "v2", {"dry_run": True}),
        ("org/name-GGUF", "model.gguf", "v2", {"local_files_only": True}),
        ("org/name-GGUF", "model.gguf", None, {"dry_run": True}),
        ("org/name-GGUF", "model.gguf", None, {"local_files_only": False}),
    ]


def test_what_is_wrong_is_one_line(file, tmp_path, capsys):
    bare = write_file(tmp_path / "bare.gguf")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:-4000])
    for arguments, message in (
        (("convert", file, tmp_path / "a", "--group-size", 32), "--group-size of a packed SRC needs --bits"),
        (("convert", file, tmp_path / "a", "--to", "mlx"), "--to mlx of a GGUF file needs --bits"),
        (("convert", bare, tmp_path / "a"), "bare.gguf has no tokenizer that transformers reads"),
        (("generate", bare, "-p", "a"), "bare.gguf has no tokenizer that transformers reads"),
        (("generate", file, "-p", "a", "--image", cut), "--image is for a model that takes images, got "),
        (("fit", cut), "cut.gguf is damaged or not in GGUF (blk."),
        (("fit", tmp_path / "none.gguf"), "none.gguf does not exist"),
        (("fit", file, "--revision", "v2"), "--revision needs a name on the Hub"),
    ):
        assert run(*arguments) == 1, arguments
        lines = capsys.readouterr().err.strip().splitlines()
        assert message in lines[-1] and not any("Traceback" in line for line in lines), (arguments, lines)


@pytest.mark.parametrize(
    "command",
    [
        *(("generate", "-p", "ab"), ("chat",), ("serve",), ("convert", "new")),
        ("convert", "new", "--bits", "4", "--importance", "text.txt"),
        ("perplexity", "--text", "text.txt"),
    ],
)
def test_an_unknown_way_to_split_text_is_refused(tmp_path, monkeypatch, capsys, command):
    """By each command that reads a tokenizer, before weights."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("ab " * 100)
    write_file(tmp_path / "model.gguf", tokenizer=True, split_text="new")
    name, *others = command
    assert run(name, "model.gguf", *others) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "model.gguf has no tokenizer that transformers reads (ValueError: tokenizer.ggml.pre must" in line
    assert line.endswith("; got new. Take the tokenizer of the model's own repository)")


def test_a_file_is_served_under_its_own_name(tmp_path, monkeypatch):
    """Wherever it lies; names on the Hub stay as they are given, folders have their own."""
    (tmp_path / "model.gguf").touch()
    for folder in ("folder", "runs/big", "runs/here"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for given, name in (
        ("model.gguf", "model.gguf"),
        ("./model.gguf", "model.gguf"),
        (str(tmp_path / "model.gguf"), "model.gguf"),
        (f"{tmp_path}:model.gguf", "model.gguf"),
        ("org/name-GGUF:model.gguf", "org/name-GGUF:model.gguf"),
        ("org/name", "org/name"),
        (f"{tmp_path}/folder", "folder"),
        ("folder", "folder"),
        ("./folder/", "folder"),
        ("runs/big", "big"),
        ("runs/here/../big", "big"),
        (f"../{tmp_path.name}/runs/big", "big"),
        (".", tmp_path.name),
        ("..", tmp_path.parent.name),
    ):
        assert sources.name_of(parser().parse_args(["serve", given])) == name
