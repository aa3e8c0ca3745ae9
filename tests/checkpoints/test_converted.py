"""`convert` is `from_pretrained` plus a file: of the same folder both make the same model, bit for bit."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support import mlx_models, tiny_models
from support.checkpoints import fp8_blocks, mxfp4_blocks
from support.models import output, prompt, tiny
from support.sweep import covering, in_sweep

import torch_moe_mps
from torch_moe_mps.checkpoints.own.config import QuantizationConfig
from torch_moe_mps.commands import main
from torch_moe_mps.models.modules.linears import formats_in, has_quantized_weights

transformers.logging.set_verbosity_error()

FORMAT = {"bits": 4, "group_size": 32}
OPTIONS = ("--bits", "4", "--group-size", "32")


def dense(folder: Path):
    tiny("qwen3_moe").save_pretrained(folder)


def sharded(folder: Path):
    tiny("qwen3_moe").save_pretrained(folder, max_shard_size="60KB")


def both_layouts(folder: Path):
    """One file, and an index of others beside it: transformers reads the file."""
    sharded(folder)
    other = tiny("qwen3_moe")
    tiny_models.randomise(other, 1)
    other.save_pretrained(folder / "other")
    shutil.move(folder / "other" / "model.safetensors", folder / "model.safetensors")
    shutil.rmtree(folder / "other")


def fp8(folder: Path):
    fp8_blocks(tiny("qwen3_moe"), folder)


def mxfp4(folder: Path):
    mxfp4_blocks(tiny("gpt_oss"), folder)


def partly_ours(folder: Path):
    model = tiny("qwen3_moe")
    torch_moe_mps.accelerate(model, 4, 32, linear_bits=None)
    model.save_pretrained(folder)


def mlx(folder: Path):
    pytest.importorskip("mlx_lm")
    mlx_models.write(mlx_models.tiny("qwen3_moe"), folder / "made", 4)
    shutil.copytree(folder / "made" / "mlx", folder, dirs_exist_ok=True)
    shutil.rmtree(folder / "made")


def multimodal(folder: Path):
    mlx_models.tiny("qwen3_5_moe with vision").save_pretrained(folder)


def other_multimodal(folder: Path):
    mlx_models.tiny("qwen3_vl_moe").save_pretrained(folder)


def classifier(folder: Path):
    with tiny_models.groups_of_32():
        config = tiny_models.tiny_config("qwen3_moe", num_labels=3)
    model = transformers.Qwen3MoeForSequenceClassification(config)
    tiny_models.randomise(model, 0)
    model.save_pretrained(folder)


def base(folder: Path):
    tiny("qwen3_moe").model.save_pretrained(folder)


def put_a_stray_file(folder: Path) -> None:
    """Averaged weights beside the real ones, under the same keys."""
    for file in sorted(folder.glob("*.safetensors")):
        tensors = {name: torch.zeros_like(tensor) for name, tensor in load_file(file).items()}
        save_file(tensors, folder / f"{file.stem}_ema.safetensors", {"format": "pt"})
        save_file(tensors, folder / f"zz.{file.stem}.safetensors", {"format": "pt"})


SOURCES = (
    *(dense, sharded, both_layouts, fp8, mxfp4, partly_ours, mlx),
    *(multimodal, other_multimodal, classifier, base),
)
OFTEN = (both_layouts, partly_ours, multimodal)


@pytest.mark.parametrize("write", in_sweep(SOURCES, OFTEN), ids=lambda f: f.__name__)
def test_convert_is_loading_plus_a_file(write, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    write(source)
    put_a_stray_file(source)
    loaded = torch_moe_mps.from_pretrained(str(source), **FORMAT)
    assert main(["convert", str(source), str(tmp_path / "new"), *OPTIONS]) == 0
    converted = torch_moe_mps.from_pretrained(str(tmp_path / "new"))
    stored = json.loads((source / "config.json").read_text())["architectures"]
    assert [type(loaded).__name__] == [type(converted).__name__] == stored
    ours, theirs = loaded.state_dict(), converted.state_dict()
    assert ours.keys() == theirs.keys() and any(name.endswith("packed") for name in ours)
    for name in ours:
        assert ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]), name
    # Not bit for bit: dense matrices lie elsewhere in memory, and the CPU looks at where they start.
    torch.testing.assert_close(output(loaded, prompt()), output(converted, prompt()), rtol=0, atol=1e-5)
    formats = {str(format) for m in converted.modules() for format in formats_in(m).values()}
    assert formats == ({"affine4_32", "mxfp4"} if write is mxfp4 else {"affine4_32"})
    assert list(map(has_quantized_weights, loaded.modules())) == [
        has_quantized_weights(module) for module in converted.modules()
    ]


@pytest.mark.parametrize(("layout", "architecture"), covering(("moe_mps", "mlx"), ("qwen3_moe", "gpt_oss")))
def test_mxfp8_becomes_fewer_bits(layout, architecture, tmp_path):
    """Of its values; what a recipe keeps is dense, and what it wants in MXFP8 has the same codes."""
    with tiny_models.groups_of_32():
        tiny_models.tiny_model(architecture, torch.bfloat16).save_pretrained(tmp_path / "dense")
    new = tmp_path / "new"
    command = ["convert", tmp_path / "dense", new, "--mode", "mxfp8", "--to", layout, "--dtype", "bfloat16"]
    assert main([*map(str, command)]) == 0
    eight = torch_moe_mps.from_pretrained(new)
    expected = type(eight).from_pretrained(tmp_path / "dense")
    tiny_models.dense_twin(expected, eight)
    recipe = {"keep": ["o_proj"], "overrides": {"q_proj": {"mode": "mxfp8"}}}
    model = torch_moe_mps.from_pretrained(new, **FORMAT, **recipe)
    report = torch_moe_mps.accelerate(expected, **FORMAT, **recipe)
    state = expected.state_dict()
    mine = model.state_dict()
    assert mine.keys() == state.keys() and any(map(has_quantized_weights, model.modules()))
    for name, tensor in state.items():
        same = eight.state_dict()[name] if "q_proj" in name and "bias" not in name else tensor
        assert torch.equal(mine[name], same), name
    assert report.quantization is not None


# Other ways to load what was converted


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Path:
    """A language model."""
    folder = tmp_path_factory.mktemp("converted")
    dense(folder / "dense")
    assert main(["convert", str(folder / "dense"), str(folder / "new"), *OPTIONS]) == 0
    return folder / "new"


@pytest.mark.parametrize("head", ["AutoModel", "AutoModelForSequenceClassification"])
def test_a_class_without_the_head_just_has_none(head, converted):
    whole = torch_moe_mps.from_pretrained(str(converted))
    other = torch_moe_mps.from_pretrained(converted, getattr(transformers, head))
    ours, theirs = other.base_model.state_dict(), whole.model.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert torch.equal(output(other.base_model, prompt()), output(whole.model, prompt()))


CLASSES = ("AutoModelForImageTextToText", "AutoModelForCausalLM", "AutoModel")


@pytest.mark.parametrize("cls", in_sweep(CLASSES, ("AutoModelForCausalLM",)))
def test_a_multimodal_model_loads_whole_and_in_part(cls, tmp_path):
    multimodal(tmp_path / "dense")
    assert main(["convert", str(tmp_path / "dense"), str(tmp_path / "new"), *OPTIONS]) == 0
    loaded = torch_moe_mps.from_pretrained(tmp_path / "new", getattr(transformers, cls))
    dense = getattr(transformers, cls).from_pretrained(tmp_path / "dense")
    torch_moe_mps.accelerate(dense, **FORMAT)
    ours, theirs = loaded.state_dict(), dense.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("layout", ["moe_mps", "mlx"])
def test_programs_that_pass_a_config_of_ours(layout, converted, tmp_path):
    folder = tmp_path / "new"
    assert main(["convert", str(converted), str(folder), "--to", layout]) == 0
    passed = QuantizationConfig(bits=4, group_size=32)
    loaded = torch_moe_mps.from_pretrained(folder, quantization_config=passed)
    expected = torch_moe_mps.from_pretrained(str(converted))
    assert torch.equal(output(loaded, prompt()), output(expected, prompt()))


def test_libraries_that_call_transformers(converted):
    """They pass a config that has ours of the checkpoint's weights, as docs/embeddings.md shows."""
    stored = transformers.AutoConfig.from_pretrained(converted).quantization_config
    ours = {"quantization_config": QuantizationConfig(**stored)}
    config = transformers.AutoConfig.from_pretrained(converted, **ours)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(converted, config=config)
    expected = torch_moe_mps.from_pretrained(str(converted))
    assert torch.equal(output(loaded, prompt()), output(expected, prompt()))


def test_weights_that_a_config_asks_for_are_never_random(converted, tmp_path):
    """A config with words of another method beside those of our layout, which count."""
    shutil.copytree(converted, tmp_path / "new")
    path = tmp_path / "new" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= {"bits": 4, "source": {"quant_method": "fp8"}}
    path.write_text(json.dumps(config))
    found, expected = map(torch_moe_mps.from_pretrained, (tmp_path / "new", converted))
    assert torch.equal(output(found, prompt()), output(expected, prompt()))
