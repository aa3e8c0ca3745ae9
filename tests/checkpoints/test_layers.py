"""Quantised linear layers and embeddings: which layers, what they compute, and their names."""

import copy
import inspect

import pytest
import torch
import transformers
from support import tiny_models
from support.models import assert_close, eager, generate, output, prompt, stored, tiny
from support.sweep import in_sweep
from torch import nn

import torch_moe_mps
from torch_moe_mps.checkpoints.quantize.importance import Importance
from torch_moe_mps.checkpoints.quantize.reasons import groups_of
from torch_moe_mps.checkpoints.quantize.target import Target
from torch_moe_mps.checkpoints.quantize.weight_uses import use_of_weight
from torch_moe_mps.checkpoints.quantize.weights import quantize_target
from torch_moe_mps.models.basics.interface import formats_of
from torch_moe_mps.models.basics.report import any_layer
from torch_moe_mps.models.modules.linears import (
    GroupedLinear,
    QuantizedEmbedding,
    QuantizedLayer,
    QuantizedLinear,
)
from torch_moe_mps.quantization import Format


def layers(model) -> dict[str, QuantizedLayer]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLayer)}


def bytes_of(*modules: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in stored(*modules))


ROUTERS = {f"model.layers.{i}.mlp.gate": "Qwen3MoeTopKRouter is no linear layer" for i in (0, 1)}


def test_everything_but_the_router_is_quantised():
    """A token reads two of eight experts, one row of the embedding, and everything else."""
    model = tiny("qwen3_moe")
    names = {name for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Embedding))}
    experts = [layer.mlp.experts for layer in model.model.layers]

    def necessary():
        rest = bytes_of(model) - bytes_of(*experts) - bytes_of(model.model.embed_tokens)
        return rest + bytes_of(*experts) // 4 + bytes_of(model.model.embed_tokens) // 97

    before = necessary()
    report = torch_moe_mps.accelerate(model, 4, 32).quantization
    assert (report.bytes_before, report.bytes_after) == (before, necessary())
    assert f"{before / 1e6:.1f} MB before" in str(report)
    assert set(layers(model)) == names and report.skipped == ROUTERS
    assert [
        name
        for name, p in model.named_parameters()
        if p.dim() == 2 and p.is_floating_point() and "scales" not in name and "biases" not in name
    ] == [f"model.layers.{i}.mlp.gate.weight" for i in (0, 1)]


GPT2 = {
    "vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 64, "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip


@pytest.mark.parametrize("bits", [4, 8])
def test_layers_with_transposed_weights_are_quantised(bits, tmp_path):
    """GPT-2's Conv1D: in place, while a checkpoint is read, and as the checkpoint that is saved."""
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)).eval()
    dense = copy.deepcopy(model)
    dense.save_pretrained(tmp_path / "dense")
    report = torch_moe_mps.accelerate(model, bits, 32).quantization
    assert not report.skipped and len(report.modules) == 2 + 2 * 4
    expected = copy.deepcopy(dense)
    for name, layer in layers(model).items():
        twin = expected.get_submodule(name)
        values = layer.dequantized(slice(None))
        twin.weight = nn.Parameter(values.T if type(twin).__name__ == "Conv1D" else values)
        assert (twin.weight - dense.get_submodule(name).weight).abs().mean() < 0.1 * twin.weight.abs().mean()
    assert_close(output(model, prompt()), output(expected, prompt()), 1e-5)
    model.save_pretrained(tmp_path / "packed")
    for loaded in (
        torch_moe_mps.from_pretrained(tmp_path / "dense", bits=bits, group_size=32),
        torch_moe_mps.from_pretrained(tmp_path / "packed"),
    ):
        assert torch.equal(output(loaded, prompt()), output(model, prompt()))


def test_importance_weighs_transposed_weights():
    """With a mean square that is the greatest for one input, its error is the least."""
    errors = []
    for factor in (1.0, 1e4):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)).eval()
        layer = model.transformer.h[0].mlp.c_fc
        layer.weight.data = torch.linspace(-1, 1, 64 * 256).view(64, 256).sin()
        before, mean = layer.weight.detach().clone(), torch.ones(64)
        mean[3] = factor
        importance = Importance({"transformer.h.0.mlp.c_fc": mean})
        torch_moe_mps.accelerate(model, 4, 32, importance=importance)
        after = model.transformer.h[0].mlp.c_fc.dequantized(slice(None)).T
        errors.append((after - before)[3].abs().mean())
    assert errors[1] < errors[0]


@pytest.mark.parametrize("architecture", in_sweep(tiny_models.architectures(), ["phimoe", "zaya"]))
def test_the_report_has_every_matrix_that_stays_dense(architecture):
    model = tiny(architecture)
    report = torch_moe_mps.accelerate(model, 4, 32).quantization
    text, quantised = str(report), {f"{name}." for name in layers(model)}
    for name, parameter in model.named_parameters():
        is_scale = name.startswith(tuple(quantised)) or name.endswith(("_scales", "_biases"))
        is_vector = name.endswith("_proj_bias")  # one for each expert
        if sum(size > 1 for size in parameter.shape) > 1 and not is_scale and not is_vector:
            said = name.removesuffix(".weight")
            assert report.sizes[said] == parameter.nbytes, name
            assert f"{any_layer(said)} (" in text and report.skipped[said] in text


@pytest.mark.parametrize(
    "architecture", in_sweep(["afmoe", "phimoe", "hunyuan_v1_moe", "gemma4", "zaya"], ["phimoe"])
)
def test_linear_layers_of_routers_stay_dense(architecture):
    model = tiny(architecture)
    report = torch_moe_mps.accelerate(model, 4, 32).quantization
    routers = [name for name, reason in report.skipped.items() if reason == "it feeds a router"]
    assert routers and all(isinstance(model.get_submodule(name), nn.Linear) for name in routers)
    assert all("router" in name or ".gate." in name for name in routers)


def test_a_shared_expert_as_wide_as_there_are_experts_is_no_router():
    """Qwen3-Next has 512 of both."""
    model = tiny("qwen2_moe", num_experts=64, shared_expert_intermediate_size=64)
    torch_moe_mps.accelerate(model, 4, 32)
    shared = model.model.layers[0].mlp.shared_expert
    assert isinstance(shared.gate_proj, QuantizedLayer) and isinstance(shared.up_proj, QuantizedLayer)


def test_tied_layers_share_one_weight(tmp_path):
    model = tiny("qwen3_moe", tie_word_embeddings=True)
    dense = copy.deepcopy(model)
    report = torch_moe_mps.accelerate(model, 4, 32).quantization
    embedding, head = model.model.embed_tokens, model.lm_head
    assert isinstance(embedding, QuantizedEmbedding) and isinstance(head, QuantizedLinear)
    assert head.packed is embedding.packed and head.scales is embedding.scales
    assert report.shared == {"lm_head": "model.embed_tokens"}
    tiny_models.dense_twin(dense, model)
    assert torch.equal(generate(model, prompt()), generate(dense, prompt()))
    model.save_pretrained(tmp_path)
    loaded = eager(torch_moe_mps.from_pretrained(tmp_path, type(model)).eval())
    assert loaded.lm_head.packed is loaded.model.embed_tokens.packed
    model.tie_weights()
    copied = copy.deepcopy(model)
    assert copied.lm_head.packed is copied.model.embed_tokens.packed
    for other in (loaded, copied, model):
        assert_close(output(other, prompt()), output(dense, prompt()), 1e-5)


OF_THEIR_OWN = {
    "Shifted": lambda self, ids: nn.Embedding.forward(self, ids + 1) * self.embed_scale,
    "OfTheIds": lambda self, ids: nn.Embedding.forward(self, ids) * ids.unsqueeze(-1),
    "WithoutOneId": lambda self, ids: (nn.Embedding.forward(self, ids) * 2).masked_fill(
        ids[..., None] == 3, 0
    ),
    "ByValue": lambda self, ids: nn.Embedding.forward(self, ids) * (2 if ids.max() > 3 else 1),
}


@pytest.mark.parametrize("name", OF_THEIR_OWN)
def test_an_embedding_with_code_of_its_own_stays_dense(name):
    model = tiny("gemma4")
    model.model.embed_tokens.__class__ = type(name, (nn.Embedding,), {"forward": OF_THEIR_OWN[name]})
    report = torch_moe_mps.accelerate(model, 4, 32).quantization
    assert report.skipped["model.embed_tokens"] == f"{name} has code of its own"
    assert type(model.model.embed_tokens).__name__ == name


FORMATS = {None: None, 6: Format(6, 32), 8: Format(8, 32), "same": Format(4, 32)}


@pytest.mark.parametrize(("linear", "embedding"), [(None, "same"), (8, 6), ("same", None)])
def test_recipes(linear, embedding, tmp_path):
    model = tiny("qwen3_moe")
    torch_moe_mps.accelerate(
        model, 4, 32, linear_bits=linear, embedding_bits=embedding, keep=["layers.1.self_attn.*"],
        overrides={"*.v_proj": {"mode": "mxfp4"}, "0.mlp.experts.down_proj": 8, "1.self_attn.v_proj": 5},
    )  # fmt: skip
    expected = {"model.embed_tokens": FORMATS[embedding], "lm_head": FORMATS[embedding]}
    expected |= {f"model.layers.0.self_attn.{name}_proj": FORMATS[linear] for name in "qko"}
    expected["model.layers.0.self_attn.v_proj"] = Format(mode="mxfp4")
    assert {n: m.format for n, m in layers(model).items()} == {n: f for n, f in expected.items() if f}
    experts = [layer.mlp.experts for layer in model.model.layers]
    formats = [[*map(str, formats_of(module).values())] for module in experts]
    assert formats == [["affine4_32", "affine8_32"], ["affine4_32", "affine4_32"]]
    dense = tiny_models.dense_twin(tiny("qwen3_moe"), model)
    assert_close(output(model, prompt()), output(dense, prompt()), 1e-5)
    model.save_pretrained(tmp_path)
    loaded, info = torch_moe_mps.from_pretrained(tmp_path, type(model), output_loading_info=True)
    assert not any(info.values()) and torch.equal(
        output(eager(loaded.eval()), prompt()), output(model, prompt())
    )


def test_what_something_else_needs_stays_dense():
    class Twice(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = tiny("qwen3_moe")
    first = model.model.layers[0].self_attn
    first.q_proj.register_forward_hook(lambda *_: None)
    torch.nn.utils.parametrizations.weight_norm(first.k_proj)
    twice = Twice(first.v_proj.in_features, first.v_proj.out_features, bias=False)
    twice.weight = first.v_proj.weight
    first.v_proj = twice
    report = torch_moe_mps.accelerate(model, 4, 32).quantization
    prefix = "model.layers.0.self_attn."
    assert report.skipped == ROUTERS | {
        f"{prefix}q_proj": "a hook is on it",
        f"{prefix}k_proj": "its weight is computed by a parametrisation",
        f"{prefix}v_proj": "Twice has code of its own",
    }


class Inherits(nn.Linear):
    pass


class Transposed(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight.T, self.bias)


def test_subclasses_of_linear_layers():
    """Those with nn.Linear's forward are quantised; others are named with the reason."""
    model = nn.ModuleDict({cls.__name__: cls(64, 64) for cls in (Inherits, Transposed)})
    model["attention"] = nn.MultiheadAttention(64, 2)
    report = torch_moe_mps.accelerate(model.eval(), 4, 32).quantization
    assert [*report.modules] == ["Inherits"] and report.skipped == {
        "Transposed": "Transposed has code of its own",
        "attention.out_proj": "NonDynamicallyQuantizableLinear has code of its own",
        "attention.in_proj_weight": "MultiheadAttention is no linear layer",
    }


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("product", "cast", "dtype", "row", "asked", "trained", "called"):
            setattr(self, name, nn.Linear(32, 32))
        self.eval()

    def forward(self, x):
        if isinstance(self.asked.weight, torch.Tensor) and x.dtype != self.asked.weight.dtype:
            x = x.to(self.asked.weight.dtype)
        if self.training and x is not None:
            return x @ self.trained.weight.T
        return self.called(x.to(self.dtype.weight.dtype)) @ self.product.weight + self.row.weight[0, None]

    def cuda_forward(self, x):
        return x @ self.called.weight

    def backwards(self, x):
        return x @ self.cast.weight.float()


class InheritingReader(Reader):
    def forward(self, x):
        return super().forward(x)


@pytest.mark.parametrize("cls", [Reader, InheritingReader])
def test_weights_that_code_reads_stay_dense(cls):
    """Its type, an attribute or a row of a weight may be read, and anything for training or CUDA."""
    report = torch_moe_mps.accelerate(nn.ModuleDict({"reader": cls()}), 4, 32).quantization
    why = "the code around it reads its weight"
    assert report.skipped == {"reader.product": why, "reader.cast": why}
    assert len(report.modules) == 5


def test_sources_of_a_base_are_read_once(monkeypatch):
    """Of all models of a process: most methods are those of transformers' bases."""
    read, own = [], inspect.getsource
    monkeypatch.setattr(inspect, "getsource", lambda method: read.append(method) or own(method))

    class Base(nn.Module):
        def forward(self, x):
            return x @ self.child.weight

    for cls in [type(name, (Base,), {}) for name in "ABC"]:
        assert use_of_weight(cls, "child") == "the code around it reads its weight"
    assert read == [Base.forward]


def test_code_without_source_keeps_what_it_may_read():
    scope = {"nn": nn, "torch": torch}
    exec(
        "class Remote(nn.Module):\n"
        "    def forward(self, x):\n"
        "        return sum(x @ layer.weight.T for layer in (self.read,)) + self.called(x)\n",
        scope,
    )
    module, x = scope["Remote"]().eval(), torch.randn(3, 32)
    module.read, module.called = nn.Linear(32, 32), nn.Linear(32, 32)
    model = nn.ModuleDict({"remote": module})
    dense = copy.deepcopy(model)
    report = torch_moe_mps.accelerate(model, 4, 32).quantization
    why = "the code around it, which has no source, may read its weight"
    assert report.skipped == dict.fromkeys(("remote.read", "remote.called"), why) and not report.modules
    with torch.no_grad():
        assert_close(module(x), tiny_models.dense_twin(dense, model).remote(x), 1e-5)


@pytest.mark.on("mps")
def test_a_matrix_for_each_group_of_inputs(device, tmp_path):
    """DeepSeek-V4's o_a_proj; a class that turns the groups round would keep its weight."""
    with tiny_models.sizes(head_dim=64):
        model = tiny("deepseek_v4")
    layer = model.model.layers[0].self_attn.o_a_proj
    assert (layer.n_groups, layer.in_features, layer.out_features) == (2, 128, 128)
    own = type(layer).forward
    turned = copy.copy(layer)
    turned.__class__ = type("Turned", (type(layer),), {"forward": lambda self, x: own(self, x.flip(-2))})
    assert groups_of(layer) == 2 and groups_of(turned) is None and groups_of(nn.Linear(4, 4)) is None
    dense = copy.deepcopy(model)
    report = torch_moe_mps.accelerate(model, 4, 32).quantization
    name = "model.layers.0.self_attn.o_a_proj"
    layer = model.get_submodule(name)
    assert type(layer) is GroupedLinear and name not in report.skipped
    x = torch.randn(2, 19, 2, 128, generator=torch.Generator().manual_seed(3))
    weight = layer.weight[:].view(2, 64, 128).double()
    expected = torch.einsum("btgc,grc->btgr", x.double(), weight)
    for part in (x, x[:1, :1], x[:0], x[:, ::2], x.flip(1)[0]):
        rows = expected if part is x else torch.einsum("...gc,grc->...gr", part.double(), weight)
        found = copy.deepcopy(layer).to(device)(part.to(device)).cpu()
        assert found.shape == rows.shape and torch.allclose(found.double(), rows, atol=1e-4)
    dense = tiny_models.dense_twin(dense, model)
    assert_close(output(model, prompt()), output(dense, prompt()), 1e-5)
    model.save_pretrained(tmp_path)
    loaded = torch_moe_mps.from_pretrained(tmp_path, type(model)).eval()
    assert type(loaded.get_submodule(name)) is GroupedLinear
    assert_close(output(eager(loaded), prompt()), output(model, prompt()), 1e-5)


def test_adapters_keep_their_layers():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False)
    adapted = peft.get_peft_model(tiny("qwen3_moe"), config).eval()
    dense = copy.deepcopy(adapted)
    report = torch_moe_mps.accelerate(adapted, 4, 32).quantization
    adapters = [name for name, why in report.skipped.items() if why == "it is under an adapter of PEFT"]
    assert len(adapters) == 2 * 3 == len(report.skipped) - len(ROUTERS)
    assert_close(output(adapted, prompt()), output(tiny_models.dense_twin(dense, adapted), prompt()), 1e-5)


def quantised_linear(
    bias: bool = True, dtype: torch.dtype = torch.float32
) -> tuple[nn.Linear, QuantizedLinear]:
    parent = nn.Sequential(nn.Linear(64, 48, bias=bias, dtype=dtype))
    dense = copy.deepcopy(parent[0])
    target = Target("0", parent[0], "linears", {"weight": Format(8, 32)})
    quantize_target(parent, target, [])
    return dense, parent[0]


def test_what_is_read_of_the_weight():
    dense, layer = quantised_linear(dtype=torch.bfloat16)
    weight = layer.weight
    assert (weight.shape, weight.dtype, weight.device) == ((48, 64), torch.bfloat16, dense.weight.device)
    assert (layer.in_features, layer.out_features) == (64, 48)
    values = weight[:]
    assert values.shape == (48, 64) and torch.allclose(values, dense.weight, atol=2e-3)
    assert torch.equal(weight[5], values[5]) and torch.equal(weight[-1, 3:7], values[-1, 3:7])
    assert torch.equal(weight[None, 2:5], values[None, 2:5][:, :])
    assert torch.equal(weight[torch.tensor([1, 4])], values[[1, 4]])
    with pytest.raises(TypeError):
        nn.functional.linear(torch.ones(1, 64), weight)
    layer.to(torch.float16)
    assert layer.weight.dtype == torch.float16


def test_autocast_and_gradients():
    _, layer = quantised_linear()
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    assert layer(x).dtype == torch.float32
    layer(x.requires_grad_()).sum().backward()
    right = layer.dequantized(slice(None)).double().sum(0).expand(3, -1)
    assert (x.grad - right).norm() <= 5e-6 * right.norm()


def state(model: nn.Module) -> tuple:
    """All that accelerate changes in a model: classes, attributes, weights by their addresses, the config."""
    modules = {name: (type(m), sorted(m.__dict__)) for name, m in model.named_modules()}
    weights = {name: (id(p), p._version) for name, p in model.named_parameters()}
    return modules, weights, model.config._experts_implementation, model.config._attn_implementation


WRONG = {
    "the pattern 'q_prj' fits no weight": {"keep": ("q_prj",)},
    "linear_bits must be bits, a format or None, got '4'": {"linear_bits": "4"},
    "bits must be 1, 2": {"linear_bits": 7},
    "must have bits, group_size and mode, got bit": {"overrides": {"lm_head": {"bit": 4}}},
    "group_size must be 32, 64 or 128 for mode affine, got 48": {"group_size": 48},
    "mode must be": {"mode": "nf4"},
}


def test_bad_recipes_change_nothing():
    model = tiny("qwen3_moe")
    before = state(model)
    for message, options in WRONG.items():
        with pytest.raises(ValueError, match=message) as error:
            torch_moe_mps.accelerate(model, **{"bits": 4, "group_size": 32} | options)
        assert "\n" not in str(error.value) and state(model) == before


def narrow(weight: nn.Parameter) -> None:
    weight.data = weight.data[..., :48].contiguous()


def off_the_device(weight: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(weight, device="meta"))


UNFIT = [
    ("model.layers.1.mlp.experts", "down_proj", narrow, "multiple of 32 for affine4_32, got 48"),
    ("model.layers.1.mlp.experts", "gate_up_proj", lambda w: w.data[1, 2].fill_(torch.inf), "finite"),
    ("model.layers.1.self_attn.o_proj", "weight", off_the_device, "must be loaded"),
    ("lm_head", "weight", lambda w: w.data[3].fill_(torch.nan), "finite"),
]


@pytest.mark.parametrize(("path", "name", "spoil", "message"), UNFIT)
def test_what_does_not_fit_is_named_before_anything_changes(path, name, spoil, message):
    """The fault is in the last weights, so that all others would have been quantised before them."""
    model = tiny("qwen3_moe")
    module = model.get_submodule(path)
    spoiled = spoil(getattr(module, name))
    if isinstance(spoiled, nn.Parameter):
        setattr(module, name, spoiled)
    before = state(model)
    with pytest.raises(ValueError, match=message) as error:
        torch_moe_mps.accelerate(model, 4, 32)
    assert path in str(error.value) and "\n" not in str(error.value) and state(model) == before
