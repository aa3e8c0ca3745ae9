"""Models with quantised experts: generation, checkpoints, gpt-oss's MXFP4 blocks."""

import copy
import itertools
import json
import re

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support import tiny_models
from support.checkpoints import changed, mxfp4_blocks
from support.models import assert_close, eager, generate, operators_of, output, prompt, quantize_experts, tiny
from support.sweep import in_sweep

import torch_moe_mps
from torch_moe_mps.models.basics.interface import formats_of
from torch_moe_mps.models.modules.linears import QuantizedLayer
from torch_moe_mps.quantization import Format
from torch_moe_mps.transformers import is_experts, is_quantized

transformers.logging.set_verbosity_error()

FORMATS = [(4, 32, "affine"), (8, 32, "affine"), (4, 32, "mxfp4")]
ARCHITECTURES = ["qwen3_moe", "gpt_oss", "deepseek_v3", "nemotron_h"]


def quantised_layers(model) -> list:
    return [module for module in model.modules() if isinstance(module, QuantizedLayer)]


def stored_quantization(folder) -> dict:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize(
    ("architecture", "form"),
    [
        *(("qwen3_moe", FORMATS[2]), ("deepseek_v3", FORMATS[0]), ("gemma4", FORMATS[0])),
        *(
            pytest.param(*each, marks=pytest.mark.sweep)
            for each in itertools.product(ARCHITECTURES, FORMATS)
            if each not in (("qwen3_moe", FORMATS[2]), ("deepseek_v3", FORMATS[0]))
        ),
        *(
            pytest.param(name, FORMATS[0], marks=pytest.mark.sweep)
            for name in tiny_models.architectures()
            if name not in (*ARCHITECTURES, "gemma4")
        ),
    ],
    ids=str,
)
def test_logits_generation_and_checkpoint(architecture, form, tmp_path):
    """Those of a dense model with the rounded weights; and what is saved is loaded."""
    dense = tiny(architecture)
    model = copy.deepcopy(dense)
    report = torch_moe_mps.accelerate(model, *form)
    tiny_models.dense_twin(dense, model)
    expected = output(model, prompt())
    assert_close(expected, output(dense, prompt()), 1e-5)
    stored = [each for m in model.modules() for each in tiny_models.quantized_parameters(m).values()]
    assert not any(tensor.requires_grad for tensors, _ in stored for tensor in tensors if tensor is not None)
    if architecture in ARCHITECTURES:
        errors = [entry.error for entries in report.quantization.modules.values() for entry in entries]
        assert errors and all(0.0 < error < 0.2 for error in errors)
        assert torch.equal(generate(model, prompt()), generate(dense, prompt()))
    model.save_pretrained(tmp_path)
    stored = stored_quantization(tmp_path)
    quantized = [name for name, m in model.named_modules() if tiny_models.quantized_parameters(m)]
    assert stored.keys() == {"library", "modules"} and stored["library"] == "torch_moe_mps"
    assert {*stored["modules"].values()} == {str(Format(*form))}
    lines = {
        n: {n, re.sub(r"\.\d+(?=\.|$)", ".*", n)} & stored["modules"].keys() for n, _ in model.named_modules()
    }
    assert [name for name, found in lines.items() if found] == quantized
    assert set().union(*lines.values()) == stored["modules"].keys()
    loaded, info = torch_moe_mps.from_pretrained(tmp_path, type(model), output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    for name, parameter in loaded.named_parameters():
        assert parameter.dtype == model.get_parameter(name).dtype
    # expert_qmm: where the activation is the model's own
    used = operators_of(lambda: output(loaded.eval(), prompt())).keys()
    assert used & {"_moe_experts_quantized", "expert_qmm"}
    assert_close(output(loaded, prompt()), expected, 1e-5)
    torch_moe_mps.accelerate(loaded)
    assert_close(output(loaded, prompt()), expected, 1e-5)


def quantise_all(model):
    quantize_experts(model, 4, 32)


def quantise_one(model):
    quantize_experts(model, 8, 32, **{"layers.1.*": None})


def quantise_in_two_formats(model):
    quantise_one(model)
    torch_moe_mps.accelerate(model, mode="mxfp4")


def quantise_layers(model):
    quantize_experts(model.model.layers[1], 4, 64)
    torch_moe_mps.accelerate(model)


@pytest.mark.parametrize(
    "quantise", [quantise_one, quantise_in_two_formats, quantise_layers], ids=lambda f: f.__name__
)
def test_a_checkpoint_has_each_module_in_its_format(quantise, tmp_path):
    model = tiny("qwen3_moe")
    quantise(model)
    expected = output(model, prompt())
    model.save_pretrained(tmp_path)
    loaded, info = torch_moe_mps.from_pretrained(tmp_path, type(model), output_loading_info=True)
    assert not any(info.values())
    assert_close(output(loaded.eval(), prompt()), expected, 1e-5)  # dense experts run their own code here
    loaded.save_pretrained(tmp_path / "again")
    assert stored_quantization(tmp_path / "again") == stored_quantization(tmp_path)


@pytest.mark.parametrize("dtype", in_sweep((torch.float16, torch.bfloat16), (torch.bfloat16,)))
def test_parts_in_float32_stay_so(dtype, tmp_path):
    """HY-V4 keeps its output head, gates and hyper-connections in float32, whose names say "scale"."""
    with tiny_models.groups_of_32():
        dense = tiny_models.tiny_model("hy_v4")
    dense.save_pretrained(tmp_path / "dense")
    model = type(dense).from_pretrained(tmp_path / "dense", dtype=dtype)
    torch_moe_mps.accelerate(model, 4, 32)
    model.save_pretrained(tmp_path / "quantised")
    streamed = torch_moe_mps.from_pretrained(str(tmp_path / "dense"), dtype=dtype, bits=4, group_size=32)
    loaded = torch_moe_mps.from_pretrained(str(tmp_path / "quantised"), dtype=dtype)
    dtypes = [
        {name: tensor.dtype for name, tensor in [*m.named_parameters(), *m.named_buffers()]}
        for m in (model, streamed, loaded)
    ]
    assert dtypes[0] == dtypes[1] == dtypes[2]
    assert dtypes[0]["lm_head._like"] == torch.float32 and dtypes[0]["model.embed_tokens._like"] == dtype


def through_peft(model):
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2)).eval()
    quantise_one(adapted)
    return adapted.merge_and_unload()


def through_compile(model):
    compiled = torch.compile(model, backend="eager")
    quantise_one(compiled)
    return compiled


@pytest.mark.parametrize("through", [through_peft, through_compile], ids=lambda f: f.__name__)
def test_what_is_wrapped_around_a_model_is_not_in_its_checkpoint(through, tmp_path):
    model = tiny("qwen3_moe")
    through(model).save_pretrained(tmp_path)
    loaded = torch_moe_mps.from_pretrained(tmp_path, type(model)).eval()
    assert_close(output(loaded, prompt()), output(model, prompt()), 1e-5)


@pytest.mark.parametrize("quantise", [quantise_all, quantise_one], ids=lambda f: f.__name__)
def test_checkpoints_of_one_class_load_in_another(quantise, tmp_path):
    model = tiny("qwen3_moe")
    quantise(model)
    expected = output(model.model, prompt())
    model.save_pretrained(tmp_path / "whole")
    base = torch_moe_mps.from_pretrained(tmp_path / "whole", transformers.AutoModel).eval()
    assert_close(output(base, prompt()), expected, 1e-6)
    base.save_pretrained(tmp_path / "base")
    whole = torch_moe_mps.from_pretrained(tmp_path / "base", transformers.AutoModelForCausalLM).eval()
    assert_close(output(whole.model, prompt()), expected, 1e-6)


def test_rejects_a_module_that_the_model_lacks(tmp_path):
    model = tiny("qwen3_moe")
    quantise_one(model)
    model.save_pretrained(tmp_path)
    with changed(tmp_path / "config.json") as config:
        modules = config["quantization_config"]["modules"]
        modules["layers.7.experts"] = modules.pop("model.layers.0.mlp.experts")
    with pytest.raises(
        ValueError, match=r"has quantised experts layers.7.experts, but the model has model.laye"
    ):
        torch_moe_mps.from_pretrained(tmp_path, type(model))


def test_rejects_a_checkpoint_without_a_tensor(tmp_path):
    """Transformers would fill it with random values, and log its name."""
    model = tiny("qwen3_omni_moe")
    quantise_all(model)
    model.save_pretrained(tmp_path)
    with changed(tmp_path / "model.safetensors") as tensors:
        del tensors[next(name for name in tensors if name.endswith("mlp.gate.weight"))]
    with pytest.raises(ValueError, match=r"mlp\.gate\.weight must be in the checkpoint, got no such tensor"):
        torch_moe_mps.from_pretrained(tmp_path, type(model))


def test_rejects_a_dense_checkpoint_without_a_tensor(tmp_path):
    """Transformers only warns of it."""
    tiny("qwen3_moe").save_pretrained(tmp_path)
    with changed(tmp_path / "model.safetensors") as tensors:
        del tensors["model.layers.1.mlp.gate.weight"]
    with pytest.raises(ValueError, match=r"^moe_mps::from_pretrained: model.layers.1.mlp.gate.weight must"):
        torch_moe_mps.from_pretrained(str(tmp_path))


@pytest.mark.parametrize(
    ("form", "part", "value"),
    [(FORMATS[0], "scales", torch.nan), (FORMATS[0], "biases", -torch.inf), (FORMATS[2], "scales", 255)],
    ids=str,
)
def test_a_scale_that_is_not_finite_is_an_error(form, part, value, tmp_path):
    """One of a layer and one of experts, which the error names."""
    model = tiny("qwen3_moe")
    torch_moe_mps.accelerate(model, *form)
    model.save_pretrained(tmp_path)
    good = load_file(tmp_path / "model.safetensors")
    for name in (f"model.layers.0.self_attn.q_proj.{part}", f"model.layers.1.mlp.experts.down_proj_{part}"):
        with changed(tmp_path / "model.safetensors") as tensors:
            tensors |= {each: tensor.clone() for each, tensor in good.items()}
            tensors[name].flatten()[-1] = value
        error = f"^moe_mps::from_pretrained: {re.escape(name)} must be finite, got NaN or inf$"
        with pytest.raises(ValueError, match=error):
            torch_moe_mps.from_pretrained(tmp_path, type(model))
        with pytest.raises(ValueError, match=error):
            torch_moe_mps.from_pretrained(str(tmp_path))


def test_another_quantiser_keeps_its_record(tmp_path):
    model = tiny("qwen3_moe")
    for record in ({"quant_method": "other"}, transformers.BitsAndBytesConfig(load_in_8bit=True)):
        model.config.quantization_config = record
        with pytest.raises(
            ValueError, match=r"already quantised with (other|bitsandbytes): .*; use bits=None"
        ):
            torch_moe_mps.accelerate(model, 4, 32)
        torch_moe_mps.accelerate(model)
        assert model.config.quantization_config is record
        assert not any(map(is_quantized, model.modules()))


def test_what_asks_for_quantisation():
    model = tiny("qwen3_moe")
    for arguments in ({"group_size": 32}, {"mode": "affine"}):
        with pytest.raises(ValueError, match=r"moe_mps::quantize: \w+=.* needs bits, one of 1, .*, got None"):
            torch_moe_mps.accelerate(model, **arguments)
    assert torch_moe_mps.accelerate(model).quantization is None
    report = torch_moe_mps.accelerate(model, mode="mxfp4")
    formats = {str(e.format) for entries in report.quantization.modules.values() for e in entries}
    assert formats == {"mxfp4"} and len(report.quantization.modules) == 2 + 8 + 2
    for argument in (
        {"linear_bits": 4},
        {"embedding_bits": None},
        {"keep": ["lm_head"]},
        {"overrides": {"lm_head": 8}},
    ):
        with pytest.raises(
            ValueError, match=f"moe_mps::quantize: {next(iter(argument))} needs bits or a mode, got n"
        ):
            torch_moe_mps.accelerate(model, **argument)


def test_mxfp4_blocks_are_never_dequantised(tmp_path):
    model = tiny("gpt_oss")
    mxfp4_blocks(model, tmp_path)
    loaded = torch_moe_mps.from_pretrained(str(tmp_path))
    expected = output(tiny_models.dense_twin(model, loaded), prompt())
    for module in filter(is_experts, loaded.modules()):
        assert module.gate_up_proj_packed.dtype in (torch.uint32, torch.int32) and not hasattr(
            module, "gate_up_proj"
        )
    assert "_moe_experts_quantized" in operators_of(lambda: output(loaded, prompt()))
    assert_close(output(loaded, prompt()), expected, 1e-5)
    loaded.save_pretrained(tmp_path / "again")
    again = torch_moe_mps.from_pretrained(str(tmp_path / "again"))
    assert torch.equal(output(again, prompt()), output(loaded, prompt()))


def test_gradients_of_scales_are_an_error():
    model = tiny("qwen3_moe")
    torch_moe_mps.accelerate(model, 4, 32)
    for parameter in model.parameters():
        parameter.requires_grad_()
    logits = model(input_ids=prompt()).logits
    with pytest.raises(RuntimeError, match="backward is not implemented for scales, zeros, only for x"):
        logits.sum().backward()


@pytest.mark.parametrize("architecture", in_sweep(("qwen3_moe", "mixtral", "gpt_oss"), ("gpt_oss",)))
def test_gradients_through_quantised_experts(architecture):
    """Norms, routers and embeddings of a packed model have the gradients of a dense one in float64."""
    dense = tiny(architecture)
    model = copy.deepcopy(dense)
    torch_moe_mps.accelerate(model, 4, 32, linear_bits=4)
    twin = tiny_models.dense_twin(dense, model).double()
    for each in (model, twin):
        for name, parameter in each.named_parameters():
            parameter.requires_grad_("norm" in name or ".gate." in name or ".router." in name)
        logits = each(input_ids=prompt()).logits.double()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), prompt().flatten()).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert len(grads) >= 6
    for name, parameter in twin.named_parameters():
        if name in grads:
            assert (grads[name] - parameter.grad).norm() <= 5e-6 * parameter.grad.norm(), name


def test_restore_keeps_quantised_experts_running():
    """Dense first, quantised then: what the dense experts ran on is not set for the quantised ones."""
    model = tiny("qwen2_moe")
    torch_moe_mps.accelerate(model)
    torch_moe_mps.accelerate(model, 4, 32)
    expected = output(model, prompt())
    torch_moe_mps.restore(model)
    assert model.config._experts_implementation == "eager"
    called = operators_of(lambda: output(model, prompt()))
    assert called.pop("_moe_experts_quantized") == 2
    assert called == {"linear_quantized": len(quantised_layers(model)) - 1, "embedding_quantized": 1}
    assert_close(output(model, prompt()), expected, 1e-5)
    torch_moe_mps.accelerate(model)
    assert_close(output(model, prompt()), expected, 1e-5)


@pytest.mark.parametrize("way", in_sweep(("accelerate", "from_pretrained"), ("from_pretrained",)))
def test_other_implementations_leave_quantised_experts_running(way, tmp_path):
    """Set for the model, or for another model with the same config."""
    model = tiny("qwen2_moe")
    torch_moe_mps.accelerate(model, 4, 32)
    if way == "from_pretrained":
        model.save_pretrained(tmp_path)
        model = torch_moe_mps.from_pretrained(tmp_path, type(model)).eval()
    expected = output(model, prompt())
    sibling = type(model)(model.config)
    implementations = ("eager", "grouped_mm", "batched_mm")
    for other, implementation in itertools.product((model, sibling), implementations):
        other.set_experts_implementation(implementation)
        assert_close(output(model, prompt()), expected, 1e-5)
        assert_close(output(copy.deepcopy(model), prompt()), expected, 1e-5)


def test_rejects_a_config_that_is_no_object(tmp_path):
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(
        ValueError, match=r"^moe_mps::from_pretrained: the config of .* must be an object, got a list$"
    ):
        torch_moe_mps.from_pretrained(str(tmp_path))


def test_arguments_of_from_pretrained(tmp_path):
    model = tiny("qwen3_moe")
    model.save_pretrained(tmp_path / "dense")
    load = torch_moe_mps.from_pretrained
    loaded, info = load(tmp_path, subfolder="dense", bits=8, group_size=32, output_loading_info=True)
    assert not info["missing_keys"] and not loaded.training
    torch_moe_mps.accelerate(model, 8, 32)
    assert_close(output(loaded, prompt()), output(model, prompt()), 1e-5)
    fewer = load(tmp_path / "dense", num_experts_per_tok=1, dtype=torch.bfloat16)
    assert fewer.config.num_experts_per_tok == 1 and fewer.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="group_size must be 32 for mode mxfp4, got 64"):
        load(tmp_path / "nothing here", mode="mxfp4", group_size=64)


@pytest.mark.parametrize("arguments", [{}, {"bits": 8, "group_size": 32}], ids=str)
def test_a_file_that_is_cut_off_is_named(arguments, tmp_path):
    """The last of several, in a subfolder, and the only one of a model that is quantised already."""
    tiny("qwen3_moe").save_pretrained(tmp_path / "dense", max_shard_size="50KB")
    model = tiny("qwen3_moe")
    torch_moe_mps.accelerate(model, 8, 32)
    model.save_pretrained(tmp_path / "packed")
    for folder in ("dense", "packed"):
        *others, last = sorted((tmp_path / folder).glob("*.safetensors"))
        assert bool(others) == (folder == "dense")
        last.write_bytes(last.read_bytes()[: last.stat().st_size // 2])
        with pytest.raises(
            ValueError, match=f"^{re.escape(str(last))} is truncated or not a safetensors file"
        ):
            torch_moe_mps.from_pretrained(tmp_path, subfolder=folder, **arguments)


@pytest.mark.parametrize(
    "name", ["../stray.safetensors", "{parent}/stray.safetensors", "in/../../stray.safetensors"]
)
@pytest.mark.parametrize("by", ["index", "config"])
def test_rejects_a_file_outside_of_the_folder(name, by, tmp_path):
    """A whole one, which transformers reads, named by the index or by the config's own entry for it."""
    folder, name = tmp_path / "model", name.format(parent=tmp_path)
    tiny("qwen3_moe").save_pretrained(folder)
    (folder / "in").mkdir()
    stray = (folder / "model.safetensors").rename(tmp_path / "stray.safetensors")
    listing = folder / ("config.json" if by == "config" else "model.safetensors.index.json")
    if by == "config":
        with changed(listing) as content:
            content["transformers_weights"] = name
    else:
        listing.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(load_file(stray), name)}))
    with pytest.raises(ValueError) as error:
        torch_moe_mps.from_pretrained(folder)
    assert str(error.value) == f"{listing} names {name}, which is outside of the folder"


@pytest.mark.parametrize("architecture", ["gemma4", "ernie4_5_moe"])
def test_rejects_more_experts_a_token_than_a_layer_has(architecture, tmp_path):
    tiny(architecture).save_pretrained(tmp_path)
    name = {"gemma4": "top_k_experts", "ernie4_5_moe": "moe_k"}[architecture]
    with changed(tmp_path / "config.json") as content:
        content.get("text_config", content)[name] = 9
    expected = f"^moe_mps::from_pretrained: {name} must be at most 8, the experts of a layer, got 9$"
    with pytest.raises(ValueError, match=expected):
        torch_moe_mps.from_pretrained(tmp_path)


def test_more_experts_a_token_than_have_weights(tmp_path):
    """LongCat's router chooses experts that give their input, too."""
    sizes = {"n_routed_experts": 4, "zero_expert_num": 4, "moe_topk": 8}
    model = tiny("longcat_flash", **sizes)
    model.save_pretrained(tmp_path)
    assert_close(
        output(torch_moe_mps.from_pretrained(tmp_path).eval(), prompt()), output(model, prompt()), 1e-5
    )
    with changed(tmp_path / "config.json") as content:
        content["moe_topk"] = 9
    expected = r"moe_topk must be at most 8, the experts of a layer, got 9$"
    with pytest.raises(ValueError, match=expected):
        torch_moe_mps.from_pretrained(tmp_path)


def test_experts_of_some_layers_are_quantised(tmp_path):
    """With GELU no operator computes the clamped ones: config.json names the layers that have codes."""
    config = copy.deepcopy(tiny("step3p7").config)
    config.get_text_config().hidden_act = "gelu"
    model = eager(transformers.Step3p7ForConditionalGeneration(config).eval())
    with pytest.warns(UserWarning, match="none of the operators' forms of experts"):
        torch_moe_mps.accelerate(model, bits=4, group_size=32)
    model.save_pretrained(tmp_path)
    with changed(tmp_path / "config.json") as content:
        named = [name for name in content["quantization_config"]["modules"] if name.endswith("mlp.experts")]
    assert named == ["model.language_model.layers.0.mlp.experts"]
    loaded = torch_moe_mps.from_pretrained(tmp_path)  # with SiLU, whatever the config says
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_arguments_of_from_pretrained_with_mxfp4_blocks(tmp_path):
    model = tiny("gpt_oss")
    (tmp_path / "sub").mkdir()
    mxfp4_blocks(model, tmp_path / "sub")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "sub")
    config.quantization_config = transformers.Mxfp4Config()
    for arguments in (
        {"subfolder": "sub", "num_experts_per_tok": 1, "dtype": torch.float32},
        {"subfolder": "sub", "config": config, "trust_remote_code": False},
        {"subfolder": "sub", "model_class": transformers.GptOssForCausalLM, "bits": 8},
    ):
        loaded = torch_moe_mps.from_pretrained(tmp_path, **arguments)
        assert loaded.config.num_experts_per_tok == arguments.get("num_experts_per_tok", 2)
        assert loaded.dtype == arguments.get("dtype", model.dtype)
        experts = filter(is_experts, loaded.modules())
        assert {str(format) for each in experts for format in formats_of(each).values()} == {"mxfp4"}
    assert isinstance(config.quantization_config, transformers.Mxfp4Config)
