"""Models written for MLX: mlx-lm reads them, and has the same logits."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support import mlx_models, tiny_models
from support.models import assert_close, output, prompt
from support.sweep import covering, in_sweep

import torch_moe_mps
from torch_moe_mps.checkpoints.mlx.older_keys import with_older_keys
from torch_moe_mps.checkpoints.mlx.writing import save_mlx
from torch_moe_mps.commands import main
from torch_moe_mps.models.basics.interface import is_experts, is_quantized
from torch_moe_mps.models.modules.linears import QuantizedLayer, formats_in

pytest.importorskip("mlx_lm")
transformers.logging.set_verbosity_error()

# A module of MLX whose words are dequantised when they are read: routers, and the halves of kv_b_proj.
REWRITTEN = (
    *("gate", "gate.gate", "gate.proj", "router", "router.classifier", "router.layer", "shared_expert_gate"),
    *("embed_q", "unembed_out"),
)
ALWAYS = ["qwen3_moe", "gpt_oss"]
# transformers 5 does not keep all that mlx-lm reads of its config.
ONLY_OF_ORIGINALS = ("mimo_v2_flash",)
EVERY = in_sweep(mlx_models.ARCHITECTURES, ALWAYS)
FORMATS = [(bits, 32, "affine") for bits in (4, 2, 3, 5, 6, 8)]
FORMATS += [(4, 64, "affine"), (4, 32, "mxfp4"), (8, 32, "mxfp8"), (4, 16, "nvfp4")]
OFTEN = [
    *((name, FORMATS[0]) for name in ("qwen3_moe", "deepseek_v3", "dbrx")),
    *(("gpt_oss", FORMATS[7]), ("qwen3_next", FORMATS[4])),
]
# In the sweep each architecture in the first format, and in two others in turn.
IN_THE_SWEEP = [
    pytest.param(name, FORMATS[number], marks=pytest.mark.sweep)
    for turn, name in enumerate(mlx_models.ARCHITECTURES)
    for number in (0, 1 + 2 * turn % 9, 1 + (2 * turn + 1) % 9)
    if (name, FORMATS[number]) not in OFTEN
]
IN_THE_SWEEP.append(pytest.param("qwen3_moe", (1, 32, "affine"), marks=pytest.mark.sweep))


def config_of(model, folder) -> dict:
    """What transformers writes into config.json."""
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    return mlx_models.with_older_keys(config) if config["model_type"] in ONLY_OF_ORIGINALS else config


def convert(folder, source, target, *options) -> None:
    paths = folder / source, folder / target
    assert main([*map(str, ("convert", *paths, "--to", "mlx", *options))]) == 0


def assert_mlx_computes_the_same(model, converted) -> None:
    theirs = mlx_models.logits(converted)
    ours = output(model, prompt())
    assert_close(theirs, ours, 2e-5)
    assert torch.equal(theirs.argmax(-1), ours.argmax(-1))


@pytest.mark.parametrize("architecture", EVERY)
def test_mlx_reads_what_is_quantised_here(architecture, tmp_path):
    """Mixed formats, and layers that stay dense."""
    model = mlx_models.tiny(architecture).eval()
    for name, tensor in model.state_dict().items():
        if architecture == "ernie4_5_moe" and name.endswith("e_score_correction_bias"):
            tensor.zero_()  # mlx-lm drops it
    config = config_of(model, tmp_path / "dense")
    torch_moe_mps.accelerate(
        model, 4, 32, embedding_bits=6, overrides={"experts.down_proj": 8}, keep=["*.o[u_]*proj"]
    )
    (tmp_path / "mlx").mkdir()
    save_mlx(model, tmp_path / "mlx", config)
    assert_mlx_computes_the_same(model, mlx_models.read(tmp_path / "mlx"))
    again = mlx_models.load(tmp_path, type(model))
    assert_close(output(again, prompt()), output(model, prompt()), 2e-5)


@pytest.mark.parametrize(("architecture", "form"), [*OFTEN, *IN_THE_SWEEP], ids=str)
def test_words_come_back(architecture, form, tmp_path):
    """A checkpoint of mlx-lm is read, with its logits, and written."""
    model = mlx_models.tiny(architecture)
    oracle = mlx_models.write(model, tmp_path, *form)
    loaded = mlx_models.load(tmp_path, type(model))
    experts = [module for module in loaded.modules() if is_experts(module)]
    assert experts and all(map(is_quantized, experts))
    assert any(isinstance(module, QuantizedLayer) for module in loaded.modules())
    assert_mlx_computes_the_same(loaded, oracle)
    written = mlx_models.write_back(loaded, tmp_path)
    stored, back = (load_file(tmp_path / name / "model.safetensors") for name in ("mlx", "back"))
    rewritten = {name for name in stored if name.rpartition(".")[0].endswith(REWRITTEN)}
    assert stored.keys() - rewritten == back.keys() - rewritten
    for name in stored.keys() - rewritten:
        assert stored[name].dtype == back[name].dtype and torch.equal(stored[name], back[name]), name
    assert any(tensor.dtype == torch.uint32 for tensor in back.values())
    assert_mlx_computes_the_same(loaded, written)


@pytest.mark.parametrize("architecture", in_sweep(mlx_models.ARCHITECTURES, ("deepseek_v3", "mistral3")))
def test_what_is_planned_is_written(architecture, tmp_path):
    """One half of kv_b_proj is dense, towers are left out; buffers, of at most 64 bytes, are not planned."""
    config = config_of(mlx_models.tiny(architecture), tmp_path / "dense")
    (tmp_path / "dense" / "config.json").write_text(json.dumps(config))
    convert(tmp_path, "dense", "mlx", "--group-size", 32, "--json", tmp_path / "plan.json")
    size = sum(tensor.nbytes for tensor in load_file(tmp_path / "mlx" / "model.safetensors").values())
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert size - 64 <= plan["after"] <= size
    assert sum(weight["after"] for weight in plan["weights"]) == plan["after"]


@pytest.mark.sweep
@pytest.mark.parametrize(("architecture", "bits"), covering(("qwen3_moe", "qwen3"), (1, 2)))
def test_groups_of_128_as_a_whole_model(architecture, bits, tmp_path):
    """Few bits, as Bonsai has them: written here and by mlx-lm, read here and there, the same tokens."""
    wide = dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 128)
    wide |= {"head_dim": 64, "num_attention_heads": 4}
    with tiny_models.sizes(**wide):
        model = tiny_models.tiny_model(architecture)
    oracle = mlx_models.write(model, tmp_path, bits, 128)
    loaded = mlx_models.load(tmp_path, type(model))
    assert_mlx_computes_the_same(loaded, oracle)
    assert greedy(loaded) == greedy_of_mlx(oracle)
    options = ("--bits", bits, "--group-size", 128, "--linear-bits", "same", "--embedding-bits", "same")
    for target in ("mlx", "moe_mps"):
        paths = tmp_path / "dense", tmp_path / f"as {target}"
        assert main([*map(str, ("convert", *paths, "--to", target, *options))]) == 0
    written = mlx_models.read(tmp_path / "as mlx")
    for folder in ("as mlx", "as moe_mps"):
        own = torch_moe_mps.from_pretrained(str(tmp_path / folder), attn_implementation="eager")
        formats = {str(f) for module in own.modules() for f in formats_in(module).values()}
        assert formats == {f"affine{bits}_128"}
        assert_mlx_computes_the_same(own, written)
        assert greedy(own) == greedy_of_mlx(written)


def greedy(model) -> list[int]:
    """Eight tokens behind the first row of the prompt."""
    ids = prompt()[:1]
    found = model.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    return found[0, ids.shape[1] :].tolist()


def greedy_of_mlx(converted) -> list[int]:
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    return [int(token) for token, _ in generate_step(mx.array(prompt()[0].numpy()), converted, max_tokens=8)]


def test_what_mlx_drops_is_said(tmp_path):
    model = mlx_models.tiny("ernie4_5_moe")
    config = config_of(model, tmp_path / "dense")
    (tmp_path / "mlx").mkdir()
    with pytest.warns(UserWarning, match=r"mlx-lm drops \S+\.e_score_correction_bias and 0 others like it"):
        save_mlx(model, tmp_path / "mlx", config)


def test_dense_models(tmp_path):
    model = mlx_models.tiny("qwen3_moe").eval()
    config = config_of(model, tmp_path / "dense")
    (tmp_path / "mlx").mkdir()
    save_mlx(model, tmp_path / "mlx", config)
    assert_mlx_computes_the_same(model, mlx_models.read(tmp_path / "mlx"))


def test_a_folder_of_the_users_stays_as_it_is(tmp_path):
    """Beside files and folders nothing is written, and nothing of them is removed."""
    model = mlx_models.tiny("qwen3_moe").eval()
    config, folder = config_of(model, tmp_path / "dense"), tmp_path / "mine"
    (folder / "photos").mkdir(parents=True)
    for name in ("notes.txt", "photos/a.jpg", "model-00001.safetensors", "unfinished.json"):
        (folder / name).write_text(name)
    with pytest.raises(
        ValueError, match=r"mine must be an empty folder, got one with model-00001\.safetensors"
    ):
        save_mlx(model, folder, config)
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert len(files) == 4 and all(file.read_text() == str(file.relative_to(folder)) for file in files)


def test_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr("torch_moe_mps.checkpoints.layouts.files.LARGEST", 30000)
    model = mlx_models.tiny("qwen3_moe").eval()
    config_of(model, tmp_path / "dense")
    convert(tmp_path, "dense", "mlx", "--bits", 4, "--group-size", 32)
    assert len(list((tmp_path / "mlx").glob("*.safetensors"))) > 2
    again = torch_moe_mps.from_pretrained(str(tmp_path / "mlx"))
    torch_moe_mps.accelerate(model, 4, 32)
    assert torch.equal(output(model, prompt()), output(again, prompt()))


def test_packed_experts_that_a_trial_recognised_are_planned(tmp_path, capsys):
    """On the meta device: what their code reads is made anew there, in place of the checkpoint's tensors."""
    with tiny_models.groups_of_32():
        model = tiny_models.tiny_model("step3p7")
    torch_moe_mps.accelerate(model, 4, 32)
    model.save_pretrained(tmp_path / "packed")
    convert(tmp_path, "packed", "mlx", "--dry-run")
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "experts.gate_up_proj" in line]
    assert row.split()[1:3] == ["affine4_32", "affine4_32"]


@pytest.mark.sweep
@pytest.mark.parametrize("architecture", ["kimi_k25", "qwen3_vl_moe", "gemma4 with vision", "step3p5"])
def test_the_language_model_of_more_is_converted(architecture, tmp_path):
    """A dense model with its tower and the projector beside it, and what MLX has of it."""
    model = mlx_models.tiny(architecture)
    model.save_pretrained(tmp_path / "dense")
    convert(tmp_path, "dense", "mlx", "--bits", 4, "--group-size", 32)
    convert(tmp_path, "mlx", "again")
    torch_moe_mps.accelerate(model, 4, 32)
    for folder in ("mlx", "again"):
        assert_mlx_computes_the_same(model, mlx_models.read(tmp_path / folder))


@pytest.mark.parametrize(
    "architecture",
    in_sweep(
        ("qwen3_5_moe with vision", "qwen3_5_moe", *mlx_models.WITHOUT_EXPERTS),
        ("qwen3_5_moe with vision", "gemma4 without experts"),
    ),
)
def test_one_layout_with_and_without_vision(architecture, tmp_path):
    """mlx-lm reads a model for text as the language part of one with vision; so it is written, and read."""
    model = mlx_models.tiny(architecture)
    model.save_pretrained(tmp_path / "dense")
    convert(tmp_path, "dense", "mlx", "--bits", 4, "--group-size", 32)
    torch_moe_mps.accelerate(model, 4, 32)
    assert_mlx_computes_the_same(model, mlx_models.read(tmp_path / "mlx"))
    again = mlx_models.load(tmp_path)
    assert type(again) is type(model)
    assert_close(output(again, prompt()), output(model, prompt()), 1e-5)


@pytest.mark.parametrize("kind", [*mlx_models.ARCHITECTURES, "llama"])
def test_the_config_of_an_original_checkpoint_keeps_what_it_says(kind):
    """It may leave out what is as usual, and has older keys; none of another meaning is added to them."""
    stored = {
        "num_attention_heads": 4,
        "head_dim": 7,
        "swa_head_dim": 5,
        "layer_types": ["mamba", "attention"],
    }
    stored |= {"rotary_dim": 3, "intermediate_size": 9, "linear_attn_config": {"head_dim": 2}}
    for config in ({"model_type": kind, **stored}, {"model_type": kind}):
        assert with_older_keys(config | {"swa_head_dim": 5}).items() >= config.items()
        whole = with_older_keys({"model_type": "x", "text_config": config | {"swa_head_dim": 5}})
        assert whole["text_config"].items() >= config.items() and whole["model_type"] == "x"


def test_a_config_that_lacks_what_mlx_reads_is_one_line(tmp_path, refused):
    mlx_models.tiny("mimo_v2_flash").save_pretrained(tmp_path / "dense")
    error = refused("convert", tmp_path / "dense", tmp_path / "mlx", "--to", "mlx", progress=True)
    assert "the config must be that of the original checkpoint, with swa_head_dim" in error
    assert {path.name for path in tmp_path.iterdir()} == {"dense"}


def test_other_architectures_are_one_line(tmp_path, refused):
    model = mlx_models.tiny("qwen3_moe")
    model.save_pretrained(tmp_path / "dense")
    config = json.loads((tmp_path / "dense" / "config.json").read_text()) | {"model_type": "flex_olmo"}
    (tmp_path / "dense" / "config.json").write_text(json.dumps(config))
    error = refused("convert", tmp_path / "dense", tmp_path / "mlx", "--to", "mlx", progress=True)
    assert "model_type must be one of afmoe, " in error and "got flex_olmo" in error
    assert not (tmp_path / "mlx").exists()
