"""Whole models of every architecture with experts: the accelerated model against its own eager code."""

import copy

import pytest
import torch
import transformers
from support import tiny_models
from support.models import NO_GENERATE, assert_close, eager, generate, output, prompt

import torch_moe_mps

transformers.logging.set_verbosity_error()

# The families that get every check; all other architectures get logits and greedy generation.
FAMILIES = (
    "deepseek_v3",
    "gemma4",
    "glm4_moe",
    "gpt_oss",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_5_moe",
    "qwen3_moe",
    "qwen3_next",
)


@pytest.mark.parametrize("architecture", tiny_models.architectures())
def test_logits_and_greedy_generation(architecture):
    model = eager(tiny_models.tiny_model(architecture))
    ids = prompt()
    logits = output(model, ids)
    tokens = None if architecture in NO_GENERATE else generate(model, ids, max_new_tokens=12)
    report = torch_moe_mps.accelerate(model)
    experts = [row for row in report.rows if row.kind == "experts"]
    assert experts and all(row.replaced_by for row in experts)
    assert_close(output(model, ids), logits, 1e-5)
    if tokens is not None:
        assert torch.equal(generate(model, ids, max_new_tokens=12), tokens)


def errors(result: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Of each token's logits, relative."""
    difference = (result.float() - exact).norm(dim=-1)
    return (difference / exact.norm(dim=-1)).flatten()


# A router of each kind; the other families in the sweep.
ROUTERS = ("deepseek_v3", "gemma4", "gpt_oss", "qwen3_next")


@pytest.mark.parametrize(
    "architecture",
    [name if name in ROUTERS else pytest.param(name, marks=pytest.mark.sweep) for name in FAMILIES],
)
def test_bfloat16_logits(architecture):
    """No farther from float32 than the model's own code is. Near ties between experts fall either way, with
    the whole difference of two experts: the median is what rounding makes."""
    ids, own, ours = prompt(1, 7), [], []
    for seed in range(6):
        model = eager(tiny_models.tiny_model(architecture, torch.bfloat16, seed))
        exact = output(copy.deepcopy(model).float(), ids)
        own.append(errors(output(model, ids), exact))
        torch_moe_mps.accelerate(model)
        ours.append(errors(output(model, ids), exact))
    assert torch.cat(ours).median() <= 1.1 * torch.cat(own).median()


@pytest.mark.parametrize("architecture", FAMILIES)
def test_padded_batch(architecture):
    """Rows of different length, padded on the left as for generation."""
    model = eager(tiny_models.tiny_model(architecture))
    ids = prompt(3, 11)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    mask[2, :1] = 0
    ids = ids * mask
    expected = output(model, ids, attention_mask=mask)
    tokens = generate(model, ids, attention_mask=mask)
    torch_moe_mps.accelerate(model)
    seen = mask.bool()
    assert_close(output(model, ids, attention_mask=mask)[seen], expected[seen], 1e-5)
    assert torch.equal(generate(model, ids, attention_mask=mask), tokens)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_static_cache(architecture):
    model = eager(tiny_models.tiny_model(architecture))
    ids = prompt()
    options = {"cache_implementation": "static", "disable_compile": True}
    tokens = generate(model, ids, **options)
    torch_moe_mps.accelerate(model)
    assert torch.equal(generate(model, ids, **options), tokens)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_checkpoint_of_an_accelerated_model(architecture, tmp_path):
    """save_pretrained after accelerate writes a checkpoint that transformers reads as the model's own."""
    model = eager(tiny_models.tiny_model(architecture))
    ids = prompt()
    expected = output(model, ids)
    torch_moe_mps.accelerate(model)
    model.save_pretrained(tmp_path)
    plain = type(model).from_pretrained(tmp_path, experts_implementation="eager").eval()
    assert_close(output(plain, ids), expected, 0.0)
    loaded = type(model).from_pretrained(tmp_path, experts_implementation="moe_mps").eval()
    assert_close(output(loaded, ids), expected, 1e-5)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_replaced_in_the_family(architecture):
    """Experts and routers of these families run on the operators, and the sums next to their norms."""
    report = torch_moe_mps.accelerate(tiny_models.tiny_model(architecture))
    replaced = {row.kind for row in report.replaced}
    assert {"experts", "router", "layer"} <= replaced, str(report)
    assert not any(row.kind in ("experts", "router") for row in report.left_alone), str(report)


@pytest.mark.parametrize(
    "architecture", ["deepseek_v3", "glm4_moe", "qwen2_moe", "qwen3_5_moe", "qwen3_next"]
)
def test_shared_expert_is_folded_in(architecture):
    report = torch_moe_mps.accelerate(tiny_models.tiny_model(architecture))
    blocks = [row.replaced_by.split("; ")[0] for row in report.rows if row.kind == "block"]
    gated = architecture.startswith("qwen")
    assert blocks and set(blocks) == {f"shared expert{' and its gate' if gated else ''} in moe_experts"}
