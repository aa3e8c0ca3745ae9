"""The experts with weights in the formats of _weight_formats.py."""

import inspect

import torch
from torch import Tensor

from .._activations import CLAMPED, POINTWISE, Activation
from .._checks import options_in, wide
from .._decoded import decoded_experts
from .._formats import ARGUMENTS, Format, QuantizedWeight
from .._registry import Backward, door, operator
from .._sample import Calls, Changes
from .combine import ExpertSum
from .experts import (
    AROUND,
    IDS,
    NO_SHARED,
    Mlp,
    Product,
    combine_experts,
    is_per_token,
    project_pairs,
)
from .linear import check_packed_mlp, mlp_outputs, packed_mlp
from .norms import InputNorm
from .routing import GROUP_SCORES, SCORINGS, Router, moe_router


def _quantized_product(weight: QuantizedWeight) -> Product:
    """The product with a quantised stack, in float32; experts are dequantised one at a time."""
    matrix = decoded_experts(weight)
    return Product(lambda expert: matrix(expert).t(), weight.packed.shape[1], in_float32=True)


def _check_expert_qmm_transposed(check, dy, packed, scales, zeros, topk_ids, format, sums):
    weight = QuantizedWeight(packed, scales, zeros, Format.named(format, check))
    columns = weight.format.columns(packed.shape[2])
    weight.check(check, "", (*packed.shape[:2], columns), "E, N, H")
    return dy.new_empty(*(topk_ids.shape[:-1] if sums else topk_ids.shape), columns)


@operator(f"{IDS} dy[..., K, N] packed[E, N, _]:packed", _check_expert_qmm_transposed)
def _expert_qmm_transposed(
    dy: Tensor,
    topk_ids: Tensor,
    packed: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    format: str,
    sums: bool = False,
) -> Tensor:
    """The gradient of the input of expert_qmm: dx[t, k] = dy[t, k] @ dequantised(topk_ids[t, k]).

    Args:
        dy: [..., K, N], float32, float16 or bfloat16: the gradient of the output.
        packed: [E, N, H * bits / 32], uint32 or the same bits as int32.
        topk_ids, scales, zeros, format: as for expert_qmm.
        sums: the pairs of a token are added: the gradient of an input that has one row for each token.

    Returns: [..., K, H], or with `sums` [..., H], in the dtype of `dy`; dequantised and accumulated in
        float32, rounded once. On Metal a pair is rounded before it is added to others.

    Raises: ValueError for a dtype, shape, device or format that does not fit.
    """
    weight = QuantizedWeight(packed, scales, zeros, Format.named(format))
    shape = packed.shape[0], weight.format.columns(packed.shape[2])
    product = Product(decoded_experts(weight), shape[1])
    out = project_pairs(wide(dy), topk_ids, shape, product, None)
    return (out.sum(-2) if sums else out).to(dy.dtype)


def _qmm_backward(grad, asked, given):
    weight, topk_ids = [given[name] for name in ARGUMENTS], given["topk_ids"]
    sums, backward = is_per_token(given["x"], topk_ids), torch.ops.moe_mps._expert_qmm_transposed
    return {"x": backward(grad, topk_ids, *weight, given["format"], sums)}


def _check_expert_qmm(check, packed, scales, zeros, format, **_):
    weight = QuantizedWeight(packed, scales, zeros, Format.named(format, check))
    weight.check(check, "", check.dims("E N H"), "E, N, H")


@operator(
    f"{IDS} x[..., H]|[..., K, H] packed[E, N, _]:packed bias[E, N] -> [..., K, N]:x",
    _check_expert_qmm,
    backward=Backward(_qmm_backward, {"x": (*ARGUMENTS, "topk_ids")}, frozen=ARGUMENTS),
    public="experts matrix by matrix with weights from `quantize`",
)
def expert_qmm(
    x: Tensor,
    topk_ids: Tensor,
    packed: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    *,
    format: str,
    bias: Tensor | None = None,
) -> Tensor:
    """expert_mm with quantised weights: out[t, k] = dequantised(e) @ x[t] + bias[e], e = topk_ids[t, k].

    Args:
        x: [..., H] or [..., K, H], float32, float16 or bfloat16. On Metal an infinite element may give NaN
            where the formula gives infinity: affine codes, scales and zeros are multiplied by it separately.
        topk_ids: [..., K] with K <= 64, int32 or int64. An id outside [0, E) reads nothing and gives zeros.
        packed: [E, N, H * bits / 32], uint32 or the same bits as int32.
        scales: [E, N, H / group size]: float32, float16 or bfloat16 in affine formats; uint8 in mxfp4, mxfp8,
            nvfp4 and nvfp4_global; int32, the bits of a float32, in fp8_32 and fp8_128. Types of GGUF have
            int16, the bits of a float16, for each group or for 256 values; or, uint8 [E, N, H * n / 256], a
            stream of n bytes of small integers for 256 values. _weight_formats.py says which, and an error
            the shape that it should have.
        zeros: the values of code 0, which MLX calls biases: like `scales` in affine formats and where a type
            of GGUF adds a float16 to a group; int16 [E, N, H * n / 256], the bits of n float16 factors, next
            to a stream; int32 [E, N, 1], the bits of a float32 factor for each row, in nvfp4_global: the
            global scale of its matrix; else None.
        format: "affine4_64" for affine codes of 4 bits in groups of 64; also 1, 2, 3, 5, 6 or 8 bits and
            groups of 32 or 128; "mxfp4" and "mxfp8" in groups of 32, "nvfp4" and "nvfp4_global" in groups of
            16; "fp8_32" and "fp8_128"; or a type of GGUF, such as "q4_k", whose values _weight_formats.py
            defines. H must be a multiple of the group size, and of 256 where scales are small integers, and
            in codebook formats.
        bias: [E, N], float32, float16 or bfloat16: of the layer, not of the format.

    Returns: [..., K, N] in the dtype of `x`; dequantised and accumulated in float32. For more than 32 tokens
        the Metal kernels round what they dequantise to the dtype of `x`. Gradients reach `x`.

    Raises: ValueError for a dtype, shape, device or format that does not fit.

    Example:
        >>> from torch_moe_mps.quantization import quantize
        >>> w = quantize(torch.stack([torch.eye(32), 2 * torch.eye(32)]), mode="mxfp4")
        >>> ops.expert_qmm(torch.ones(1, 32), torch.tensor([[1, 0]]), *w, format="mxfp4")[..., 0].tolist()
        [[2.0, 1.0]]
    """
    weight = QuantizedWeight(packed, scales, zeros, Format.named(format))
    return project_pairs(x, topk_ids, packed.shape, _quantized_product(weight), bias)


MATRICES = tuple(f"{matrix}_{part}" for matrix in ("gate_up", "down") for part in ARGUMENTS)


def _check_shared_expert(check, arguments):
    """The matrices of the shared expert, shaped like one routed expert's."""
    for name in MATRICES:
        argument, own = f"shared_{name}", arguments[name]
        shared = arguments[argument]
        check.only(f"with {name}", own is not None, **{argument: shared})
        if shared is not None:
            check.dtype(argument, shared, (own.dtype,))
            check.shape(argument, shared, tuple(own.shape[1:]), f"as one of {name}")


def _check_moe_experts_quantized(check, x, **arguments):
    check_packed_mlp(check, x.shape[-1], arguments, stack="E, ")
    around = options_in(arguments, ExpertSum)
    if any(arguments[f"shared_{name}"] is not None for name in MATRICES):
        _check_shared_expert(check, arguments)
        around = around._replace(shared_out=x)  # it has this shape
    around.check(check)
    if arguments["weights_on_inputs"] and arguments["has_identity"]:
        check.fail("weights_on_inputs", "False beside has_identity", True)
    options_in(arguments, Router).check(check)


@operator(
    f"{AROUND} {packed_mlp('E, ')} logits[..., E] correction_bias[E] per_expert_scale[E] "
    "shared_gate_up_packed[_, _]:gate_up_packed shared_down_packed[_, _]:down_packed -> x",
    _check_moe_experts_quantized,
    allowed={
        **{"scoring": SCORINGS, "group_score": GROUP_SCORES, "shared_activation": POINTWISE},
        **{"sum_eps": 0.0, "sum_min": 0.0},
    },
    dependences=(
        "logits not beside has_identity",
        "topk_weights topk_ids only without logits",
        "shared_gate_up_packed not without logits",
        "shared_activation not without shared_gate_up_packed",
        "shared_out gate_up_bias down_bias not beside shared_gate_up_packed",
        NO_SHARED,
    ),
)
def _moe_experts_quantized(
    x: Tensor,
    topk_weights: Tensor | None,
    topk_ids: Tensor | None,
    gate_up_packed: Tensor,
    gate_up_scales: Tensor,
    gate_up_zeros: Tensor | None,
    down_packed: Tensor,
    down_scales: Tensor,
    down_zeros: Tensor | None,
    *,
    format: str,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    alpha: float | None = None,
    limit: float | None = None,
    gated: bool = True,
    interleaved: bool = False,
    shared_gate: Tensor | None = None,
    shared_out: Tensor | None = None,
    residual: Tensor | None = None,
    gate_is_logit: bool = False,
    down_format: str | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-06,
    norm_weight_offset: float = 0.0,
    logits: Tensor | None = None,
    top_k: int = 1,
    scoring: str = "softmax",
    correction_bias: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    group_score: str = "top2_sum",
    masked_score: float | None = None,
    bias_on_logits: bool = False,
    norm_topk_prob: bool = False,
    sum_eps: float = 1e-20,
    sum_min: float = 0.0,
    scaling_factor: float = 1.0,
    per_expert_scale: Tensor | None = None,
    shared_gate_up_packed: Tensor | None = None,
    shared_gate_up_scales: Tensor | None = None,
    shared_gate_up_zeros: Tensor | None = None,
    shared_down_packed: Tensor | None = None,
    shared_down_scales: Tensor | None = None,
    shared_down_zeros: Tensor | None = None,
    shared_activation: str | None = None,
    has_identity: bool = False,
    weights_on_inputs: bool = False,
) -> Tensor:
    """moe_experts_quantized, and what joins a layer around it into the same dispatches.

    That is a router, a shared expert, a norm and a residual stream. It may change in any release.

        out[t] = moe_experts_quantized(norm(x))[t] + g[t] * shared_out[t] + residual[t]

    Args:
        x, gate_up_packed, gate_up_scales, gate_up_zeros, down_packed, down_scales, down_zeros, format,
            gate_up_bias, down_bias, down_format: as for moe_experts_quantized.
        activation, alpha, limit, gated, interleaved: as for moe_experts.
        shared_gate, shared_out, residual, gate_is_logit, norm_weight, norm_eps, norm_weight_offset: as for
            _moe_experts.
        topk_weights, topk_ids: as for moe_experts; None with logits.
        logits: [..., E], float32, float16 or bfloat16; moe_router makes topk_weights and topk_ids of them.
            On Metal the first product of one token selects among up to 512 experts itself, which saves a
            dispatch.
        top_k, scoring, correction_bias, num_groups, top_groups, group_score, masked_score, bias_on_logits,
            norm_topk_prob, sum_eps, sum_min, scaling_factor, per_expert_scale: as for moe_router; by default
            without logits.
        shared_gate_up_packed, shared_gate_up_scales, shared_gate_up_zeros, shared_down_packed,
            shared_down_scales, shared_down_zeros: of an expert that each token has beside its routed ones,
            shaped like one of them, [2I, H * bits / 32] and so on; shared_out is its output for
            norm(x). Only with logits, beside no shared_out and no bias of the layer. On Metal it is part of
            both products where the first one chooses.
        shared_activation: of that expert if it has another one: silu, gelu, gelu_tanh, relu or relu2. It is
            gated and interleaved as the others are.
        has_identity: as for _moe_experts; only without logits.
        weights_on_inputs: topk_weights multiply the inputs of the experts, norm(x), not their outputs. Not
            beside has_identity. On Metal the first product that chooses multiplies its sums, not rounded.

    Returns: [..., H] in the dtype of `x`.

    Raises: ValueError for a dtype, shape, device, option or format that does not fit.
    """
    first, second = Format.named(format), Format.named(down_format or format)
    gate_up = QuantizedWeight(gate_up_packed, gate_up_scales, gate_up_zeros, first)
    down = QuantizedWeight(down_packed, down_scales, down_zeros, second)
    options = Activation(activation, alpha, limit, gated, interleaved)
    mlp = Mlp(_quantized_product(gate_up), _quantized_product(down), gate_up_bias, down_bias, options)
    norm = InputNorm(norm_weight, norm_eps, norm_weight_offset)
    if logits is not None:
        topk_weights, topk_ids = moe_router(
            logits,
            top_k,
            scoring=scoring,
            correction_bias=correction_bias,
            num_groups=num_groups,
            top_groups=top_groups,
            group_score=group_score,
            masked_score=masked_score,
            bias_on_logits=bias_on_logits,
            norm_topk_prob=norm_topk_prob,
            sum_eps=sum_eps,
            sum_min=sum_min,
            scaling_factor=scaling_factor,
            per_expert_scale=per_expert_scale,
        )
    assert topk_ids is not None and topk_weights is not None
    if shared_gate_up_packed is not None and shared_down_packed is not None:
        assert shared_gate_up_scales is not None and shared_down_scales is not None
        matrices = (
            QuantizedWeight(shared_gate_up_packed, shared_gate_up_scales, shared_gate_up_zeros, first),
            QuantizedWeight(shared_down_packed, shared_down_scales, shared_down_zeros, second),
        )
        if shared_activation is not None:
            options = options._replace(activation=shared_activation, alpha=None, limit=None)
        shared_out = mlp_outputs(x, norm, *matrices, options)
    around = ExpertSum(shared_gate, shared_out, residual, gate_is_logit)
    options_of_sum = has_identity, weights_on_inputs
    return combine_experts(
        x, norm, topk_weights, topk_ids, gate_up_packed.shape[0], mlp, around, *options_of_sum
    )


def _is_gated(gate_up_packed: Tensor, down_packed: Tensor, down: Format) -> bool:
    """True if an expert has twice as many rows as its second matrix has columns."""
    return gate_up_packed.shape[1] == 2 * down.columns(down_packed.shape[2])


def _gated(check, gate_up_packed, down_packed, format, down_format, **arguments):
    """The argument of `_moe_experts_quantized` that shapes say."""
    down = (
        Format.named(format, check)
        if down_format is None
        else Format.named(down_format, check, "down_format")
    )
    inner, shape = down.columns(down_packed.shape[2]), tuple(gate_up_packed.shape)
    gated = _is_gated(gate_up_packed, down_packed, down)
    if not gated and shape[1] != inner:
        check.fail("gate_up_packed", f"of 2I = {2 * inner} rows, or I = {inner} without a gate", shape)
    if not gated and (arguments["activation"] in CLAMPED or arguments["interleaved"]):
        check.fail("gate_up_packed", f"of 2I = {2 * inner} rows for these options", shape)
    return {"gated": gated}


@door(_moe_experts_quantized, derived=_gated, public="a layer of experts with weights from `quantize`")
def moe_experts_quantized(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    gate_up_packed: Tensor,
    gate_up_scales: Tensor,
    gate_up_zeros: Tensor | None,
    down_packed: Tensor,
    down_scales: Tensor,
    down_zeros: Tensor | None,
    *,
    format: str,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    limit: float | None = None,
    interleaved: bool = False,
    down_format: str | None = None,
) -> Tensor:
    """Combined output of a layer's experts with quantised weights, from the hidden states:

        h[t, k] = act(gate_up[e] @ x[t] + gate_up_bias[e])          with e = topk_ids[t, k]
        y[t, k] = down[e] @ h[t, k] + down_bias[e]
        out[t]  = sum_k topk_weights[t, k] * y[t, k]

    gate_up and down are dequantised in float32. h is rounded to the dtype of `x`. For many tokens the Metal
    kernels also round each y, and in float16 what they dequantise, so that a value beyond 65504 becomes
    infinite. An infinite element of `x` may make NaN there where the formula gives infinity.

    Args:
        x: [..., H], float32, float16 or bfloat16.
        topk_weights: [..., K], float32, float16 or bfloat16.
        topk_ids: [..., K] with K <= 64, int32 or int64. An id outside [0, E) adds nothing and reads nothing.
        gate_up_packed: [E, 2I, H * bits / 32], or [E, I, ...] if the experts have no gate: uint32 or the same
            bits as int32.
        gate_up_scales: [E, 2I, H / group size]: float32, float16 or bfloat16 in affine formats; uint8 in
            mxfp4, mxfp8, nvfp4 and nvfp4_global; int32, the bits of a float32, in fp8_32 and fp8_128. Types
            of GGUF have int16 or, for small integers, uint8; an error says which shape they should have.
        gate_up_zeros: like the scales in affine formats, and where a type of GGUF adds a float16 to a group;
            int16, the bits of float16 factors, beside small integers; int32 [E, 2I, 1], the bits of a float32
            factor for each row, in nvfp4_global; else None.
        down_packed, down_scales, down_zeros: the same of the rows [E, H, I].
        format: "affine4_64" for affine codes of 4 bits in groups of 64; also 1, 2, 3, 5, 6 or 8 bits and
            groups of 32 or 128; "mxfp4" and "mxfp8" in groups of 32, "nvfp4" and "nvfp4_global" in groups of
            16; "fp8_32" and "fp8_128"; or a type of GGUF, such as "q4_k". H and I must be multiples of the
            group size, and of 256 where scales are small integers, and in codebook formats.
        gate_up_bias, down_bias: [E, 2I] ([E, I] without a gate) and [E, H], float32, float16 or bfloat16: the
            layer's, not the format's.
        activation: with gate and up the two halves of the first product,
            silu, gelu (exact), gelu_tanh, relu, relu2 (relu squared): act(gate) * up, or, of experts without
            a gate, act alone;
            swiglu_oai: (up + 1) * gate * sigmoid(1.702 * gate), gate at most `limit`, up within +-`limit`;
            silu_clamped: silu(gate) * up, clamped likewise;
            silu_capped: silu(gate) * up, silu(gate) at most `limit`, up within +-`limit`. The last three
            need a gate.
        limit: of swiglu_oai, 7.0 unless given; of silu_clamped and silu_capped, required.
        interleaved: the rows of gate_up are gate0, up0, gate1, up1, ... instead of all gates, then all ups.
        down_format: of the down weights if they have another format. None means as for gate and up.

    Returns: [..., H] in the dtype of `x`.

    Raises: ValueError for a dtype, shape, device, option or format that does not fit.

    In models, `_moe_experts_quantized` replaces it.

    Example:
        >>> from torch_moe_mps.quantization import quantize
        >>> gate_up, down = (quantize(torch.eye(32).repeat(2, n, 1), mode="mxfp4") for n in (2, 1))
        >>> x, chosen = torch.full((1, 32), 3.0), (torch.tensor([[0.5, 1.0]]), torch.tensor([[0, 1]]))
        >>> out = ops.moe_experts_quantized(x, *chosen, *gate_up, *down, format="mxfp4", activation="relu")
        >>> out[0, :2].tolist()  # 1.5 * relu(3) * 3
        [13.5, 13.5]
    """
    gated = _is_gated(gate_up_packed, down_packed, Format.named(down_format or format))
    return inspect.unwrap(_moe_experts_quantized)(**locals())


def _layer(s):
    routed = s.of("x[T, H]", topk_weights=s.topk_weights, topk_ids=s.topk_ids, format=s.format.name)
    return routed | s.quantized("gate_up_", 2 * s.I, s.H) | s.quantized("down_", s.H, s.I)


CALLS: Calls = {
    "expert_qmm": lambda s: s.of(
        "x[T, H]", **s.quantized("", s.I, s.H), topk_ids=s.topk_ids, format=s.format.name
    ),
    "_expert_qmm_transposed": lambda s: s.of(
        "dy[T, K, I]", **s.quantized("", s.I, s.H), topk_ids=s.topk_ids, format=s.format.name, sums=True
    ),
    "_moe_experts_quantized": _layer,
    "moe_experts_quantized": _layer,
}
CHANGES: Changes = {
    "_expert_qmm_transposed": lambda s: [{"sums": False}],
    "moe_experts_quantized": lambda s: [
        {"gate_up_bias": s.values(s.E, 2 * s.I), "interleaved": True},
        {"activation": "relu", **s.quantized("gate_up_", s.I, s.H)},
    ],
    "_moe_experts_quantized": lambda s: [
        {"residual": s.values(1, s.T, s.H), **s.norm},
        {**s.norm, "has_identity": True},
        {**s.one_token, **s.norm},
        {**s.routed, **s.norm, **s.of("correction_bias[E] per_expert_scale[E]", scoring="sigmoid")}
        | {"weights_on_inputs": True},
        {
            **s.routed,
            **s.norm,
            **s.quantized("shared_gate_up_", 2 * s.I, s.H, ()),
            **s.quantized("shared_down_", s.H, s.I, ()),
            "shared_gate": s.values(1, 1),
            "shared_activation": "relu",
        },
    ],
}
