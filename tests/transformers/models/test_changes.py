"""Whatever changes in an accelerated model, or is put on it: it computes what its own code does, prompts and
captured tokens alike, and hooks and adapters see and change what they do there.
"""

import contextlib
import copy
import inspect
import io
import json
import pickle
from functools import partial

import pytest
import torch
import transformers
from support import tiny_models
from support.models import (
    Conversation,
    assert_close,
    eager,
    generate,
    operators_of,
    output,
    prompt,
    quantize_experts,
    tiny,
)
from torch import nn
from torch.nn.utils import parametrize
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe

import torch_moe_mps
from torch_moe_mps._environment import CAPTURE
from torch_moe_mps.models.capture.classes import captures_of
from torch_moe_mps.transformers import is_experts
from torch_moe_mps.transformers.install import rewrite

transformers.logging.set_verbosity_error()
accelerate = pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")


def pair(architecture: str, bits: int | None = None):
    """A model accelerated, and one with the same weights that runs its own code."""
    own = tiny(architecture) if bits else eager(tiny_models.tiny_model(architecture))
    fast = copy.deepcopy(own)
    torch_moe_mps.accelerate(fast, bits, bits and 32)
    return fast, tiny_models.dense_twin(own, fast)


def check(fast, own) -> None:
    assert_close(output(fast, prompt()), output(own, prompt()), 1e-5)


def norm(model) -> nn.Module:
    return model.model.layers[0].post_attention_layernorm


def attention(model) -> nn.Module:
    return model.model.layers[1].self_attn


def double(module, args, result):
    return 2 * result


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


class OtherNorm(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight = norm.weight

    def forward(self, x):
        return 3 * self.weight * x


def swap_layers(model):
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]


def subclass(module):
    cls = type(module)
    module.__class__ = type("Other", (cls,), {"forward": lambda self, x: 2 * cls.forward(self, x)})


def wrap(module):
    wrapped = module.forward
    module.forward = lambda *args, **kwargs: 2 * wrapped(*args, **kwargs)


def flip_joined(model):
    for name in ("q_proj", "k_proj"):
        for parameter in getattr(attention(model), name).parameters():
            parameter.data = parameter.data.flip(0)


def parametrise(model):
    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            parametrize.register_parametrization(module, "weight", Doubled())


def change_parametrised(model):
    """An attribute beneath the class that a parametrisation puts on top."""
    parametrise(model)
    model.model.layers[0].mlp.gate.norm_topk_prob = True


def set_in_all(kind: str, name: str, value, model):
    """Sets an attribute of all modules whose class ends in `kind`."""
    found = [m for m in model.modules() if type(m).__name__.endswith(kind) and hasattr(m, name)]
    assert found
    for module in found:
        setattr(module, name, value)


def write_over(path: str, model):
    """Into the instance's dictionary, where Python looks before it asks the module for its children."""
    owner, _, name = f"model.layers.0.{path}".rpartition(".")
    new = copy.deepcopy(getattr(model.get_submodule(owner), name))
    for parameter in [new] if isinstance(new, nn.Parameter) else new.parameters():
        parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5))
    model.get_submodule(owner).__dict__[name] = new


# Of Qwen3-MoE.
CHANGES = {
    "weight replaced": lambda m: setattr(norm(m), "weight", nn.Parameter(norm(m).weight * 2)),
    "weight written": lambda m: norm(m).weight.mul_(2),
    "data replaced": lambda m: setattr(norm(m).weight, "data", norm(m).weight.data * 2),
    "data of joined layers replaced": flip_joined,
    "hook": lambda m: norm(m).register_forward_hook(double),
    "hook before": lambda m: norm(m).register_forward_pre_hook(lambda module, args: (2 * args[0],)),
    "hook of the model": lambda m: m.register_forward_hook(
        lambda module, args, out: setattr(out, "logits", 2 * out.logits)
    ),
    "hook of an activation": lambda m: m.model.layers[0].mlp.experts.act_fn.register_forward_hook(double),
    "module replaced": lambda m: setattr(m.model.layers[0], "post_attention_layernorm", OtherNorm(norm(m))),
    "layers swapped": swap_layers,
    "class of a module": lambda m: subclass(norm(m)),
    "forward of a module": lambda m: wrap(norm(m)),
    "number of a module": lambda m: setattr(attention(m), "scaling", 0.5),
    "config": lambda m: setattr(m.config, "output_router_logits", True),
    "attention implementation": lambda m: m.set_attn_implementation("eager"),
    "experts implementation": lambda m: m.set_experts_implementation("batched_mm"),
    "training": lambda m: m.model.layers[0].train(),
    "restored": torch_moe_mps.restore,
    "buffer": lambda m: m.model.rotary_emb.register_buffer("inv_freq", m.model.rotary_emb.inv_freq * 2),
    "parametrisation": parametrise,
    "beneath a parametrisation": change_parametrised,
    "offloaded": lambda m: accelerate.cpu_offload(m, torch.device("cpu")),
    "top_k": partial(set_in_all, "Router", "top_k", 3),
    "norm_topk_prob": partial(set_in_all, "Router", "norm_topk_prob", True),
    "activation": partial(set_in_all, "Experts", "act_fn", nn.GELU()),
    "unknown activation": partial(set_in_all, "Experts", "act_fn", nn.Tanh()),
    "eps": partial(set_in_all, "RMSNorm", "variance_epsilon", 0.5),
    "input_layernorm": partial(write_over, "input_layernorm"),
    "input_layernorm.weight": partial(write_over, "input_layernorm.weight"),
    "self_attn.q_proj": partial(write_over, "self_attn.q_proj"),
}
# May give the same logits.
SILENT = ("config", "attention implementation", "experts implementation", "training", "restored", "offloaded")
# With captured tokens; the others without. The fingerprint tells all of them (capture/test_fingerprint.py).
TOLD_BY_TOKENS = (
    *("data of joined layers replaced", "hook", "hook of an activation", "module replaced", "restored"),
    *("class of a module", "number of a module", "training"),
)
# Of others.
ATTRIBUTES = [
    ("gpt_oss", partial(set_in_all, "Experts", "limit", 0.25)),
    ("gpt_oss", partial(set_in_all, "Experts", "alpha", 3.0)),
    ("deepseek_v3", partial(set_in_all, "Router", "routed_scaling_factor", 0.5)),
    ("deepseek_v3", partial(set_in_all, "Router", "norm_topk_prob", False)),
    ("nemotron_h", partial(set_in_all, "Experts", "act_fn", nn.SiLU())),
]


def check_change(fast, own, change) -> None:
    """Behind it, and with it when the model is restored and accelerated again."""
    tokens = 5 if captures_of(fast) else 2  # the fourth is captured
    talks = Conversation(fast), Conversation(own)
    assert_close(*(talk.tokens(tokens) for talk in talks), 1e-5)
    before = output(own, prompt())
    for model in (fast, own):
        change(model)
    assert_close(*(talk.tokens(tokens) for talk in talks), 1e-5)
    expected = output(own, prompt())
    assert change in map(CHANGES.get, SILENT) or not torch.equal(expected, before)
    assert_close(output(fast, prompt()), expected, 1e-5)
    for again in (torch_moe_mps.restore, torch_moe_mps.accelerate, torch_moe_mps.accelerate):
        again(fast)
        assert_close(output(fast, prompt()), expected, 1e-5)


@pytest.mark.parametrize("name", CHANGES)
@torch.no_grad()
def test_a_change(name, monkeypatch):
    """Of captured tokens, and of those that run module by module."""
    monkeypatch.setenv(CAPTURE, str(int(name in TOLD_BY_TOKENS)))
    fast, own = pair("qwen3_moe")
    check_change(fast, own, CHANGES[name])


@pytest.mark.parametrize(("architecture", "change"), ATTRIBUTES)
@torch.no_grad()
def test_an_attribute(architecture, change):
    check_change(*pair(architecture), change)


@torch.no_grad()
def test_a_hook_on_the_activation_of_quantised_experts():
    check_change(*pair("qwen3_moe", 4), CHANGES["hook of an activation"])


def test_the_implementation_of_attention_changes(monkeypatch):
    """The rewritten forward looks it up in every call."""
    fast, own = pair("qwen3_moe")
    calls, sdpa = [], ALL_ATTENTION_FUNCTIONS["sdpa"]

    def counted(*args, **kwargs):
        calls.append(kwargs)
        return sdpa(*args, **kwargs)

    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "counted", counted)
    for name, times in (("eager", 0), ("counted", 2), ("sdpa", 2)):
        fast.set_attn_implementation(name)
        check(fast, own)
        assert len(calls) == times
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", counted)
    output(fast, prompt())
    assert len(calls) == 4
    attention(fast).config._attn_implementation = "unknown"
    with pytest.raises(KeyError, match="`unknown` is not a valid attention implementation"):
        output(fast, prompt())


def test_a_parametrised_router_runs_its_own_code():
    """Its class is on top of the rewritten one."""
    fast, own = pair("qwen3_moe")
    parametrise(fast), parametrise(own)
    for again in (torch_moe_mps.accelerate, torch_moe_mps.restore, torch_moe_mps.accelerate):
        assert "moe_router" not in operators_of(lambda: check(fast, own))
        again(fast)


PATCHES = ["Qwen3MoeRotaryEmbedding", "Qwen3MoeAttention"]


@pytest.mark.parametrize("name", PATCHES)
def test_a_class_is_patched(monkeypatch, name):
    """Whoever gives a class another forward, as profilers and kernel packages do, is heard."""
    fast, own = pair("qwen3_moe")
    cls = getattr(qwen3_moe, name)
    forward, calls = cls.forward, []

    def patched(self, *args, **kwargs):
        calls.append(self)
        out = forward(self, *args, **kwargs)
        return tuple(x * 1.5 for x in out) if isinstance(out, tuple) and name.endswith("Embedding") else out

    check(fast, own)
    monkeypatch.setattr(cls, "forward", patched)
    check(fast, own)
    assert sum(call in [*fast.modules()] for call in calls) * 2 == len(calls) > 0


def test_a_function_is_patched(monkeypatch):
    fast, own = pair("qwen3_moe")
    rotate = qwen3_moe.apply_rotary_pos_emb
    before = output(fast, prompt())
    monkeypatch.setattr(qwen3_moe, "apply_rotary_pos_emb", lambda q, k, cos, sin: rotate(q, k, sin, cos))
    assert (output(own, prompt()) - before).abs().max() > 1e-3
    check(fast, own)


# Hooks


def test_global_hooks_see_every_module():
    fast, own = pair("qwen3_moe")
    seen = {}
    for model in (fast, own):
        names = {module: name for name, module in model.named_modules()}
        called = seen[model] = []
        hook = nn.modules.module.register_module_forward_hook(
            lambda module, args, result, called=called, names=names: called.append(names[module])
        )
        try:
            output(model, prompt())
        finally:
            hook.remove()
    assert set(seen[own]) <= set(seen[fast])
    assert any("post_attention_layernorm" in name for name in seen[fast])
    check(fast, own)


def calls_of_experts(model, replace) -> tuple[list, torch.Tensor]:
    """What hooks on the last experts see, and the logits with results that a hook `replace`s."""
    seen = []
    experts = [module for module in model.modules() if is_experts(module)][-1]
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


@pytest.mark.parametrize("architecture", ["deepseek_v3", "gemma4"])
def test_hooks_of_experts_see_and_change_what_they_do_in_eager(architecture):
    """The hook sees the routed output only; zeroing it leaves the output of the shared expert."""
    for dtype in (torch.float32, torch.bfloat16):
        model = eager(tiny_models.tiny_model(architecture, dtype))
        seen, ablated = calls_of_experts(model, torch.zeros_like)
        torch_moe_mps.accelerate(model)
        seen_now, ablated_now = calls_of_experts(model, torch.zeros_like)
        assert len(seen_now) == 4 and [v.dtype for v in seen_now] == [v.dtype for v in seen]
        if dtype == torch.float32:
            assert_close(seen_now[-1], seen[-1], 1e-5)
            assert_close(ablated_now, ablated, 1e-5)


def test_a_router_computes_the_probabilities_that_a_hook_may_want():
    fast, own = pair("gemma4")
    seen = []
    for model in (fast, own):
        router = model.model.layers[0].router
        router.register_forward_hook(lambda module, args, result: seen.append(result[0]))
    check(fast, own)
    assert seen[0].shape == (18, 8)
    assert_close(*seen, 1e-5)


def test_hooks_of_the_accelerate_library():
    """Those that are gone leave a forward on every instance; those that are there call the module's."""
    model = eager(tiny_models.tiny_model("qwen2_moe"))
    torch_moe_mps.accelerate(model)
    expected = operators_of(lambda: output(model, prompt()))
    for again, left in ((torch_moe_mps.restore, {}), (torch_moe_mps.accelerate, expected)):
        accelerate.cpu_offload(model, torch.device("cpu"))
        accelerate.hooks.remove_hook_from_submodules(model)
        again(model)
        assert operators_of(lambda: output(model, prompt())) == left
    fresh = eager(tiny_models.tiny_model("qwen2_moe"))
    accelerate.cpu_offload(fresh, torch.device("cpu"))
    for again in (torch_moe_mps.accelerate, torch_moe_mps.restore):
        again(fresh)
        used = operators_of(lambda: output(fresh, prompt()))
        assert ("rms_norm" in used) == (again is torch_moe_mps.accelerate)


# Adapters


ON_A_ROUTER = {"target_modules": r".*router\.proj"}
ON_EXPERTS = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]}


@pytest.mark.parametrize(
    ("architecture", "target"),
    [
        ("gemma4", ON_A_ROUTER),
        ("qwen2_moe", {"target_modules": "all-linear"}),
        ("qwen3_moe", ON_EXPERTS),
        ("qwen3_moe", {"target_modules": ["q_proj", "v_proj"]}),
    ],
)
def test_peft_adapters(architecture, target):
    """Put in before acceleration and after: trained by the model's own code, seen in evaluation."""
    own = eager(tiny_models.tiny_model(architecture))
    plain = output(own, prompt())

    def adapted(base):
        torch.manual_seed(0)
        return peft.get_peft_model(base, peft.LoraConfig(r=2, init_lora_weights=False, **target)).eval()

    after = copy.deepcopy(own)
    torch_moe_mps.accelerate(after)
    after, before, own = map(adapted, (after, copy.deepcopy(own), own))
    if target is not ON_EXPERTS:
        report = torch_moe_mps.accelerate(before)
        assert "other" in {row.kind for row in report.replaced}
        assert operators_of(lambda: output(before, prompt()))["_moe_experts"] == 2
    expected = output(own, prompt())
    assert not torch.allclose(expected, plain, atol=1e-2)
    for model in (after, before):
        assert_close(output(model, prompt()), expected, 1e-5)
        model.train()(input_ids=prompt(), labels=prompt()).loss.backward()
        trained = [p for name, p in model.named_parameters() if "lora_B" in name]
        assert trained and all(p.grad.abs().sum() > 0 for p in trained)
        assert_close(output(model.eval(), prompt()), expected, 1e-5)


def test_peft_prompts_in_front_of_quantised_layers():
    """PEFT looks for the embedding by a dense weight: the prompt is put in first."""
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    adapted = peft.get_peft_model(tiny("qwen3_moe"), config).eval()
    expected = output(adapted, prompt())
    assert expected.shape[1] == prompt().shape[1] + 4
    torch_moe_mps.accelerate(adapted, 8, 32)
    assert_close(output(adapted, prompt()), expected, 0.05)


# Copies, and what callers see of a module


def through_pickle(model):
    return pickle.loads(pickle.dumps(model))


def through_torch_save(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@torch.no_grad()
def test_copies_are_accelerated(monkeypatch):
    """With weights of their own, and without the original's captured tokens."""
    monkeypatch.setenv(CAPTURE, "1")
    model = tiny_models.tiny_model("qwen2_moe")
    torch_moe_mps.accelerate(model)
    expected, used = output(model, prompt()), operators_of(lambda: output(model, prompt()))
    logits = Conversation(model).tokens(5)
    assert captures_of(model).programs
    twins = [copied(model) for copied in (copy.deepcopy, through_pickle, through_torch_save)]
    for parameter in model.parameters():
        parameter.zero_()
    for twin in twins:
        assert captures_of(twin) and not captures_of(twin).programs
        assert operators_of(lambda: output(twin, prompt())) == used != {}  # noqa: B023
        assert torch.equal(output(twin, prompt()), expected)
        assert all(map(torch.equal, Conversation(twin).tokens(5), logits))
        torch_moe_mps.restore(twin)
        assert operators_of(lambda: output(twin, prompt())) == {}  # noqa: B023
    assert operators_of(lambda: output(model, prompt())) == used


def test_what_is_seen_of_modules():
    """The model's signatures in the attention of a layer and in its norms; a state dict without ours."""
    model = tiny_models.tiny_model("qwen3_moe")
    modules = attention(model), norm(model)
    before = [inspect.signature(module.forward) for module in modules]
    classes, state = [*map(type, modules)], {n: t.clone() for n, t in model.state_dict().items()}
    torch_moe_mps.accelerate(model)
    assert [*map(type, modules)] != classes
    assert [inspect.signature(module.forward) for module in modules] == before
    after = model.state_dict()
    assert list(after) == list(state) and all(torch.equal(after[name], state[name]) for name in state)
    assert "moe_mps" not in str(model.config.to_dict())


def test_instance_with_its_own_forward_is_left_alone():
    module = norm(tiny_models.tiny_model("qwen3_moe"))
    module.forward = lambda x: x
    assert rewrite(module) == ([], "its forward was replaced on the instance")


# Two models with one config object: what is done to one does not show in the other


def two_of_one_config():
    first = tiny("qwen3_moe")
    second = type(first)(first.config).eval()
    second.set_experts_implementation("eager")
    assert first.config is second.config
    return first, second


# Models with experts, and with attention that transformers' "sdpa" lacks: sinks, a soft cap, an indexer
NAMED = ("qwen3_moe", "gpt_oss", "gemma2", "minimax_m3_vl")


def configs_of(model):
    return {name: module.config for name, module in model.named_modules() if hasattr(module, "config")}


@pytest.mark.parametrize("architecture", NAMED)
def test_configs_keep_their_names(architecture):
    """While a model is accelerated, too: a model built from one is plain, and `restore` gives each back."""
    model = tiny(architecture)
    config, configs, state = model.config, configs_of(model), copy.deepcopy(model.config.__dict__)
    expected = output(model, prompt())
    torch_moe_mps.accelerate(model)
    for called in (lambda: None, lambda: output(model, prompt())):
        called()
        assert model.config is config and config.__dict__ == state
        assert copy.deepcopy(config)._attn_implementation == config._attn_implementation != "moe_mps"
        assert all(str(each) == str(configs[name]) for name, each in configs_of(model).items())
    assert operators_of(lambda: output(model, prompt()))
    assert operators_of(lambda: output(type(model)(config).eval(), prompt())) == {}
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert copied.config is not config and copied.config.__dict__.keys() == state.keys()
        assert operators_of(lambda m=copied: output(m, prompt())) == operators_of(
            lambda: output(model, prompt())
        )
        assert configs_of(torch_moe_mps.restore(copied))[""] is copied.config
        assert_close(output(copied, prompt()), expected, 1e-5)
    torch_moe_mps.restore(model)
    assert all(module is configs[name] for name, module in configs_of(model).items())
    assert config.__dict__ == state and torch.equal(output(model, prompt()), expected)


def test_a_call_that_fails_leaves_the_config():
    model = tiny("gpt_oss")
    config = model.config
    torch_moe_mps.accelerate(model)
    with pytest.raises(IndexError):
        model(torch.tensor([[10**6]]))
    assert model.config is config and model.model.config is config


def test_one_of_two_models_with_a_config_is_accelerated():
    """With what the user chose, if that is ours; what one chooses later holds for both."""
    models = two_of_one_config()
    for chosen in ("eager", "moe_mps", "grouped_mm"):
        models[1].set_experts_implementation(chosen)
        torch_moe_mps.accelerate(models[0])
        assert models[0].config is models[1].config and models[1].config._experts_implementation == chosen
        ran = [operators_of(lambda m=model: output(m, prompt())).get("_moe_experts", 0) for model in models]
        assert ran == [2, 2 * (chosen == "moe_mps")]
        models[1].set_experts_implementation("batched_mm")
        assert "_moe_experts" not in operators_of(lambda: output(models[0], prompt()))
        torch_moe_mps.restore(models[0])
        assert models[0].config._experts_implementation == "batched_mm"


def test_generate_chooses_no_other_experts(simulated):
    """On a GPU transformers takes "batched_mm" for tokens where the config says "grouped_mm"."""
    model, names = tiny_models.tiny_model("qwen3_moe").to("mps"), []
    torch_moe_mps.accelerate(model)
    model.model.norm.register_forward_hook(lambda *_: names.append(model.config._experts_implementation))
    ran = operators_of(lambda: generate(model, prompt(1, 5).to("mps"), max_new_tokens=3))
    assert names == ["grouped_mm"] * 3 and ran["_moe_experts"] == 2 * 3
    torch_moe_mps.restore(model)
    generate(model, prompt(1, 5).to("mps"), max_new_tokens=2)
    assert names[3:] == ["grouped_mm", "batched_mm"]


def test_a_quantised_one_has_a_config_of_its_own(tmp_path):
    """All its modules have it; it loads a checkpoint of the model, but no dense one."""
    first, second = two_of_one_config()
    first.save_pretrained(tmp_path / "dense")
    stored = json.loads((tmp_path / "dense/config.json").read_text())
    quantize_experts(first, 4, 32)
    assert first.config is first.model.config is first.model.layers[0].self_attn.config is not second.config
    own = second.config._attn_implementation
    first.set_attn_implementation("eager")
    assert first.model.layers[1].self_attn.config._attn_implementation == "eager" != own
    assert second.config._attn_implementation == own
    first.save_pretrained(tmp_path / "quantised")
    load = torch_moe_mps.from_pretrained
    loaded = load(tmp_path / "quantised", config=first.config).eval()
    assert_close(output(loaded, prompt()), output(first, prompt()), 1e-5)
    stored["quantization_config"] = first.config.quantization_config.to_dict()
    (tmp_path / "dense/config.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match=r"experts\.gate_up_proj_\w+ must be in the checkpoint, got no"):
        load(tmp_path / "dense")


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_dense_experts_in_a_quantised_model(layers, monkeypatch, tmp_path):
    """Put there by the user, or left there by an interrupt: what is saved is what the model is."""
    first, second = two_of_one_config()
    with monkeypatch.context() as patch:
        if layers == 0:
            patch.setattr("torch_moe_mps.checkpoints.in_place.keep_when_saving", interrupt)
        with pytest.raises(KeyboardInterrupt) if layers == 0 else contextlib.nullcontext():
            quantize_experts(first, 4, 32)
    for layer in range(layers):
        first.model.layers[layer].mlp.experts = second.model.layers[layer].mlp.experts
    first.save_pretrained(tmp_path)
    assert (layers < 2) == ("quantization_config" in json.loads((tmp_path / "config.json").read_text()))
    loaded = torch_moe_mps.from_pretrained(tmp_path).eval()
    assert_close(output(loaded, prompt()), output(first, prompt()), 1e-5)


def test_a_restored_model_is_saved_as_quantised(tmp_path):
    """It stays quantised, and transformers' own method writes the config that describes it."""
    model = eager(tiny("qwen3_moe"))
    quantize_experts(model, 4, 32)
    torch_moe_mps.restore(model)
    model.save_pretrained(tmp_path)
    assert "quantization_config" in json.loads((tmp_path / "config.json").read_text())
    loaded = torch_moe_mps.from_pretrained(tmp_path).eval()
    assert_close(output(loaded, prompt()), output(model, prompt()), 1e-5)


def interrupt(*_):
    raise KeyboardInterrupt
