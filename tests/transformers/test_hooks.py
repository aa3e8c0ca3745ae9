"""In an accelerated model, hooks, recorded outputs and adapters see and change what they do in eager."""

import copy

import pytest
import torch
import transformers
from support import tiny_models
from support.models import assert_close, eager, operators_of, output, prompt

import torch_moe_mps

transformers.logging.set_verbosity_error()


def test_peft_adapters_on_attention():
    peft = pytest.importorskip("peft")
    model = eager(tiny_models.tiny_model("qwen3_moe"))
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).eval()
    ids = prompt()
    expected = output(adapted, ids)
    report = torch_moe_mps.accelerate(adapted)
    assert {row.kind for row in report.replaced} == {"experts", "router", "other"}
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


def test_peft_prompts_in_front_of_quantised_layers():
    """PEFT looks for the embedding by a dense weight: the prompt is put in first."""
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with tiny_models.groups_of_32():
        model = eager(tiny_models.tiny_model("qwen3_moe"))
    adapted = peft.get_peft_model(model, config).eval()
    expected = output(adapted, prompt())
    assert expected.shape[1] == prompt().shape[1] + 4
    torch_moe_mps.accelerate(adapted, 8, 32)
    assert_close(output(adapted, prompt()), expected, 0.05)


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


def calls_of_experts(model, replace) -> tuple[list, torch.Tensor]:
    """What hooks on the last experts see, and the logits with results that a hook `replace`s."""
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
