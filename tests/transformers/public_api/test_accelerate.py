"""accelerate and restore: the operators of a layer, the report, and who keeps its own code."""

import pytest
import torch
import transformers
from support import tiny_models
from support.models import assert_close, eager, operators_of, output, prompt
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import torch_moe_mps

transformers.logging.set_verbosity_error()


OF_TWO_LAYERS = {
    "qwen2_moe": {"rms_norm": 5, "rope": 2, "moe_router": 2, "_moe_experts": 2, "_pointwise": 2},
    "gemma4": {"rms_norm": 23, "rope_heads": 4, "_pointwise": 4, "_moe_experts": 2},
}


@pytest.mark.parametrize("architecture", OF_TWO_LAYERS)
def test_operators_of_a_layer(architecture):
    """The same ones when a model is accelerated again; nothing is left of them when it is restored."""
    model = tiny_models.tiny_model(architecture)

    def state():
        modules = [(name, type(module), set(module.__dict__)) for name, module in model.named_modules()]
        return modules, model.config._experts_implementation

    before = state()
    first = str(torch_moe_mps.accelerate(model))
    assert operators_of(lambda: output(model, prompt())) == OF_TWO_LAYERS[architecture]
    classes = [type(module) for module in model.modules()]
    assert str(torch_moe_mps.accelerate(model)) == first
    assert [type(module) for module in model.modules()] == classes
    assert torch_moe_mps.restore(model) is model and state() == before
    assert operators_of(lambda: output(model, prompt())) == {}


def test_report_prints_a_table():
    report = str(torch_moe_mps.accelerate(tiny_models.tiny_model("phimoe")))
    lines = [line.split("  ")[0] for line in report.splitlines()]
    assert lines[0] == "module" and "model.layers.*.mlp.experts" in lines
    assert "left alone: its formula is not one of moe_router" in report


def test_model_without_experts():
    report = torch_moe_mps.accelerate(nn.Sequential(nn.Linear(4, 4)))
    assert report.rows == []
    assert str(report) == "Nothing in this model is replaced; it is left as it is."


def test_the_report_of_a_model_with_quantised_layers_alone():
    report = torch_moe_mps.accelerate(nn.Sequential(nn.Linear(64, 64)).eval(), bits=4)
    assert report.rows == [] and str(report).startswith(str(report.quantization))
    assert "1 matrices quantised" in str(report) and "left as it is" not in str(report)


def test_quantisation_of_nothing_is_a_warning():
    with pytest.warns(UserWarning, match="torch_moe_mps: nothing was found that can be quantised"):
        torch_moe_mps.accelerate(nn.Sequential(nn.Linear(4, 4)), bits=4)


def test_an_unknown_argument_is_an_error():
    known = r"^moe_mps::accelerate: arguments must be some of model, bits, .*, keep, overrides, got 'foo'$"
    with pytest.raises(TypeError, match=known):
        torch_moe_mps.accelerate(nn.Sequential(nn.Linear(4, 4)), foo=1)


@pytest.mark.parametrize("function", [torch_moe_mps.accelerate, torch_moe_mps.restore])
def test_what_is_not_a_module_is_an_error(function):
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got str$"):
        function("Qwen/Qwen3-30B-A3B")


# Gradients and training


def test_training_runs_the_models_own_code():
    model = eager(tiny_models.tiny_model("qwen2_moe")).train()
    ids = prompt()

    def gradients():
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    expected = gradients()
    torch_moe_mps.accelerate(model)
    assert operators_of(gradients) == {}
    for name, gradient in gradients().items():
        assert torch.equal(gradient, expected[name]), name


def test_training_runs_the_experts_implementation_of_before(monkeypatch):
    """What transformers has chosen, or the user: not the loop over experts of the class."""
    calls = []

    def counted(self, *inputs):
        calls.append(self)
        return ALL_EXPERTS_FUNCTIONS["batched_mm"](self, *inputs)

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._local_mapping, "counted", counted)
    model = tiny_models.tiny_model("qwen3_moe").train()
    model.set_experts_implementation("counted")
    model(prompt()).logits.sum().backward()
    expected, before = [parameter.grad for parameter in model.parameters()], len(calls)
    model.zero_grad()
    torch_moe_mps.accelerate(model)
    model(prompt()).logits.sum().backward()
    assert len(calls) == 2 * before == 2 * model.config.num_hidden_layers
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)  # its sums come in any order


def test_forward_mode_gradients():
    """torch.func.jvp through dense weights is the model's own; quantised ones say that they have none."""
    with tiny_models.groups_of_32():
        model = eager(tiny_models.tiny_model("qwen3_moe"))
    model.set_attn_implementation("eager")  # sdpa has no forward-mode gradients on a CPU
    x = model.get_input_embeddings()(prompt()).detach()

    def jvp():
        return torch.func.jvp(lambda x: model(inputs_embeds=x).logits, (x,), (torch.ones_like(x),))

    expected = jvp()
    torch_moe_mps.accelerate(model)
    assert_close(jvp(), expected, 1e-5)
    torch_moe_mps.accelerate(model, bits=4, group_size=32)
    with pytest.raises(NotImplementedError, match="forward-mode") as error:
        jvp()
    assert "\n" not in str(error.value)


def test_gradients_of_the_routing_weights_alone():
    """Neither the experts nor their input need a gradient. The layer before runs the operators."""
    own, model = (eager(tiny_models.tiny_model("qwen3_moe")).requires_grad_(False) for _ in range(2))
    model.set_experts_implementation("moe_mps")
    gradients = []
    for each in (model, own.double()):
        router = each.model.layers[1].mlp.gate.weight.requires_grad_()
        each(input_ids=prompt()).logits.square().sum().backward()
        gradients.append(router.grad.float())
    assert_close(*gradients, 1e-5)


def test_where_the_models_own_code_runs():
    """With gradients, which frozen weights do not need outside of no_grad either, autocast or float64."""
    model = tiny_models.tiny_model("gemma4")
    torch_moe_mps.accelerate(model)
    used = operators_of(lambda: output(model, prompt()))
    assert used["_moe_experts"] == 2 and operators_of(lambda: model(input_ids=prompt())) == {}
    model.requires_grad_(False)
    assert torch.is_grad_enabled() and operators_of(lambda: model(input_ids=prompt())) == used
    with torch.autocast("cpu", torch.bfloat16):
        assert operators_of(lambda: output(model, prompt())) == {}
    model.double()
    assert operators_of(lambda: output(model, prompt())) == {}


@pytest.mark.parametrize("architecture", ["qwen3_moe", "deepseek_v4"])
def test_a_model_in_float64(architecture):
    """No operator takes it: it keeps its code, tables of rotary embeddings as well."""
    model = eager(tiny_models.tiny_model(architecture)).double()
    expected = output(model, prompt())
    with pytest.warns(UserWarning, match="Experts is left alone: its weights are torch.float64"):
        torch_moe_mps.accelerate(model)
    assert torch.equal(output(model, prompt()), expected)


def test_meta_device():
    """Shapes of an accelerated model that has no weights."""
    model = tiny_models.tiny_model("qwen2_moe")
    torch_moe_mps.accelerate(model)
    assert output(model.to("meta"), prompt().to("meta")).shape == (2, 9, 97)


def test_router_that_chooses_more_than_its_groups_hold():
    """The model's own code then chooses masked experts too; moe_router would refuse."""
    model = tiny_models.tiny_model("deepseek_v3", num_experts_per_tok=6)
    rows = [row for row in torch_moe_mps.accelerate(model).rows if row.kind == "router"]
    assert [row.reason for row in rows] == ["it chooses 6 experts from 1 of 2 groups of 4"]
    assert "_moe_experts" in operators_of(lambda: output(model, prompt()))


# Compilation


@pytest.mark.sweep
@pytest.mark.parametrize(("architecture", "rewritten"), (("qwen2_moe", True), ("gpt_oss", False)))
def test_torch_compile(architecture, rewritten):
    """One graph with the operators in it; without accelerate the experts' plan is found while compiling."""
    model = eager(tiny_models.tiny_model(architecture))
    ids = prompt()
    expected = output(model, ids)
    if rewritten:
        torch_moe_mps.accelerate(model)
    else:
        model.set_experts_implementation("moe_mps")
    targets = []

    def backend(graph, inputs):
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert_close(output(compiled, ids, use_cache=False), expected, 1e-5)
    assert sum("moe_mps._moe_experts" in target for target in targets) == 2
    assert sum("moe_mps.moe_router" in target for target in targets) == (2 if rewritten else 0)


# Expert parallelism


def test_sentinels_of_expert_parallelism():
    """Ids of other ranks' experts are num_experts; they contribute nothing."""
    experts = eager(tiny_models.tiny_model("qwen3_moe")).model.layers[0].mlp.experts
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 32, generator=generator)
    ids = torch.tensor([[0, 8], [8, 8], [3, 7], [8, 1], [2, 8], [5, 6]])
    weights = torch.rand(6, 2, generator=generator).masked_fill(ids == 8, 0.0)
    experts._is_expert_parallel = True
    with torch.no_grad():
        expected = experts(x, ids, weights)
        torch_moe_mps.accelerate(experts)
        assert_close(experts(x, ids, weights), expected, 1e-5)
    assert expected[1].eq(0).all()
