"""DBRX and JetMoE in few bits: their classes have the stacks elsewhere, and packed ones are as all are."""

import copy
import pickle

import peft
import pytest
import torch
from safetensors.torch import load_file
from support import tiny_models
from support.capturing import answer, without_capture
from support.models import assert_close, eager, edit_forward, generate, operators_of, output, prompt

import torch_moe_mps
from torch_moe_mps import from_pretrained
from torch_moe_mps.models.adapters.lora import ParamWrapper
from torch_moe_mps.models.attention.attention import NAME as ATTENTION
from torch_moe_mps.models.basics.interface import experts_of, is_quantized
from torch_moe_mps.models.capture.classes import captures_of

ARCHITECTURES = ["dbrx", "jetmoe"]
FORMATS = {"4 bits": {"bits": 4}, "8 bits": {"bits": 8}, "mxfp4": {"mode": "mxfp4", "group_size": None}}
OPERATORS = {
    "dbrx": {"_moe_experts_quantized": 2, "moe_router": 2},
    "jetmoe": {"_moe_experts_quantized": 2, "expert_qmm": 4, "moe_weighted_reduce": 2, "moe_router": 4},
}
SOURCES = ("w1", "v1", "w2", "input_linear.weight", "output_linear.weight")


def dense(architecture: str):
    with tiny_models.groups_of_32():
        return eager(tiny_models.tiny_model(architecture))


def quantized(architecture: str, device: str = "cpu", **options):
    """A quantised model, and its own code with the rounded weights."""
    own = dense(architecture)
    model = copy.deepcopy(own).to(device)
    torch_moe_mps.accelerate(model, **{"bits": 4, "group_size": 32} | options)
    return model, tiny_models.dense_twin(own, model)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_and_tokens_are_those_of_rounded_weights(architecture, name, device):
    model, own = quantized(architecture, device, **FORMATS[name])
    assert not any(parameter.endswith(SOURCES) for parameter in model.state_dict())
    linears = {path for path, module in model.named_modules() if type(module) is torch.nn.Linear}
    assert {path.rpartition(".router.")[2] for path in linears} == {"layer"}  # all others are packed
    run = lambda ids: output(model, ids.to(device)).cpu()  # noqa: E731
    for shape in ((1, 1), (2, 7)):
        assert_close(run(prompt(*shape)), output(own, prompt(*shape)), 1e-5)
    found = operators_of(lambda: run(prompt()))
    assert found.items() >= OPERATORS[architecture].items()
    if name == "4 bits":
        tokens = generate(model, prompt(2).to(device), max_new_tokens=5)
        assert torch.equal(tokens.cpu(), generate(own, prompt(2), max_new_tokens=5))


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_captured_tokens(architecture, device):
    model, own = quantized(architecture, device)
    for each in (model, own):
        each.set_attn_implementation(ATTENTION)
    assert_close(answer(model, device, 4), answer(without_capture(own), "cpu", 4), 2e-5)
    assert captures_of(model).reason is None, captures_of(model).reason
    assert captures_of(model).programs


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_copies_and_restored_models_stay_quantised(architecture):
    model, own = quantized(architecture)
    expected = output(own, prompt())
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_close(output(each, prompt()), expected, 1e-5)
        assert (
            operators_of(lambda each=each: output(each, prompt())).items() >= OPERATORS[architecture].items()
        )
    torch_moe_mps.restore(model)
    assert_close(output(model, prompt()), expected, 1e-5)
    report = torch_moe_mps.accelerate(model)
    assert all(row.done for row in report.rows if row.kind == "experts")
    assert_close(output(model, prompt()), expected, 1e-5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_accelerated_model_is_quantised(architecture):
    own = dense(architecture)
    model = copy.deepcopy(own)
    torch_moe_mps.accelerate(model)
    torch_moe_mps.accelerate(model, bits=4, group_size=32)
    own = tiny_models.dense_twin(own, model)
    found = operators_of(lambda: assert_close(output(model, prompt()), output(own, prompt()), 1e-5))
    assert found.items() >= OPERATORS[architecture].items()


ADAPTED = {"dbrx": "ffn.experts", "jetmoe": "mlp"}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_lora_of_experts(architecture):
    """By what PEFT itself would add to dense weights."""
    model, own = quantized(architecture)
    targets = [f"{ADAPTED[architecture]}.{name}" for name in ("gate_up_proj", "down_proj")]
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_parameters=targets, r=4, target_modules=[]))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3, generator=generator)
        for name, wrapper in adapted.base_model.model.named_modules():
            if not isinstance(wrapper, ParamWrapper):
                continue
            module = own.get_submodule(name.replace(".base_layer", ""))
            delta = wrapper.get_delta_weight("default")
            for weight, part in tiny_models.own_weights(module, wrapper.parameter_name, delta):
                weight += part
    assert_close(output(adapted.eval(), prompt()), output(own, prompt()), 1e-5)


def test_lora_of_attentions_projections_is_refused():
    model, _ = quantized("jetmoe")
    config = peft.LoraConfig(target_parameters=["experts.up_proj"], r=4, target_modules=[])
    expected = "target_parameters must be stacks of experts that are called, got JetMoeMoA's, of map"
    with pytest.raises(ValueError, match=expected):
        peft.get_peft_model(model, config)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gradients_reach_the_embeddings(architecture):
    """Of inputs and routers; packed weights have none."""
    gradients = []
    for each in quantized(architecture):
        each.requires_grad_(False)
        inputs = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        each(inputs_embeds=inputs).logits.square().mean().backward()
        gradients.append(inputs.grad)
    assert gradients[1].abs().max() > 0
    assert_close(*gradients, 1e-4)


def test_router_logits_are_recorded():
    model, own = quantized("jetmoe")
    with torch.no_grad():
        logits = [each(prompt(), output_router_logits=True).router_logits for each in (model, own)]
    assert len(logits[0]) == len(logits[1]) > 0
    for found, expected in zip(*logits, strict=True):
        assert_close(found, expected, 1e-5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_hook_on_the_activation_sees_what_it_activates(architecture):
    model, own = quantized(architecture)
    seen = []
    for each in (model, own):
        block = (
            each.model.layers[0].mlp
            if architecture == "jetmoe"
            else each.transformer.blocks[0].ffn.experts.mlp
        )
        activation = block.activation if architecture == "jetmoe" else block.activation_fn
        activation.register_forward_hook(lambda _, x, out: seen.append(out.square().sum()))
    assert_close(output(model, prompt()), output(own, prompt()), 1e-5)
    assert len(seen) > 1
    assert_close(seen[0], sum(seen[1:]), 1e-5)


@pytest.mark.slow("loads three models")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_folders_with_dense_experts(architecture, tmp_path):
    """A recipe may leave them dense: then the folder has them under the names of their class."""
    own = dense(architecture)
    own.save_pretrained(tmp_path / "own")
    kept = ["*experts*"] if architecture == "dbrx" else ["*.mlp.*", "*experts*"]
    options = {"bits": 4, "group_size": 32, "keep": kept}
    first = from_pretrained(str(tmp_path / "own"), **options)
    assert not any(name.endswith("_proj_packed") for name in first.state_dict())
    first.save_pretrained(tmp_path / "new")
    names = load_file(tmp_path / "new" / "model.safetensors").keys()
    assert {name for name in names if name.endswith(SOURCES)} == {
        name for name in own.state_dict() if name.endswith(SOURCES)
    }
    second = from_pretrained(str(tmp_path / "new"))
    twin = tiny_models.dense_twin(copy.deepcopy(own), first)
    for each in (first, second):
        assert_close(output(each, prompt()), output(twin, prompt()), 1e-5)
        assert torch.equal(
            generate(each, prompt(1), max_new_tokens=4), generate(twin, prompt(1), max_new_tokens=4)
        )
    torch_moe_mps.restore(first)
    assert_close(output(first, prompt()), output(twin, prompt()), 1e-5)
    embeddings = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert_close(first(inputs_embeds=embeddings).logits, twin(inputs_embeds=embeddings).logits, 1e-5)


NEAR = {
    "dbrx": ("transformer.blocks.0.ffn.experts", ".mlp", "gate_proj * up_proj", "gate_proj * up_proj.abs()"),
    "jetmoe": ("model.layers.0.mlp", "", "+ self.bias", "- self.bias"),
}


@pytest.mark.filterwarnings("ignore:torch_moe_mps")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_experts_of_another_formula_stay_dense(architecture):
    path, end, old, new = NEAR[architecture]
    own = dense(architecture)
    edit_forward(own.get_submodule(path + end), old, new)
    model = copy.deepcopy(own)
    torch_moe_mps.accelerate(model, bits=4, group_size=32)
    packed = {name.rpartition(".")[0] for name in model.state_dict() if name.endswith("down_proj_packed")}
    other = path.replace(".0.", ".1.")
    assert other in packed and path not in packed
    assert_close(output(model, prompt()), output(tiny_models.dense_twin(own, model), prompt()), 1e-5)


def test_weights_that_are_not_finite_leave_the_model_as_it_is():
    own = dense("dbrx")
    own.transformer.blocks[1].ffn.experts.mlp.v1.data[3, 2] = torch.nan
    names = own.state_dict().keys()
    with pytest.raises(ValueError, match=r"blocks.1.ffn.experts.gate_up_proj must be finite"):
        torch_moe_mps.accelerate(own, bits=4, group_size=32)
    assert own.state_dict().keys() == names
    assert not any(map(is_quantized, experts_of(own).values()))
