"""Whole models of the architectures with experts that have no file here, against their own eager code."""

import copy
from pathlib import Path

import pytest
import torch
import transformers
from support import tiny_models
from support.families import SHORT, accelerated, check_bfloat16, check_every_call, check_tokens
from support.models import eager, generate, prompt
from support.sweep import in_sweep

import torch_moe_mps

transformers.logging.set_verbosity_error()

FOUND = {path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py")} | {
    "minimax_m3_vl"
}
# They get every check, as do families with a file here; all others get logits, routers and greedy generation.
MORE = ("olmoe", "qwen2_moe")


def replaced_by(report) -> frozenset:
    """Which kinds of modules run what, and which run their own code."""
    return frozenset((row.kind, *sorted({*map(str, row.done)}), bool(row.replaced_by)) for row in report.rows)


# Whatever is replaced, or keeps its own code, is so in one of these; the others in the sweep.
FIRST = (
    *("deepseek_v4", "diffusion_gemma", "glm5_next", "gpt_oss", "granitemoehybrid", "inkling2", "jamba"),
    *("minimax", "minimax_m3_vl", "mistral_large4", "nemotron_h", "openai_privacy_filter", "qwen4_exp"),
)


@pytest.mark.sweep
def test_whatever_is_replaced_is_so_in_one_that_always_runs():
    found = {name: replaced_by(accelerated(name)[2]) for name in tiny_models.architectures()}
    assert frozenset().union(*map(found.get, FIRST)) == frozenset().union(*found.values())


@pytest.mark.parametrize(
    "architecture", in_sweep([name for name in tiny_models.architectures() if name not in FOUND], FIRST)
)
def test_logits_routers_and_greedy_generation(architecture):
    check_tokens(architecture)


@pytest.mark.sweep
@pytest.mark.parametrize("architecture", MORE)
def test_every_check(architecture, tmp_path):
    check_bfloat16(architecture)
    check_every_call(architecture, tmp_path)


@pytest.mark.parametrize("architecture", in_sweep(("recurrent_gemma", "zamba", "falcon_h1"), ("zamba",)))
def test_recurrent_layers_without_an_operator_run_unmodified(architecture):
    own, ids = eager(tiny_models.tiny_model(architecture)), prompt(1)
    model = copy.deepcopy(own)
    report = torch_moe_mps.accelerate(model)
    assert not {"selective_scan_", "_gated_delta_rule_"} & report.operators()
    assert torch.equal(generate(model, ids, **SHORT), generate(own, ids, **SHORT))
