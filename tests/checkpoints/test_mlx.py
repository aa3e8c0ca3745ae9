"""Checkpoints of MLX: mlx-lm writes them, and its logits are the oracle."""

import importlib
import json
import re
from contextlib import contextmanager
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers
from support import mlx_models
from support.models import assert_close, output, prompt

import torch_moe_mps
from torch_moe_mps.checkpoints.mlx.reading import MlxLayout
from torch_moe_mps.models.basics.interface import formats_of

pytest.importorskip("mlx_lm")
transformers.logging.set_verbosity_error()


def assert_same_tokens(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert_close(ours, theirs, 2e-5)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])
def test_dense_checkpoints(architecture, tmp_path):
    model = mlx_models.tiny(architecture)
    oracle = mlx_models.write(model, tmp_path, None)
    assert_same_tokens(output(mlx_models.load(tmp_path, type(model)), prompt()), mlx_models.logits(oracle))


def test_every_module_has_its_own_format(tmp_path):
    """A recipe of mlx-lm, with a module that stays dense."""

    def predicate(path, module):
        if "k_proj" in path:
            return False
        bits = 6 if "down_proj" in path or "lm_head" in path else 3
        return {"group_size": 32, "bits": bits, "mode": "affine"}

    model = mlx_models.tiny("qwen3_moe")
    oracle = mlx_models.write(model, tmp_path, 4, predicate=predicate)
    loaded = mlx_models.load(tmp_path, type(model))
    assert isinstance(loaded.model.layers[0].self_attn.k_proj, torch.nn.Linear)
    assert [f.bits for f in formats_of(loaded.model.layers[0].mlp.experts).values()] == [3, 6]
    assert loaded.lm_head.format.bits == 6
    assert_same_tokens(output(loaded, prompt()), mlx_models.logits(oracle))
    loaded.save_pretrained(tmp_path / "ours")
    again, info = torch_moe_mps.from_pretrained(
        tmp_path / "ours", type(model), output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info.values())
    assert torch.equal(output(again.eval(), prompt()), output(torch_moe_mps.restore(loaded), prompt()))


def test_matrices_of_one_parameter_have_one_format(tmp_path):
    """Those of gate and up projections, which are one parameter here, and those of a layer's experts."""

    def predicate(path, module):
        return {"group_size": 32, "bits": 8 if "1.mlp.switch_mlp.up_proj" in path else 4, "mode": "affine"}

    model = mlx_models.tiny("qwen3_moe")
    mlx_models.write(model, tmp_path, 4, predicate=predicate)
    experts = r"model\.layers\.1\.mlp\.switch_mlp"
    expected = rf"{experts}\.gate_proj and {experts}\.up_proj must be in one format, got .*4_32 and .*8_32$"
    with pytest.raises(ValueError, match=expected):
        mlx_models.load(tmp_path, type(model))


def test_a_dense_checkpoint_is_saved_under_the_names_of_the_class(tmp_path):
    """DBRX has its experts in three flat parameters: transformers would make new ones for other names."""
    model = mlx_models.tiny("dbrx")
    mlx_models.write(model, tmp_path, None)
    loaded = mlx_models.load(tmp_path, type(model))
    loaded.save_pretrained(tmp_path / "back")
    back, info = type(model).from_pretrained(
        tmp_path / "back", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info.values())
    for name, weight in model.state_dict().items():
        assert torch.equal(back.state_dict()[name], weight), name


@pytest.mark.parametrize(("architecture", "ends"), [("qwen3_moe", "down_proj"), ("dbrx", (".w1", ".v1"))])
def test_experts_with_one_matrix_in_few_bits_are_dense(architecture, ends, tmp_path):
    model = mlx_models.tiny(architecture)
    predicate = lambda path, _: not path.endswith(ends) and {"group_size": 32, "bits": 4, "mode": "affine"}  # noqa: E731
    oracle = mlx_models.write(model, tmp_path, 4, predicate=predicate)
    loaded = mlx_models.load(tmp_path, type(model))
    assert not any(name.endswith("_proj_packed") for name in loaded.state_dict())
    assert_same_tokens(output(loaded, prompt()), mlx_models.logits(oracle))


def test_a_layer_of_matrices_in_two_formats_is_dense(tmp_path):
    """Gate and up projection of a layer without experts, which are one here."""

    def predicate(path, module):
        return {"group_size": 32, "bits": 8 if path.endswith("0.mlp.up_proj") else 4, "mode": "affine"}

    model = mlx_models.tiny("minimax_m3_vl")
    oracle = mlx_models.write(model, tmp_path, 4, predicate=predicate)
    loaded = mlx_models.load(tmp_path, type(model))
    layer = loaded.get_submodule("model.language_model.layers.0.mlp")
    assert type(layer.gate_up_proj) is torch.nn.Linear and layer.down_proj.format.bits == 4
    assert_same_tokens(output(loaded, prompt()), mlx_models.logits(oracle))


def test_global_scales_of_nvfp4_are_refused(tmp_path):
    """MLX applies them on CUDA GPUs only."""
    model = mlx_models.tiny("qwen3_moe")
    mlx_models.write(model, tmp_path, 4, 16, "nvfp4", global_scale=True)
    with pytest.raises(ValueError, match="must be in a format of MLX without a global scale"):
        mlx_models.load(tmp_path, type(model))


def test_the_auto_classes_read_them(tmp_path):
    model = mlx_models.tiny("qwen3_moe")
    oracle = mlx_models.write(model, tmp_path, 4)
    loaded = torch_moe_mps.from_pretrained(tmp_path / "mlx", dtype=torch.float32).eval()
    assert_same_tokens(output(loaded, prompt()), mlx_models.logits(oracle))


def test_only_the_language_model_is_in_a_checkpoint(tmp_path):
    """mlx-lm writes nothing of a vision tower: what needs one says so, also after saving."""
    model = mlx_models.tiny("qwen3_vl_moe")
    oracle = mlx_models.write(model, tmp_path, 4)
    loaded = mlx_models.load(tmp_path, type(model))
    assert not [name for name, _ in loaded.named_parameters() if "visual" in name]
    loaded.save_pretrained(tmp_path / "ours")
    again = torch_moe_mps.from_pretrained(tmp_path / "ours", type(model), attn_implementation="eager").eval()
    for each in (loaded, again):
        assert_same_tokens(output(each, prompt()), mlx_models.logits(oracle))
        with pytest.raises((AttributeError, RuntimeError), match=r"must have model\.visual for this, got"):
            output(each, prompt(), pixel_values=torch.zeros(4, 8), image_grid_thw=torch.tensor([[1, 2, 2]]))


def test_types_that_only_mlx_lm_knows(tmp_path):
    """Kimi K2 is DeepSeek's model with another name; another type is one line."""
    model = mlx_models.tiny("deepseek_v3")
    oracle = mlx_models.write(model, tmp_path, 4)
    path = tmp_path / "mlx" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"model_type": "kimi_k2"}))
    loaded = mlx_models.load(tmp_path)
    assert_same_tokens(output(loaded, prompt()), mlx_models.logits(oracle))
    kinds = ("Klear", "bailing_moe", "bailing_moe_linear", "deepseek", "deepseek_v41", "hunyuan", "kimi_k3")
    for kind in (*kinds, "kimi_vl", "longcat_flash_ngram", "phixtral"):
        path.write_text(json.dumps(config | {"model_type": kind}))
        with pytest.raises(
            ValueError, match=rf"^moe_mps::from_pretrained: model_type must be .*, got '{kind}'$"
        ):
            torch_moe_mps.from_pretrained(str(path.parent))


def test_types_that_no_class_here_is_for(tmp_path):
    """The same names in mlx-lm and transformers may be of two models."""
    model = mlx_models.tiny("minimax_m2")
    mlx_models.write(model, tmp_path, 4)
    path = tmp_path / "mlx" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"model_type": "minimax", "layer_types": None}))
    error = "model.layers.0.mlp.experts.gate_up_proj must be in the checkpoint of MLX"
    with pytest.raises(ValueError, match=rf"^moe_mps::load: {error}, .*$"):
        torch_moe_mps.from_pretrained(str(path.parent))


@pytest.mark.sweep
def test_another_bailing_hybrid_is_one_line(tmp_path):
    """Without BailingMoeV3ForCausalLM mlx-lm means another model than transformers does."""
    from mlx_lm import utils

    model = mlx_models.tiny("bailing_hybrid")
    keys = mlx_models.with_older_keys(model.config.to_dict())
    others = {"architectures": ["BailingMoeV2_5ForCausalLM"], "group_norm_size": 2, "q_lora_rank": 32}
    others |= {"num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 64}
    cls, arguments = utils._get_classes(keys | others)
    written, config = utils.quantize_model(cls(arguments.from_dict(keys | others)), keys | others, 32, 4)
    utils.save_model(tmp_path / "mlx", written)
    utils.save_config(config, tmp_path / "mlx" / "config.json")
    with pytest.raises(ValueError, match=r"^moe_mps::load: model.layers.\S+ must be .*$"):
        mlx_models.load(tmp_path, type(model))


def test_what_mlx_drops_is_made_where_it_is_loaded(tmp_path):
    """A process of a pipeline makes nothing for the layers of others."""
    model = mlx_models.tiny("ernie4_5_moe")
    mlx_models.write(model, tmp_path, None)
    with torch.device("meta"):
        empty = type(model)(model.config)
    layout = MlxLayout(empty, [str(tmp_path / "mlx" / "model.safetensors")], {})
    for is_loaded in (False, True):
        layout.finish(lambda owner, is_loaded=is_loaded: is_loaded)
        biases = [empty.get_parameter(name) for name in layout.dropped]
        assert biases and all(bias.is_meta != is_loaded for bias in biases)
    assert not any(bias.any() for bias in biases)


@contextmanager
def written(folder):
    """A model and the tensors of its checkpoint in 4 bit, which may be changed within `with`."""
    model = mlx_models.tiny("qwen3_moe")
    mlx_models.write(model, folder, 4)
    path = folder / "mlx" / "model.safetensors"
    stored = safetensors.torch.load_file(path)
    yield model, stored
    safetensors.torch.save_file(stored, path, metadata={"format": "mlx"})


LAYER = "model.layers.1.self_attn.q_proj"
# {what is wrong: (the tensor of a layer, what becomes of it, the message)}
WRONG = {
    "words that do not fit": (
        "weight",
        lambda tensor: tensor.repeat(1, 4),
        rf"{LAYER}.weight must be of shape \((\d+), 8\), got \(\1, 32\)$",
    ),
    "scales and biases of two dtypes": (
        "biases",
        torch.Tensor.half,
        rf"{LAYER}.biases must be of F32, as {LAYER}.scales, got F16$",
    ),
    "no such tensor": ("weight", None, rf"{LAYER}.weight must be in the checkpoint of MLX"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_tensor_is_one_line(what, tmp_path):
    part, change, message = WRONG[what]
    with written(tmp_path) as (model, stored):
        if change is None:
            for each in ("weight", "scales", "biases"):
                del stored[f"{LAYER}.{each}"]
        else:
            stored[f"{LAYER}.{part}"] = change(stored[f"{LAYER}.{part}"])
    with pytest.raises(ValueError, match=message):
        mlx_models.load(tmp_path, type(model))


def test_the_list_names_what_is_tested():
    text = (Path(__file__).parents[2] / "docs" / "mlx.md").read_text()
    _, _, text = text.partition("scripts/make/make_mlx_table.py writes what follows -->\n")
    assert re.findall(r"`([^`]*)`[,.]", text.replace("\n", " ")) == sorted(mlx_models.ARCHITECTURES)
    assert "\n- " not in text  # formats that differ


def test_every_architecture_of_mlx_lm_with_experts_is_named():
    """Those that are read are in the table; the others have a reason."""
    text = (Path(__file__).parents[2] / "docs" / "mlx.md").read_text()
    named = set(re.findall(r"`(\w+)`", text))
    models = Path(importlib.import_module("mlx_lm.models").__path__[0])
    importing = re.compile(r"^(?:from|import) .*\b(?:switch_layers)\b", re.MULTILINE)
    found = {file.stem for file in models.glob("*.py") if importing.search(file.read_text())}
    assert len(found) > 30 and not {name.removesuffix("_text") for name in found} - named


@pytest.mark.parametrize("truncate", [True, pytest.param(False, marks=pytest.mark.sweep)])
def test_yarn_of_gpt_oss(truncate, tmp_path):
    """gpt-oss says "truncate": false: mlx-lm rounds the range of the ramp all the same."""
    rope = {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 64, "truncate": truncate,
    }  # fmt: skip
    with mlx_models.tiny_models.groups_of_32(), mlx_models.tiny_models.sizes(**mlx_models.SIZES, head_dim=32):
        model = mlx_models.tiny_models.tiny_model("gpt_oss", rope_parameters=rope)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    oracle = mlx_models.write(model, tmp_path, 4, rope_scaling=scaling)
    config = tmp_path / "mlx" / "config.json"
    assert json.loads(config.read_text())["rope_parameters"]["truncate"] is truncate
    ours, theirs = output(mlx_models.load(tmp_path, type(model)), prompt()), mlx_models.logits(oracle)
    error = float((ours - theirs).abs().max() / theirs.abs().max())
    assert error <= 2e-5 if truncate else error > 1e-4


@pytest.mark.parametrize(
    "architecture", ["qwen3_moe", *(pytest.param(n, marks=pytest.mark.sweep) for n in ("gpt_oss", "mixtral"))]
)
def test_bfloat16_within_rounding(architecture, tmp_path):
    """Two roundings of bfloat16 apart from mlx-lm, as mlx-lm is from its own float32."""
    model = mlx_models.tiny(architecture).to(torch.bfloat16)
    oracle = mlx_models.write(model, tmp_path, 4)
    theirs = mlx_models.logits(oracle)
    exact = output(mlx_models.load(tmp_path, type(model)), prompt())
    ours = output(mlx_models.load(tmp_path, type(model), dtype=torch.bfloat16), prompt()).float()
    scale = exact.abs().max()
    own = (theirs - exact).abs().max() / scale
    assert (ours - exact).abs().max() / scale <= max(2 * own, 2**-7)
