"""Calls that reach what plain samples do not: branches that only real sizes take, and odd values.

Each is as cheap as its branch allows: one row, few heads. tests/selfcheck counts the shaders' branches over
all calls of the check; the families' own samples (CALLS, CHANGES) take the others.
"""

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from ..ops._checks import dtype_name
from ..ops._sample import Changes, Sample
from ..ops._samples import LINEAR_ATTENTION
from ..ops.families.attention import rope_attention_sample

BEYOND_NORM = (9000, 8201)  # columns: rows of up to 8,192 stay in registers; read as vectors, and one by one
BEYOND_SUM = (8000, 6151)  # a weighted sum with a norm has up to 6,144
OFFSET = 8192  # columns of 9 tokens, and 2,048 of 40: an offset of 16 bits is too short for them
FAR = 65_700  # keys: behind what 16 bits count
WIDEST_FAR = 128  # elements of a head that are compared with so many keys


def _apart(s: Sample, *shape: int) -> Tensor:
    """Contiguous, but nothing of it can be read as a vector."""
    return s.values(math.prod(shape) + 1)[1:].view(shape)


def _weights_of_norm(s: Sample) -> list[dict[str, Any]]:
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    wide = [
        {"x": s.values(1, width), "norm_weight": s.values(width, dtype=d)}
        for width in BEYOND_NORM
        for d in dtypes
    ]
    return [*wide, {"x": _apart(s, s.T, s.H)}]


def _scalars(s: Sample) -> list[dict[str, Any]]:
    dtypes = itertools.cycle((torch.float16, torch.bfloat16, torch.float32))
    counts = ((c, n) for c in _weights_of_norm(s) for n in (1, c["x"].shape[-1]))
    return [{**change, "scalar": s.values(n, dtype=next(dtypes))} for change, n in counts]


def _weighted_sums(s: Sample) -> list[dict[str, Any]]:
    return [s.of("expert_out[1, 40, 63]"), s.of("expert_out[1, 2, 17000]")]


# --- attention


def _far_keys(s: Sample) -> dict[str, Any]:
    """Rows are repeated: numbers of that many keys would take longer than the call."""
    period = 1021
    k, v = (s.values(1, 1, period, w).repeat(1, 1, -(-FAR // period), 1)[:, :, :FAR] for w in (s.D, s.V))
    return {"q": s.values(1, 1, 1, s.D), "k": k, "v": v, "sinks": None, "scale": s.D**-0.5}


def _far_mask() -> dict[str, Any]:
    """Mask that shows only some keys at positions beyond 16 bits."""
    mask = torch.zeros(1, 1, 1, FAR, dtype=torch.bool)
    mask[..., 1 << 16 :: 2] = True
    return {"attn_mask": mask}


def _masks(s: Sample) -> list[dict[str, Any]]:
    """Masks in each dtype, with numbers that hide keys; the last token sees nothing."""
    changes = []
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        mask = s.values(2, 1, s.T, 9, dtype=dtype)
        mask[..., ::4] = torch.finfo(dtype).min
        mask[0, :, -1], mask[1, :, -1] = torch.finfo(dtype).min, -torch.inf
        changes.append({"attn_mask": mask, "sinks": None})
    return [*changes, {"attn_mask": mask, "sinks": torch.tensor([1.0, -torch.inf, -50.0, 60.0]).to(s.dtype)}]


def _attention(s: Sample) -> list[dict[str, Any]]:
    """Changes to the sample of `cached_attention` for branches that only these sizes and values take."""
    steep = 30 * s.D**-0.5  # scores of 30
    blocks = torch.tensor([[[[4, 1, -1]] * s.T]] * 2, dtype=torch.int32)
    many = s.of("k[2, 2, 300, D] v[2, 2, 300, V]")
    odd = {"k": s.values(2, 2, 9, s.D + 1)[..., 1:], "v": s.values(2, 2, 9, s.V + 1)[..., 1:]}
    bits = torch.randint(-(2**31), 2**31, (2, 2, s.T, 10), generator=torch.Generator().manual_seed(0)).int()
    changes = [
        {"softcap": 20.0, "scale": steep, "sinks": None},
        {"scale": steep, "sinks": torch.tensor([60.0, -60.0, 80.0, 30.0]).to(s.dtype)},
        {"indices": blocks, "index_block": 2},
        many | s.of("q[2, 4, 20, D]", window=250),
        many | {"attn_mask": bits},
        odd,
        s.of("q[2, 4, T, 7] k[2, 2, 9, 7] v[2, 2, 9, 5]"),
        *_masks(s),
    ]
    if max(s.D, s.V) <= WIDEST_FAR:
        far = _far_keys(s)
        changes += [far | {"window": FAR - 100}, far | _far_mask()]
    return changes


def _written(s: Sample) -> list[dict[str, Any]]:
    """A group whose numbers are equal, and one with NaN."""
    states = s.values(2, 2, s.T, max(64, -(-s.D // 32) * 32))
    states[0, 0, 0, :32], states[1, 1, -1, 40] = 0.5, torch.nan
    return [{"states": states}]


def _exact_scores(s: Sample, keys: int, heads: int) -> dict[str, Any]:
    """Scores of 2^22 and more, which differ in the last bits alone. Sums in any order are exact."""
    q, k = torch.zeros(1, 2, heads, 16), torch.zeros(1, keys, 16)
    low = torch.randperm(4096, generator=torch.Generator().manual_seed(1))[:keys]
    q[..., 0], q[..., 1], q[..., 2] = 2048.0, 64.0, 1.0
    k[..., 0], k[..., 1], k[..., 2] = 2048.0, low // 64, low % 64
    return {"q": q.to(s.dtype), "k": k.to(s.dtype), "weights": None, "scale": 1.0}


def _sample(s: Sample) -> list[dict[str, Any]]:
    """More chunks than top-k; many equal scores, also zeros of both signs; rows without a distribution, and
    draws that are NaN or zero.
    """
    vocabulary = 33_000
    draws = {"draws": s.values(2, vocabulary, dtype=torch.float32).abs() + 0.01}
    row = draws | {"logits": s.values(2, vocabulary)}
    tied = row | {"logits": s.integers(3, 2, vocabulary, dtype=s.dtype, low=-2)}
    tied["logits"][0, ::7] = -0.0
    nan = torch.full((2, vocabulary), torch.nan)
    nan[1, ::7] = 0.0
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    return [
        row,
        row | off | {"top_p": 0.9, "min_p": 0.4},
        tied | {"top_k": 12_000},
        tied | off | {"top_p": 0.3},
        row | {"logits": torch.full((2, vocabulary), -torch.inf, dtype=s.dtype)},
        row | {"draws": nan},
    ]


def _index_topk(s: Sample) -> list[dict[str, Any]]:
    """Changes to the sample of `index_topk`: ties, NaN, empty ranges, blocks with a tail."""
    scores = _exact_scores(s, 1500, 1) | {"top_k": 700}
    q, k = s.values(2, s.T, 5, 15), s.values(2, 300, 15)
    k[0, 11], k[1, 290] = torch.nan, torch.nan
    ranged = torch.tensor([[0, 9], [202, 300]], dtype=torch.int32)
    empty = torch.tensor([[5, 5], [9, 2]], dtype=torch.int32)
    heads = s.of("weights[2, T, 5]", q=q, k=k)
    of_keys = {"q": q, "k": k, "weights": None, "reduce": "keys", "block": 3, "tail": 1, "top_k": 6}
    pooled = {"block": 3, "weights": None}
    few = {"key_range": torch.tensor([[0, 3], [6, 9]], dtype=torch.int32), "as_bits": True}
    return [
        scores,
        scores | {"as_bits": True},
        scores | {"as_bits": True, "k": s.integers(2, 1, 1500, 16, dtype=s.dtype)},  # many are equal
        _exact_scores(s, 1500, 2) | {"reduce": "keys", "top_k": 700},
        *(heads | {"key_range": r, "as_bits": b} for r in (ranged, empty, None) for b in (False, True)),
        *(of_keys | {"key_range": r, "as_bits": b} for r in (ranged, empty, None) for b in (False, True)),
        *(
            pooled | {"keys": 3 * s.T + n, "tail": tail, "as_bits": b}
            for n, tail, b in itertools.product((12, 14), (0, 1), (False, True))
        ),
        few,
        {"top_k": 40},
        {"top_k": 40, "as_bits": True},
    ]


# --- sequences


def _many_tokens(s: Sample) -> list[dict[str, Any]]:
    """Arguments for many tokens, of one sequence and few heads."""
    channels = {"g": -s.values(2, s.T, 4, s.D).abs(), "A_log": None, "dt_bias": None, "decay_form": "log"}
    return [s.of("q[1, 150, 1, D] v[1, 150, 2, V]"), channels]


def _pooled(s: Sample) -> list[dict[str, Any]]:
    """The first windows, which have none before them; without overlap; and windows of many tokens."""
    return [
        {"position": 0},
        s.of("entries_[2, 9, 8] kv[2, 5, 8] state_[2, 2, 2, 8]"),
        s.of("kv[1, 150, 16] position_bias[64, 16] state_[1, 128, 2, 16] entries_[1, 5, 8]", position=70),
        s.of("position_bias[2, 16]:float32"),
    ]


def _heads(s: Sample) -> list[dict[str, Any]]:
    """Wider than what a simdgroup reads at once, as vectors and one by one; pairs of one table."""
    wider = [s.of(f"q[2, T, 4, {n}] k[2, T, 2, {n}] cos[1, T, {n}]") for n in (264, 130)]
    return [*wider, {"pairs": "interleaved"}, {"q": _apart(s, 2, s.T, 4, s.D)}]


def _cached(s: Sample) -> list[dict[str, Any]]:
    keys = s.of("k[2, T, 1, 264] q[2, T, 4, 264] cos[1, T, 264] k_norm_weight[264] k_bias[264]")
    keys |= dict.fromkeys(("q_norm_weight", "v", "values_"))
    return [{"norm_v": True}, keys, keys | {"pairs": "interleaved"}]


def _streams(s: Sample) -> list[dict[str, Any]]:
    """Two streams, four that are wider than a threadgroup, and two of more slices than lanes."""

    def streams(tokens: int, count: int, width: int) -> dict[str, Any]:
        fn = s.values((2 + count) * count, count * width, dtype=torch.float32) / width**0.5
        comb = s.values(tokens, count, count, dtype=torch.float32).softmax(-1)
        return {"streams": s.values(tokens, count, width), "fn": fn, "comb": comb}

    return [streams(s.T, 2, s.H), streams(1, 4, 2052), streams(1, 2, 8204)]


def _formulas(s: Sample) -> list[dict[str, Any]]:
    steps = (
        "neg a f32; exp %0 f16; sigmoid a bf16; tanh a f32; relu a f32; log1p %4 f32; add %1 2.5 f32; "
        "log %6 f32; sqrt %6 f32; rsqrt %6 f32; softplus a f32; max a b f32; min c b f32; to %12 bf16; "
        "cos c f32; sin c f32"
    )
    count = steps.count(";") + 1
    total = [f"add %{i} %{count + i - 1} f32" for i in range(count)]  # the first adds the last step
    arguments = s.of("a[5, 37] b[5, 1]")
    arguments |= {"c": s.integers(9, 5, 37, dtype=torch.int32), "formula": "; ".join([steps, *total])}
    arguments["a"][1, 3], arguments["b"][2], arguments["b"][3] = torch.inf, torch.nan, torch.inf
    return [arguments | {"mean": mean} for mean in (False, True)]


# --- routing


def _router(s: Sample) -> list[dict[str, Any]]:
    """Changes to the sample of `moe_router`: NaN, infinities, ties, groups, up to 1023 experts."""
    special = s.values(5, 48)
    special[0], special[1], special[2, 5], special[4] = torch.nan, -1.0, torch.inf, -torch.inf
    special[1, ::2], special[1, 4::8] = 0.0, -0.0  # a tie
    sigmoid: dict[str, Any] = {"scoring": "sigmoid"}
    groups = sigmoid | {"num_groups": 4, "top_groups": 2}
    biased = groups | {"correction_bias": s.values(48)}
    return [
        {"logits": special, "top_k": 6},
        {"logits": special, "top_k": 6, "norm_topk_prob": False},
        {"logits": _apart(s, 5, 48) - 200, **sigmoid, "sum_min": 1e-3, "sum_eps": 0.0},
        {"logits": s.values(5, 48) - 200, **sigmoid, "sum_eps": 0.0},
        s.of("logits[5, 48]", **biased, group_score="max"),
        s.of("logits[5, 48]", **groups, group_score="max"),
        s.of("logits[5, 48]", **biased, masked_score=0.0),
        s.of("logits[5, 48] correction_bias[48]", **sigmoid),
        s.of("logits[5, 48]", **groups),
        s.of("logits[5, 48] correction_bias[48]", bias_on_logits=True),
        s.of("logits[5, 48]", **groups, masked_score=0.0),
        s.of("logits[1, 1023]", top_k=64),
        s.of("logits[259, 9]", scoring="sqrtsoftplus"),
    ]


def _gate(s: Sample) -> list[dict[str, Any]]:
    odd = s.of("x[41, 63] weight[7, 63]") | {"per_expert_scale": s.values(7).abs()}
    return [odd, {"x": s.values(9, OFFSET), "weight": s.values(s.E, OFFSET) / 64}]


def _logits(s: Sample) -> list[dict[str, Any]]:
    sizes = (1, 63), (1, 2048), (41, 63), (41, 2048), (9, OFFSET)
    changes = [s.of(f"x[{tokens}, {columns}] weight[7, {columns}]") for tokens, columns in sizes]
    return [*changes, {"dtype": "float16"}, {"bias": None}]


def _ids(s: Sample, tokens: int, top_k: int, experts: int) -> Tensor:
    """Some of them are no expert."""
    return s.integers(experts + 2, tokens, top_k, dtype=torch.int64) - 1


def _buckets(s: Sample) -> list[dict[str, Any]]:
    """Ids of any size, all of one expert, and so many that runs and chunks are several."""
    return [
        *(
            {"topk_ids": _ids(s, tokens, 8, experts).to(dtype), "num_experts": experts}
            for (tokens, experts), dtype in itertools.product(
                ((40, 8), (700, 600), (4100, 1000)), (torch.int32, torch.int64)
            )
        ),
        {"topk_ids": torch.full((40, 8), 3, dtype=torch.int32)},
        {"topk_ids": torch.full((40, 8), -(2**31), dtype=torch.int32)},
    ]


# --- matmuls


def _rows(s: Sample, tokens: int, columns: int) -> Tensor:
    """Sums over the columns are of about 1."""
    return s.values(tokens, columns) * columns**-0.5


def _expert_ids(tokens: int, experts: int) -> Tensor:
    return torch.stack([torch.arange(tokens) % experts, torch.arange(1, tokens + 1) % experts], 1).int()


ACTIVATIONS: tuple[dict[str, Any], ...] = (
    *({"activation": name} for name in ("gelu", "gelu_tanh", "relu", "relu2")),
    {"activation": "swiglu_oai", "limit": 0.5, "alpha": 1.7},
    {"activation": "silu_clamped", "limit": 0.5},
    {"activation": "silu_capped", "limit": 0.5},
)


def _dense(s: Sample, experts: int, columns: int, rows: int, tokens: int) -> dict[str, Any]:
    weights = {"gate_up": s.values(experts, 2 * rows, columns), "down": s.values(experts, columns, rows) / 4}
    return {"x": _rows(s, tokens, columns), **weights, "topk_ids": _expert_ids(tokens, experts)}


def _experts(s: Sample) -> list[dict[str, Any]]:
    nobody = torch.full((40, 2), s.E, dtype=torch.int32)
    return [
        *(_dense(s, 2, OFFSET if tokens < 10 else 2048, 4, tokens) for tokens in (1, 9, 40)),
        *(_dense(s, 3, 38, 7, tokens) for tokens in (1, 5, 20, 40)),
        *ACTIVATIONS,
        {"topk_ids": nobody, "has_identity": True},
        {"topk_ids": torch.tensor([[s.E, 2]], dtype=torch.int64), "has_identity": True},
    ]


def _transposed(s: Sample, *experts: int) -> list[dict[str, Any]]:
    """Rows that end within a fragment, and columns within a simdgroup's."""
    leading = (s.K,) if experts else ()
    weight = s.quantized("", 19, _quantized_columns(s, 96), experts)
    return [{"dy": s.values(s.T, *leading, 19), **weight}]


def _expert_mm(s: Sample) -> list[dict[str, Any]]:
    changes = [
        s.of(f"weight[2, 5, {columns}]", x=_rows(s, tokens, columns), topk_ids=_expert_ids(tokens, 2))
        for tokens, columns in ((1, OFFSET), (9, OFFSET), (40, 2048), (20, 38))
    ]
    for width in (19, 32):  # stacks that the transposed product reads as they lie
        stored = s.values(2, 38, width).mT
        changes.append({"weight": stored, "x": _rows(s, 9, 38), "topk_ids": _expert_ids(9, 2)})
    nobody = ([[s.E, 2]], torch.int32), ([[2**32, 2]], torch.int64)
    return changes + [{"topk_ids": torch.tensor(ids, dtype=dtype)} for ids, dtype in nobody]


def _quantized_columns(s: Sample, least: int) -> int:
    return -(-least // s.format.multiple) * s.format.multiple


def _deep(s: Sample) -> list[tuple[int, int]]:
    """(tokens, columns of quantised weights) for each path of a matmul: one token, a few, and tiles."""
    return [(n, _quantized_columns(s, least)) for n, least in ((1, OFFSET), (9, OFFSET), (40, 2048))]


def _quantized_experts(s: Sample) -> list[dict[str, Any]]:
    """Calls of quantised experts: each path of a matmul, activations, no experts, choice by the router."""
    inner, changes = s.format.multiple, list[dict[str, Any]]()
    for tokens, columns in _deep(s):
        weights = s.quantized("gate_up_", 2 * inner, columns, (2,)) | s.quantized(
            "down_", columns, inner, (2,)
        )
        changes.append({"x": _rows(s, tokens, columns), "topk_ids": _expert_ids(tokens, 2), **weights})
    nobody = torch.full((40, 2), s.E, dtype=torch.int32)
    return [
        *changes,
        *ACTIVATIONS,
        {"topk_ids": _expert_ids(20, s.E)},
        {"topk_ids": nobody},
        s.routed | s.norm | s.of("logits[1, E]:float32 correction_bias[E]", scoring="sigmoid"),
    ]


def _expert_qmm(s: Sample) -> list[dict[str, Any]]:
    return [
        {
            **s.quantized("", 5, columns, (2,)),
            "x": _rows(s, tokens, columns),
            "topk_ids": _expert_ids(tokens, 2),
        }
        for tokens, columns in _deep(s)
    ]


def _linear(s: Sample) -> list[dict[str, Any]]:
    """Rows that are no multiple of anything; columns behind an offset of 16 bits."""

    def of(tokens: int, rows: int, columns: int, **more: Any) -> dict[str, Any]:
        return {"x": _rows(s, tokens, columns), **s.quantized("", rows, columns, ()), **more}

    names = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
    wide = _quantized_columns(s, OFFSET)
    return [
        *(of(tokens, rows, columns) for tokens, columns in _deep(s) for rows in (5, 37)),
        of(1, 37, wide, norm_weight=s.values(wide)),
        of(4, 5, _quantized_columns(s, 3 * OFFSET)),  # the most tokens that matrix products do not take
        *(of(3, 37, s.H, activation=name, activated=20, factor=0.5) for name in names),
    ]


def _mlp(s: Sample) -> list[dict[str, Any]]:
    wide, inner = _quantized_columns(s, OFFSET), s.format.multiple
    weights = {**s.quantized("gate_up_", 2 * inner, wide, ()), **s.quantized("down_", wide, inner, ())}
    normed = {"x": _rows(s, 1, wide), "norm_weight": s.values(wide)}
    return [{"x": _rows(s, 9, wide), **weights}, {**weights, **normed}, *ACTIVATIONS]


def _both_ways(s: Sample, weight: dict[str, Any], x: str, **plain: Any) -> list[dict[str, Any]]:
    """One token and few, times transposed matrices of 19 rows, and times the matrices: by rows of `x`."""
    plain |= weight | {"transposed": False, "appended": None}
    return [
        *(s.of(f"x[1, {tokens}, 2, 19] appended[1, {tokens}, 2, 6]", **weight) for tokens in (1, 5)),
        *(s.of(x.format(tokens), **plain) for tokens in (1, 5)),
    ]


def _heads_mm(s: Sample) -> list[dict[str, Any]]:
    return _both_ways(s, s.of("weight[2, 19, 300]"), "x[1, {}, 2, 300]")


def _quantized_heads(s: Sample) -> list[dict[str, Any]]:
    columns = _quantized_columns(s, 300)
    x = f"x[1, {{}}, 2, {columns}]:float32"
    return _both_ways(s, s.quantized("", 19, columns, (2,)), x, dtype=dtype_name(s.dtype))


def _adapters(s: Sample) -> list[dict[str, Any]]:
    """Ranks and columns of more than one round."""
    return [{"a": s.values(9 * s.E, 150), "b": s.values(300, 9 * s.E)}]


def _expert_adapters(s: Sample) -> list[dict[str, Any]]:
    """Calls of adapters with several rounds of ranks and columns, and pairs without an expert."""
    ids = s.topk_ids.long() - 1
    listed = torch.ops.moe_mps.moe_bucket(ids, num_experts=s.E)
    return [*_adapters(s), {"topk_ids": ids, **dict(zip(("pair_order", "offsets"), listed, strict=True))}]


SIZES: Changes = {
    "cached_attention": _attention,
    "_write_cache_quantized_": _written,
    **dict.fromkeys(("rms_norm", "layer_norm", "rms_norm_gated", "fused_norm_add"), _weights_of_norm),
    "fused_norm_add_scalar": _scalars,
    **dict.fromkeys(
        ("fused_residual_norm", "fused_residual_layer_norm"),
        lambda s: [c | {"residual": s.values(*c["x"].shape)} for c in _weights_of_norm(s)],
    ),
    "fused_residual_norm_scalar": _scalars,
    "silu_mul_stacked": lambda s: [
        s.of("gate[3, 43]"),
        {"gate": _apart(s, 3, 43), "up": _apart(s, 3, 43)},
    ],
    "weighted_sum_stacked": _weighted_sums,
    "weighted_sum_residual_stacked_": _weighted_sums,
    "weighted_sum_residual_norm_stacked_": lambda s: [
        s.of(f"expert_out[1, 2, {width}]") for width in (*BEYOND_SUM, 63)
    ],
    "moe_weighted_reduce": lambda s: [
        s.of("shared_out[T, H]", shared_gate=None),
        s.of("expert_out[1, 40, 63]"),
    ],
    "expert_mm": _expert_mm,
    "_expert_outer": lambda s: [s.of("dy[T, K, 43] x[T, 70]")],
    "linear_lora": _adapters,
    **dict.fromkeys(("expert_lora", "_expert_lora_backward"), _expert_adapters),
    "_expert_qmm_transposed": lambda s: _transposed(s, s.E),
    "_linear_quantized_transposed": _transposed,
    "_moe_experts": _experts,
    "_heads_mm": _heads_mm,
    "_hyper_connection": _streams,
    "_index_topk": _index_topk,
    **dict.fromkeys(("sample", "_sample_with_flags"), _sample),
    "_hyper_update": lambda s: [s.of("streams[1, 3, 2052]")],
    "_heads_quantized": _quantized_heads,
    "embedding_quantized": lambda s: [
        s.quantized("", 300, _quantized_columns(s, 512), ())
        | {"tokens": s.integers(300, 5, 1, dtype=torch.int32)}
    ],
    "linear_quantized": _linear,
    "_mlp_quantized": _mlp,
    **dict.fromkeys(LINEAR_ATTENTION, _many_tokens),
    **dict.fromkeys(("selective_scan_", "causal_conv1d_update_"), lambda s: [s.of("x[1, 150, 6]")]),
    "_pointwise": _formulas,
    "_pool_window_": _pooled,
    "expert_qmm": _expert_qmm,
    "_moe_experts_quantized": _quantized_experts,
    "rope": _heads,
    "rope_heads": lambda s: [s.of(f"x[2, T, 4, {n}] cos[1, T, {n}]") for n in (264, 130)],
    "_rope_cache_": _cached,
    "_rope_attention_": lambda s: [
        rope_attention_sample(s, 1, keys=300),
        rope_attention_sample(s, 1, heads=34),
        rope_attention_sample(s, 1) | {"cos": None, "sin": None},
    ],
    "moe_router": _router,
    **dict.fromkeys(
        ("moe_router_topk_softmax", "fused_moe_routing"),
        lambda s: [s.of("logits[5, 300]", top_k=11), s.of("logits[1, 1023]", top_k=11)],
    ),
    "moe_gate": _gate,
    "router_logits": _logits,
    "moe_bucket": _buckets,
    "moe_compute_ids_tpe": lambda s: [
        {"topk_ids": _ids(s, 700, 2, 9).int()},
        {"topk_ids": _ids(s, 9, 2, 900), "num_experts": 900},
    ],
}
