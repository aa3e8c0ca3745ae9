"""`convert`: sources that are quantised, what is said before and written beside, runs that were cut off."""

import io
import json
import re
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from support.models import tiny

import torch_moe_mps
from torch_moe_mps.checkpoints.layouts import files
from torch_moe_mps.checkpoints.write.parts import Parts
from torch_moe_mps.commands import convert, main
from torch_moe_mps.commands.results import locked

transformers.logging.set_verbosity_error()


BEHIND = ("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors")


def run(*arguments) -> int:
    return main([str(argument) for argument in ("convert", *arguments)])


def tensors_in(folder) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense")
    tiny("qwen3_moe", dtype=torch.bfloat16).save_pretrained(folder)
    for file in (*BEHIND, "onnx/config.json", "1_Pooling/notes.md"):
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(file)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\nbase_model: org/name\n---\n# old\n")
    return folder


@pytest.fixture(scope="module")
def eight_bits(dense, tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantised") / "eight"
    assert run(dense, folder, "--bits", 8, "--group-size", 32, "--keep", "*.k_proj") == 0
    return folder


def test_what_sentence_transformers_has_behind_a_model_is_copied(dense, eight_bits):
    """Configs and weights in folders that begin with a number; no other folder's."""
    copied = {str(path.relative_to(eight_bits)) for path in eight_bits.glob("*/*")}
    assert copied == {*BEHIND}
    assert all((eight_bits / file).read_bytes() == (dense / file).read_bytes() for file in copied)


# Quantised sources


def test_packed_weights_are_not_quantised_again(eight_bits, tmp_path, refused):
    """With fewer bits or with more: nothing is written, or loaded, that looks like others."""
    message = "moe_mps::quantize: bits must be left out, or those of the checkpoint, which has affine8_32"
    for options, got in (
        (["--bits", 3], "affine3_64"),
        (["--bits", 3, "--dry-run"], "affine3_64"),
        (["--recipe", "mixed_4_6"], "affine4_64 and affine6_64"),
    ):
        error = refused("convert", eight_bits, tmp_path / "new", *options)
        assert error == f"{message}: quantise the dense one instead, got {got}"
    assert "--group-size of a packed SRC needs --bits" in refused(
        "convert", eight_bits, tmp_path / "new", "--group-size", 32
    )
    with pytest.raises(ValueError, match=message):
        torch_moe_mps.from_pretrained(eight_bits, mode="nvfp4")
    assert run(eight_bits, tmp_path / "all", "--bits", 8, "--group-size", 32) == 0  # k_proj, which was dense
    with pytest.raises(ValueError, match=message):
        torch_moe_mps.from_pretrained(tmp_path / "all", mode="mxfp8", linear_bits=None)
    assert not (tmp_path / "new").exists()


@pytest.mark.sweep
def test_types_that_mlx_does_not_have(tmp_path, refused):
    """Asked for, or stored: one line before anything is written; a recipe with a name has others for MLX."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 1, "num_experts": 2}
    tiny("qwen3_moe", num_experts_per_tok=1, vocab_size=64, **sizes).save_pretrained(tmp_path / "dense")
    assert run(tmp_path / "dense", tmp_path / "ours", "--recipe", "fast") == 0
    stored = json.loads((tmp_path / "ours" / "config.json").read_text())["quantization_config"]["modules"]
    assert {*stored.values()} == {"iq4_xs"}
    message = "--to mlx needs --bits, and a --mode of MLX's, which does not have iq4_xs"
    for source, options in (("dense", ["--mode", "iq4_xs"]), ("ours", [])):
        assert message in refused("convert", tmp_path / source, tmp_path / "mlx", *options, "--to", "mlx")
    assert not (tmp_path / "mlx").exists()
    assert run(tmp_path / "dense", tmp_path / "mlx", "--recipe", "fast", "--to", "mlx") == 0
    assert json.loads((tmp_path / "mlx" / "config.json").read_text())["quantization"]["bits"] == 4


@pytest.mark.parametrize(("options", "k_proj"), [((), "weight"), (("--bits", 8), "packed")])
def test_a_quantised_source_stays_as_it_is(options, k_proj, eight_bits, tmp_path):
    """What is dense in it has the bits that are asked for."""
    assert run(eight_bits, tmp_path / "new", *options) == 0
    before, after = tensors_in(eight_bits), tensors_in(tmp_path / "new")
    same = [name for name in before if "k_proj" not in name]
    assert all(torch.equal(before[name], after[name]) for name in same)
    assert f"model.layers.0.self_attn.k_proj.{k_proj}" in after


# What is said before, and written beside


def test_the_dry_run_of_a_quantised_source_has_its_formats(eight_bits, tmp_path, capsys):
    capsys.readouterr()
    assert run(eight_bits, tmp_path / "new", "--bits", 8, "--dry-run") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["model.layers.*.self_attn.q_proj", "affine8_32", "affine8_32", "2"] in [
        line[:4] for line in lines
    ]
    assert ["model.layers.*.self_attn.k_proj", "bfloat16", "affine8_64", "2"] in [line[:4] for line in lines]
    size = sum(tensor.nbytes for tensor in tensors_in(eight_bits).values())
    total = next(line for line in lines if "->" in line)
    assert total[0] == "weights:" and abs(float(total[1]) * 1e6 - size) < 0.06e6


@pytest.mark.parametrize(
    ("source", "options", "hint"),
    [
        ("dense", (), "4 bits have"),
        ("dense", ("--bits", 2), "2 bits have"),
        ("dense", ("--importance", "auto"), None),
        ("dense", ("--bits", 8, "--linear-bits", 8, "--embedding-bits", 8), None),
        ("eight_bits", (), None),
    ],
)
def test_few_bits_without_importance_hint_at_it(source, options, hint, request, tmp_path, capsys):
    source = request.getfixturevalue(source)
    capsys.readouterr()
    assert run(source, tmp_path / "new", *options, "--dry-run") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "--importance auto" in line]
    assert [hint] == [line[:11] for line in lines] if hint else not lines


def test_a_disk_without_space_is_one_line_before_anything_is_written(dense, tmp_path, refused, monkeypatch):
    usage = namedtuple("usage", "total used free")(0, 0, 1000)
    monkeypatch.setattr(convert.shutil, "disk_usage", lambda path: usage)
    error = refused("convert", dense, tmp_path / "new", "--group-size", 32)
    assert f"{tmp_path} must have 0." in error and "MB of free space, got 0.0 MB" in error
    assert not [*tmp_path.iterdir()]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress(dense, tmp_path, capsys, monkeypatch):
    """A bar on a terminal; elsewhere a line at the start and one at the end."""
    assert run(dense, tmp_path / "first", "--group-size", 32) == 0
    said = capsys.readouterr()
    assert len(re.findall(r"^Converting: 0 of \d+ parts$", said.err, re.M)) == 1
    assert len(re.findall(r"^Converting: (\d+) of \1 parts after \d+\.\d s$", said.err, re.M)) == 1
    assert said.err.count("Converting") == 2 and "\r" not in said.err
    assert "Converting" not in said.out
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    assert run(dense, tmp_path / "second", "--group-size", 32) == 0
    assert "Converting: 100%" in terminal.getvalue()


@pytest.mark.parametrize(("layout", "library"), [("moe_mps", "transformers"), ("mlx", "mlx")])
def test_the_model_card_says_where_the_model_is_from(layout, library, dense, tmp_path):
    assert run(dense, tmp_path / "a new one", "--group-size", 32, "--to", layout) == 0
    card = ModelCard.load(tmp_path / "a new one" / "README.md")
    about = card.data.to_dict()
    assert about["license"] == "apache-2.0" and about["base_model"] == "org/name"
    assert about["library_name"] == library and about["base_model_relation"] == "quantized"
    assert "affine4_32" in card.text and "mean error" in card.text and str(tmp_path) not in card.content
    command = {"moe_mps": "torch-moe-mps chat 'a new one'", "mlx": "mlx_lm.chat --model 'a new one'"}[layout]
    assert f"\n{command}\n" in card.text and "pip install" not in card.text


# Runs that were cut off


def cut_off(monkeypatch, after: int) -> None:
    """Ctrl-C while a part is loaded."""
    load, count = Parts._load, iter(range(100))

    def interrupted(self, part):
        if next(count) == after:
            raise KeyboardInterrupt
        load(self, part)

    monkeypatch.setattr(Parts, "_load", interrupted)


def test_the_same_command_goes_on(dense, tmp_path, capsys, monkeypatch):
    """Only with the parts that were not complete; what is written is what one run writes, and its report."""
    monkeypatch.setattr(files, "LARGEST", 8000)
    options = ["--group-size", 32, "--to", "mlx"]
    assert run(dense, tmp_path / "whole", *options) == 0
    said = capsys.readouterr().out.partition("\n")[2].replace("whole", "new")
    with monkeypatch.context() as patch:
        cut_off(patch, 4)
        assert run(dense, tmp_path / "new", *options) == 130
    left = tmp_path / ".new.unfinished"
    assert f"{left} has what is complete: the same command goes on with it" in capsys.readouterr().err
    (left / "tmp123").write_text("of a process that was killed")
    (left / "additional_chat_templates").mkdir()
    loaded = []
    load = Parts._load
    monkeypatch.setattr(Parts, "_load", lambda self, part: loaded.append(part) or load(self, part))
    assert run(dense, tmp_path / "new", *options) == 0
    again = capsys.readouterr().out
    assert "goes on behind " in again and "model.layers.0" not in loaded and "lm_head" in loaded
    assert [line for line in said.splitlines() if line not in again] == []
    whole, new = tmp_path / "whole", tmp_path / "new"
    assert {path.name for path in whole.iterdir()} == {path.name for path in new.iterdir()}
    for path in filter(Path.is_file, whole.iterdir()):
        if path.name != "README.md":
            assert path.read_bytes() == (new / path.name).read_bytes(), path.name
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "new"}


def test_another_command_begins_anew(dense, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(files, "LARGEST", 8000)
    with monkeypatch.context() as patch:
        cut_off(patch, 3)
        assert run(dense, tmp_path / "new", "--group-size", 32) == 130
    assert run(dense, tmp_path / "new", "--group-size", 32, "--bits", 8) == 0
    assert "begins anew" in capsys.readouterr().out
    config = json.loads((tmp_path / "new" / "config.json").read_text())["quantization_config"]
    assert {*config["modules"].values()} == {"affine8_32"}
    assert {path.name for path in tmp_path.iterdir()} == {"new"}


def test_two_processes_do_not_write_one_folder(dense, tmp_path, refused):
    folder = tmp_path / ".new.unfinished"
    folder.mkdir()
    with locked(folder, "another"):
        error = refused("convert", dense, tmp_path / "new", "--group-size", 32)
        assert "new is being written by another process" in error
    assert folder.exists()
