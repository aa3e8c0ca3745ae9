"""The machinery behind accelerate: registration, rewriting, and what a model goes through afterwards."""

import copy
import inspect
import io
import pickle
import subprocess
import sys
import textwrap
import traceback

import pytest
import tiny_models
import torch
import torch.nn.functional as F
import transformers
from test_transformers_families import assert_close, eager, generate, output, prompt
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch_moe_mps.transformers.modules import is_rewritten, rewrite
from transformers.integrations.moe import use_experts_implementation

import torch_moe_mps

transformers.logging.set_verbosity_error()


class CountOperators(TorchDispatchMode):
    """Counts the calls of moe_mps operators by name."""

    def __init__(self):
        super().__init__()
        self.counts: dict[str, int] = {}
        self.others: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "moe_mps":
            name = function._schema.name.partition("::")[2]
            self.counts[name] = self.counts.get(name, 0) + 1
        else:
            self.others.add(function._schema.name.partition("::")[2])
        return function(*args, **(kwargs or {}))


def operators_of(call) -> dict[str, int]:
    with CountOperators() as mode:
        call()
    return mode.counts


def python(source: str) -> str:
    """What a fresh interpreter prints."""
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(source)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


# Registration


@pytest.mark.parametrize("order", [("torch_moe_mps", "transformers"), ("transformers", "torch_moe_mps")])
@pytest.mark.parametrize("touch", [False, True])
def test_registered_in_both_import_orders(order, touch):
    """`touch` imports the experts module of transformers in between."""
    between = "import transformers.integrations.moe" if touch else ""
    printed = python(f"""
        import {order[0]}
        {between}
        import {order[1]}
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
        print("moe_mps" in ALL_EXPERTS_FUNCTIONS.keys())
    """)
    assert printed == "True"


def test_import_is_light():
    printed = python("""
        import sys, time, torch
        start = time.process_time()
        import torch_moe_mps
        print("transformers" in sys.modules, time.process_time() - start)
    """)
    imported, seconds = printed.split()
    assert imported == "False"
    assert float(seconds) < 0.3


def test_set_experts_implementation_alone():
    model = eager(tiny_models.tiny_model("qwen3_moe"))
    ids = prompt()
    expected = output(model, ids)
    model.set_experts_implementation("moe_mps")
    assert operators_of(lambda: output(model, ids)) == {"moe_experts": 2}
    assert_close(output(model, ids), expected, 1e-5)


# accelerate and restore


def test_operators_of_a_layer():
    model = tiny_models.tiny_model("qwen2_moe")
    torch_moe_mps.accelerate(model)
    expected = {"fused_residual_norm": 2, "moe_router": 2, "moe_experts": 2}
    assert operators_of(lambda: output(model, prompt())) == expected


def test_nothing_between_router_and_experts():
    """A block in 16 bit: the router's matmul, the router, the experts, and views."""
    model = tiny_models.tiny_model("qwen3_moe", torch.bfloat16)
    torch_moe_mps.accelerate(model)
    block = model.model.layers[0].mlp
    x = torch.ones(1, 1, 32, dtype=torch.bfloat16)
    with torch.no_grad(), CountOperators() as mode:
        block(x)
    assert mode.counts == {"moe_router": 1, "moe_experts": 1}
    assert not {name for name in mode.others if "copy" in name or "to" in name.split("_")}


def test_other_implementation_after_acceleration():
    """The routers are ours, the experts somebody else's: ids and weights are as those expect them."""
    model = eager(tiny_models.tiny_model("qwen2_moe"))
    expected = output(model, prompt())
    torch_moe_mps.accelerate(model)
    for implementation in ("eager", "batched_mm", "grouped_mm"):
        model.set_experts_implementation(implementation)
        assert_close(output(model, prompt()), expected, 1e-5)


def test_operators_of_gemma4():
    model = tiny_models.tiny_model("gemma4")
    torch_moe_mps.accelerate(model)
    expected = {"fused_norm_add": 4, "fused_norm_add_scalar": 2, "moe_gate": 2, "moe_experts": 2}
    assert operators_of(lambda: output(model, prompt())) == expected


def test_restore():
    model = tiny_models.tiny_model("gemma4")
    before = [(name, type(module), set(module.__dict__)) for name, module in model.named_modules()]
    implementation = model.config._experts_implementation
    torch_moe_mps.accelerate(model)
    assert torch_moe_mps.restore(model) is model
    after = [(name, type(module), set(module.__dict__)) for name, module in model.named_modules()]
    assert before == after
    assert model.config._experts_implementation == implementation
    assert operators_of(lambda: output(model, prompt())) == {}


def test_accelerate_twice_is_accelerate_once():
    model = tiny_models.tiny_model("qwen2_moe")
    first = str(torch_moe_mps.accelerate(model))
    classes = [type(module) for module in model.modules()]
    assert str(torch_moe_mps.accelerate(model)) == first
    assert [type(module) for module in model.modules()] == classes
    torch_moe_mps.restore(model)
    assert operators_of(lambda: output(model, prompt())) == {}


def test_report_prints_a_table():
    report = str(torch_moe_mps.accelerate(tiny_models.tiny_model("phimoe")))
    lines = [line.split("  ")[0] for line in report.splitlines()]
    assert lines[0] == "module" and "model.layers.*.mlp.experts" in lines
    assert "left alone: its forward is decorated or uses super()" in report


def test_model_without_experts():
    report = torch_moe_mps.accelerate(nn.Sequential(nn.Linear(4, 4)))
    assert report.rows == []
    expected = "No experts with transformers' experts interface found; the model is left as it is."
    assert str(report) == expected


def test_quantisation_of_a_model_without_experts_is_a_warning():
    with pytest.warns(UserWarning, match="torch_moe_mps: no experts were found that can be quantised"):
        torch_moe_mps.accelerate(nn.Sequential(nn.Linear(4, 4)), bits=4)


@pytest.mark.parametrize("function", [torch_moe_mps.accelerate, torch_moe_mps.restore])
def test_what_is_not_a_module_is_an_error(function):
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got str$"):
        function("Qwen/Qwen3-30B-A3B")


def test_block_alone():
    """Any module can be accelerated, a single block too."""
    block = eager(tiny_models.tiny_model("qwen2_moe")).model.layers[0].mlp
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = block(x)
        report = torch_moe_mps.accelerate(block)
        assert {row.kind for row in report.replaced} == {"experts", "router", "layer"}
        assert_close(block(x), expected, 1e-5)


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


def test_gradients_in_evaluation_mode():
    model = tiny_models.tiny_model("gemma4")
    torch_moe_mps.accelerate(model)
    assert operators_of(lambda: model(input_ids=prompt())) == {}
    model.requires_grad_(False)
    assert "moe_experts" in operators_of(lambda: model(input_ids=prompt()))


def test_gradients_through_frozen_experts():
    """The input needs a gradient, the parameters do not."""
    model = eager(tiny_models.tiny_model("qwen3_moe")).requires_grad_(False)
    embedded = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(0))

    def gradient():
        x = embedded.clone().requires_grad_()
        model(inputs_embeds=x).logits.square().sum().backward()
        return x.grad

    expected = gradient()
    torch_moe_mps.accelerate(model)
    assert torch.equal(gradient(), expected)


def test_gradients_of_the_routing_weights_alone():
    """Neither the experts nor their input need a gradient."""
    model = eager(tiny_models.tiny_model("qwen3_moe")).requires_grad_(False)
    router = model.model.layers[1].mlp.gate.weight.requires_grad_()

    def gradient():
        router.grad = None
        model(input_ids=prompt()).logits.square().sum().backward()
        return router.grad

    expected = gradient()
    model.set_experts_implementation("moe_mps")
    assert torch.equal(gradient(), expected)


def test_autocast_runs_the_models_own_code():
    model = tiny_models.tiny_model("qwen3_moe")
    torch_moe_mps.accelerate(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert operators_of(lambda: output(model, prompt())) == {}


def test_float64_runs_the_models_own_code():
    model = tiny_models.tiny_model("gemma4")
    torch_moe_mps.accelerate(model)
    model.double()
    assert operators_of(lambda: output(model, prompt())) == {}


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
    assert "moe_experts" in operators_of(lambda: output(model, prompt()))


def test_peft_adapters_on_attention():
    peft = pytest.importorskip("peft")
    model = eager(tiny_models.tiny_model("qwen3_moe"))
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).eval()
    ids = prompt()
    expected = output(adapted, ids)
    report = torch_moe_mps.accelerate(adapted)
    assert {row.kind for row in report.replaced} == {"experts", "router", "block", "layer"}
    assert operators_of(lambda: output(adapted, ids))["moe_experts"] == 2
    assert_close(output(adapted, ids), expected, 1e-5)
    adapted.train()(input_ids=ids, labels=ids).loss.backward()
    trained = [p for name, p in adapted.named_parameters() if "lora_B" in name]
    assert trained and all(p.grad.abs().sum() > 0 for p in trained)


@pytest.mark.parametrize(
    ("architecture", "target"),
    [
        ("gemma4", {"target_modules": r".*router\.proj"}),
        ("qwen2_moe", {"target_modules": "all-linear"}),
        ("qwen3_moe", {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]}),
    ],
)
def test_peft_adapters_put_in_after_acceleration(architecture, target):
    """On a router's matmul and on the experts: trained by the model's own code, seen in evaluation."""
    peft = pytest.importorskip("peft")
    model = eager(tiny_models.tiny_model(architecture))
    plain = output(model, prompt())
    config = peft.LoraConfig(r=2, init_lora_weights=False, **target)

    def adapted(base):
        torch.manual_seed(0)
        return peft.get_peft_model(base, config).eval()

    expected = output(adapted(copy.deepcopy(model)), prompt())
    assert not torch.allclose(expected, plain, atol=1e-2)
    torch_moe_mps.accelerate(model)
    model = adapted(model)
    assert_close(output(model, prompt()), expected, 1e-5)
    model.train()(input_ids=prompt(), labels=prompt()).loss.backward()
    assert_close(output(model.eval(), prompt()), expected, 1e-5)


# Copies, checkpoints, hooks


def through_pickle(model):
    return pickle.loads(pickle.dumps(model))


def through_torch_save(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle, through_torch_save])
@pytest.mark.parametrize("architecture", ["qwen2_moe", "gemma4"])
def test_copies_are_accelerated(copied, architecture):
    model = tiny_models.tiny_model(architecture)
    torch_moe_mps.accelerate(model)
    ids = prompt()
    twin = copied(model)
    assert operators_of(lambda: output(twin, ids)) == operators_of(lambda: output(model, ids)) != {}
    assert torch.equal(output(twin, ids), output(model, ids))
    torch_moe_mps.restore(twin)
    assert operators_of(lambda: output(twin, ids)) == {} != operators_of(lambda: output(model, ids))


def test_pickle_loads_in_a_fresh_process(tmp_path):
    """Reading the pickle imports this package."""
    model = tiny_models.tiny_model("qwen3_moe")
    torch_moe_mps.accelerate(model)
    (tmp_path / "layer.pickle").write_bytes(pickle.dumps(model.model.layers[0]))
    printed = python(f"""
        import pickle
        layer = pickle.load(open({str(tmp_path / "layer.pickle")!r}, "rb"))
        print(type(layer).__name__, hasattr(type(layer), "_moe_mps_original_class"))
    """)
    assert printed == "Qwen3MoeDecoderLayer True"


def test_state_dict_is_unchanged():
    model = tiny_models.tiny_model("gemma4")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch_moe_mps.accelerate(model)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert "moe_mps" not in str(model.config.to_dict())


def test_sharded_and_tied_checkpoint(tmp_path):
    model = eager(tiny_models.tiny_model("qwen3_moe", tie_word_embeddings=True))
    expected = output(model, prompt())
    torch_moe_mps.accelerate(model)
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = type(model).from_pretrained(tmp_path, low_cpu_mem_usage=True, device_map="cpu").eval()
    torch_moe_mps.accelerate(loaded)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert_close(output(loaded, prompt()), expected, 1e-5)


@pytest.mark.parametrize("hooks_first", [True, False])
def test_hooks_of_the_accelerate_library(hooks_first):
    """Offloaded weights come and go around each module's forward; the hooks keep working."""
    accelerate = pytest.importorskip("accelerate")
    model = eager(tiny_models.tiny_model("qwen2_moe"))
    ids = prompt()
    expected = output(model, ids)
    steps = [
        lambda: accelerate.cpu_offload(model, torch.device("cpu")),
        lambda: torch_moe_mps.accelerate(model),
    ]
    for step in steps if hooks_first else reversed(steps):
        step()
    assert "moe_experts" in operators_of(lambda: output(model, ids))
    assert_close(output(model, ids), expected, 1e-5)


def test_hooks_of_the_accelerate_library_that_are_gone():
    """They leave a forward on every instance."""
    accelerate = pytest.importorskip("accelerate")
    model = eager(tiny_models.tiny_model("qwen2_moe"))
    torch_moe_mps.accelerate(model)
    expected = operators_of(lambda: output(model, prompt()))

    def put_on_and_remove():
        accelerate.cpu_offload(model, torch.device("cpu"))
        accelerate.hooks.remove_hook_from_submodules(model)

    put_on_and_remove()
    torch_moe_mps.restore(model)
    assert operators_of(lambda: output(model, prompt())) == {}
    put_on_and_remove()
    torch_moe_mps.accelerate(model)
    assert operators_of(lambda: output(model, prompt())) == expected


def test_forward_hooks_still_run():
    model = tiny_models.tiny_model("gemma4")
    torch_moe_mps.accelerate(model)
    seen = []
    for name in ("router", "post_attention_layernorm", "experts"):
        module = model.model.layers[0].get_submodule(name)
        module.register_forward_hook(lambda module, args, result, name=name: seen.append((name, result)))
    expected = output(eager(torch_moe_mps.restore(copy.deepcopy(model))), prompt())
    seen.clear()
    assert_close(output(model, prompt()), expected, 1e-5)
    assert [name for name, _ in seen] == ["post_attention_layernorm", "router", "experts"]
    assert seen[1][1][0].shape == (18, 8)  # the probabilities, computed because a hook may want them


def calls_of_experts(model, replace=lambda result: None) -> tuple[list, torch.Tensor]:
    """What hooks on the last experts see, and the logits; a hook may `replace` results."""
    seen = []
    experts = [module for module in model.modules() if torch_moe_mps.transformers.is_experts(module)][-1]
    hooks = [
        experts.register_forward_pre_hook(
            lambda module, args, kwargs: seen.extend([*args, *kwargs.values()]), with_kwargs=True
        ),
        experts.register_forward_hook(lambda module, args, result: seen.append(result.clone())),
        experts.register_forward_hook(lambda module, args, result: replace(result)),
    ]
    logits = output(model, prompt())
    for hook in hooks:
        hook.remove()
    return seen, logits


@pytest.mark.parametrize("architecture", ["deepseek_v3", "gemma4", "glm4_moe", "qwen2_moe", "qwen3_moe"])
def test_hooks_of_experts_see_and_change_what_they_do_in_eager(architecture):
    """The routed output alone, without the shared expert; zeroing it leaves the shared expert's."""
    model = eager(tiny_models.tiny_model(architecture))
    seen, ablated = calls_of_experts(model, torch.zeros_like)
    torch_moe_mps.accelerate(model)
    seen_now, ablated_now = calls_of_experts(model, torch.zeros_like)
    assert len(seen_now) == len(seen) == 4
    for value, expected in zip(seen_now, seen, strict=True):
        assert value.dtype == expected.dtype
    assert_close(seen_now[-1], seen[-1], 1e-5)
    assert_close(ablated_now, ablated, 1e-5)


@pytest.mark.parametrize("architecture", ["gemma4", "qwen2_moe", "qwen3_moe"])
def test_hooks_of_experts_get_the_dtypes_of_eager(architecture):
    model = eager(tiny_models.tiny_model(architecture, torch.bfloat16))
    expected = [value.dtype for value in calls_of_experts(model)[0]]
    torch_moe_mps.accelerate(model)
    assert [value.dtype for value in calls_of_experts(model)[0]] == expected


@pytest.mark.parametrize("path", ["router.proj", "router.norm"])
def test_hooks_within_a_gate_still_run(path):
    """moe_gate computes the router's parts in one: not where something changes one of them."""
    model = eager(tiny_models.tiny_model("gemma4"))
    plain = output(model, prompt())
    module = model.model.layers[0].get_submodule(path)
    hook = module.register_forward_hook(lambda module, args, result: result.flip(-1))
    expected = output(model, prompt())
    hook.remove()
    torch_moe_mps.accelerate(model)
    module.register_forward_hook(lambda module, args, result: result.flip(-1))
    assert not torch.allclose(expected, plain, atol=1e-2)
    assert_close(output(model, prompt()), expected, 1e-5)


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
def test_recorded_outputs(architecture):
    model = eager(tiny_models.tiny_model(architecture))
    options = {"output_hidden_states": True}
    if architecture != "deepseek_v3":
        options["output_router_logits"] = True

    def recorded():
        with torch.no_grad():
            result = model(input_ids=prompt(), **options)
        return [*result.hidden_states, *(result.get("router_logits") or [])]

    expected = recorded()
    torch_moe_mps.accelerate(model)
    results = recorded()
    assert len(results) == len(expected) > 2
    for value, reference in zip(results, expected, strict=True):
        assert_close(value, reference, 1e-5)


def test_beam_search():
    model = eager(tiny_models.tiny_model("qwen3_moe"))
    ids = prompt(2, 6)
    tokens = generate(model, ids, num_beams=3, max_new_tokens=12)
    torch_moe_mps.accelerate(model)
    assert torch.equal(generate(model, ids, num_beams=3, max_new_tokens=12), tokens)


@pytest.mark.parametrize("architecture", ["qwen2_moe", "gpt_oss"])
@pytest.mark.parametrize("rewritten", [True, False])
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
    assert sum("moe_mps.moe_experts" in target for target in targets) == 2
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


# Classes that nobody here has seen


class Config:
    _experts_implementation = "eager"


@use_experts_implementation
class FutureExperts(nn.Module):
    """Follows the interface, with an activation that no operator knows."""

    def __init__(self, config):
        super().__init__()
        self.num_experts = 4
        self.gate_up_proj = nn.Parameter(torch.empty(4, 2 * 12, 16))
        self.down_proj = nn.Parameter(torch.empty(4, 16, 12))

    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.cos(gate) * up

    def forward(self, hidden_states, top_k_index, top_k_weights):
        result = torch.zeros_like(hidden_states)
        for token, (ids, weights) in enumerate(zip(top_k_index, top_k_weights, strict=True)):
            for expert, weight in zip(ids, weights, strict=True):
                hidden = self._apply_gate(F.linear(hidden_states[token], self.gate_up_proj[expert]))
                result[token] += weight * F.linear(hidden, self.down_proj[expert])
        return result


class FutureRouter(nn.Module):
    """Not one of moe_router's formulas: the weights are squared."""

    def __init__(self):
        super().__init__()
        self.top_k = 2
        self.weight = nn.Parameter(torch.empty(4, 16))

    def forward(self, hidden_states):
        logits = F.linear(hidden_states, self.weight)
        values, ids = torch.topk(logits.softmax(-1), self.top_k, dim=-1)
        return logits, values.square(), ids


class FutureBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = FutureRouter()
        self.experts = FutureExperts(Config())

    def forward(self, hidden_states):
        _, weights, ids = self.router(hidden_states)
        return self.experts(hidden_states, ids, weights)


def random_block(cls: type[FutureBlock]) -> tuple[FutureBlock, torch.Tensor]:
    """A block with random parameters, and an input for it."""
    block = cls().eval()
    tiny_models.randomise(block, 0)
    return block, torch.randn(7, 16, generator=torch.Generator().manual_seed(0))


def test_unknown_class_that_follows_the_interface():
    block, x = random_block(FutureBlock)
    with torch.no_grad():
        expected = block(x)
        report = torch_moe_mps.accelerate(block)
        assert_close(block(x), expected, 1e-5)
        assert operators_of(lambda: block(x)) == {"expert_mm": 2, "moe_weighted_reduce": 1}
    rows = {row.kind: row for row in report.rows}
    assert rows["experts"].replaced_by == "expert_mm, own activation, moe_weighted_reduce"
    assert rows["router"].reason == "its formula is not one of moe_router's"


class OtherExperts(nn.Module):
    """A stack of experts with an interface that nobody here knows."""

    def __init__(self):
        super().__init__()
        self.stacked = nn.Parameter(torch.ones(4, 8, 16))


def test_experts_with_another_interface_are_left_alone():
    module = nn.Sequential(OtherExperts())
    with pytest.warns(UserWarning, match="OtherExperts is left alone: its class does not follow"):
        report = torch_moe_mps.accelerate(module)
    assert [(row.name, row.replaced_by) for row in report.rows] == [("0", None)]


class SeparateExperts(nn.ModuleDict):
    pass


@pytest.mark.parametrize("container", ["list", "dict"])
def test_experts_that_are_modules_are_left_alone(container):
    """By the name of the list, or of the class; shared experts are none of it."""
    model, experts = nn.Module(), [nn.Linear(4, 4), nn.Linear(4, 4)]
    model.shared_experts = nn.ModuleList(experts)
    if container == "list":
        model.experts = nn.ModuleList(experts)
    else:
        model.mlp = SeparateExperts({"expert_0": experts[0]})
    with pytest.warns(UserWarning, match="is left alone: each expert is a module"):
        report = torch_moe_mps.accelerate(model)
    assert [row.name for row in report.left_alone] == ["experts" if container == "list" else "mlp"]


def test_model_with_another_interface_is_as_it_was():
    torch.manual_seed(0)
    cls = transformers.Llama4ForCausalLM
    model = cls(tiny_models.build_config(cls.config_class)).eval()
    tiny_models.randomise(model, 0)
    expected = output(model, prompt())
    with pytest.warns(UserWarning, match="Llama4TextExperts is left alone"):
        report = torch_moe_mps.accelerate(model)
    assert report.replaced == []
    assert torch.equal(output(model, prompt()), expected)


def test_experts_in_another_dtype_are_left_alone():
    block = FutureBlock().to(torch.float64).eval()
    with pytest.warns(UserWarning, match="FutureExperts is left alone: its weights are torch.float64"):
        report = torch_moe_mps.accelerate(block)
    rows = {row.kind: row for row in report.rows}
    assert rows["experts"].reason == "its weights are torch.float64"
    assert block.experts.config._experts_implementation == "eager"


# Rewriting of forwards


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 16))
        self.variance_epsilon = 1e-5

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * y.to(x.dtype)


class Layer(FutureBlock):
    """What the layers below have in common."""

    def __init__(self):
        super().__init__()
        self.norm = Norm()
        self.after = Norm()
        self.double = True

    def moe(self, x):
        _, weights, ids = self.router(x)
        return self.experts(x, ids, weights)


class Chained(Layer):
    def forward(self, x, y):
        residual = x
        x = x + y
        residual = x
        x = self.norm(x)
        return residual + self.moe(x)


class Branching(Layer):
    """A branch that the module decides, and one that only the input does."""

    def forward(self, x, y):
        if self.double:
            y = y * 2
        if x.shape[0] > 3:
            y = y + 1
        total = x + y
        x = self.norm(total)
        if x.shape[0] > 5:
            total = total * 3
        return total + self.moe(x)


class Reassigned(Layer):
    """The sum is not what reaches the norm."""

    def forward(self, x, y):
        total = x + y
        if x.shape[0] > 0:
            total = total * 2
        return total + self.moe(self.norm(total))


class InPlace(Layer):
    """The normed value is changed in place before it is added."""

    def forward(self, x, y):
        normed = self.norm(y)
        y *= 3
        return x + normed + self.moe(y)


class Aliased(Layer):
    """An in-place change that is seen through another name."""

    def forward(self, x, y):
        total = x + y
        residual = total
        total *= 2
        return residual + self.moe(self.norm(total))


class Post(Layer):
    def forward(self, x, y):
        y = self.after(y)
        y = x + y
        return y + self.moe(y)


class Looping(Layer):
    def forward(self, x, y):
        for _ in range(2):
            x = x + y
        return self.moe(self.norm(x))


class EarlyReturn(Layer):
    def forward(self, x, y):
        if x.shape[0] == 0:
            return x
        return self.moe(self.norm(x + y))


class OwnInPlace(Layer):
    """The input of the norm is changed in place, before what was normed of it is added."""

    def forward(self, x, y):
        y = y * 2
        normed = self.after(y)
        y *= 3
        total = x + normed
        return total + self.moe(y)


class SumWithNumber(Layer):
    """What is added before the norm is no tensor."""

    def forward(self, x, y):
        x = x + 1
        x = self.norm(x)
        return y + self.moe(x)


class SumInPlace(Layer):
    """The sum is changed in place by a branch before it is normed."""

    def forward(self, x, y):
        total = x + y
        if x.shape[0] > 0:
            total.mul_(2)
        x = self.norm(total)
        return total + self.moe(x)


class SharedLayer(Layer):
    """A shared expert beside the routed ones."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(16, 16)


class Shared(SharedLayer):
    """The experts' input is needed when its name has another value already."""

    def forward(self, x, y):
        x = x + y
        _, weights, ids = self.router(x)
        routed = self.experts(x, ids, weights)
        x = self.shared(x)
        return routed + x


class SharedInPlace(SharedLayer):
    """The experts' input is changed in place after they have run."""

    def forward(self, x, y):
        x = x + y
        _, weights, ids = self.router(x)
        routed = self.experts(x, ids, weights)
        x *= 2
        return routed + x


class SharedAfterRouted(SharedLayer):
    """The second expert reads the result of the routed ones."""

    def forward(self, x, y):
        _, weights, ids = self.router(x)
        routed = self.experts(x, ids, weights)
        x = routed
        total = x
        return total + self.shared(x)


def normed(x):
    return x * 0.5


class NameOfAGlobal(Layer):
    """The variable that holds the norm's results must not hide a function of the same name."""

    def forward(self, x, y):
        total = x + y
        x = self.norm(total)
        return normed(total) + self.moe(x)


CASES = {
    Chained: ["fused_residual_norm (norm)"],
    Branching: ["fused_residual_norm (norm)"],
    Post: ["fused_norm_add (after)"],
    Reassigned: "no norm or shared expert here that an operator can fuse",
    InPlace: "its forward changes a tensor in place that has another name",
    Aliased: "its forward changes a tensor in place that has another name",
    OwnInPlace: "no norm or shared expert here that an operator can fuse",
    SumWithNumber: ["fused_residual_norm (norm)"],
    SumInPlace: "no norm or shared expert here that an operator can fuse",
    Shared: ["shared expert in moe_experts"],
    SharedInPlace: "no norm or shared expert here that an operator can fuse",
    SharedAfterRouted: "no norm or shared expert here that an operator can fuse",
    NameOfAGlobal: ["fused_residual_norm (norm)"],
    Looping: "no norm or shared expert here that an operator can fuse",
    EarlyReturn: "its forward returns from within a branch or defines functions",
}


@pytest.mark.parametrize("cls", CASES, ids=lambda cls: cls.__name__)
def test_rewriting_of_a_forward(cls):
    layer = cls().eval()
    tiny_models.randomise(layer, 1)
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(2, 7, 16, generator=generator)
    with torch.no_grad():
        expected = layer(x.clone(), y.clone())
        rewrites, reason = rewrite(layer)
        assert (rewrites or reason) == CASES[cls]
        assert is_rewritten(layer) == bool(rewrites)
        assert_close(layer(x.clone(), y.clone()), expected, 1e-5)
        assert_close(layer(x=x.clone(), y=y.clone()), expected, 1e-5)


@pytest.mark.parametrize("cls", [Chained, Post])
def test_norm_whose_weight_widens_its_result(cls):
    """bfloat16 times a float32 weight is float32, which the operators would not give."""
    layer = cls().eval()
    tiny_models.randomise(layer, 1)
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(2, 7, 16, generator=generator).bfloat16()
    with torch.no_grad():
        expected = layer(x, y)
        assert rewrite(layer)[0] == CASES[cls]
        assert expected.dtype == torch.float32
        assert_close(layer(x, y), expected, 1e-5)


class SharedOfFloat32(SharedLayer):
    def forward(self, x, y):
        _, weights, ids = self.router(x)
        return self.experts(x, ids, weights) + self.shared(y)


def test_shared_expert_in_another_dtype():
    layer = SharedOfFloat32().eval()
    tiny_models.randomise(layer, 1)
    layer.bfloat16().shared.float()
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(2, 7, 16, generator=generator)
    with torch.no_grad():
        expected = layer(x.bfloat16(), y)
        report = torch_moe_mps.accelerate(layer)
        assert "shared expert in moe_experts" in {row.replaced_by for row in report.replaced}
        assert_close(layer(x.bfloat16(), y), expected, 2e-2)


# Formulas that look like ones of the operators


class OverTokens(FutureRouter):
    def forward(self, hidden_states):
        logits = F.linear(hidden_states, self.weight)
        weights, ids = torch.topk(logits.softmax(0), self.top_k, dim=-1)
        return logits, weights, ids


def test_softmax_over_another_dimension():
    router = OverTokens().eval()
    assert rewrite(router) == ([], "its formula is not one of moe_router's")


class LateLogits(FutureRouter):
    """What the router returns first is computed after the ids."""

    def forward(self, hidden_states):
        logits = F.linear(hidden_states, self.weight)
        weights, ids = torch.topk(logits.softmax(-1), self.top_k, dim=-1)
        logits = logits * 2
        return logits, weights, ids


class ReturnsLogits(FutureBlock):
    def __init__(self):
        super().__init__()
        self.router = LateLogits()

    def forward(self, hidden_states):
        logits, weights, ids = self.router(hidden_states)
        return self.experts(hidden_states, ids, weights), logits


def test_logits_that_are_computed_last():
    block, x = random_block(ReturnsLogits)
    with torch.no_grad():
        expected = block(x)
        report = torch_moe_mps.accelerate(block)
        assert {row.kind for row in report.replaced} >= {"experts", "router"}
        for result, reference in zip(block(x), expected, strict=True):
            assert_close(result, reference, 1e-5)


class ClampedApart(FutureExperts):
    """As silu_clamped, but with other limits of the up half below than above."""

    low, high = 0.25, 1.0

    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate.clamp(max=self.high)) * up.clamp(-self.low, self.high)


class ClampedAlike(ClampedApart):
    low = 1.0


def future_experts(cls):
    experts = cls(Config()).eval()
    tiny_models.randomise(experts, 0)
    return experts


@pytest.mark.parametrize(
    ("cls", "operators"),
    [(ClampedAlike, {"moe_experts": 1}), (ClampedApart, {"expert_mm": 2, "moe_weighted_reduce": 1})],
)
def test_limits_of_a_clamped_activation(cls, operators):
    experts = future_experts(cls)
    generator = torch.Generator().manual_seed(0)
    x, weights = 9 * torch.randn(7, 16, generator=generator), torch.rand(7, 2, generator=generator)
    ids = torch.rand(7, 4, generator=generator).argsort(-1)[:, :2]
    with torch.no_grad():
        expected = experts(x, ids, weights)
        torch_moe_mps.accelerate(experts)
        assert operators_of(lambda: experts(x, ids, weights)) == operators
        assert_close(experts(x, ids, weights), expected, 1e-5)


def test_more_slots_than_the_operators_take():
    """The model's own code computes them, and the shared expert is added behind its gate."""
    experts = future_experts(FutureExperts)
    generator = torch.Generator().manual_seed(0)
    x, shared = torch.randn(2, 7, 16, generator=generator)
    ids, weights = torch.randint(4, (7, 65), generator=generator), torch.rand(7, 65, generator=generator)
    gate = torch.randn(7, 1, generator=generator)
    with torch.no_grad():
        expected = experts(x, ids, weights)
        torch_moe_mps.accelerate(experts)
        assert operators_of(lambda: experts(x, ids, weights)) == {}
        assert_close(experts(x, ids, weights), expected, 1e-5)
        for each in (gate, gate.flatten()):
            with_shared = experts(x, ids, weights, shared_gate=each, shared_out=shared)
            assert_close(with_shared, expected + gate.sigmoid() * shared, 1e-5)


def test_rewritten_forward_has_source_and_signature():
    """Tracebacks and debuggers show the code that runs; the signature is the model's."""
    model = tiny_models.tiny_model("qwen3_moe")
    layer = model.model.layers[0]
    before = inspect.signature(layer.forward)
    torch_moe_mps.accelerate(model)
    assert inspect.signature(layer.forward) == before
    with torch.no_grad(), pytest.raises(RuntimeError) as error:
        layer(torch.ones(1, 2, 31), position_embeddings=(torch.ones(1), torch.ones(1)))
    lines = [frame.line for frame in traceback.extract_tb(error.tb) if "torch_moe_mps" in frame.filename]
    assert any("self.input_layernorm(hidden_states)" in line for line in lines)


def test_instance_with_its_own_forward_is_left_alone():
    layer = Chained().eval()
    layer.forward = lambda x, y: x
    assert rewrite(layer) == ([], "its forward was replaced on the instance")
