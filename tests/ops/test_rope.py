"""Rotary position embedding with the norms of the heads."""

import numpy as np
import pytest
import torch
from support.oracles import FLOAT32_EPS, exact, spacing
from support.oracles_sequence import rotated
from support.values import EACH_DTYPE, numbers

from torch_moe_mps.ops.families.rope import rope, rope_heads

EPS = 1e-6
FLOAT32_ERRORS = 16


def tables(batch, tokens, width, dtype=torch.float32, seed=0):
    """Tables that differ from those of a model: the two elements of a pair have different entries."""
    return numbers(batch, tokens, width, dtype=dtype, seed=seed), numbers(
        batch, tokens, width, dtype=dtype, seed=seed + 1
    )


def test_inputs_are_read_where_they_lie(simulated):
    """One dispatch, no copy, and only what belongs to q and k is read, once."""
    qkv = numbers(2, 3, 96, dtype=torch.float16).to("mps")
    q, k = qkv[..., :64].view(2, 3, 4, 16), qkv[..., 64:80].view(2, 3, 1, 16)
    cos, sin = (t.to("mps") for t in tables(1, 3, 16, torch.float16))
    with simulated.counters() as dispatches:
        rope(q, k, cos, sin)
    (dispatch,) = dispatches
    of_qkv = [dispatch.buffers[i].bytes_read for i in (0, 1, 2) if i in dispatch.buffers]  # one buffer
    assert sum(of_qkv) == 2 * (q.numel() + k.numel())


def test_nan_stays_in_its_head(device):
    q = numbers(1, 2, 3, 16).to(device)
    q[0, 1, 2, 5] = torch.nan
    cos, sin = (t.to(device) for t in tables(1, 2, 16))
    for weight, count in ((None, 2), (torch.ones(16, device=device), 16)):
        out = rope_heads(q, cos, sin, weight)
        assert out.isnan().sum() == count == out[0, 2, 1].isnan().sum()


# The models' own functions -------------------------------------------------------------------------------


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
    ours = rope(*(t.to(device) for t in (q, k, cos, sin, *weights)), EPS)
    for x, weight, model, our in zip((q, k), weights, models, ours, strict=True):
        correct, magnitude = rotated(x, cos, sin, weight, "half", 32, False, EPS, 0.0)
        error, models_error = (abs(exact(t) - correct) for t in (our, model))
        assert (error <= spacing(correct, dtype) + FLOAT32_ERRORS * FLOAT32_EPS * magnitude).all()
        assert error.mean() <= models_error.mean() + FLOAT32_EPS
