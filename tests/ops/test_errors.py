"""Bad arguments: one line that names operator, argument, what was expected and what came."""

import pytest
import torch
from torch import Tensor

from torch_moe_mps.ops import OPERATORS
from torch_moe_mps.ops._sample import E, H, I, K, T
from torch_moe_mps.ops._samples import packet, sample_arguments

# What is tested here does not depend on the order of threads.
pytestmark = pytest.mark.one_schedule

FLOATS = "float32 or float16 or bfloat16"
NAME = "a name such as affine4_64 or mxfp4"


def wrong(message: str, **arguments) -> tuple[str, dict]:
    """The message about wrong arguments, and these.

    The text may be only what the first of them must be, and may leave out what it got: one of them.
    """
    return (message if " must be " in message else f"{next(iter(arguments))} must be {message}"), arguments


def bad_arguments(device: str) -> list[tuple[str, str, dict]]:
    """(operator, message, wrong arguments)."""

    def zeros(*shape, dtype=torch.float32):
        return torch.zeros(shape, dtype=dtype, device=device)

    axes, places = zeros(8, dtype=torch.int32), zeros(3, 2, T, dtype=torch.int64)

    half, integer, short = torch.float16, torch.int32, torch.int16  # MPS has no float64
    logits = [
        wrong(FLOATS, logits=zeros(T, E, dtype=integer)),
        wrong("[T, E] with E between 1 and 1024, got E = 0", logits=zeros(T, 0)),
        wrong("[T, E] with E between 1 and 1024, got E = 1025", logits=zeros(T, 1025)),
        wrong("between 1 and 8, the smaller of E and 64", top_k=0),
        wrong("between 1 and 8, the smaller of E and 64", top_k=-1),
        wrong("between 1 and 8, the smaller of E and 64", top_k=E + 1),
        wrong("between 1 and 64, the smaller of E and 64", top_k=65, logits=zeros(T, 128)),
    ]
    scale = [
        wrong("of shape [E] = (8,)", per_expert_scale=zeros(E + 1)),
        wrong(FLOATS, per_expert_scale=zeros(E, dtype=integer)),
    ]
    ids = [
        wrong("int32 or int64", ids=zeros(T, K)),
        wrong("int32 or int64", ids=zeros(T, K, dtype=short)),
        wrong("2-D", ids=zeros(T * K, dtype=integer)),
        wrong("between 1 and 1024", num_experts=0),
        wrong("between 1 and 1024", num_experts=1025),
    ]
    around = [
        wrong("of shape [E, 2I] = (8, 64)", gate_up_bias=zeros(E, I)),
        wrong("of shape [E, H] = (8, 64)", down_bias=zeros(E, I)),
        wrong("one of silu, gelu, gelu_tanh, relu, relu2, swiglu_oai, silu_clamped", activation="swish"),
        wrong("limit must be a number for activation silu_clamped, got None", activation="silu_clamped"),
    ]
    tail = [
        wrong("of shape [T, H] = (3, 64)", shared_out=zeros(T, H + 1)),
        wrong("float32", shared_out=zeros(T, H, dtype=half)),
        wrong("shared_out must be given when shared_gate is, got None", shared_gate=zeros(T)),
        wrong("of shape [T, 1] = (3, 1)", shared_gate=zeros(T, 2), shared_out=zeros(T, H)),
        wrong("of shape [T] = (3,)", shared_gate=zeros(T + 1), shared_out=zeros(T, H)),
        wrong(FLOATS, shared_gate=zeros(T, dtype=integer), shared_out=zeros(T, H)),
        wrong("T = 3 rows of H = 64 elements", residual=zeros(T + 1, H)),
        wrong("T = 3 rows of H = 64 elements", residual=zeros(1, H, T)),
        wrong("float32", residual=zeros(T, H, dtype=half)),
        wrong("False without shared_gate", gate_is_logit=True, shared_out=zeros(T, H)),
    ]
    q4_k = {
        **{"format": "q4_k", "x": zeros(T, 256), "packed": zeros(I, 32, dtype=integer)},
        **{"scales": zeros(I, 12, dtype=torch.uint8), "biases": zeros(I, 2, dtype=short)},
    }
    mxfp4 = {"format": "mxfp4", "biases": None, "scales": zeros(E, I, 2, dtype=torch.uint8)}
    scales = zeros(2, 2, 9, 1)
    eight_bits = {
        **{"q": zeros(2, 4, T, 32), "k_scales": scales, "k_biases": scales},
        **{"v": zeros(2, 2, 9, 8, dtype=integer), "v_scales": scales, "v_biases": scales},
    }
    plain = {"transposed": False, "tail": None}
    beside = {"k_tail": zeros(2, 2, 5, 16), "v_tail": zeros(2, 2, 5, 8)}
    table = {
        "heads_quantized": [
            wrong(FLOATS, x=zeros(2, T, 4, I, dtype=integer)),
            wrong("4-D", x=zeros(T, 4, I)),
            wrong("of a last dimension of 32, the rows of a matrix", x=zeros(2, T, 4, 33)),
            wrong("of a last dimension of 64, the columns of a matrix", x=zeros(2, T, 4, I), **plain),
            wrong("3-D", packed=zeros(I, 8, dtype=integer)),
            wrong("uint32 or int32", packed=zeros(4, I, 8)),
            wrong("of shape [Hq, R, C * 4 / 32] = (4, 32, 8)", packed=zeros(3, I, 8, dtype=integer)),
            wrong("of shape [Hq, R, C / 32] = (4, 32, 2)", scales=zeros(4, I, 1)),
            wrong("a tensor for format affine4_32", biases=None),
            wrong(NAME, format=""),
            wrong("of shape [B, T, Hq, R] = (2, 3, 4, 6)", tail=zeros(2, T, 3, 6)),
            wrong("dtype must be float32, got float16", dtype=half),
            wrong(f"{FLOATS}, got int32", dtype=torch.int32, x=zeros(2, T, 4, 64), **plain),
        ],
        "heads_mm": [
            wrong(FLOATS, x=zeros(2, T, 4, 16, dtype=integer)),
            wrong("4-D", x=zeros(T, 4, 16)),
            wrong("of a last dimension of 16, the rows of a matrix", x=zeros(2, T, 4, 17)),
            wrong("of a last dimension of 40, the columns of a matrix", x=zeros(2, T, 4, 16), **plain),
            wrong("float32", weight=zeros(4, 16, 40, dtype=half)),
            wrong("weight must be float16, got float32", x=zeros(2, T, 4, 40, dtype=half), **plain),
            wrong(
                f"weight must be {FLOATS}, got int32",
                x=zeros(2, T, 4, 40),
                weight=zeros(4, 16, 40, dtype=integer),
                **plain,
            ),
            wrong("3-D", weight=zeros(16, 40)),
            wrong("of shape [Hq, rows, columns] = (4, 16, 40)", weight=zeros(3, 16, 40)),
            wrong("None unless transposed", tail=zeros(2, T, 4, 6), x=zeros(2, T, 4, 40), transposed=False),
            wrong("float32", tail=zeros(2, T, 4, 6, dtype=half)),
            wrong("4-D", tail=zeros(T, 4, 6)),
            wrong("of shape [B, T, Hq, R] = (2, 3, 4, 6)", tail=zeros(2, T, 3, 6)),
        ],
        "index_topk": [
            wrong(FLOATS, q=zeros(2, T, 4, 16, dtype=integer)),
            wrong("4-D", q=zeros(T, 4, 16)),
            wrong("q's head dimension must be between 1 and 256, got 257", q=zeros(2, T, 4, 257)),
            wrong("float32", k=zeros(2, 9, 16, dtype=half)),
            wrong("3-D", k=zeros(9, 16)),
            wrong("of shape [B, S, D] = (2, 9, 16)", k=zeros(2, 9, 17)),
            wrong("of shape [B, T, Hi] = (2, 3, 4)", weights=zeros(2, T, 5)),
            wrong(FLOATS, weights=zeros(2, T, 4, dtype=integer)),
            wrong("top_k must be at least 1, got 0", top_k=0),
            wrong("scale must be a number in the range of float32, got 1e+39", scale=1e39),
            wrong("of shape [B, 2] = (2, 2)", key_range=zeros(3, 2, dtype=integer)),
            wrong("int32", key_range=zeros(2, 2)),
            wrong("reduce must be one of heads, keys, got 'max'", reduce="max"),
            wrong('weights must be None with reduce = "keys", got (2, 3, 4)', reduce="keys"),
            wrong("block must be between 1 and 1024, got 1025", block=1025),
            wrong(
                "key_range must be None where k has a row for each block",
                key_range=zeros(2, 2, dtype=integer),
                block=2,
            ),
            wrong("tail must be between 0 and 0, got 1", tail=1),
            wrong("tail must be between 0 and 1, got 2", tail=2, block=2, keys=9),
            wrong("keys must be 0 where k has a row for each key, got 3", keys=3),
            wrong("keys must be at most 25, for which k has rows", keys=2 * (T + 9) + 2, block=2),
        ],
        "pointwise": [
            wrong(
                "a must be float32 or float16 or bfloat16 or int32 or int64, got int16",
                a=zeros(T, dtype=short),
            ),
            wrong("0-D or 1-D or 2-D or 3-D or 4-D", b=zeros(1, 1, 1, 1, 1)),
            wrong(
                "a must be of a shape that broadcasts with the others, got (3,), (2,)",
                a=zeros(2),
                b=zeros(3),
                c=None,
                formula="add a b f32",
            ),
            wrong("dtype must be float32 or float16 or bfloat16, got int32", dtype=torch.int32),
            *(
                wrong(f"steps such as 'mul a %0 bf16', joined by '; ', got {line!r}", formula=line)
                for line in ("", "cos a f32", "mul a f32", "neg a f64")
            ),
            *(
                wrong(f"of inputs that are given, steps before and numbers, got {line!r}", formula=line)
                for line in ("neg f f32", "neg %0 f32", "neg 1e39 f32", "neg nan f32")
            ),
            wrong(
                "formula's number of steps must be between 1 and 32, got 33",
                formula="; ".join(["neg a f32"] * 33),
            ),
            wrong(
                "formula's number of different numbers must be between 0 and 12, got 13",
                formula="; ".join(f"add a {n} f32" for n in range(13)),
            ),
            wrong(
                "mean must be of a last dimension but one with elements, got (3,)",
                **{"a": zeros(3), "formula": "neg a f32", "b": None, "c": None, "mean": True},
            ),
        ],
        "hyper_update": [
            wrong(FLOATS, streams=zeros(T, 2, H, dtype=integer)),
            wrong("at least 2-D", streams=zeros(H)),
            wrong("streams' dimension -2 must be between 1 and 4, got 5", streams=zeros(T, 5, H)),
            wrong("of rows of a multiple of 4 elements, got 62", streams=zeros(T, 2, H - 2)),
            wrong("of shape [..., H] = (3, 64)", out=zeros(T, H + 4)),
            wrong("float32", out=zeros(T, H, dtype=half)),
            wrong("of shape [..., N] = (3, 2)", post=zeros(T, 3)),
            wrong("float32", post=zeros(T, 2, dtype=half)),
            wrong("of shape [..., N, N] = (3, 2, 2)", comb=zeros(T, 2, 3)),
            wrong("float32", comb=zeros(T, 2, 2, dtype=half)),
        ],
        "pool_window_": [
            wrong(FLOATS, kv=zeros(2, T, 16, dtype=integer)),
            wrong("3-D", kv=zeros(T, 16)),
            wrong("gate must be of shape kv's = (2, 3, 16)", gate=zeros(2, T, 8)),
            wrong("entries_ must be float32", entries_=zeros(2, 5, 8, dtype=half)),
            wrong("entries_ must be 3-D", entries_=zeros(2, 8)),
            wrong("entries_' last dimension must be between 2 and 512, got 514", entries_=zeros(2, 5, 514)),
            wrong("of an even last dimension D, with W = D or 2 D, here 16", entries_=zeros(2, 5, 4)),
            wrong("of shape [rate, W] = (1, 16)", position_bias=zeros(0, 16)),
            wrong("of shape [B, rate W / D, 2, W] = (2, 4, 2, 16)", state_=zeros(2, 2, 2, 16)),
            wrong("position must be between 0 and 2147483644, got -1", position=-1),
            wrong(
                "entries_ must be of shape [B, N, D], with B = 2 and N at least 6, got (2, 5, 8)", position=9
            ),
            wrong("of shape [B, N, D], with B = 2 and N at least 3", entries_=zeros(1, 5, 8)),
            wrong("of shape [D] = (8,)", norm_weight=zeros(16)),
            wrong(FLOATS, inv_freq=zeros(2, dtype=integer)),
            wrong("inv_freq's length must be between 0 and 4, got 5", inv_freq=zeros(5)),
        ],
        "hyper_connection": [
            wrong("streams' dimension -2 must be between 1 and 4, got 0", streams=zeros(T, 0, H)),
            wrong("post must be given with out, and only then, got (3, 4)", out=None, comb=None),
            wrong("post must be given with out, and only then", post=None),
            wrong("comb must be None without out, got shape (3, 4, 4)", out=None, post=None),
            wrong("of shape [..., H] = (3, 64)", out=zeros(T, 4)),
            wrong(FLOATS, fn=zeros(24, 4 * H, dtype=integer)),
            wrong("2-D", fn=zeros(24)),
            wrong("fn must be of N, 2 N or (2 + N) N = 4, 8 or 24 rows, got 5", fn=zeros(5, 4 * H)),
            wrong("of shape [R, N H] = (24, 256)", fn=zeros(24, H)),
            wrong("of shape [R] = (24,)", base=zeros(8)),
            wrong("of shape [1 to 3, as many as parts of fn] = (3,)", scale=zeros(2)),
            wrong(FLOATS, scale=zeros(3, dtype=integer)),
            wrong("iterations must be at least 1, got 0", iterations=0),
            wrong("eps must be a number in the range of float32, got 1e+39", eps=1e39),
        ],
        "expert_mm": [
            wrong(FLOATS, x=zeros(T, H, dtype=integer)),
            wrong("2-D or 3-D", x=zeros(H)),
            wrong("of shape [T, K, H] = (3, 2, 64)", x=zeros(T, 1, H)),
            wrong("float32", weight=zeros(E, I, H, dtype=half)),
            wrong("3-D", weight=zeros(E, I)),
            wrong("of shape [E, N, H] with H = 64 as in x", weight=zeros(E, I, H - 1)),
            wrong("weight must be of shape [E, H, N] with H = 64 as in x, got (8, 32, 64)", transposed=True),
            wrong("int32 or int64", ids=zeros(T, K)),
            wrong("2-D", ids=zeros(T * K, dtype=integer)),
            wrong("of shape [T, K] with T = 3 as in x", ids=zeros(T - 1, K, dtype=integer)),
            wrong("K, the columns of ids, must be between 1 and 64, got 0", ids=zeros(T, 0, dtype=integer)),
            wrong("K, the columns of ids, must be between 1 and 64, got 65", ids=zeros(T, 65, dtype=integer)),
            wrong("of shape [E, N] = (8, 32)", bias=zeros(E, H)),
            wrong(FLOATS, bias=zeros(E, I, dtype=integer)),
        ],
        "moe_experts": [
            wrong("2-D", x=zeros(T, K, H)),
            wrong("of shape [E, 2I, H] with H = 64 as in x", gate_up=zeros(E, 2 * I + 1, H)),
            wrong("float32", gate_up=zeros(E, 2 * I, H, dtype=half)),
            wrong("of shape [E, I, H] with H = 64 as in x", gate_up=zeros(E, 2 * I, H + 1), gated=False),
            wrong("of shape [E, H, I] = (8, 64, 32)", down=zeros(E, H, I - 1)),
            wrong("of shape [E, H, I] = (8, 64, 32)", down=zeros(E + 1, H, I)),
            wrong(
                "down must be of shape [E, I, H] = (8, 32, 64), got (8, 64, 32)",
                gate_up=zeros(E, H, 2 * I),
                transposed=True,
            ),
            wrong("of shape [T, K] = (3, 2)", weights=zeros(T, K + 1)),
            wrong(FLOATS, weights=zeros(T, K, dtype=integer)),
            *around,
            wrong("True for activation swiglu_oai", gated=False, activation="swiglu_oai"),
            wrong("at least 0.0", limit=-1.0, activation="silu_clamped"),
            wrong("a number in the range of float32", limit=float("nan"), activation="swiglu_oai"),
            wrong("None for activation silu", limit=7.0),
            wrong("None for activation silu", alpha=1.0),
            wrong("a finite number", alpha=float("inf"), activation="swiglu_oai"),
            wrong("False when gated is False", interleaved=True, gated=False),
            *tail,
        ],
        "expert_qmm": [
            wrong("H, the input dimension of packed, must be a multiple of 32, got 33", x=zeros(T, 33)),
            wrong("3-D", packed=zeros(E * I, 8, dtype=integer)),
            wrong("uint32 or int32", packed=zeros(E, I, 8)),
            wrong("of shape [E, N, H * 4 / 32] = (8, 32, 8)", packed=zeros(E, I, 9, dtype=integer)),
            wrong("of shape [E, N, H / 32] = (8, 32, 2)", scales=zeros(E, I, 1)),
            wrong(FLOATS, scales=zeros(E, I, 2, dtype=torch.uint8)),
            wrong("a tensor for format affine4_32", biases=None),
            wrong("of shape [E, N, H / 32] = (8, 32, 2)", biases=zeros(E, I, 1)),
            wrong("float32", biases=zeros(E, I, 2, dtype=half)),
            wrong(NAME, format="affine7_64"),
            wrong(NAME, format="affine4_16"),
            wrong(NAME, format="affine"),
            wrong(
                "biases must be None for format mxfp4, got a tensor of shape (8, 32, 2)",
                **mxfp4 | {"biases": zeros(E, I, 2)},
            ),
            wrong("scales must be uint8", **mxfp4 | {"scales": zeros(E, I, 2)}),
            wrong(
                "packed must be of shape [E, N, H * 8 / 32] = (8, 32, 16), got (8, 32, 8)",
                **mxfp4 | {"format": "mxfp8"},
            ),
            wrong(
                "scales must be of shape [E, N, H / 16] = (8, 32, 4), got (8, 32, 2)",
                **mxfp4 | {"format": "nvfp4"},
            ),
            wrong("of shape [E, N] = (8, 32)", bias=zeros(E, I + 1)),
            wrong("of shape [T, K] with T = 3 as in x", ids=zeros(T - 1, K, dtype=integer)),
        ],
        "moe_experts_quantized": [
            wrong(
                "gate_up_scales must be of shape [E, 2I, H / 64] = (8, 64, 1), got (8, 64, 2)",
                **{"format": "affine4_64", "down_format": "affine4_32"},
            ),
            wrong(
                "down_packed must be of shape [E, H, I * 4 / 32] = (8, 64, 8), got (8, 64, 4)", gated=False
            ),
            wrong("of an even number of rows 2I", gate_up_packed=zeros(E, 63, 8, dtype=integer)),
            wrong("of shape [E, 2I, H / 32] = (8, 64, 2)", gate_up_scales=zeros(E, 2 * I, 1)),
            wrong("of shape [E, H, I * 4 / 32] = (8, 64, 4)", down_packed=zeros(E, H, 8, dtype=integer)),
            wrong("a tensor for format affine4_32", down_biases=None),
            wrong(
                "down_packed must be of shape [E, H, I * 6 / 32] = (8, 64, 6), got (8, 64, 4)",
                down_format="affine6_32",
            ),
            wrong(
                "down_biases must be None for format mxfp4, got a tensor of shape (8, 64, 1)",
                down_format="mxfp4",
            ),
            wrong(NAME, down_format="int4"),
            *around,
            wrong("shared_out must be given when shared_gate is, got None", shared_gate=zeros(T)),
        ],
        "linear_quantized": [
            wrong(FLOATS, x=zeros(T, H, dtype=integer)),
            wrong("at least 1-D", x=zeros()),
            wrong("C, the input dimension of packed, must be a multiple of 32, got 33", x=zeros(T, 33)),
            wrong("2-D", packed=zeros(1, I, 8, dtype=integer)),
            wrong("uint32 or int32", packed=zeros(I, 8)),
            wrong("of shape [N, C * 4 / 32] = (32, 8)", packed=zeros(I, 9, dtype=integer)),
            wrong("of shape [N, C / 32] = (32, 2)", scales=zeros(I, 1)),
            wrong(FLOATS, scales=zeros(I, 2, dtype=torch.uint8)),
            wrong("a tensor for format affine4_32", biases=None),
            wrong("of shape [N, C / 32] = (32, 2)", biases=zeros(I, 1)),
            wrong("packed must be of shape [N, C * 6 / 32] = (32, 12), got (32, 8)", format="affine6_32"),
            wrong(NAME, format=""),
            wrong("C, the input dimension of packed, must be a multiple of 256, got 64", format="q4_k"),
            wrong("scales must be uint8", **q4_k | {"scales": zeros(I, 12)}),
            wrong(
                "biases must be of shape [N, C * 2 / 256] = (32, 2), got (32, 1)",
                **q4_k | {"biases": zeros(I, 1, dtype=short)},
            ),
            wrong("biases must be a tensor for format q4_k, got None", **q4_k | {"biases": None}),
            wrong("scales must be int16, got float32", format="q4_0", biases=None),
            wrong("of shape [N] = (32,)", bias=zeros(I + 1)),
            wrong(FLOATS, bias=zeros(I, dtype=integer)),
            wrong("int32", order=zeros(I)),
            wrong("of shape [N] = (32,)", order=zeros(I + 1, dtype=integer)),
            wrong("one of silu, gelu, gelu_tanh, relu, relu2, got 'swiglu_oai'", activation="swiglu_oai"),
            wrong("activated must be between 1 and 32, the rows of packed", activation="silu", activated=0),
            wrong(
                "activated must be between 1 and 32, the rows of packed", activation="silu", activated=I + 1
            ),
            wrong("activated must be None without an activation, got 4", activated=4),
            wrong("factor must be 1.0 without an activation, got 0.5", factor=0.5),
            wrong("factor must be a finite number, got inf", activation="silu", factor=float("inf")),
            wrong("float32", streams=zeros(T, 4, 8, dtype=half)),
            wrong("3-D", streams=zeros(4, 8)),
            wrong("streams' dimension -2 must be between 1 and 4, got 8", streams=zeros(T, 8, 4)),
            wrong(
                "streams' dimension -2 must be a divisor of the 32 rows of packed, got 3",
                streams=zeros(T, 3, 8),
            ),
            wrong("of shape [..., S, N / S] = (3, 4, 8)", streams=zeros(T, 4, 9)),
            wrong("of shape [..., N] = (3, 8)", residual=zeros(T, I), streams=zeros(T, 4, 8)),
            wrong(
                "None with streams, got a tensor of shape (32,)",
                **{"order": zeros(I, dtype=integer), "streams": zeros(T, 4, 8)},
            ),
            wrong("activation must be None with streams", streams=zeros(T, 4, 8), activation="silu"),
            wrong(
                "streams must be None for an x without columns, got a tensor of shape (3, 4, 8)",
                **{"x": zeros(T, 0), "packed": zeros(I, 0, dtype=integer), "streams": zeros(T, 4, 8)},
                **{"scales": zeros(I, 0), "biases": zeros(I, 0)},
            ),
            wrong(
                "activation must be None for an x without columns, got 'silu'",
                **{"x": zeros(T, 0), "packed": zeros(I, 0, dtype=integer), "activation": "silu"},
                **{"scales": zeros(I, 0), "biases": zeros(I, 0)},
            ),
        ],
        "mlp_quantized": [
            wrong("gate_up_packed must be of shape [2I, H * 4 / 32] = (64, 4), got (64, 8)", x=zeros(T, I)),
            wrong("of an even number of rows 2I", gate_up_packed=zeros(63, 8, dtype=integer)),
            wrong("down_packed must be of shape [H, I * 4 / 32] = (64, 8), got (64, 4)", gated=False),
            wrong("of shape [H, I / 32] = (64, 1)", down_scales=zeros(H, 2)),
            wrong(
                "down_packed must be of shape [H, I * 3 / 32] = (64, 3), got (64, 4)",
                down_format="affine3_32",
            ),
            wrong(
                "down_biases must be None for format mxfp4, got a tensor of shape (64, 1)",
                down_format="mxfp4",
            ),
            wrong("of shape [2I] = (64,)", gate_up_bias=zeros(I)),
            wrong("of shape [H] = (64,)", down_bias=zeros(I)),
            wrong("one of silu, gelu, gelu_tanh, relu, relu2, swiglu_oai, silu_clamped", activation="tanh"),
            wrong("of shape [..., H] = (3, 64)", residual=zeros(H)),
            wrong("float32", residual=zeros(T, H, dtype=half)),
        ],
        "embedding_quantized": [
            wrong("int32 or int64", ids=zeros(T)),
            wrong("2-D", packed=zeros(8, dtype=integer)),
            wrong("of shape [V, C / 32] = (8, 2)", scales=zeros(E - 1, 2)),
            wrong(
                "C, the input dimension of packed, must be a multiple of 128, got 64", format="affine4_128"
            ),
            wrong(f"{FLOATS}, got int32", dtype=torch.int32),
        ],
        "rms_norm": [
            wrong(FLOATS, input=zeros(T, H, dtype=short)),
            wrong("at least 1-D", input=zeros()),
            wrong("of shape [H] = (64,)", weight=zeros(H - 1)),
            wrong(FLOATS, weight=zeros(H, dtype=integer)),
            wrong("0.0 without a weight", weight_offset=1.0, weight=None),
            wrong(f"of shape [N, H] of input = ({T}, 64)", weight=zeros(T + 1, H)),
            wrong("weight must be of shape [H] = (64,)", input=zeros(H), weight=zeros(1, H)),
            wrong(FLOATS, weight=zeros(T, H, dtype=integer)),
        ],
        "layer_norm": [
            wrong(FLOATS, input=zeros(T, H, dtype=short)),
            wrong("at least 1-D", input=zeros(), bias=None),
            wrong("of shape [H] = (64,)", weight=zeros(H - 1)),
            wrong(FLOATS, weight=zeros(H, dtype=integer)),
            wrong("bias must be of shape [H] = (64,)", bias=zeros(1)),
            wrong(FLOATS, bias=zeros(H, dtype=integer)),
            wrong("0.0 without a weight", weight_offset=1.0, weight=None),
        ],
        "rope": [
            wrong("one of half, interleaved, interleaved_to_half", pairs="quarters"),
            wrong("4-D", q=zeros(2, T, 16)),
            wrong("of heads of an even number of elements, 16 or more", q=zeros(2, T, 4, 15)),
            wrong("of heads of an even number of elements, 16 or more", q=zeros(2, T, 4, 14)),
            wrong("of at least one head", q=zeros(2, T, 0, 16)),
            wrong(FLOATS, q=zeros(2, T, 4, 16, dtype=integer)),
            wrong("float32", k=zeros(2, T, 2, 16, dtype=half)),
            wrong("of shape [B, T, Hk, Dk] = (2, 3, 2, 16)", k=zeros(2, T + 1, 2, 16)),
            wrong("k_weight must be None without k, got shape (16,)", k=None),
            wrong("of shape [B or 1, T, R or R / 2], with B, T, R = (2, 3, 16)", cos=zeros(3, T, 16)),
            wrong(
                "of shape [B or 1, T, R or R / 2], with B, T, R = (2, 3, 16)",
                cos=zeros(1, T, 12),
                rotary_dim=16,
            ),
            wrong("3-D", cos=zeros(T, 16)),
            wrong("an even number of at least 2", rotary_dim=7),
            wrong("of shape cos's = (1, 3, 16)", sin=zeros(1, T, 8)),
            wrong("sin must be given with cos, and only then, got None", sin=None),
            wrong(
                "of heads of an even number of elements, 2 or more", q=zeros(2, T, 4, 15), cos=None, sin=None
            ),
            wrong("float32", sin=zeros(1, T, 16, dtype=half)),
            wrong("of shape [Dq] = (16,)", q_weight=zeros(8)),
            wrong(FLOATS, k_weight=zeros(16, dtype=short)),
        ],
        "rope_cache_": [
            wrong("one of half, interleaved, interleaved_to_half", pairs="quarters"),
            wrong("of shape [B, T, Hk, Dk] = (2, 3, 2, 16)", k=zeros(2, T + 1, 2, 16)),
            wrong("of heads of an even number of elements, 2 or more", v=zeros(2, T, 2, 7)),
            wrong("float32", v=zeros(2, T, 2, 8, dtype=half)),
            wrong("of shape [B, Hk, S, Dk] = (2, 2, 2, 16)", keys_=zeros(2, T, 2, 16)),
            wrong("float32", keys_=zeros(2, 2, T, 16, dtype=half)),
            wrong("of 3 tokens or more, as many as k has", keys_=zeros(2, 2, T - 1, 16)),
            wrong("None without norm_v", v_weight=zeros(8)),
            wrong("of shape [Dv] = (8,)", v_weight=zeros(16), norm_v=True),
            wrong("free of expanded (stride-0) dimensions", values_=zeros(2, 1, T, 8).expand(2, 2, T, 8)),
            wrong("of shape [B or 1, T, R or R / 2], with B, T, R = (2, 3, 16)", cos=zeros(3, T, 16)),
        ],
        "index_keys_": [
            wrong("3-D", k=zeros(2, T, 1, 16)),
            wrong("of heads of an even number of elements", k=zeros(2, T, 15), keys_=zeros(2, T, 15)),
            wrong("of shape [B, S, D] = (2, 5, 16)", keys_=zeros(2, 5, 8)),
            wrong("float32", keys_=zeros(2, 5, 16, dtype=half)),
            wrong("of 3 tokens or more, as many as k has", keys_=zeros(2, T - 1, 16)),
            wrong("given with cos, and only then", sin=None),
            wrong("q must be None without cos and sin, got (2, 3, 4, 16)", cos=None, sin=None),
            wrong("of shape [D] = (16,)", weight=zeros(8)),
            wrong("of shape [D] = (16,)", bias=zeros(8)),
            wrong("float32", bias=zeros(16, dtype=half)),
            wrong("of shape [B, T, Hi, D] = (2, 3, 2, 16)", q=zeros(2, T + 1, 2, 16)),
            wrong("q_weight must be None with a bias", q_weight=zeros(16)),
            wrong("q_weight must be of shape [Dq] = (16,)", q_weight=zeros(8), bias=None),
            wrong("weight_offset must be 0 with a bias, got 1.0", weight_offset=1.0),
            wrong("one of half, interleaved, interleaved_to_half", pairs="quarters"),
            wrong("free of expanded (stride-0) dimensions", keys_=zeros(1, T, 16).expand(2, T, 16)),
        ],
        "rms_norm_gated": [
            wrong(FLOATS, input=zeros(T, H, dtype=short)),
            wrong("at least 1-D", input=zeros()),
            wrong("float32", gate=zeros(T, H, dtype=half)),
            wrong("of shape [..., H] of input = (3, 64)", gate=zeros(T, H - 1)),
            wrong("of shape [H] = (64,)", weight=zeros(H - 1)),
            wrong(FLOATS, weight=zeros(H, dtype=integer)),
            wrong("one of silu, sigmoid", activation="gelu"),
            wrong("a divisor of the 64 columns, got 48", group=48),
            wrong("a divisor of the 64 columns, got 0", group=0),
        ],
        "rope_tables": [
            wrong("one of pairs, halves, interleaved", layout="thirds"),
            wrong("int32 or int64", position_ids=zeros(2, T)),
            wrong("2-D", position_ids=zeros(T, dtype=integer)),
            wrong("float32", inv_freq=zeros(8, dtype=half)),
            wrong("1-D", inv_freq=zeros(1, 8)),
            wrong(f"{FLOATS}, got float64", dtype=torch.float64),
            wrong("a number in the range of float32", scaling=float("nan")),
            wrong("2-D", position_ids=zeros(3, 2, T, dtype=integer)),
            wrong("3-D", position_ids=zeros(2, T, dtype=integer), axes=axes),
            wrong("of shape [R / 2] = (8,)", axes=axes[1:], position_ids=places),
            wrong("int32", axes=zeros(8), position_ids=places),
            wrong("of at least one position a token", position_ids=places[:0], axes=axes),
        ],
        "causal_conv1d_update_": [
            wrong("one of none, silu", activation="tanh"),
            wrong(FLOATS, x=zeros(2, T, 6, dtype=short)),
            wrong("3-D", x=zeros(6, T)),
            wrong("2-D", weight=zeros(6, 1, 4)),
            wrong("of shape [C, W] = (6, 4)", weight=zeros(5, 4)),
            wrong(FLOATS, weight=zeros(6, 4, dtype=integer)),
            wrong(FLOATS, conv_state_=zeros(2, 6, 5, dtype=integer)),
            wrong("3-D", conv_state_=zeros(6, 5)),
            wrong("of shape [B, C, S] = (2, 6, 5)", conv_state_=zeros(2, 7, 5)),
            wrong("of W - 1 = 3 positions or more, got 2", conv_state_=zeros(2, 6, 2)),
            wrong("free of expanded (stride-0) dimensions", conv_state_=zeros(1, 6, 5).expand(2, -1, -1)),
            wrong("of shape [C] = (6,)", bias=zeros(5)),
            wrong(FLOATS, bias=zeros(6, dtype=integer)),
        ],
        "selective_scan_": [
            wrong("3-D", x=zeros(T, 6)),
            wrong(FLOATS, x=zeros(2, T, 6, dtype=short)),
            wrong("of shape [B, T, I] of x = (2, 3, 6)", step=zeros(2, T, 5)),
            wrong("float32", step=zeros(2, T, 6, dtype=half)),
            wrong("3-D", B=zeros(2, 5)),
            wrong("between 1 and 16 states a channel, got 17", B=zeros(2, T, 17)),
            wrong("of shape [B, T, N] = (2, 3, 5)", B=zeros(1, T, 5)),
            wrong("of shape [B, T, N] of B = (2, 3, 5)", C=zeros(2, T, 4)),
            wrong("float32", C=zeros(2, T, 5, dtype=half)),
            wrong("of shape [B, I, N] = (2, 6, 5)", state_=zeros(2, 5, 6)),
            wrong("float32", state_=zeros(2, 6, 5, dtype=half)),
            wrong("free of expanded (stride-0) dimensions", state_=zeros(1, 6, 5).expand(2, -1, -1)),
            wrong("of shape [I, N] = (6, 5)", A_log=zeros(6)),
            wrong(FLOATS, A_log=zeros(6, 5, dtype=integer)),
            wrong("of shape [I] = (6,)", dt_bias=zeros(5)),
            wrong("of shape [I] = (6,)", skip=zeros(5)),
            wrong("of shape [B, T, I] of x = (2, 3, 6)", gate=zeros(2, T, 5)),
            wrong("float32", gate=zeros(2, T, 6, dtype=half)),
        ],
        "linear_attention_": [
            wrong("4-D", q=zeros(2, T, 32)),
            wrong(FLOATS, q=zeros(2, T, 2, 16, dtype=short)),
            wrong("between 1 and 256 elements a head, got 257", q=zeros(2, T, 2, 257), k=zeros(2, T, 2, 257)),
            wrong("float32", k=zeros(2, T, 2, 16, dtype=half)),
            wrong("of shape [B, T, Hk, Dk] of q = (2, 3, 2, 16)", k=zeros(2, T, 1, 16)),
            wrong("4-D", v=zeros(2, T, 32)),
            wrong("float32", v=zeros(2, T, 4, 8, dtype=half)),
            wrong("of shape [B, T, Hv, Dv] = (2, 3, 4, 8)", v=zeros(2, T + 1, 4, 8)),
            wrong("of a multiple of q's 2 heads, got 5 heads", v=zeros(2, T, 5, 8)),
            wrong("of shape [B, T, Hv] = (2, 3, 4)", g=zeros(2, T, 2)),
            wrong(FLOATS, g=zeros(2, T, 4, dtype=integer)),
            wrong("of shape [B, T, Hv] = (2, 3, 4)", beta=zeros(2, T)),
            wrong("float32", state_=zeros(2, 4, 16, 8, dtype=half)),
            wrong("of shape [B, Hv, Dk, Dv] = (2, 4, 16, 8)", state_=zeros(2, 4, 8, 16)),
            wrong("free of expanded (stride-0) dimensions", state_=zeros(1, 4, 16, 8).expand(2, -1, -1, -1)),
            wrong('A_log must be None with decay="log", and only then, got None', A_log=None),
            wrong('A_log must be None with decay="log", and only then, got a tensor', decay="log"),
            wrong("dt_bias must be None without A_log, got shape (4,)", A_log=None, decay="log"),
            wrong("one of log, softplus, sigmoid, times_beta", decay="exp"),
            wrong("one of none, sigmoid, softplus", beta_activation="silu"),
            wrong("beta_activation must be none without beta, got sigmoid", beta=None),
            wrong("beta_min must be None without beta", beta=None, beta_activation="none", beta_min=0.0),
            wrong("one of silu, sigmoid", gate_activation="tanh"),
            wrong('g must be None with decay="times_beta", and only then, got None', g=None),
            wrong('g must be None with decay="times_beta", and only then, got (2, 3, 4)', decay="times_beta"),
            wrong('beta must be given with decay="times_beta"', decay="times_beta", g=None, beta=None),
            wrong('lower_bound must be given with decay="sigmoid", and only then', lower_bound=-1.0),
            wrong('lower_bound must be given with decay="sigmoid", and only then, got None', decay="sigmoid"),
            wrong("g must be 1-D or 3-D", g=zeros(2, T, 4, 16), dt_bias=None, delta=False),
            wrong("of shape [B, T, Hv, Dk] = (2, 3, 4, 16)", g=zeros(2, T, 4, 8)),
            wrong("of shape [Hv] = (4,)", g=zeros(3)),
            wrong("dt_bias must be of shape [Hv, Dk] = (4, 16), got (4,)", g=zeros(2, T, 4, 16)),
            wrong(
                "beta_activation must be none or sigmoid where g has a value for each channel, got softplus",
                g=zeros(2, T, 4, 16),
                dt_bias=None,
                beta_activation="softplus",
            ),
            wrong("of shape [Hv] = (4,)", skip=zeros(3)),
            wrong("a number in the range of float32", beta_min=float("nan")),
            wrong("of shape [Hv] = (4,)", A_log=zeros(2)),
            wrong(FLOATS, dt_bias=zeros(4, dtype=integer)),
            wrong("a number in the range of float32", l2norm_eps=float("nan")),
            wrong("given with norm_weight, and only then, got one of the two", gate=zeros(2, T, 4, 8)),
            wrong(
                "of shape [B, T, Hv, Dv] of v = (2, 3, 4, 8)", gate=zeros(2, T, 4, 9), norm_weight=zeros(8)
            ),
            wrong("float32", gate=zeros(2, T, 4, 8, dtype=half), norm_weight=zeros(8)),
            wrong("of shape [Dv] = (8,)", norm_weight=zeros(9), gate=zeros(2, T, 4, 8)),
        ],
        "router_logits": [
            wrong(FLOATS, x=zeros(T, H, dtype=short)),
            wrong("2-D", x=zeros(H)),
            wrong("of shape [E, H] = (8, 64)", weight=zeros(E, H + 1)),
            wrong("2-D", weight=zeros(E * H)),
            wrong(FLOATS, weight=zeros(E, H, dtype=integer)),
            wrong("of shape [E] = (8,)", bias=zeros(E + 1)),
            wrong(FLOATS, bias=zeros(E, dtype=short)),
            wrong("of shape [columns of x] = (64,)", norm_weight=zeros(H + 1)),
            wrong(f"{FLOATS}, got int32", dtype=torch.int32),
        ],
        "attention": [
            wrong("4-D", q=zeros(2, 4, 16)),
            wrong(FLOATS, q=zeros(2, 4, T, 16, dtype=short)),
            wrong("q's head dimension must be between 1 and 576, got 577", q=zeros(2, 4, T, 577)),
            wrong(
                "k must be of a number of heads that divides Hq = 3, got (2, 2, 9, 16)", q=zeros(2, 3, T, 16)
            ),
            wrong("float32", k=zeros(2, 2, 9, 16, dtype=half)),
            wrong("of shape [B, Hk, S, D] = (2, 2, 9, 16)", k=zeros(2, 2, 9, 8)),
            wrong("of a number of heads that divides Hq = 4", k=zeros(2, 0, 9, 16)),
            wrong("of shape [B, Hk, S, Dv] = (2, 2, 9, 8)", v=zeros(2, 2, 8, 8)),
            wrong("v's head dimension must be between 1 and 512, got 513", v=zeros(2, 2, 9, 513)),
            wrong("of shape [Hq] or [B, T, Hq] = (4,)", sinks=zeros(2)),
            wrong("of shape [B, T, Hq] = (2, 3, 4)", sinks=zeros(2, 4, T)),
            wrong("of shape [B, T, Hq, E] = (2, 3, 4, 5)", relative=zeros(2, 4, T, 5)),
            wrong("of shape [B, T, Hq, E] = (2, 3, 4, 1)", relative=zeros(2, T, 4, 0)),
            wrong("relative must be 4-D", relative=zeros(2, T, 4)),
            wrong("relative must be float32", relative=zeros(2, T, 4, 5, dtype=half)),
            wrong("None beside a mask", relative=zeros(2, T, 4, 5), mask=zeros(1, 1, T, 9)),
            wrong("None beside a look-ahead", relative=zeros(2, T, 4, 5), lookahead=1),
            wrong(
                "relative must be None beside a tail, got (2, 3, 4, 5)",
                relative=zeros(2, T, 4, 5),
                k_tail=zeros(2, 2, 1, 16),
                v_tail=zeros(2, 2, 1, 8),
            ),
            wrong(
                "None beside indices",
                relative=zeros(2, T, 4, 5),
                indices=zeros(2, 1, T, 4, dtype=integer),
            ),
            wrong("of shape [B, T, Hq, Dv or 1] = (2, 3, 4, 8)", gate=zeros(2, T, 4, 16)),
            wrong("of shape [B, T, Hq, Dv or 1] = (2, 3, 4, 1)", gate=zeros(2, T, 2, 1)),
            wrong("gate must be float32", gate=zeros(2, T, 4, 1, dtype=half)),
            wrong("one of sigmoid, softplus", gate_activation="silu"),
            wrong("dtype must be float32, got float16", dtype=half),
            wrong(FLOATS, sinks=zeros(4, dtype=integer)),
            wrong(
                "of shape [B or 1, Hk or 1, T, S], with B, Hk, T, S = (2, 2, 3, 9)", mask=zeros(2, 4, T, 9)
            ),
            wrong(f"bool or {FLOATS} or int32", mask=zeros(2, 1, T, 9, dtype=short)),
            wrong(
                "of shape [B or 1, Hk or 1, T, ceil(S / 32)], with B, Hk, T, ceil(S / 32) = (2, 2, 3, 1)",
                mask=zeros(2, 1, T, 9, dtype=integer),
            ),
            wrong("int32", indices=zeros(2, 1, T, 4, dtype=torch.int64)),
            wrong("4-D", indices=zeros(2, T, 4, dtype=integer)),
            wrong("of shape [B, Hk or 1, T, K] = (2, 1, 3, 4)", indices=zeros(2, 3, T, 4, dtype=integer)),
            wrong("between 1 and 1024", index_block=0, indices=zeros(2, 1, T, 4, dtype=integer)),
            wrong("1 without indices", index_block=2),
            wrong("None beside indices, which hold it", window=4, indices=zeros(2, 1, T, 4, dtype=integer)),
            wrong(
                "None beside indices, which hold it",
                mask=zeros(1, 1, T, 9),
                indices=zeros(2, 1, T, 4, dtype=integer),
            ),
            wrong("None beside a mask, which holds it", window=4, mask=zeros(1, 1, T, 9)),
            wrong(
                "None beside a mask, which holds it",
                key_range=zeros(2, 2, dtype=integer),
                mask=zeros(1, 1, T, 9),
            ),
            wrong("of shape [B, 2] = (2, 2)", key_range=zeros(2, dtype=integer)),
            wrong("int32", key_range=zeros(2, 2, dtype=torch.int64)),
            wrong("at least 1", window=0),
            wrong("lookahead must be at least 0, got -1", lookahead=-1),
            wrong("0 beside a mask or indices, which hold it", lookahead=1, mask=zeros(1, 1, T, 9)),
            wrong(
                "0 beside a mask or indices, which hold it",
                lookahead=1,
                indices=zeros(2, 1, T, 4, dtype=integer),
            ),
            wrong("above 0 and finite", softcap=0.0),
            wrong("k_tail must be None unless keys and values have a tail", k_tail=zeros(2, 2, 5, 16)),
            wrong("v_tail must be None unless keys and values have a tail", v_tail=zeros(2, 2, 5, 8)),
            wrong("lookahead must be 0 beside a tail, got 1", lookahead=1, **beside),
            wrong("mask must be None beside a tail", mask=zeros(1, 1, T, 9), **beside),
            wrong("key_range must be None beside a tail", key_range=zeros(2, 2, dtype=integer), **beside),
            wrong("of shape [B, Hk, N, D] = (2, 2, 5, 16)", **beside | {"k_tail": zeros(2, 1, 5, 16)}),
            wrong(
                "v_tail must be of shape [B, Hk, N, Dv] = (2, 2, 5, 8)",
                **beside | {"v_tail": zeros(2, 2, 4, 8)},
            ),
            wrong("k_tail must be float32", **beside | {"k_tail": zeros(2, 2, 5, 16, dtype=half)}),
            wrong("between 1 and 2147483647", tail_rate=0, **beside),
            wrong("position must be between 0 and 2147483644, got -1", **beside, position=-1),
            wrong(
                "index_block must be between 1 and 1 beside a tail",
                **beside,
                index_block=2,
                indices=zeros(2, 1, T, 4, dtype=integer),
            ),
            wrong("a number in the range of float32", scale=float("nan")),
            wrong("k must be uint32 or int32", **eight_bits),
            wrong(
                "v_biases must be a tensor beside quantised v",
                **{**eight_bits, "k": zeros(2, 2, 9, 8, dtype=integer), "v_biases": None},
            ),
            wrong(
                "k_scales must be of a last dimension of 16 / 32 or 64 or 128",
                k=zeros(2, 2, 9, 4, dtype=integer),
                **eight_bits,
            ),
            wrong(
                "k_scales must be of a last dimension of 32 / 32 or 64 or 128",
                **{**eight_bits, "k": zeros(2, 2, 9, 8, dtype=integer), "k_scales": zeros(2, 2, 9, 2)},
            ),
            wrong(
                "v_biases must be float32",
                **{
                    **eight_bits,
                    "k": zeros(2, 2, 9, 8, dtype=integer),
                    "v_biases": zeros(2, 2, 9, 1, dtype=half),
                },
            ),
        ],
        "write_cache_quantized_": [
            wrong(FLOATS, states=zeros(2, 2, T, 64, dtype=short)),
            wrong("4-D", states=zeros(2, T, 64)),
            wrong("of shape [B, Hk, T, D] = (2, 2, 3, 64)", states=zeros(2, 2, T, 32)),
            wrong(
                "packed_ must be of shape [B, Hk, N, D / 4] = (2, 3, 8, 16), got (2, 2, 8, 16)",
                states=zeros(2, 3, T, 64),
            ),
            wrong("uint32 or int32", packed_=zeros(2, 2, T + 5, 16)),
            wrong(
                "free of expanded (stride-0) dimensions",
                packed_=zeros(2, 2, 1, 16, dtype=integer).expand(2, 2, T + 5, 16),
            ),
            wrong("of a last dimension of 64 / 32 or 64 or 128", scales_=zeros(2, 2, T + 5, 4)),
            wrong("float32", scales_=zeros(2, 2, T + 5, 2, dtype=half)),
            wrong("of shape of scales_ = (2, 2, 8, 2)", biases_=zeros(2, 2, T + 5, 1)),
            wrong("between 0 and 5", start=6),
            wrong("between 0 and 5", start=-1),
        ],
        "fused_norm_add": [
            wrong(FLOATS, residual=zeros(T, H, dtype=short)),
            wrong("at least 1-D", residual=zeros()),
            wrong("float32", input=zeros(T, H, dtype=half)),
            wrong("of shape [..., H] of residual = (3, 64)", input=zeros(T + 1, H)),
            wrong("of shape [..., H] of residual = (3, 64)", input=zeros(H)),
            wrong(FLOATS, weight=zeros(H, dtype=integer)),
            wrong("of shape [H] = (64,)", weight=zeros(H - 1)),
            wrong("of shape [H] = (64,)", weight=zeros(1, H)),
            wrong("a tensor", weight=None),
            wrong("a number in the range of float32", eps=float("nan")),
            wrong("a number in the range of float32", weight_offset=1e39),
        ],
        "fused_norm_add_scalar": [
            wrong("of shape [..., H] of residual = (3, 64)", input=zeros(T + 1, H)),
            wrong("of 1 or H = 64 elements", scalar=zeros(2)),
            wrong("of 1 or H = 64 elements", scalar=zeros(1, 1)),
            wrong(FLOATS, scalar=zeros(1, dtype=short)),
            wrong("a tensor", scalar=None),
        ],
        "fused_residual_norm": [
            wrong(FLOATS, residual=zeros(T, H, dtype=short)),
            wrong("at least 1-D", residual=zeros()),
            wrong("of shape [..., H] of residual = (3, 64)", input=zeros(T + 1, H)),
            wrong("float32", input=zeros(T, H, dtype=half)),
            wrong("of shape [H] = (64,)", weight=zeros(H - 1)),
            wrong("of shape [N, H] of residual = (3, 64)", weight=zeros(1, H)),
            wrong("at least 2-D", residual=zeros(H), input=zeros(H), gate=zeros(1)),
            wrong("of shape [..., N] of residual = (3, 4)", gate=zeros(T, 3), residual=zeros(T, 4, H)),
            wrong("float32", gate=zeros(T, 4, dtype=half), residual=zeros(T, 4, H)),
            wrong(
                "of shape [..., H] of residual = (3, 64)",
                **{"input": zeros(T, 4, H), "residual": zeros(T, 4, H), "gate": zeros(T, 4)},
            ),
            wrong("gate_factor must be 1.0 without a gate, got 0.5", gate_factor=0.5),
        ],
        "fused_residual_norm_scalar": [
            wrong("of shape [H] = (64,)", weight=zeros(H - 1)),
            wrong("of 1 or H = 64 elements", scalar=zeros(2)),
        ],
        "moe_router": [
            *logits,
            wrong("2-D", logits=zeros(1, T, E)),
            wrong("one of softmax, sigmoid, sqrtsoftplus, softmax_after_topk", scoring="tanh"),
            wrong("of shape [E] = (8,)", bias=zeros(E, 1)),
            wrong(FLOATS, bias=zeros(E, dtype=short)),
            wrong("between 1 and 8", num_groups=0),
            wrong("a divisor of the 8 experts", num_groups=3),
            wrong("at most 4, for 2 experts a group with top2_sum", num_groups=E, group_score="top2_sum"),
            wrong("one of top2_sum, max", group_score="sum"),
            wrong("between 1 and 4", top_groups=5, num_groups=4),
            wrong("between 1 and 4", top_groups=0, num_groups=4),
            wrong("at most 2, the experts in top_groups groups", top_k=3, num_groups=4, top_groups=1),
            *scale,
            wrong("at least 0.0", norm_eps=-5.0),
            wrong("a number in the range of float32", norm_min=float("nan")),
            wrong("a number in the range of float32", masked_score=1e39),
        ],
        "moe_router_topk_softmax": [
            *logits,
            wrong("2-D", logits=zeros(1, T, E)),
        ],
        "fused_moe_routing": [
            *logits,
            wrong("1-D or 2-D", logits=zeros(1, T, E)),
            *scale,
            wrong("a tensor", per_expert_scale=None),
        ],
        "moe_gate": [
            wrong(FLOATS, hidden=zeros(T, H, dtype=short)),
            wrong("2-D", hidden=zeros(H)),
            wrong(FLOATS, router_weight=zeros(E, H, dtype=integer)),
            wrong("2-D", router_weight=zeros(E * H)),
            wrong("of shape [E, H] = (8, 64)", router_weight=zeros(E, H + 1)),
            wrong("of shape [H] = (64,)", norm_weight=zeros(H + 1)),
            wrong(FLOATS, norm_weight=zeros(H, dtype=short)),
            *scale,
            wrong(
                "[E, H] with E between 1 and 1024, got E = 1025",
                router_weight=zeros(1025, H),
                per_expert_scale=zeros(1025),
            ),
            wrong("between 1 and 8, the smaller of E and 64", top_k=0),
            wrong("between 1 and 8, the smaller of E and 64", top_k=E + 1),
            wrong("a tensor", hidden=None),
        ],
        "moe_bucket": [
            *ids,
        ],
        "moe_compute_ids_tpe": [
            *ids,
            wrong("between 1 and 2147483647", gate_up_rows=0),
            wrong("between 1 and 2147483647", down_rows=-1),
        ],
        "silu_mul_stacked": [
            wrong(FLOATS, gate=zeros(T, I, dtype=integer)),
            wrong("at least 1-D", gate=zeros()),
            wrong("float32", up=zeros(T, I, dtype=half)),
            wrong("of shape [..., I] of gate = (3, 32)", up=zeros(I)),
        ],
        "weighted_sum_stacked": [
            wrong(FLOATS, slots=zeros(T, K, H, dtype=short)),
            wrong("at least 2-D", slots=zeros(H)),
            wrong("[..., S, H] with S at least 1", slots=zeros(T, 0, H), weights=zeros(T, 0)),
            wrong("of shape [..., S] of slots = (3, 2)", weights=zeros(T, K + 1)),
            wrong(FLOATS, weights=zeros(T, K, dtype=integer)),
        ],
        "weighted_sum_residual_stacked_": [
            wrong("of shape [..., S] of slots = (3, 2)", weights=zeros(T, K + 1)),
            wrong("float32", residual_=zeros(T, H, dtype=half)),
            wrong("of shape [..., H] of slots = (3, 64)", residual_=zeros(T, H + 1)),
            wrong("free of expanded (stride-0) dimensions", residual_=zeros(1, H).expand(T, H)),
            wrong("a tensor", residual_=None),
        ],
        "weighted_sum_residual_norm_stacked_": [
            wrong("float32", residual_=zeros(T, H, dtype=half)),
            wrong(FLOATS, norm_weight=zeros(H, dtype=short)),
            wrong("of shape [H] = (64,)", norm_weight=zeros(1)),
        ],
        "moe_weighted_reduce": [
            wrong(FLOATS, weights=zeros(T, K, dtype=integer)),
            wrong("2-D", weights=zeros(T * K)),
            wrong("[T, K] with K at least 1", weights=zeros(T, 0)),
            wrong(FLOATS, expert_out=zeros(T, K, H, dtype=short)),
            wrong("2-D or 3-D", expert_out=zeros(T * K * H)),
            wrong("of shape [T, K, H] = (3, 2, 64)", expert_out=zeros(T, K + 1, H)),
            wrong("of shape [T * K, H] = (6, 64)", expert_out=zeros(T, H)),
            *tail,
        ],
    }
    return [(name, message, changes) for name, cases in table.items() for message, changes in cases]


def descriptions(value) -> list[str]:
    """What a message may say of an argument."""
    if not isinstance(value, Tensor):
        return [repr(value)]
    shape = str(tuple(value.shape))
    dtype = str(value.dtype).removeprefix("torch.")
    return [dtype, shape, f"shape {shape}", f"{value.dim()}-D of shape {shape}", f"strides {value.stride()}"]


def test_messages(device):
    """On the device and on meta: one line that names the operator and the argument."""
    for where in (device, "meta"):
        good = {name: sample_arguments(name, where, torch.float32) for name in OPERATORS}
        for name, message, changes in bad_arguments(where):
            with pytest.raises(ValueError) as error:
                packet(name)(**(good[name] | changes))
            whole = f"moe_mps::{name}: {message}"
            got = [text for value in changes.values() for text in descriptions(value)]
            expected = [whole] if ", got " in message else [f"{whole}, got {text}" for text in got]
            assert str(error.value) in expected


def test_sparse_tensors():
    gate = torch.ones(2, 3)
    message = "moe_mps::silu_mul_stacked: gate must be a dense tensor, got sparse_coo"
    with pytest.raises(ValueError, match=message):
        packet("silu_mul_stacked")(gate.to_sparse(), gate)


@pytest.mark.parametrize("name", OPERATORS)
def test_tensors_of_two_devices(name):
    """Each tensor argument but the first on meta beside a first one on the CPU."""
    arguments = sample_arguments(name, "cpu", torch.float32)
    tensors = [argument for argument, value in arguments.items() if isinstance(value, Tensor)]
    for argument in tensors[1:]:
        mixed = {**arguments, argument: arguments[argument].to("meta")}
        with pytest.raises(
            ValueError, match=rf"^moe_mps::{name}: {argument} must be on the device of .*, got meta$"
        ):
            packet(name)(**mixed)
