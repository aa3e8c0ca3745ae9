"""`convert --importance`: a text runs through the model, and weights are quantised by what they multiply."""

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support.checkpoints import add_tokenizer
from support.models import tiny

import torch_moe_mps
from torch_moe_mps.checkpoints import calibration
from torch_moe_mps.commands import main

transformers.logging.set_verbosity_error()

TEXT = "The quick brown fox jumps over the lazy dog. " * 20
RECIPE = {"bits": 4, "group_size": 32}


def run(*arguments) -> int:
    return main([str(argument) for argument in ("convert", *arguments, "--group-size", 32)])


def tensors_in(folder) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense")
    tiny("qwen3_moe", hidden_size=64, moe_intermediate_size=32, vocab_size=200).save_pretrained(folder)
    add_tokenizer(folder)
    (folder / "text").write_text(TEXT)
    return folder


@pytest.fixture(scope="module")
def converted(dense, tmp_path_factory):
    """A folder with a conversion by a text, and the file of importance that it wrote."""
    folder = tmp_path_factory.mktemp("converted")
    written = ("--importance", dense / "text", "--save-importance", folder / "i.safetensors")
    assert run(dense, folder / "new", *written) == 0
    return folder


@pytest.fixture(scope="module")
def state(dense, converted):
    """The tensors that accelerate makes by the same file."""
    model = transformers.AutoModelForCausalLM.from_pretrained(dense)
    torch_moe_mps.accelerate(model, importance=converted / "i.safetensors", check=False, **RECIPE)
    return model.state_dict()


def ids_of(dense) -> torch.Tensor:
    return transformers.AutoTokenizer.from_pretrained(dense)(TEXT, return_tensors="pt").input_ids[0]


def same(found: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, state[name]) for name, tensor in found.items() if name in state)


def test_a_text_runs_through_the_model(dense, converted):
    model = transformers.AutoModelForCausalLM.from_pretrained(dense)
    expected = torch_moe_mps.collect_importance(model, ids_of(dense), text=TEXT, progress=False)
    found = torch_moe_mps.read_importance(converted / "i.safetensors")
    assert (found.text, found.model, found.tokens) == (expected.text, dense.name, 900)
    for name, mean in expected.means.items():
        torch.testing.assert_close(found.means[name], mean, rtol=1e-4, atol=1e-9)
    said = "errors weighed by the importance of 900 tokens"
    assert said in (converted / "new" / "README.md").read_text()


def test_all_ways_write_the_same_weights(dense, converted, state, tmp_path):
    file = converted / "i.safetensors"
    found = tensors_in(converted / "new")
    assert len(found) > 30 and same(found, state)
    assert run(dense, tmp_path / "mlx", "--importance", file, "--to", "mlx") == 0
    for model in (
        torch_moe_mps.from_pretrained(str(tmp_path / "mlx"), check=False),
        torch_moe_mps.from_pretrained(str(dense), importance=file, check=False, **RECIPE),
    ):
        assert same(model.state_dict(), state)
    model = torch_moe_mps.from_pretrained(str(dense), check=False, **RECIPE)
    assert not same(model.state_dict(), state)


def test_what_only_fits_quantised_is_quantised_twice(dense, converted, monkeypatch):
    """The means are then of the model that plain quantising makes."""
    monkeypatch.setattr(calibration, "_SHARE", 0)
    seen, collect = [], calibration.collect_importance

    def collected(model, *arguments, **options):
        seen.append({**model.state_dict()})
        return collect(model, *arguments, **options)

    monkeypatch.setattr(calibration, "collect_importance", collected)
    twice = torch_moe_mps.from_pretrained(str(dense), importance=str(dense / "text"), check=False, **RECIPE)
    plain = torch_moe_mps.from_pretrained(str(dense), check=False, **RECIPE).state_dict()
    assert len(seen) == 1 and same(seen[0], plain) and seen[0].keys() == plain.keys()
    assert not same(twice.state_dict(), plain)


def test_auto_reads_the_beginning_of_the_built_in_text(dense, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(calibration, "TOKENS", 600)
    assert run(dense, tmp_path / "a", "--importance", "auto") == 0
    assert "importance of 600 tokens" in capsys.readouterr().out


def test_what_is_wrong_is_one_line(dense, tmp_path, capsys):
    (tmp_path / "short").write_text("too short")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for arguments, message in (
        (("--importance", tmp_path / "short"), "at least 512, got (9,): too little text"),
        (("--importance", tmp_path / "binary"), "binary must be a file of importance, or a text in UTF-8"),
        (("--importance", dense / "model.safetensors"), "written by Importance.save"),
        (("--importance", "auto", "--bits", 1), "of 2 bits and more, or ggml's, got --bits 1"),
        (("--importance", "auto", "--mode", "mxfp4"), "of 2 bits and more, or ggml's, got --mode mxfp4"),
    ):
        assert run(dense, tmp_path / "a", *arguments) == 1, arguments
        lines = capsys.readouterr().err.strip().splitlines()
        assert message in lines[-1] and not any("Traceback" in line for line in lines), (arguments, lines)
        assert not (tmp_path / "a").exists()
