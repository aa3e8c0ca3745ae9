"""Bad arguments: one line that names operator, argument, what was expected and what came."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from support.any_calls import Call, Expanded, check_values, outcome
from torch import Tensor

from torch_moe_mps.ops import OPERATORS
from torch_moe_mps.ops._declared import Declared
from torch_moe_mps.ops._registry import DECLARED
from torch_moe_mps.ops._sample import E, H, I, T
from torch_moe_mps.ops._samples import more_samples, packet, sample_arguments

FLOATS = "float32 or float16 or bfloat16"
# Of an argument that does not follow another one; the last two are of pointwise and of masks.
ALLOWED = [FLOATS, "int32 or int64", "uint32 or int32"]
ALLOWED += [f"{FLOATS} or int32 or int64", f"bool or {FLOATS} or int32"]


def wrong(message: str, **arguments) -> tuple[str, dict]:
    """The message about wrong arguments, and these.

    The text may be only what the first of them must be, and may leave out what it got: one of them.
    """
    return (message if " must be " in message else f"{next(iter(arguments))} must be {message}"), arguments


def bad_arguments(device: str) -> list[tuple[str, str, dict]]:
    """(operator, message, wrong arguments)."""

    def zeros(*shape, dtype=torch.float32):
        return torch.zeros(shape, dtype=dtype, device=device)

    integer, short = torch.int32, torch.int16
    logits = [
        wrong("between 1 and 8, the smaller of E and 64", top_k=0),
        wrong("between 1 and 8, the smaller of E and 64", top_k=-1),
        wrong("between 1 and 8, the smaller of E and 64", top_k=E + 1),
        wrong("between 1 and 64, the smaller of E and 64", top_k=65, logits=zeros(T, 128)),
    ]
    around = [
        wrong("of shape [E, 2I] = (8, 64)", gate_up_bias=zeros(E, I)),
        wrong("limit must be a number for activation silu_clamped, got None", activation="silu_clamped"),
    ]
    tail = [
        wrong("shared_out must be given when shared_gate is, got None", shared_gate=zeros(T)),
        wrong("T = 3 rows of H = 64 elements", residual=zeros(1, H, T)),
        wrong("False without shared_gate", gate_is_logit=True, shared_out=zeros(T, H)),
    ]
    q4_k = {
        **{"format": "q4_k", "x": zeros(T, 256), "packed": zeros(I, 32, dtype=integer)},
        **{"scales": zeros(I, 12, dtype=torch.uint8), "biases": zeros(I, 2, dtype=short)},
    }
    chosen = {"ids": None, "weights": None, "logits": zeros(T, E), "top_k": 2}
    weights = {
        name: tensor[0]
        for name, tensor in sample_arguments("moe_experts_quantized", device, torch.float32).items()
        if name.startswith(("gate_up", "down"))
    }
    shared = chosen | {f"shared_{name}": tensor for name, tensor in weights.items()}
    mxfp4 = {"format": "mxfp4", "biases": None, "scales": zeros(E, I, 2, dtype=torch.uint8)}
    scales = zeros(2, 2, 9, 1)
    eight_bits = {
        **{"q": zeros(2, 4, T, 32), "k_scales": scales, "k_biases": scales},
        **{"v": zeros(2, 2, 9, 8, dtype=integer), "v_scales": scales, "v_biases": scales},
    }
    plain = {"transposed": False, "tail": None}
    beside = {"k_tail": zeros(2, 2, 5, 16), "v_tail": zeros(2, 2, 5, 8)}
    mask, ranges, relative = zeros(1, 1, T, 9), zeros(2, 2, dtype=integer), zeros(2, T, 4, 5)
    indices = zeros(2, 1, T, 4, dtype=integer)
    alone = {"v": None, "values_": None}
    of_five = {**dict.fromkeys(("beta", "A_log", "dt_bias")), "g": zeros(2, T, 5), "decay": "log"}
    kept = {"counts": zeros(2, 1, dtype=integer), "keep": True}
    table = {
        "heads_quantized": [
            wrong("of a last dimension of 64, the columns of a matrix", x=zeros(2, T, 4, I), **plain)
        ],
        "heads_mm": [
            wrong("of a last dimension of 40, the columns of a matrix", x=zeros(2, T, 4, 16), **plain),
            wrong(
                f"weight must be {FLOATS}, got int32",
                x=zeros(2, T, 4, 40),
                weight=zeros(4, 16, 40, dtype=integer),
                **plain,
            ),
        ],
        "sample": [
            wrong("above 0 and finite, got 0.0", temperature=0.0),
            wrong("temperature must be above 0 and finite, got inf", temperature=float("inf")),
            wrong("between 0 and 1, got 1.5", top_p=1.5),
            wrong("between 0 and 1, got -0.1", min_p=-0.1),
            wrong("between 0 and 299, got 300", otherwise=300),
        ],
        "index_topk": [
            wrong(
                "key_range must be None where k has a row for each block",
                key_range=ranges,
                block=2,
            ),
            wrong("tail must be between 0 and 0, got 1", tail=1),
            wrong("tail must be between 0 and 1, got 2", tail=2, block=2, keys=9),
            wrong("keys must be 0 where k has a row for each key, got 3", keys=3),
            wrong("keys must be at most 25, for which k has rows", keys=2 * (T + 9) + 2, block=2),
        ],
        "pointwise": [
            wrong("0-D or 1-D or 2-D or 3-D or 4-D", b=zeros(1, 1, 1, 1, 1)),
            *(
                wrong(f"steps such as 'mul a %0 bf16', joined by '; ', got {line!r}", formula=line)
                for line in ("", "tan a f32", "mul a f32", "neg a f64")
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
            wrong(
                "of rows of a multiple of 4 elements, got 62", streams=zeros(T, 2, H - 2), out=zeros(T, H - 2)
            )
        ],
        "quantize_by_importance": [
            wrong(
                "C, the last dimension of weight, must be a multiple of 32, got 40",
                weight=zeros(2, 5, 40),
                importance=zeros(2, 40),
            ),
            wrong("importance must be of shape [E, C] = (2, 128)", importance=zeros(1, 128)),
        ],
        "pool_window_": [
            wrong(
                "of an even last dimension D, with W = D or 2 D, here 16",
                entries_=zeros(2, 5, 4),
                norm_weight=zeros(4),
            ),
            wrong("position must be between 0 and 2147483644, got -1", position=-1),
            wrong(
                "entries_ must be of shape [B, N, D], with B = 2 and N at least 6, got (2, 5, 8)", position=9
            ),
            wrong("inv_freq's length must be between 0 and 4, got 5", inv_freq=zeros(5)),
        ],
        "hyper_connection": [
            wrong(
                "fn must be of N, 2 N or (2 + N) N = 4, 8 or 24 rows, got 5",
                fn=zeros(5, 4 * H),
                base=zeros(5),
            ),
        ],
        "expert_mm": [
            wrong("weight must be of shape [E, H, N] with H = 64 as in x, got (8, 32, 64)", transposed=True),
            wrong("of shape [E, N] = (8, 32)", bias=zeros(E, H)),
        ],
        "moe_experts": [
            wrong("of shape [E, I, H] with H = 64 as in x", gate_up=zeros(E, 2 * I, H + 1), gated=False),
            wrong(
                "down must be of shape [E, I, H] = (8, 32, 64), got (8, 64, 32)",
                gate_up=zeros(E, H, 2 * I),
                transposed=True,
            ),
            *around,
            wrong("True for activation swiglu_oai", gated=False, activation="swiglu_oai"),
            wrong("at least 0.0", limit=-1.0, activation="silu_clamped"),
            wrong("None for activation silu", limit=7.0),
            wrong("None for activation silu", alpha=1.0),
            wrong("a finite number", alpha=float("inf"), activation="swiglu_oai"),
            wrong("False when gated is False", interleaved=True, gated=False),
            *tail,
        ],
        "expert_qmm": [
            wrong("float32", biases=zeros(E, I, 2, dtype=torch.float16)),
            wrong("H, the input dimension of packed, must be a multiple of 32, got 33", x=zeros(T, 33)),
            wrong(
                "biases must be None for format mxfp4, got (8, 32, 2)",
                **mxfp4 | {"biases": zeros(E, I, 2)},
            ),
            wrong("scales must be uint8", **mxfp4 | {"scales": zeros(E, I, 2)}),
        ],
        "expert_qmm_transposed": [
            wrong("float32", biases=zeros(E, I, 2, dtype=torch.float16)),
            wrong(
                "scales must be of shape [E, N, H / 32] = (8, 32, 2), got (8, 32, 3)", scales=zeros(E, I, 3)
            ),
        ],
        "linear_quantized_transposed": [
            wrong("scales must be of shape [N, C / 32] = (32, 2), got (32, 3)", scales=zeros(I, 3))
        ],
        "expert_activation": [
            wrong("rows must be of an even number of columns, gates and ups", rows=zeros(T, 3)),
            wrong("limit must be a number for activation silu_clamped, got None", activation="silu_clamped"),
        ],
        "expert_activation_backward": [
            wrong("dy must be of shape [..., I] = (3, 2, 32), got (3, 2, 33)", dy=zeros(T, 2, 33)),
        ],
        "linear_lora": [
            wrong("a finite number", scaling=float("inf")),
            wrong(
                "a must be of r E rows, with E = 1 and r between 1 and 256, got (257, 64)",
                a=zeros(257, H),
                b=zeros(I, 257),
            ),
            wrong("b must be of shape [N, r E] with r E = 3 rows as in a, got (32, 4)", b=zeros(I, 4)),
            wrong("x must be of shape [..., H] = (3, 64), got (4, 64)", x=zeros(T + 1, H)),
        ],
        "expert_lora": [
            wrong("a finite number", scaling=float("inf")),
            wrong(
                "a must be of r E rows, with E = 8 and r between 1 and 256, got (25, 64)",
                a=zeros(25, H),
                b=zeros(I, 25),
            ),
            wrong("between 1 and 1024", experts=0),
        ],
        "expert_lora_backward": [
            wrong("a finite number", scaling=float("inf")),
            wrong(
                "offsets must be of shape [E + 1] = (9,), got (8,)", offsets=torch.zeros(8, dtype=torch.int32)
            ),
        ],
        "expert_outer": [
            wrong("between 1 and 1024", experts=0),
            wrong("between 1 and 1024", experts=1025),
        ],
        "router_logits": [wrong("a finite number", factor=float("inf"))],
        "moe_experts_quantized": [
            wrong(
                "down_biases must be None for format mxfp4, got (8, 64, 1)",
                down_format="mxfp4",
            ),
            *around,
            wrong("shared_out must be given when shared_gate is, got None", shared_gate=zeros(T)),
            wrong("top_k must be 1 without logits, got 2", top_k=2),
            wrong("router_bias must be None without logits, got (8,)", router_bias=zeros(E)),
            wrong("top_k must be between 1 and 8, the smaller of E and 64", **chosen | {"top_k": 9}),
            wrong(
                "shared_down_scales must be given with down_scales, and only then, got None",
                **shared | {"shared_down_scales": None},
            ),
            wrong(
                "shared_down_packed must be of shape as one of down_packed = (64, 4), got (63, 4)",
                **shared | {"shared_down_packed": weights["down_packed"][1:]},
            ),
        ],
        "linear_quantized": [
            wrong("C, the input dimension of packed, must be a multiple of 32, got 33", x=zeros(T, 33)),
            wrong("C, the input dimension of packed, must be a multiple of 256, got 64", format="q4_k"),
            wrong("scales must be uint8", **q4_k | {"scales": zeros(I, 12)}),
            wrong(
                "biases must be of shape [N, C * 2 / 256] = (32, 2), got (32, 1)",
                **q4_k | {"biases": zeros(I, 1, dtype=short)},
            ),
            wrong("biases must be a tensor for format q4_k, got None", **q4_k | {"biases": None}),
            wrong("scales must be int16, got float32", format="q4_0", biases=None),
            wrong("activated must be between 1 and 32, the rows of packed", activation="silu", activated=0),
            wrong(
                "activated must be between 1 and 32, the rows of packed", activation="silu", activated=I + 1
            ),
            wrong("factor must be 1.0 without an activation, got 0.5", factor=0.5),
            wrong("factor must be a finite number, got inf", activation="silu", factor=float("inf")),
            wrong("out_dtype must be float32, got float16", out_dtype=torch.float16),
            wrong(
                "activation must be None for an x without columns, got 'silu'",
                **{"x": zeros(T, 0), "packed": zeros(I, 0, dtype=integer), "activation": "silu"},
                **{"scales": zeros(I, 0), "biases": zeros(I, 0)},
            ),
        ],
        "mlp_quantized": [
            wrong("of an even number of rows 2I", gate_up_packed=zeros(63, 8, dtype=integer)),
            wrong(
                "down_biases must be None for format mxfp4, got (64, 1)",
                down_format="mxfp4",
            ),
        ],
        "embedding_quantized": [
            wrong("C, the input dimension of packed, must be a multiple of 128, got 64", format="affine4_128")
        ],
        "rms_norm": [
            wrong("0.0 without a weight", weight_offset=1.0, weight=None),
            wrong("weight must be of shape [N, H] of the input = (3, 64), got (4, 64)", weight=zeros(4, H)),
        ],
        **{
            key: [wrong("0.0 without a weight", weight_offset=1.0, weight=None)]
            for key in ("layer_norm", "fused_residual_layer_norm")
        },
        "rope": [
            wrong("of heads of an even number of elements, 16 or more", q=zeros(2, T, 4, 14), q_weight=None),
            wrong("an even number of at least 2", rotary_dim=7),
            wrong(
                "of heads of an even number of elements, 2 or more",
                q=zeros(2, T, 4, 15),
                q_weight=None,
                cos=None,
                sin=None,
            ),
        ],
        "rope_cache_": [
            wrong("norm_v must be False without v, got True", v=None, values_=None, norm_v=True),
            wrong("of 3 tokens or more, as many as k has", keys_=zeros(2, 2, T - 1, 16)),
            wrong("of 3 tokens or more, as many as v has", values_=zeros(2, 2, T - 1, 8)),
            wrong(
                "None without k_weight, or with a weight_offset",
                **{"k_bias": zeros(16), "q_weight": None, "k_weight": zeros(16), "weight_offset": 1.0},
                **alone,
            ),
        ],
        "rope_attention_": [
            wrong(
                "k must be of a number of heads that divides Hq = 3, got (2, 3, 2, 16)", q=zeros(2, T, 3, 16)
            )
        ],
        "rms_norm_gated": [
            wrong("a divisor of the 64 columns, got 48", group=48),
            wrong("a divisor of the 64 columns, got 0", group=0),
        ],
        "causal_conv1d_update_": [
            wrong("of W - 1 + before = 3 positions or more, got 2", conv_state_=zeros(2, 6, 2)),
            wrong("of W - 1 + before = 6 positions or more, got 5", conv_state_=zeros(2, 6, 5), before=3),
            wrong("before must be 0 with add_input, got 1", add_input=True, before=1),
            wrong("keep must be False without pending_, got True", keep=True),
            wrong("pending_ must be of T = 3 tokens or more, got 2", pending_=zeros(2, 6, 2), **kept),
        ],
        "rg_lru_": [
            wrong("keep must be False without pending_, got True", keep=True),
            wrong("pending_ must be of T = 3 tokens or more, got 2", pending_=zeros(2, 6, 2), **kept),
        ],
        "linear_attention_": [
            wrong(
                "of a multiple of q's 2 heads, got 5 heads",
                v=zeros(2, T, 5, 8),
                state_=zeros(2, 5, 16, 8),
                **of_five,
            ),
            wrong("beta_activation must be none without beta, got sigmoid", beta=None),
            wrong('beta must be given with decay="times_beta"', decay="times_beta", g=None, beta=None),
            wrong(
                "beta_activation must be none or sigmoid where g has a value for each channel, got softplus",
                g=zeros(2, T, 4, 16),
                dt_bias=None,
                beta_activation="softplus",
            ),
            wrong("keep must be False without pending_, got True", keep=True),
            wrong("pending_ must be of 27 elements for a token, got 26", pending_=zeros(2, 4, 4, 26), **kept),
            wrong("pending_ must be of T = 3 tokens or more, got 2", pending_=zeros(2, 4, 2, 27), **kept),
        ],
        "attention": [
            wrong("v's head dimension must be between 1 and 512, got 513", v=zeros(2, 2, 9, 513)),
            wrong("None beside a look-ahead", relative=relative, lookahead=1),
            wrong("between 1 and 1024", index_block=0, indices=indices),
            wrong("1 without indices", index_block=2),
            wrong("None beside indices, which hold it", window=4, indices=indices),
            wrong("None beside indices, which hold it", mask=mask, indices=indices),
            wrong("0 beside a mask or indices, which hold it", lookahead=1, mask=mask),
            wrong("0 beside a mask or indices, which hold it", lookahead=1, indices=indices),
            wrong("above 0 and finite", softcap=0.0),
            wrong("k_tail must be None unless keys and values have a tail", k_tail=zeros(2, 2, 5, 16)),
            wrong("v_tail must be None unless keys and values have a tail", v_tail=zeros(2, 2, 5, 8)),
            wrong("lookahead must be 0 beside a tail, got 1", lookahead=1, **beside),
            wrong("position must be between 0 and 2147483644, got -1", **beside, position=-1),
            wrong(
                "index_block must be between 1 and 1 beside a tail", index_block=2, **beside, indices=indices
            ),
            wrong(
                "k_scales must be of a last dimension of 16 / 32 or 64 or 128",
                k=zeros(2, 2, 9, 4, dtype=integer),
                **eight_bits,
            ),
        ],
        "write_cache_quantized_": [
            wrong("of a last dimension of 64 / 32 or 64 or 128", scales_=zeros(2, 2, T + 5, 4)),
            wrong("between 0 and 5", start=6),
            wrong("between 0 and 5", start=-1),
        ],
        "moe_router": [
            *logits,
            wrong("between 1 and 8", num_groups=0),
            wrong("a divisor of the 8 experts", num_groups=3),
            wrong("at most 4, for 2 experts a group with top2_sum", num_groups=E, group_score="top2_sum"),
            wrong("between 1 and 4", top_groups=5, num_groups=4),
            wrong("between 1 and 4", top_groups=0, num_groups=4),
            wrong("at most 2, the experts in top_groups groups", top_k=3, num_groups=4, top_groups=1),
        ],
        "moe_router_topk_softmax": [*logits],
        "fused_moe_routing": [*logits[:-1]],
        "moe_gate": [
            wrong("between 1 and 8, the smaller of E and 64", top_k=0),
            wrong("between 1 and 8, the smaller of E and 64", top_k=E + 1),
        ],
        "moe_weighted_reduce": [*tail],
    }
    return [(name, message, changes) for name, cases in table.items() for message, changes in cases]


def words(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def descriptions(value) -> list[str]:
    """What a message may say of an argument."""
    if not isinstance(value, Tensor):
        return [repr(value)]
    shape = str(tuple(value.shape))
    return [
        words(value.dtype),
        shape,
        f"shape {shape}",
        f"{value.dim()}-D of shape {shape}",
        f"strides {value.stride()}",
    ]


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


class Refusal(NamedTuple):
    """What the message of an error says."""

    argument: str
    expected: str
    got: str


def refusal(name: str, arguments: dict[str, Any], device: str = "cpu", **layouts: Any) -> Refusal | None:
    """On meta, in one line; on the device the values of what is taken are right."""
    contiguous = {n: "contiguous" for n, value in arguments.items() if isinstance(value, Tensor)}
    call = Call(name, arguments, contiguous | layouts, good=False)
    error = outcome(call, "meta").error
    if error is None:
        check_values(call, outcome(call, device))
        return None
    parts = re.fullmatch(rf"ValueError: moe_mps::{name}: (\w+)[^:]* must be (.*), got (.*)", error)
    assert parts, error
    return Refusal(*parts.groups())


def of_other_shapes(value: Tensor) -> list[Tensor]:
    """With a dimension more, with one less, with none; each dimension longer, shorter and empty."""
    shapes = [(1, *value.shape), value.shape[1:], ()]
    for dim, size in enumerate(value.shape):
        sizes = {size + 1, abs(size - 1), 0} - {size}
        shapes += [(*value.shape[:dim], other, *value.shape[dim + 1 :]) for other in sizes]
    return [value.new_zeros(shape) for shape in shapes]


def tensors_of(name: str) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Each tensor of good arguments, by name, and all of them."""
    base = sample_arguments(name, "cpu", torch.float32)
    for changes in ({}, *more_samples(name, "cpu", torch.float32)):
        for argument, value in (changes or base).items():
            if isinstance(value, Tensor):
                yield base | changes, argument, value


@pytest.mark.on("mps")
@pytest.mark.parametrize("name", OPERATORS)
def test_tensors_of_other_dtypes(device, name):
    """The message has those that an argument may be of; they are taken, or another tensor has to follow."""
    kinds = {(argument, value.dtype): (good, value) for good, argument, value in tensors_of(name)}
    for (argument, _), (good, value) in kinds.items():
        _, allowed, _ = refusal(name, good | {argument: value.to(torch.complex64)}, device)
        assert words(value.dtype) in allowed.split(" or ")
        assert allowed in (*ALLOWED, words(value.dtype))
        for dtype in {torch.float32, torch.bfloat16, torch.int16, torch.int32, torch.uint8} - {value.dtype}:
            found = refusal(name, good | {argument: value.to(dtype)}, device)
            if words(dtype) not in allowed.split(" or "):
                assert found == (argument, allowed, words(dtype))
            elif found and "of shape" not in found.expected:
                assert found.argument != argument and found[1:] == (words(dtype), words(value.dtype))


@pytest.mark.parametrize("name", OPERATORS)
def test_tensors_of_other_shapes(name):
    """The message names the tensor, or another one that it does not go with, and has that one's shape."""
    for good, argument, value in tensors_of(name):
        for bad in (None, *of_other_shapes(value)):
            arguments = {**good, argument: bad}
            found = refusal(name, arguments)
            if found and ("-D" in found.expected or " = (" in found.expected):
                assert found.got in descriptions(arguments[found.argument])
                assert found.got not in found.expected


@pytest.mark.parametrize("name", OPERATORS)
def test_other_numbers_names_and_strides(name):
    """No number is NaN or out of float32's range; each name stands in the message; no result is expanded."""
    good = sample_arguments(name, "cpu", torch.float32)
    for argument in packet(name).default._schema.arguments:
        kind, value = str(argument.type).removeprefix("Optional[").rstrip("]"), good.get(argument.name)
        for number in (float("nan"), 1e39) if kind == "float" else ():
            found = refusal(name, good | {argument.name: number})
            assert found == (argument.name, "a number in the range of float32", str(number))
        if kind == "str":
            found = refusal(name, good | {argument.name: "other"})
            assert found.argument == argument.name and found.got == "'other'"
            for choice in re.findall(r"\w+", found.expected.partition("one of ")[2]):
                taken = refusal(name, good | {argument.name: choice})
                assert taken is None or taken.expected != found.expected
        if argument.name == "dtype":
            found = refusal(name, good | {"dtype": torch.int32})
            assert found.argument == "dtype" and found.got == "int32"
        for dim in range(value.dim()) if value is not None and argument.name.endswith("_") else ():
            found = refusal(name, good, **{argument.name: Expanded(dim)})
            assert found.argument == argument.name and "expanded (stride-0)" in found.expected


def present(argument: str, kind: str, good: dict[str, Any], declared: Declared) -> Any:
    """A value of an argument, of the shape and dtype that the others ask for."""

    def make(_: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
        return torch.zeros([1 if size is None else size for size in shape], dtype=dtype or torch.float32)

    others = {name: value for name, value in good.items() if name != argument}
    return declared.completed(others, [argument], make, {})[argument] if "Tensor" in kind else 1


@pytest.mark.parametrize("name", [name for name in OPERATORS if DECLARED[name].dependences])
def test_declared_dependences(name):
    """An argument in a case that it is not for, and left out in the only one that it is for."""
    declared, arguments = DECLARED[name], packet(name).default._schema.arguments
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    base = defaults | sample_arguments(name, "cpu", torch.float32)
    samples = [base | changes for changes in ({}, *more_samples(name, "cpu", torch.float32))]
    for dependence in declared.dependences:
        for argument in dependence.arguments:
            kind = next(str(a.type) for a in arguments if a.name == argument)
            expected = f"{'given' if dependence.is_only else 'None'} {dependence.why}"
            refusals = set()
            for good in samples:
                applies = dependence.applies(good)
                if dependence.is_only or applies:
                    value = (
                        None if dependence.is_only and applies else present(argument, kind, good, declared)
                    )
                    refusals.add(refusal(name, good | {argument: value})[:2])
            assert (argument, expected + ", and only then" * dependence.is_only) in refusals


@pytest.mark.parametrize("name", OPERATORS)
def test_beyond_declared_bounds(name):
    """Each size, integer and number that has a bound, one below and one above."""
    base, declared = sample_arguments(name, "cpu", torch.float32), DECLARED[name]
    for argument, shapes, _ in declared.tensors:
        value = base.get(argument)
        for shape in shapes if value is not None else ():
            for size, (sign, bound) in shape.bounds.items() if shape.fits(value.dim()) else ():
                words = (
                    f"{shape.text} with {size} "
                    + (f"between 1 and {bound}", f"at least {bound}")[sign == ">"]
                )
                for beyond in (bound - 1,) if sign == ">" else (0, bound + 1):
                    sizes = [*value.shape]
                    sizes[shape.names.index(size) - len(shape.names)] = beyond
                    found = refusal(name, base | {argument: value.new_zeros(sizes)})
                    assert found == (argument, words, f"{size} = {beyond}")
    for argument, allowed in declared.allowed.items():
        if isinstance(allowed, range):
            for beyond in (allowed[0] - 1, allowed[-1] + 1):
                found = refusal(name, base | {argument: beyond})
                assert found == (argument, f"between {allowed[0]} and {allowed[-1]}", str(beyond))
        elif isinstance(allowed, int | float):
            found = refusal(name, base | {argument: allowed - 1})
            assert found == (argument, f"at least {allowed}", str(allowed - 1))


def test_sparse_tensors():
    gate = torch.ones(2, 3)
    message = "moe_mps::silu_mul_stacked: gate must be a dense tensor, got sparse_coo"
    with pytest.raises(ValueError, match=message):
        packet("silu_mul_stacked")(gate.to_sparse(), gate)
