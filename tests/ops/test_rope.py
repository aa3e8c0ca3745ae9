"""Rotary position embedding with the norms of the heads."""

import numpy as np
import pytest
import torch
from support.oracles import FLOAT32_EPS, exact, spacing
from support.oracles_operators import checked
from support.oracles_sequence import rotated
from support.values import DTYPES, numbers

from torch_moe_mps.ops.rope import PAIRS, rope

EPS = 1e-6
FLOAT32_ERRORS = 16


def tables(batch, tokens, width, dtype=torch.float32, seed=0):
    """Tables that differ from those of a model: the two elements of a pair have different entries."""
    return numbers(batch, tokens, width, dtype=dtype, seed=seed), numbers(
        batch, tokens, width, dtype=dtype, seed=seed + 1
    )


def check(q, k, cos, sin, q_weight=None, k_weight=None, offset=0.0, pairs="half", rotary=None, last=False):
    options = {"pairs": pairs, "rotary_dim": rotary, "rotary_last": last}
    _, k_out = checked("rope", q, k, cos, sin, q_weight, k_weight, EPS, offset, **options)
    assert k_out.dtype == q.dtype


@pytest.mark.parametrize("pairs", PAIRS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads(device, dtype, pairs):
    """(D, R, width of the tables, rotary_last): whole heads and parts, vectors and odd sizes."""
    sizes = [
        (64, 64, 64, False),
        (64, 32, 16, True),
        (48, 16, 16, False),
        (10, 6, 3, False),
        (14, 2, 2, True),
    ]
    for i, (width, rotary, columns, last) in enumerate(sizes):
        q, k = (numbers(2, 3, heads, width, dtype=dtype).to(device) for heads in (3, 1))
        cos, sin = (t.to(device) for t in tables(1 + i % 2, 3, columns, torch.float32 if i % 2 else dtype))
        weight = numbers(width, dtype=torch.float32 if i % 2 else dtype).to(device)
        check(q, k, cos, sin, weight, weight.flip(0), float(i % 3 == 0), pairs, rotary, last)
        check(q, k, cos, sin, None, weight, 0.0, pairs, rotary, last)


def test_long_heads(device):
    """More than a simdgroup holds, as vectors and as single elements."""
    for width in (256, 320, 514):
        q = numbers(1, 2, 2, width).to(device)
        cos, sin = (t.to(device) for t in tables(1, 2, width // 2))
        check(q, None, cos, sin, numbers(width).to(device), rotary=width)


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_that_do_not_turn(device, dtype):
    """Their norms alone, and their write into a cache; vectors and odd sizes, slices of a projection."""
    for width in (64, 10, 514):
        rows = numbers(2, 3, 6 * width + 3, dtype=dtype).to(device)[..., 3:]
        q, k, v = rows.unflatten(-1, (6, width)).split([3, 1, 2], 2)
        weight = numbers(width, dtype=dtype).to(device)
        check(q, k, None, None, weight, None, 1.0)
        keys, values = (numbers(2, heads, 5, width, dtype=dtype).to(device) for heads in (1, 2))
        checked("rope_cache_", q, k, v, keys, values, None, None, None, weight, EPS, norm_v=width == 64)


def test_heads_of_two_widths(device):
    """DeepSeek's queries begin with elements that do not turn; its keys have none."""
    q, k = numbers(1, 2, 4, 24).to(device), numbers(1, 2, 1, 8).to(device)
    cos, sin = (t.to(device) for t in tables(1, 2, 8))
    check(q, k, cos, sin, last=True, pairs="interleaved_to_half")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strides(device, dtype):
    """Slices of a fused projection, transposed views, expanded tables: aligned and not."""
    cos, sin = (t.to(device) for t in tables(1, 3, 16, dtype))
    for start, extra in ((0, 0), (8, 8), (3, 8), (8, 5)):
        qkv = numbers(2, 3, start + 5 * 16 + extra, dtype=dtype).to(device)
        q = qkv[..., start : start + 48].view(2, 3, 3, 16)
        k = qkv[..., start + 48 : start + 80].view(2, 3, 2, 16)
        check(q, k, cos, sin, numbers(16, dtype=dtype).to(device))
        check(q, k, cos.expand(2, -1, -1), sin.expand(2, -1, -1))
    heads_first = numbers(2, 3, 4, 16, dtype=dtype).to(device)
    cos, sin = (t.to(device) for t in tables(2, 4, 32, dtype))
    check(heads_first.transpose(1, 2), heads_first[:, :1].transpose(1, 2), cos[..., ::2], sin[..., ::2])
    check(heads_first.transpose(1, 2), None, cos[..., :16], sin[..., 8:24])
    check(numbers(16, 4, 3, 2, dtype=dtype).to(device).transpose(0, 3), None, cos[..., :16], sin[..., :16])


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
        out, _ = rope(q, None, cos, sin, weight)
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


@pytest.mark.one_schedule
@pytest.mark.parametrize("dtype", DTYPES)
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


@pytest.mark.one_schedule
@pytest.mark.parametrize("dtype", DTYPES)
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_into_a_cache(device, dtype):
    """Keys and values go behind those in views of longer memory; the memory around them stays as it is."""
    for i, (width, value_width, tokens) in enumerate([(64, 128, 1), (10, 6, 3), (32, 30, 2), (16, 512, 1)]):
        packed = numbers(2, tokens, 3 * width + 2 * width + 2 * value_width, dtype=dtype, seed=i).to(device)
        parts = packed.split((3 * width, 2 * width, 2 * value_width), -1)
        q, k, v = (x.unflatten(-1, (heads, -1)) for x, heads in zip(parts, (3, 2, 2), strict=True))
        memory = [numbers(2, 2, tokens + 5, w, dtype=dtype, seed=i).to(device) for w in (width, value_width)]
        before = [m.clone() for m in memory]
        held = [m[:, :, 1 : 2 + tokens] for m in memory]
        cos, sin = (t.to(device) for t in tables(1, tokens, width if i else 32, dtype))
        weight = numbers(width, dtype=dtype).to(device)
        norm = {"norm_v": i % 2 == 1, "v_weight": numbers(value_width).to(device) if i == 3 else None}
        checked("rope_cache_", q, k, v, *held, cos, sin, weight, None, EPS, float(i == 3), **norm)
        for m, was in zip(memory, before, strict=True):
            assert torch.equal(m[:, :, :2], was[:, :, :2]) and torch.equal(
                m[:, :, 2 + tokens :], was[:, :, 2 + tokens :]
            )


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_of_an_indexer(device, dtype):
    """Normed with their bias and turned, behind those in a view of longer memory; its queries beside."""
    cases = ((128, 64, 1, "half", True), (64, 64, 3, "interleaved", True), (30, 6, 2, "half", False))
    for i, (width, rotary, tokens, pairs, with_q) in enumerate(cases):
        k = (3 + numbers(2, tokens, 1, 2 * width, dtype=dtype, seed=i)[..., width:]).to(device)
        q = numbers(2, 4, tokens, width, dtype=dtype, seed=9).to(device).transpose(1, 2) if with_q else None
        memory = numbers(2, 1, tokens + 5, width, dtype=dtype, seed=i).to(device)
        before, held = memory.clone(), memory[:, :, 1 : 2 + tokens]
        cos, sin = (t.to(device) for t in tables(1, tokens, rotary, torch.float32))
        norm = [numbers(width, dtype=torch.float32, seed=s).to(device) for s in (4, 5)]
        turned = {"pairs": pairs, "rotary_last": i == 1}
        keys, of_norm = (k, None, held, None), {"k_weight": norm[0], "eps": EPS}
        checked("rope_cache_", q, *keys, cos, sin, **of_norm, k_bias=norm[1], **turned)
        assert torch.equal(memory[:, :, :2], before[:, :, :2])
        assert torch.equal(memory[:, :, 2 + tokens :], before[:, :, 2 + tokens :])
        checked("rope_cache_", None, *keys, None, None, **of_norm, k_bias=norm[1])
        of_norm |= {"q_weight": norm[1] if with_q else None, "weight_offset": 1.0}
        checked("rope_cache_", q, *keys, cos, sin, **of_norm, **turned)
        checked("rope_cache_", None, *keys, None, None, **of_norm | {"q_weight": None})
