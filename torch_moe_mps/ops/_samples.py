"""One good call of every operator, and more of some: arguments by name.

The tests of all operators and the self-check use them.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ._formats import Format

T, H, E, K, I = 3, 64, 8, 2, 32
FORMAT = Format(4, 32, "affine")
HEAD = (16, 8)  # elements of a head of queries and keys, and of values
# The arguments whose last dimensions are those of a head; of keys and values in 8 bits: words of four.
OF_HEADS = {
    "attention": ("q", "v"),
    "rope": ("q", "q"),
    "rope_cache_": ("q", "v"),
    "index_keys_": ("k", "k"),
    "linear_attention_": ("q", "v"),
    "write_cache_quantized_": ("states", "states"),
}


def _whole_groups(width: int) -> int:
    return -(-width // 32) * 32


class _Made(dict):
    """Values are made when one asks for them: the arguments of all operators take long."""

    def __getitem__(self, name):
        return super().__getitem__(name)()


def packet(name: str) -> Callable:
    return getattr(torch.ops.moe_mps, name)


def sample_arguments(
    device: str,
    dtype: torch.dtype,
    format: Format = FORMAT,
    tokens: int = T,
    wider: int = 1,
    head: tuple[int, int] = HEAD,
) -> dict[str, dict]:
    """Valid arguments of every operator, by name. No two sizes are equal.

    `format` is that of quantised weights, whose columns are a multiple of its groups; there are `wider` times
    as many columns.
    """
    T, (D, V) = tokens, head
    C = max(64, _whole_groups(D))
    H, I = (wider * size for size in ((format.multiple,) * 2 if format.multiple > 32 else (64, 32)))
    generator = torch.Generator().manual_seed(0)

    def values(*shape, dtype=dtype):
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    def integers(high, *shape, dtype):
        return torch.randint(high, shape, generator=generator, dtype=torch.int64).to(dtype).to(device)

    norm = {
        "residual": values(T, H),
        "input": values(T, H),
        "weight": values(H, dtype=torch.float32),
        "eps": 1e-6,
    }
    ids = torch.tensor([[0, 7], [3, E], [5, 3]], dtype=torch.int32, device=device)
    ids = ids.repeat(-(-T // 3), 1)[:T]
    weights = values(T, K, dtype=torch.float32).abs()
    named = {"format": format.name}
    routed = {"logits": values(T, E), "top_k": K, "norm_topk_prob": True}
    slots = {"slots": values(T, K, H), "weights": weights}

    scale_dtype = dtype if format.is_affine else format.scale_dtypes[0]
    lowest = {"nvfp4": 40, "mxfp8": 118, "mxfp4": 124}
    of_blocks = format.scale_dtypes == (torch.uint8,) and format.name not in lowest

    def held(size, *shape):
        """Numbers of about a size as the format holds them: GGUF's are the bits of halves."""
        return values(*shape) * size if format.is_affine else (values(*shape) * size).half().view(torch.int16)

    def scales(*groups):
        """Such that weights are about 1."""
        if of_blocks:
            return integers(256, *groups, dtype=torch.uint8)
        if scale_dtype == torch.uint8:
            low, count = lowest[format.name], 16 if format.name == "nvfp4" else 3
            return (low + integers(count, *groups, dtype=torch.uint8)).to(torch.uint8)
        return held(2.0 ** (-1 - format.bits), *groups)

    def quantized(prefix, rows, columns, experts=(E,)):
        counts = format.scales_of(columns)
        size = 2.0 ** (-6 - format.bits) if of_blocks else 0.25
        biases = held(size, *experts, rows, counts[1]) if format.has_biases else None
        return {
            f"{prefix}packed": integers(2**31, *experts, rows, format.words(columns), dtype=torch.int32),
            f"{prefix}scales": scales(*experts, rows, counts[0]),
            f"{prefix}biases": biases,
        }

    q, k = values(2, T, 4, D), values(2, T, 2, D)
    samples: dict = {
        "rms_norm": lambda: {name: norm[name] for name in ("input", "weight", "eps")},
        "layer_norm": lambda: {
            **{"input": values(T, H), "weight": values(H, dtype=torch.float32), "bias": values(H)},
            "eps": 1e-5,
        },
        "rope": lambda: {
            **{"q": q, "k": k, "cos": values(1, T, D), "sin": values(1, T, D)},
            **{"q_weight": values(D), "k_weight": values(D)},
        },
        "rope_cache_": lambda: {
            **{"q": q, "k": k, "v": values(2, T, 2, V), "cos": values(1, T, D), "sin": values(1, T, D)},
            **{"keys_": values(2, 2, T, D), "values_": values(2, 2, T, V), "q_weight": values(D)},
        },
        "index_keys_": lambda: {
            **{"k": values(2, T, D), "keys_": values(2, T + 2, D), "weight": values(D), "bias": values(D)},
            **{"cos": values(1, T, D), "sin": values(1, T, D), "q": q},
        },
        "rms_norm_gated": lambda: {
            **{"input": values(T, H), "gate": values(T, H), "weight": values(H, dtype=torch.float32)},
            "eps": 1e-6,
        },
        "rope_tables": lambda: {
            "position_ids": integers(1000, 2, T, dtype=torch.int64),
            "inv_freq": values(8, dtype=torch.float32).abs(),
            **{"scaling": 1.25, "dtype": dtype},
        },
        "causal_conv1d_update_": lambda: {
            **{"x": values(2, T, 6), "conv_state_": values(2, 6, 5), "weight": values(6, 4)},
            "bias": values(6),
        },
        "linear_attention_": lambda: {
            **{"q": values(2, T, 2, D), "k": values(2, T, 2, D), "v": values(2, T, 4, V)},
            **{"g": values(2, T, 4), "beta": values(2, T, 4)},
            **{"state_": values(2, 4, D, V, dtype=torch.float32), "scale": 0.25, "l2norm_eps": 1e-6},
            **{"A_log": values(4), "dt_bias": values(4), "decay": "softplus", "beta_activation": "sigmoid"},
        },
        "selective_scan_": lambda: {
            **{"x": values(2, T, 6), "step": values(2, T, 6), "B": values(2, T, 5), "C": values(2, T, 5)},
            **{"state_": values(2, 6, 5, dtype=torch.float32), "A_log": values(6, 5), "dt_bias": values(6)},
        },
        "attention": lambda: {
            **{"q": q.transpose(1, 2), "k": values(2, 2, T + 6, D), "v": values(2, 2, T + 6, V)},
            **{"sinks": values(4), "scale": 0.25},
        },
        "write_cache_quantized_": lambda: {
            "states": values(2, 2, T, C),
            "packed_": torch.zeros(2, 2, T + 5, C // 4, dtype=torch.int32, device=device),
            "scales_": torch.zeros(2, 2, T + 5, C // 32, dtype=dtype, device=device),
            "biases_": torch.zeros(2, 2, T + 5, C // 32, dtype=dtype, device=device),
            "start": 3,
        },
        "index_topk": lambda: {
            "q": values(2, T, 4, 16),
            "k": values(2, T + 9, 16),
            "weights": values(2, T, 4, dtype=torch.float32),
            "top_k": 5,
            "scale": 0.25,
        },
        "pool_window_": lambda: {
            **{"kv": values(2, T, 16), "gate": values(2, T, 16), "position_bias": values(2, 16)},
            **{"state_": values(2, 4, 2, 16), "entries_": values(2, T // 2 + 4, 8), "position": 3},
            **{"norm_weight": values(8), "inv_freq": values(2, dtype=torch.float32)},
        },
        "pointwise": lambda: {
            **{"a": values(2, T, 1, H), "formula": "silu a f32; mul %0 b f32; sub c %1 bf16; div %2 1.5 f32"},
            **{"dtype": dtype, "b": values(T, 4, H), "c": integers(9, 4, H, dtype=torch.int64)},
        },
        "hyper_update": lambda: {
            **{"streams": values(T, 2, H), "out": values(T, H), "post": values(T, 2, dtype=torch.float32)},
            "comb": values(T, 2, 2, dtype=torch.float32),
        },
        "hyper_connection": lambda: {
            **{"streams": values(T, 4, H), "fn": values(24, 4 * H, dtype=torch.float32) / 16},
            **{"base": values(24, dtype=torch.float32), "scale": values(3, dtype=torch.float32)},
            **{"out": values(T, H), "post": values(T, 4, dtype=torch.float32)},
            "comb": values(T, 4, 4, dtype=torch.float32).softmax(-1),
        },
        "fused_norm_add": lambda: norm,
        "fused_norm_add_scalar": lambda: {**norm, "scalar": values(1)},
        "fused_residual_norm": lambda: norm,
        "fused_residual_norm_scalar": lambda: {**norm, "scalar": values(H)},
        "moe_router": lambda: {**routed, "scoring": "softmax"},
        "moe_router_topk_softmax": lambda: routed,
        "fused_moe_routing": lambda: {"logits": values(T, E), "per_expert_scale": values(E), "top_k": K},
        "router_logits": lambda: {"x": values(T, H), "weight": values(E, H), "bias": values(E)},
        "moe_hash_router": lambda: {
            **{"x": values(T, H), "weight": values(E, H), "table": integers(E + 1, 11, K, dtype=torch.int64)},
            **{"tokens": integers(12, T, dtype=torch.int32), "scoring": "sqrtsoftplus"},
            "norm_topk_prob": True,
        },
        "moe_gate": lambda: {
            "hidden": values(T, H),
            "router_weight": values(E, H),
            "norm_weight": values(H),
            "per_expert_scale": values(E).abs(),
            "top_k": K,
            "eps": 1e-6,
        },
        "moe_bucket": lambda: {"ids": ids, "num_experts": E},
        "moe_compute_ids_tpe": lambda: {
            **{"ids": ids, "num_experts": E, "gate_up_rows": 2 * I, "down_rows": H}
        },
        "silu_mul_stacked": lambda: {"gate": values(T, I), "up": values(T, I)},
        "weighted_sum_stacked": lambda: slots,
        "weighted_sum_residual_stacked_": lambda: {"residual_": values(T, H), **slots},
        "weighted_sum_residual_norm_stacked_": lambda: {
            "residual_": values(T, H),
            **slots,
            "norm_weight": values(H),
            "eps": 1e-6,
        },
        "moe_weighted_reduce": lambda: {"weights": weights, "expert_out": values(T, K, H)},
        "expert_mm": lambda: {"x": values(T, H), "weight": values(E, I, H), "ids": ids},
        "heads_quantized": lambda: {
            "x": values(2, T, 4, I),
            **quantized("", I, H, (4,)),
            **named,
            "transposed": True,
            "tail": values(2, T, 4, 6),
        },
        "heads_mm": lambda: {
            "x": values(2, T, 4, 16),
            "weight": values(4, 16, 40),
            "transposed": True,
            "tail": values(2, T, 4, 6),
        },
        "moe_experts": lambda: {
            "x": values(T, H),
            "gate_up": values(E, 2 * I, H),
            "down": values(E, H, I),
            "ids": ids,
            "weights": weights,
        },
        "expert_qmm": lambda: {"x": values(T, H), **quantized("", I, H), "ids": ids, **named},
        "moe_experts_quantized": lambda: {
            "x": values(T, H),
            **quantized("gate_up_", 2 * I, H),
            **quantized("down_", H, I),
            "ids": ids,
            "weights": weights,
            **named,
        },
        "linear_quantized": lambda: {
            "x": values(T, H),
            **quantized("", I, H, ()),
            "bias": values(I),
            **named,
        },
        "mlp_quantized": lambda: {
            "x": values(T, H),
            **quantized("gate_up_", 2 * I, H, ()),
            **quantized("down_", H, I, ()),
            **named,
        },
        "embedding_quantized": lambda: {"ids": ids, **quantized("", E, H, ()), **named, "dtype": dtype},
    }
    return _Made(samples)


def more_samples(name: str, device: str, dtype: torch.dtype, head: tuple[int, int] = HEAD) -> list[dict]:
    """Changes to the valid arguments that lead to other paths of the operator."""
    D, V = head
    C = max(64, _whole_groups(D))

    def values(*shape, dtype=dtype):
        return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype).to(device)

    selected = torch.tensor([[[[8, 0, -1]] * T]] * 2, dtype=torch.int32, device=device)

    def in_8_bits(tokens, keys, heads=4):
        arguments = {"q": values(2, heads, tokens, _whole_groups(D))}
        for name, width in (("k", _whole_groups(D)), ("v", _whole_groups(V))):
            generator = torch.Generator().manual_seed(2)
            codes = torch.randint(2**31, (2, 2, keys, width // 4), generator=generator)
            arguments[name] = codes.int().to(device)
            arguments[f"{name}_scales"] = values(2, 2, keys, width // 32) / 128
            arguments[f"{name}_biases"] = values(2, 2, keys, width // 32)
        return arguments

    over_many = {"q": values(2, 4, 20, D), "k": values(2, 2, 300, D), "v": values(2, 2, 300, V)}
    compressed = {"k_tail": values(2, 2, 6, D), "v_tail": values(2, 2, 6, V), "tail_rate": 2, "position": 7}
    tail = {"shared_gate": values(T, 1), "shared_out": values(T, H), "residual": values(T, H)}
    strided = values(H, T).t()
    norm = {"norm_weight": values(H), "norm_offset": 1.0}
    wide = {"input": values(2, 4100), "weight": values(4100)}  # several simdgroups take a row
    ids = torch.tensor([[3, 0]], dtype=torch.int32, device=device)
    axes = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1], dtype=torch.int32, device=device)
    one = {"x": values(1, H), "ids": ids, "weights": values(1, K, dtype=torch.float32)}
    changes: dict[str, Callable[[], list[dict]]] = {
        "rms_norm": lambda: [
            {"input": strided, "weight": None},
            {"weight_offset": 1.0},
            wide,
            {"weight": values(T, H)},
        ],
        "layer_norm": lambda: [
            {"input": strided, "weight": None, "bias": None},
            {"weight_offset": 1.0, "bias": None},
            {**wide, "bias": values(4100)},
        ],
        "rope": lambda: [
            {"k": None, "k_weight": None, "pairs": "interleaved", "rotary_dim": 8, "cos": values(2, T, 4)}
            | {"sin": values(2, T, 4), "rotary_last": True},
        ],
        "rope_cache_": lambda: [
            {"keys_": values(2, 2, 9, D)[:, :, 2 : 3 + T], "values_": values(2, 2, 9, V)[:, :, 2 : 3 + T]}
            | {"norm_v": True, "v_weight": values(V)},
            {"cos": None, "sin": None, "k_weight": values(D)},
        ],
        "index_keys_": lambda: [
            {"k": values(2, T, 2 * D)[..., D:], "cos": values(2, T, 4), "sin": values(2, T, 4), "q": None}
            | {"rotary_dim": 8, "rotary_last": True, "pairs": "interleaved"},
            {"cos": None, "sin": None, "q": None},
            {"bias": None, "q_weight": values(D), "weight_offset": 1.0},
        ],
        "rms_norm_gated": lambda: [
            {"input": strided, "gate": strided, "weight_offset": 1.0},
            {"activation": "sigmoid", "gate_first": True, "group": 16},
            {**wide, "gate": values(2, 4100)},
        ],
        "rope_tables": lambda: [
            {"layout": "pairs"},
            {"layout": "interleaved", "scaling": 1.0},
            {"position_ids": torch.arange(6 * T, device=device).view(3, 2, T), "axes": axes},
        ],
        "causal_conv1d_update_": lambda: [
            {"x": values(2, 6, T).transpose(1, 2), "bias": None, "activation": "none"},
            {"conv_state_": values(2, 5, 6).transpose(1, 2), "add_input": True},
        ],
        "selective_scan_": lambda: [
            {"gate": values(2, T, 6), "skip": values(6), "dt_bias": None},
            {"x": values(2, T, 70), "step": values(2, 70, T).mT, "A_log": values(70, 16), "dt_bias": None}
            | {"B": values(2, T, 16), "C": values(2, T, 16)}
            | {"state_": values(2, 16, 70, dtype=torch.float32).mT},
        ],
        "linear_attention_": lambda: [
            {"A_log": None, "dt_bias": None, "g": -values(2, T, 4).abs(), "beta_activation": "none"}
            | {"decay": "log", "state_": values(4, 2, D, V, dtype=torch.float32).transpose(0, 1)},
            {"gate": values(2, T, 4, V), "norm_weight": values(V), "norm_offset": 1.0},
            {"g": values(2, T, 4, D), "dt_bias": values(4, D), "decay": "sigmoid", "lower_bound": -5.0}
            | {"gate": values(2, T, 4, V), "norm_weight": values(V), "gate_activation": "sigmoid"},
            {"g": None, "delta": False, "decay": "times_beta", "beta_activation": "softplus"}
            | {"l2norm_eps": None, "scale": 1.0, "beta_min": 0.1, "skip": values(4)},
            {
                "g": -values(4).abs(),
                "delta": False,
                "decay": "log",
                "A_log": None,
                "dt_bias": None,
                "beta": None,
                "beta_activation": "none",
            },
        ],
        "moe_hash_router": lambda: [{"x": strided, "scoring": "sigmoid"}, {**norm, "norm_topk_prob": False}],
        "router_logits": lambda: [{"x": strided, "bias": None}, {**norm, "dtype": torch.bfloat16}],
        "attention": lambda: [
            {"sinks": None, "window": 4, "softcap": 20.0},
            {"window": 4, "key_range": torch.tensor([[3, 9], [0, 7]], dtype=torch.int32, device=device)},
            {"window": 3, "lookahead": 2, "q": values(2, 4, 9, D)},
            *(
                {
                    "relative": values(2, tokens, 4, 5),
                    "sinks": values(2, tokens, 4),
                    "q": values(2, 4, tokens, D),
                }
                for tokens in (1, 9)
            ),
            in_8_bits(T, 9) | {"relative": values(2, T, 4, 20)},
            in_8_bits(9, 9) | {"relative": values(2, 9, 4, 3)},
            {"mask": values(2, 1, T, 9), "gate": values(2, T, 4, V)},
            {"mask": values(1, 1, T, 9) > 0.0, "gate": values(2, T, 4, 1), "gate_activation": "softplus"},
            {"mask": torch.randint(512, (2, 2, T, 1), dtype=torch.int32).to(device)},
            {"indices": selected},
            {"indices": selected, "q": values(2, 36, T, D), "sinks": None},
            {"indices": selected, **in_8_bits(T, 9)},
            {"indices": selected, **in_8_bits(T, 9, 36), "sinks": None},
            over_many,
            over_many | {"gate": values(2, 20, 4, V)},
            {"q": values(1, 32, 1, D), "k": values(1, 2, 9, D), "v": values(1, 2, 9, V), "sinks": None},
            compressed,
            compressed | {"indices": selected},
            compressed | {"q": values(2, 36, T, D), "sinks": None},
            compressed | {"q": values(2, 36, T, D), "indices": selected, "sinks": None, "window": 2},
            in_8_bits(T, 9),
            in_8_bits(20, 300),
            in_8_bits(20, 300) | {"gate": values(2, 20, 4, _whole_groups(V))},
        ],
        "write_cache_quantized_": lambda: [
            {"states": values(2, T, 2, C).transpose(1, 2)},
        ],
        "fused_norm_add": lambda: [
            {"input": strided, "weight_offset": 1.0},
            {**wide, "residual": values(2, 4100)},
        ],
        "fused_residual_norm": lambda: [
            {"residual": strided, "write_sum": False, "factor": 0.22},
            {**wide, "residual": values(2, 4100)},
            {"residual": values(T, 4, H), "weight": values(4, H), "gate": values(T, 9)[:, 5:]}
            | {"factor": 2.0, "gate_factor": 0.25},
        ],
        "moe_router": lambda: [
            {
                "scoring": "sigmoid",
                "bias": values(E),
                "num_groups": 4,
                "top_groups": 2,
                "per_expert_scale": values(E, dtype=torch.float32),
            },
            {"scoring": "softmax_after_topk", "logits": values(E, T).t(), "norm_topk_prob": False},
            *({"logits": values(T, experts)} for experts in (100, 200, 300, 600)),
        ],
        "fused_moe_routing": lambda: [{"logits": values(E)}],
        "moe_gate": lambda: [{"renormalize_after_scale": False}],
        "moe_bucket": lambda: [
            {"ids": torch.zeros(0, K, dtype=torch.int64, device=device)},
            {"ids": ids.long()},
        ],
        "moe_compute_ids_tpe": lambda: [{"ids": ids.long()}],
        "silu_mul_stacked": lambda: [{"gate": values(I, T).t()}],
        "weighted_sum_residual_stacked_": lambda: [{"residual_": values(H, T).t()}],
        "weighted_sum_residual_norm_stacked_": lambda: [{"residual_": values(H, T).t()}],
        "moe_weighted_reduce": lambda: [
            {"expert_out": values(T * K, H), **tail, "gate_is_logit": True},
            {"residual": values(1, T, H)},
        ],
        "index_topk": lambda: [
            {"key_range": torch.tensor([[2, 9], [0, 40]], dtype=torch.int32, device=device)},
            {"q": values(2, 4, T, 16).transpose(1, 2), "weights": values(2, T, 4)},
            {"block": 3, "keys": 3 * T + 14, "tail": 1, "weights": None, "as_bits": True},
            *(
                {"reduce": "keys", "block": 2, "tail": 1, "weights": None, "top_k": 3, "as_bits": as_bits}
                for as_bits in (False, True)
            ),
        ],
        "hyper_update": lambda: [{"comb": None, "out": strided}],
        "hyper_connection": lambda: [
            {"out": None, "post": None, "comb": None, "iterations": 3},
            {"fn": values(8, 4 * H) / 16, "base": values(8), "scale": values(2), "comb": None}
            | {"post_eps": 1e-3, "post_factor": 0.5},
            {"fn": values(4, 4 * H) / 16, "base": values(4), "scale": values(1)},
        ],
        "heads_quantized": lambda: [
            {"x": values(1, T, 4, H, dtype=torch.float32), "dtype": dtype, "transposed": False, "tail": None}
        ],
        "heads_mm": lambda: [
            {"x": values(1, T, 4, 40, dtype=torch.float32), "transposed": False, "tail": None},
            {"x": values(1, 1, 4, 40), "transposed": False, "tail": None},
            {"x": values(1, 1, 4, 16), "tail": None},
        ],
        "linear_quantized": lambda: [
            {"x": strided, "bias": None},
            {"x": values(2, 0, H)},
            {"x": values(1, H), "residual": values(1, I), **norm},
            {"order": torch.arange(I - 1, -1, -1, dtype=torch.int32, device=device), **norm},
            {"activation": "silu", "activated": I - 5, "factor": 0.25},
        ],
        "mlp_quantized": lambda: [
            {"residual": strided, "gate_up_bias": values(2 * I), "interleaved": True},
            norm,
            {"x": values(1, H), **norm},
        ],
        "moe_experts": lambda: [
            {**tail, "gate_up_bias": values(E, 2 * I), "interleaved": True},
            norm,
            {**one, **norm},
        ],
        "moe_experts_quantized": lambda: [{"residual": values(1, T, H), **norm}, {**one, **norm}],
    }
    return changes[name]() if name in changes else []


def copies(arguments: dict) -> dict:
    """Fresh tensors with the same strides, for operators that write."""
    return {
        name: value.clone(memory_format=torch.preserve_format) if isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }
