"""`convert` and MTP layers: recipes name them, a text is counted in them, and they load again."""

import copy
import json
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import changed
from support.mtp import with_mtp
from support.processes import COMMAND, environment
from support.serving import letters
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

import torch_moe_mps
from torch_moe_mps.commands import main
from torch_moe_mps.quantization import quantize
from torch_moe_mps.transformers.checkpoints.source import Source
from torch_moe_mps.transformers.modules.linears import formats_in
from torch_moe_mps.transformers.mtp import layers as mtp
from torch_moe_mps.transformers.mtp.layers import left_out_mtp
from torch_moe_mps.transformers.mtp.steps import mtp_steps

TEXT = "thequickbrownfoxjumpsoverthelazydog" * 20
FOUR = ("--bits", "4", "--group-size", "32")


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.sweep)])
def checkpoint(request, tmp_path_factory):
    """(folder, class)"""
    folder = tmp_path_factory.mktemp("dense")
    with with_mtp("glm4_moe", folder, request.param, vocab_size=27) as cls:
        letters().save_pretrained(folder)
        (folder / "text.txt").write_text(TEXT)
        yield folder, cls


def converted(folder, to, *arguments) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors, and the formats of MTP layers."""
    assert main(["convert", str(folder), str(to), *map(str, arguments)]) == 0
    config = json.loads((to / "config.json").read_text())["quantization_config"]
    return load_file(to / "model.safetensors"), config.get("mtp", {})


def refused(capsys, *arguments) -> str:
    """The last line of a command's error."""
    capsys.readouterr()
    assert main([*map(str, arguments)]) == 1
    return capsys.readouterr().err.splitlines()[-1]


@torch.no_grad()
def means_of(cls, folder, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Mean squares of the inputs of eh_proj and o_proj of each layer, by transformers' own modules."""
    model = cls.from_pretrained(folder).eval()
    layers, seen = MtpModel.from_pretrained(model).eval(), {}
    for number, layer in enumerate(layers.layers):
        for name in ("eh_proj", "mtp_block.self_attn.o_proj"):
            inputs = seen.setdefault(f"mtp.{number}.{name}", [])
            layer.get_submodule(name).register_forward_pre_hook(
                lambda _, args, into=inputs: into.append(args[0].flatten(0, -2))
            )
    for window in ids.split(512):
        states = model(window[None], use_cache=False, output_hidden_states=True).hidden_states[-1]
        for number in range(len(layers.layers)):
            tokens = window[None, number + 1 :]
            places = torch.arange(number + 1, len(window))[None]
            cache = MtpCache(config=layers.config)
            states = layers.forward_layer(
                number, states[:, : tokens.shape[1]], places, cache, input_ids=tokens
            )
    return {name: torch.cat(inputs).square().mean(0) for name, inputs in seen.items()}


@pytest.mark.slow("converts twice, and runs a text")
def test_a_text_is_counted_in_them(checkpoint, tmp_path):
    """As transformers' own modules see it; what is multiplied with more is quantised better."""
    folder, cls = checkpoint
    file, dense = tmp_path / "i.safetensors", load_file(folder / "model.safetensors")
    written = ("--importance", folder / "text.txt", "--save-importance", file)
    tensors, _ = converted(folder, tmp_path / "by_text", *FOUR, *written)
    ids = letters()(TEXT, return_tensors="pt").input_ids[0]
    means, found = means_of(cls, folder, ids), load_file(file)
    assert {name for name in found if name.startswith("mtp.")} >= {*means}
    for name, mean in means.items():
        torch.testing.assert_close(found[name], mean, rtol=1e-3, atol=1e-6)
    for number in range(len(means) // 2):
        layer = f"model.layers.{2 + number}"
        for stored, own in (("eh_proj", "eh_proj"), ("mtp_block.self_attn.o_proj", "self_attn.o_proj")):
            weight = dense[f"{layer}.{own}.weight"]
            importance = found[f"mtp.{number}.{stored}"]
            expected, plain = quantize(weight, 4, 32, importance=importance), quantize(weight, 4, 32)
            assert torch.equal(tensors[f"{layer}.{stored}.packed"], expected.packed.view(torch.int32))
            assert not torch.equal(expected.packed, plain.packed)
    again, _ = converted(folder, tmp_path / "by_file", *FOUR, "--importance", file)
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())


@pytest.mark.slow("converts, and loads twice")
def test_recipes_name_them(checkpoint, tmp_path):
    """By mtp.0 and so on; patterns for all layers are for these, too, and what is planned is written.

    A model that is quantised while it is read, or in place, has the same.
    """
    folder, cls = checkpoint
    recipe = {
        "bits": 4, "group_size": 32, "keep": ["mtp.*.k_proj"],
        "overrides": {"*.v_proj": 8, "layers.0.*": 6, "mtp.0.eh_proj": 5, "experts.down_proj": 3},
    }  # fmt: skip
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    asked = ("--recipe", tmp_path / "recipe.json", "--json", tmp_path / "plan.json")
    tensors, formats = converted(folder, tmp_path / "new", *asked)
    block = "layers.0.mtp_block.self_attn"
    assert formats["layers.0.eh_proj"] == "affine5_32" and formats[f"{block}.v_proj"] == "affine8_32"
    assert formats[f"{block}.q_proj"] == "affine4_32" and f"{block}.k_proj" not in formats
    assert formats["layers.0.mtp_block.mlp.experts.down_proj"] == "affine3_32"
    assert tensors["model.layers.2.mtp_block.self_attn.k_proj.weight"].dim() == 2
    size = sum(tensor.nbytes for tensor in tensors.values())
    assert json.loads((tmp_path / "plan.json").read_text())["after"] == pytest.approx(size, rel=1e-3)
    in_place = cls.from_pretrained(folder).eval()
    torch_moe_mps.accelerate(in_place, **recipe)
    read = torch_moe_mps.from_pretrained(folder, **recipe)
    for model in (in_place, read, copy.deepcopy(read)):
        layers = mtp_steps(model)[0].layers.layers
        found = layers.state_dict()
        for number in range(len(layers)):
            for name in ("eh_proj.packed", "mtp_block.self_attn.v_proj.packed"):
                assert torch.equal(found[f"{number}.{name}"], tensors[f"model.layers.{2 + number}.{name}"])
        assert {f"layers.{n}" for n, m in layers.named_modules() if formats_in(m)} >= {"layers.0.eh_proj"}
        assert not formats_in(layers[0].mtp_block.self_attn.k_proj)


def test_headers_are_read_once(checkpoint, tmp_path, monkeypatch):
    """For a plan, which has the bytes of these layers and reads no tensor, and for what is written.

    Layers are made once for each, with an exception of their own, too.
    """
    folder, _ = checkpoint
    read, opened, made = [], [], []
    for name, calls in (("tensors_in", read), ("safe_open", opened), ("_without_memory", made)):
        own = getattr(mtp, name)
        monkeypatch.setattr(mtp, name, lambda *a, own=own, to=calls, **k: to.append(a) or own(*a, **k))
    mtp._read_headers.cache_clear()
    plan, asked = tmp_path / "plan.json", ["convert", str(folder), str(tmp_path / "new"), *FOUR]
    asked += ["--keep", "mtp.0.eh_proj"]
    assert main([*asked, "--dry-run", "--json", str(plan)]) == 0
    assert len(read) == len(made) == 1 and not opened
    size = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert json.loads(plan.read_text())["before"] == pytest.approx(size, rel=1e-3)
    assert main(asked) == 0
    assert len(read) == 1 and len(opened) == 1 and len(made) == 3


def test_a_pattern_that_fits_none_of_them_is_one_line(checkpoint, tmp_path, capsys):
    """Of `convert` and of those that load a model, before anything is changed; of layers that stay, too."""
    folder, cls = checkpoint
    none = tmp_path / "none"
    none.mkdir()
    for file in folder.glob("*.*"):
        (none / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: tensor for name, tensor in tensors.items() if not re.search(r"layers\.[23]\.", name)},
        none / "model.safetensors",
        {"format": "pt"},
    )
    for source, pattern in ((folder, "mtp.0.x_proj"), (none, "mtp.*")):
        says = f"the pattern '{pattern}' fits no weight that can be quantised"
        assert says in refused(capsys, "convert", source, tmp_path / "new", *FOUR, "--keep", pattern)
        model = cls.from_pretrained(source).eval()
        for load, given in ((torch_moe_mps.accelerate, model), (torch_moe_mps.from_pretrained, source)):
            with pytest.raises(ValueError, match=re.escape(says)):
                load(given, bits=4, group_size=32, keep=[pattern])
        assert not any(map(formats_in, model.modules()))
    converted(folder, tmp_path / "four", *FOUR)
    with pytest.raises(
        ValueError, match=r"'mtp.\*' must be for MTP layers that are dense or in FP8, got quantised ones"
    ):
        torch_moe_mps.from_pretrained(tmp_path / "four", bits=3, group_size=32, overrides={"mtp.*": 3})


@pytest.mark.slow("converts twice")
def test_those_of_other_quantisers_are_left_out(checkpoint, tmp_path, capsys):
    """Such as layers in a checkpoint of MLX that others wrote. A line says so; the model is converted."""
    folder, _ = checkpoint
    model = Source(str(folder), {}).skeleton()
    assert left_out_mtp(str(folder), model) is None
    if model.config.num_mtp_layers > 1:
        pytest.skip("mlx-lm ignores one layer")
    assert main([*map(str, ("convert", folder, tmp_path / "mlx", *FOUR, "--to", "mlx"))]) == 0
    with changed(tmp_path / "mlx" / "config.json") as config:
        del config["quantization"]["mtp"], config["quantization_config"]["mtp"]
    capsys.readouterr()
    tensors, formats = converted(tmp_path / "mlx", tmp_path / "new", *FOUR)
    assert capsys.readouterr().err.splitlines()[0].endswith("got those of MLX")
    assert not formats and not any(re.search(r"layers\.[23]\.", name) for name in tensors)


@pytest.mark.sweep
def test_another_process_drafts_by_them(tmp_path):
    """The command's answers are those without drafts, and some tokens were drafted."""
    dense, new = tmp_path / "dense", tmp_path / "new"
    with with_mtp("qwen3_next", dense, vocab_size=27):
        letters().save_pretrained(dense)
        with changed(dense / "generation_config.json") as config:
            config["eos_token_id"] = None
        converted(dense, new, *FOUR)
    said = {}
    for speculative in ("none", "mtp"):
        command = [
            sys.executable,
            "-c",
            COMMAND,
            "chat",
            str(new),
            "--speculative",
            speculative,
            "--device",
            "cpu",
        ]
        command += ["--set", "max_new_tokens=60", "--set", "temperature=0"]
        said[speculative] = subprocess.run(
            command, input="abcabc\n!exit\n", env=environment(), capture_output=True, text=True, timeout=200
        )
        assert said[speculative].returncode == 0, said[speculative].stderr
    answers = {speculative: own.stdout.split("tokens")[0] for speculative, own in said.items()}
    assert answers["none"] == answers["mtp"] and " of " in said["mtp"].stderr
