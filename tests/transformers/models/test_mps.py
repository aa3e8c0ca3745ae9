"""One model of each kind of router on device="mps", dense and quantised: as on the CPU, all in kernels."""

import copy
import itertools

import pytest
import torch
import transformers
from support import tiny_models
from support.models import NO_GENERATE, assert_close, eager, generate, operators_of, output, prompt
from support.models import tiny as tiny_for_groups
from support.sweep import in_sweep, rows_in_sweep

import torch_moe_mps

transformers.logging.set_verbosity_error()

pytestmark = pytest.mark.on("mps")  # test_families.py and test_quantized.py show the same on the CPU

# Architecture -> the operator that routes in it.
ROUTERS = {
    "gemma4": "rms_norm",  # its own, whose tokens alone run moe_gate
    "qwen3_moe": "moe_router",  # softmax
    "gpt_oss": "moe_router",  # softmax after top-k
    "deepseek_v2": "moe_router",  # softmax, groups by maximum
    "deepseek_v3": "moe_router",  # sigmoid, bias, groups by the sum of two
    "deepseek_v4": "moe_router",  # sqrtsoftplus, bias
    "ernie4_5_moe": "moe_router",  # softmax, bias
    "kolibri1": "moe_router",  # bias on the logits
}
NEW_TOKENS = 8


def has_kernel(operator: str, device: str) -> bool:
    key = {"cpu": "CPU", "mps": "MPS"}[device]
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"moe_mps::{operator}", key)


def check(accelerated, reference, device: str, operators: set[str]) -> None:
    ids = prompt(2, 5)
    expected = output(reference, ids)
    tokens = generate(reference, ids, max_new_tokens=NEW_TOKENS)
    ran = operators_of(lambda: assert_close(output(accelerated, ids.to(device)).cpu(), expected, 1e-5))
    assert operators <= ran.keys()
    assert all(has_kernel(operator, device) for operator in ran)
    assert torch.equal(generate(accelerated, ids.to(device), max_new_tokens=NEW_TOKENS).cpu(), tokens)


@pytest.mark.parametrize("architecture", in_sweep(ROUTERS, ("deepseek_v3",)))
def test_dense(architecture, device):
    reference = eager(tiny_models.tiny_model(architecture))
    model = copy.deepcopy(reference).to(device)
    torch_moe_mps.accelerate(model)
    check(model, reference, device, {ROUTERS[architecture], "_moe_experts"})


def without_compiling(report) -> list[str]:
    """The lines but that of what was compiled, which the first report alone has."""
    return [line for line in str(report).splitlines() if "compiled in" not in line]


@pytest.mark.parametrize("architecture", in_sweep(("qwen3_next", "gpt_oss"), ["qwen3_next"]))
def test_a_default_device_changes_nothing(architecture, simulated):
    """Nor for other models in the process, whose masks come from this package, too."""
    reference = eager(tiny_models.tiny_model(architecture))
    reference.set_attn_implementation("sdpa" if reference._supports_sdpa else "eager")
    ids, mask = prompt(), torch.ones(prompt().shape, dtype=torch.int64)
    mask[0, :3] = 0
    expected = output(reference, ids, attention_mask=mask)
    model, without = (copy.deepcopy(reference).to("mps") for _ in range(2))
    expected_report = without_compiling(torch_moe_mps.accelerate(without))
    ids, mask = ids.to("mps"), mask.to("mps")
    torch.set_default_device("mps")
    try:
        assert_close(output(model, ids, attention_mask=mask).cpu(), expected, 1e-5)
        assert without_compiling(torch_moe_mps.accelerate(model)) == expected_report
        for accelerated in (model, copy.deepcopy(model)):
            assert_close(output(accelerated, ids, attention_mask=mask).cpu(), expected, 1e-5)
            assert operators_of(lambda it=accelerated: output(it, ids)) == operators_of(
                lambda: output(without, ids)
            )
    finally:
        torch.set_default_device(None)


@pytest.mark.sweep
@pytest.mark.parametrize("architecture", tiny_models.architectures())
def test_every_architecture(architecture, simulated):
    """The model's own code, the accelerated model, and generation with it.

    Their logits on the CPU are compared by test_table_is_current.
    """
    reference = eager(tiny_models.tiny_model(architecture))
    ids = prompt(2, 5)
    expected = output(reference, ids)
    model = copy.deepcopy(reference).to("mps")
    assert_close(output(model, ids.to("mps")).cpu(), expected, 1e-5)
    torch_moe_mps.accelerate(model)
    ran = operators_of(lambda: assert_close(output(model, ids.to("mps")).cpu(), expected, 1e-5))
    assert ran.keys() & {"_moe_experts", "expert_mm"} and all(has_kernel(operator, "mps") for operator in ran)
    if architecture not in NO_GENERATE:
        tokens = generate(reference, ids, max_new_tokens=NEW_TOKENS)
        assert torch.equal(generate(model, ids.to("mps"), max_new_tokens=NEW_TOKENS).cpu(), tokens)


@pytest.mark.parametrize(
    ("architecture", "mode"),
    rows_in_sweep(
        itertools.product(("qwen3_moe", "gpt_oss", "gemma4"), ("affine", "mxfp4")),
        [("qwen3_moe", "affine"), ("gpt_oss", "mxfp4")],
    ),
)
def test_quantised(architecture, mode, device):
    reference = tiny_for_groups(architecture)
    model = copy.deepcopy(reference)
    torch_moe_mps.accelerate(model, 4, 32, mode)
    tiny_models.dense_twin(reference, model)
    check(
        model.to(device),
        reference,
        device,
        {ROUTERS[architecture], "_moe_experts_quantized", "linear_quantized"},
    )


def test_moved_after_acceleration(device):
    reference = eager(tiny_models.tiny_model("qwen2_moe"))
    model = copy.deepcopy(reference)
    torch_moe_mps.accelerate(model)
    check(model.to(device), reference, device, {"moe_router", "_moe_experts", "rms_norm"})


@pytest.mark.parametrize(("architecture", "matmul"), [("qwen2_moe", []), ("deepseek_v3", ["logits_few"])])
def test_three_dispatches_a_block(architecture, matmul, simulated):
    """One token: the router, and its matmul where it is in float32; gate, up and activation; down, the sum
    with the shared expert."""
    model = tiny_models.tiny_model(architecture, torch.bfloat16).to("mps")
    torch_moe_mps.accelerate(model)
    block = model.model.layers[1].mlp
    x = torch.ones(1, 1, 32, dtype=torch.bfloat16, device="mps")
    with torch.no_grad(), simulated.trace() as commands:
        block(x)
    kernels = [
        line.split("_bf16")[0].split("_f32")[0] for line in str(commands).splitlines() if " grid " in line
    ]
    assert kernels == [*matmul, "route2", "matmul_rows", "expert_down"]
