"""Functions of transformers' models and of its sampling compute what the operators do."""

import functools
from unittest.mock import patch

import numpy as np
import pytest
import torch
from support.oracles import FLOAT32_EPS, exact, spacing
from support.oracles_sequence import rotated
from support.values import EACH_DTYPE, numbers, random
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from torch_moe_mps.ops import (
    causal_conv1d_update_,
    gated_delta_rule_,
    rms_norm,
    rms_norm_gated,
    rope,
    router_logits,
    sample,
    selective_scan_,
)

EPS = 1e-6
NORM_ERRORS = 12  # the sum of squares, the root and the products, each rounded once or twice
FLOAT32_ERRORS = 16


@pytest.mark.parametrize("dtype", EACH_DTYPE)
def test_the_convolution_of_qwen3_next(device, dtype):
    from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_update as model

    x, state = numbers(2, 48, 1, dtype=dtype), numbers(2, 48, 4, dtype=dtype)
    weight = numbers(48, 4, dtype=dtype)
    ours = state.clone().to(device)
    expected = model(x, state, weight, None, "silu")
    result = causal_conv1d_update_(x.mT.to(device), ours, weight.to(device)).mT
    allowed = 2 * spacing(exact(expected), dtype) + 16 * FLOAT32_EPS + (dtype != torch.float32) * 0.02
    assert (abs(exact(result) - exact(expected)) <= allowed).all()
    assert torch.equal(ours.cpu(), state)


@pytest.mark.parametrize("dtype", EACH_DTYPE)
def test_the_recurrence_of_qwen3_next(device, dtype):
    """The model's own function, with the gates that its layer computes."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    q, k = (numbers(2, 3, 2, 32, dtype=dtype, seed=seed) for seed in range(2))
    v, state = numbers(2, 3, 4, 16, dtype=dtype), numbers(2, 4, 32, 16)
    a, b = (numbers(2, 3, 4, dtype=dtype, seed=seed) for seed in range(2))
    A_log, dt_bias = numbers(4), numbers(4, seed=3)
    g = -A_log.exp() * torch.nn.functional.softplus(a.float() + dt_bias)
    beta = b.float().sigmoid()
    model, model_state = torch_recurrent_gated_delta_rule(
        q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    ours = [tensor.to(device) for tensor in (q, k, v, a, state)]
    options = {"beta": b.to(device), "A_log": A_log.to(device), "dt_bias": dt_bias.to(device)}
    options |= {"decay_form": "softplus", "beta_activation": "sigmoid"}
    result = gated_delta_rule_(*ours, scale=32**-0.5, l2norm_eps=1e-6, **options)
    for actual, expected in ((result, exact(model)), (ours[4], exact(model_state))):
        allowed = spacing(expected, actual.dtype) + 192 * FLOAT32_EPS
        assert (abs(exact(actual) - expected) <= allowed).all()


@pytest.mark.parametrize("dtype", EACH_DTYPE)
def test_the_scan_of_jamba(device, dtype):
    """The model's own functions, for a prompt and a token."""
    from transformers.models.jamba.modeling_jamba import mamba_selective_scan, mamba_selective_state_update

    x, step = (numbers(2, 6, 10, seed=seed) for seed in range(2))
    b, c = (numbers(2, 6, 8, seed=seed) for seed in range(2))
    a_log = numbers(10, 8)
    bias, skip, gate = numbers(10), numbers(10, seed=1), numbers(2, 6, 10, seed=5)
    given = [each.to(dtype).float() for each in (x, step, b, c, gate)]
    wide = [each.double() for each in given]
    heads = [each.transpose(1, 2) for each in wide]
    options = {"D": skip.double(), "dt_softplus": True, "dt_bias": bias.double()}
    prompt = mamba_selective_scan(
        heads[0][..., :5], heads[1][..., :5], -a_log.double().exp(), heads[2][..., :5], heads[3][..., :5],
        skip.double(), heads[4][..., :5], bias.double(), True, True,
    )  # fmt: skip
    last = [each[:, 5] for each in wide]
    state = prompt[1].clone()
    one = mamba_selective_state_update(
        state, last[0], last[1], -a_log.double().exp(), last[2], last[3], z=last[4], **options
    )
    expected = torch.cat((prompt[0].transpose(1, 2), one.unsqueeze(1)), 1)
    *ours, z = (each.to(dtype).to(device) for each in given)
    own = torch.zeros(2, 10, 8, device=device)
    options = {"dt_bias": bias.to(device), "skip": skip.to(device), "gate": z}
    result = selective_scan_(*ours, own, a_log.to(device), **options)
    for actual, right in ((result, exact(expected)), (own, exact(state))):
        assert (abs(exact(actual) - right) <= spacing(right, actual.dtype) + 400 * FLOAT32_EPS).all()


def model_norms():
    from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

    yield Qwen3MoeRMSNorm, {}, 0.0
    yield GptOssRMSNorm, {}, 0.0
    yield Qwen3NextRMSNorm, {}, 1.0
    yield Gemma4RMSNorm, {"with_scale": False}, 0.0
    yield Gemma4RMSNorm, {}, 0.0


@pytest.mark.parametrize("dtype", EACH_DTYPE)
def test_the_norms_of_models(device, dtype):
    """Those that round the normed row before they multiply it, too: 2 ulp apart at most."""
    for i, (norm, options, offset) in enumerate(model_norms()):
        module = norm(80, eps=EPS, **options).to(dtype)
        weight = getattr(module, "weight", None)
        if weight is not None:
            weight = torch.nn.Parameter(random((80,), dtype, i), requires_grad=False)
            module.weight = weight
        x = random((7, 80), dtype, 20 + i, 3.0)
        expected = exact(module(x))
        actual = exact(
            rms_norm(
                x.to(device),
                None if weight is None else weight.to(device),
                norm_eps=EPS,
                norm_weight_offset=offset,
            )
        )
        allowed = 2 * spacing(expected, dtype) + NORM_ERRORS * FLOAT32_EPS * abs(expected)
        assert (abs(actual - expected) <= allowed).all(), norm.__name__


@pytest.mark.parametrize("dtype", EACH_DTYPE)
def test_the_gated_norm_of_qwen3_next(device, dtype):
    """The model rounds the normed row, its product with the weight and the result: 3 ulp apart at most."""
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

    norm = Qwen3NextRMSNormGated(128, EPS).to(dtype)
    norm.weight = torch.nn.Parameter(random((128,), dtype, 3), requires_grad=False)
    x, z = (random((5, 128), dtype, seed) for seed in range(2))
    model = exact(norm(x, z))
    ours = exact(rms_norm_gated(*(t.to(device) for t in (x, z, norm.weight)), norm_eps=EPS))
    assert (abs(ours - model) <= 3 * spacing(model, dtype) + NORM_ERRORS * FLOAT32_EPS * abs(model)).all()


def modules():
    from transformers.models.cohere import modeling_cohere as cohere
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3
    from transformers.models.ernie4_5_moe import modeling_ernie4_5_moe as ernie
    from transformers.models.gemma4 import modeling_gemma4 as gemma4
    from transformers.models.glm import modeling_glm as glm
    from transformers.models.glm4_moe import modeling_glm4_moe as glm4_moe
    from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
    from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe

    def single(q, k, cos, sin):
        return tuple(gemma4.apply_rotary_pos_emb(x, cos, sin) for x in (q, k))

    both = slice(None)
    # function, R of D 32, how its tables are written, what of them rope takes, options
    yield qwen3_moe.apply_rotary_pos_emb, 32, "twice", both, {}
    yield single, 32, "twice", both, {}
    yield glm4_moe.apply_rotary_pos_emb, 16, "twice", both, {}
    yield gpt_oss.apply_rotary_pos_emb, 32, "once", both, {"rotary_dim": 32}
    yield glm.apply_rotary_pos_emb, 16, "twice", slice(8), {"rotary_dim": 16, "pairs": "interleaved"}
    yield ernie.apply_rotary_pos_emb, 32, "twice", slice(16), {"rotary_dim": 32, "pairs": "interleaved"}
    yield cohere.apply_rotary_pos_emb, 32, "by turns", both, {"pairs": "interleaved"}
    options = {"rotary_dim": 32, "pairs": "interleaved_to_half"}
    yield deepseek_v3.apply_rotary_pos_emb_interleave, 32, "twice", slice(16), options


def model_tables(tokens, rotary, written, dtype):
    angles = torch.arange(tokens)[None, :, None] * 10000.0 ** -(torch.arange(rotary // 2) / (rotary // 2))
    angles = {
        "once": angles,
        "twice": torch.cat((angles, angles), -1),
        "by turns": angles.repeat_interleave(2, -1),
    }[written]
    return angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.parametrize("dtype", EACH_DTYPE)
def test_the_functions_of_models(device, dtype):
    """They round each product to the dtype: 2 ulp of the larger magnitude apart at most."""
    for apply, rotary, written, columns, options in modules():
        q, k = (numbers(2, heads, 9, 32, dtype=dtype, seed=5) for heads in (4, 2))
        cos, sin = model_tables(9, rotary, written, dtype)
        models = apply(q, k, cos, sin)
        on_device = [t.transpose(1, 2).to(device) for t in (q, k)]
        ours = rope(*on_device, *(t[..., columns].to(device) for t in (cos, sin)), **options)
        for x, model, our in zip((q, k), models, ours, strict=True):
            largest = np.broadcast_to(abs(exact(x)).max(-1, keepdims=True), x.shape)
            allowed = 2 * spacing(1.5 * largest, dtype) + FLOAT32_ERRORS * FLOAT32_EPS * largest
            assert (abs(exact(our) - exact(model)) <= allowed).all(), apply


@pytest.mark.parametrize("dtype", EACH_DTYPE)
def test_norms_and_rotation_of_a_model(device, dtype):
    """Qwen3-MoE's QK-norm and rotation, no less exact than the model's own code in its dtype."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm, apply_rotary_pos_emb

    q, k = (numbers(1, 9, heads, 32, dtype=dtype, seed=7) for heads in (4, 2))
    cos, sin = model_tables(9, 32, "twice", dtype)
    norms = [Qwen3MoeRMSNorm(32, EPS).to(dtype) for _ in range(2)]
    weights = [numbers(32, dtype=dtype, seed=seed) for seed in range(2)]
    for norm, weight in zip(norms, weights, strict=True):
        norm.weight = torch.nn.Parameter(weight, requires_grad=False)
    models = apply_rotary_pos_emb(norms[0](q).transpose(1, 2), norms[1](k).transpose(1, 2), cos, sin)
    ours = rope(*(t.to(device) for t in (q, k, cos, sin, *weights)), norm_eps=EPS)
    for x, weight, model, our in zip((q, k), weights, models, ours, strict=True):
        correct, magnitude = rotated(x, cos, sin, weight, "half", 32, False, EPS, 0.0)
        error, models_error = (abs(exact(t) - correct) for t in (our, model))
        assert (error <= spacing(correct, dtype) + FLOAT32_ERRORS * FLOAT32_EPS * magnitude).all()
        assert error.mean() <= models_error.mean() + FLOAT32_EPS


def routers():
    from transformers.models.deepseek_v3 import configuration_deepseek_v3, modeling_deepseek_v3
    from transformers.models.dots1 import configuration_dots1, modeling_dots1
    from transformers.models.glm4_moe import configuration_glm4_moe, modeling_glm4_moe

    yield modeling_deepseek_v3.DeepseekV3TopkRouter, configuration_deepseek_v3.DeepseekV3Config
    yield modeling_dots1.Dots1TopkRouter, configuration_dots1.Dots1Config
    yield modeling_glm4_moe.Glm4MoeTopkRouter, configuration_glm4_moe.Glm4MoeConfig


def test_the_routers_of_models(device):
    """Their logits, bit for bit but for the order of the sum."""
    for router_class, config_class in routers():
        experts = {
            "n_routed_experts": 16,
            "num_local_experts": 16,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
        }
        config = config_class(hidden_size=96, **experts)
        router = router_class(config)
        router.weight = torch.nn.Parameter(numbers(16, 96, dtype=torch.bfloat16), requires_grad=False)
        x = numbers(4, 96, dtype=torch.bfloat16)
        model = router(x)
        logits = model[0] if isinstance(model, tuple) else model
        assert logits.dtype == torch.float32
        ours = router_logits(x.to(device), router.weight.to(device)).cpu()
        torch.testing.assert_close(ours, logits, rtol=1e-5, atol=1e-5)


def processed(logits, temperature, top_k, top_p, min_p):
    """The scores that transformers' generate() would draw from, where sorts are stable: torch leaves open
    which of equal scores top-p keeps."""
    chain = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        chain.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        chain.append(TopPLogitsWarper(top_p))
    chain.append(MinPLogitsWarper(min_p))
    with patch("torch.sort", functools.partial(torch.sort, stable=True)):
        return chain(None, logits.float())


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        *((0.6, 20, 0.8, 0.0), (1.0, 0, 0.0, 0.0), (1.0, 0, 0.5, 0.1), (1.5, 0, 1.0, 0.05)),
        *((1.0, 0, 1.0, 1.0), (0.7, 50, 0.9, 0.02), (1.0, 10_000, 0.999, 0.0)),
    ],
)
def test_what_sampling_keeps(temperature, top_k, top_p, min_p):
    """The least probable token that is kept, which these draws put first."""
    generator = torch.Generator().manual_seed(0)
    how = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    for vocabulary in (1, 33, 2001):
        tied = torch.randint(-3, 4, (2, vocabulary), generator=generator) / 2
        for logits in (torch.randn(2, vocabulary, generator=generator) * 1.5, tied):
            kept = processed(logits, **how)
            scores = logits / temperature
            draws = (scores - scores.amax(-1, keepdim=True)).exp().square().clamp(min=1e-37)
            expected = kept.masked_fill(kept == -torch.inf, torch.inf).argmin(-1)
            assert torch.equal(sample(logits, draws, **how), expected)
