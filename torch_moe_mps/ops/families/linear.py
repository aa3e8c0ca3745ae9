"""Linear layers, dense MLPs and embeddings with weights in the formats of _weight_formats.py."""

import inspect
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._activations import POINTWISE, Activation
from .._checks import NAMED_DTYPES, Check, dtype_name, options_in, wide, wide_dtype
from .._decoded import in_blocks
from .._formats import ARGUMENTS, Format, QuantizedWeight
from .._registry import Backward, DtypeName, door, operator
from .._sample import Calls, Changes
from .norms import InputNorm


def _product(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """[..., C] -> [..., N] in float32: rows times the transposed matrix, plus the layer's bias."""
    x = wide(x)
    blocks = [F.linear(x, values.to(x.dtype)) for values in in_blocks(weight)]
    out = blocks[0] if len(blocks) == 1 else torch.cat(blocks, -1)
    return out if bias is None else out.add_(wide(bias))


def _check_activated(check, activation, activated, factor, rows, columns):
    if activation is None and factor == 1.0:
        return
    if columns == 0 and activation is not None:
        check.fail("activation", "None for an x without columns", repr(activation))
    if columns == 0:
        check.fail("factor", "1.0 for an x without columns", factor)
    if activated is not None:
        check.between("activated", activated, 1, rows, ", the rows of packed")
    if not math.isfinite(factor):
        check.fail("factor", "a finite number", factor)


def _check_linear_quantized_transposed(check, dy, packed, scales, zeros, format):
    weight = QuantizedWeight(packed, scales, zeros, Format.named(format, check))
    columns = weight.format.columns(packed.shape[1])
    weight.check(check, "", (packed.shape[0], columns), "N, C")
    return dy.new_empty(*dy.shape[:-1], columns)


@operator("dy[..., N] packed[N, _]:packed", _check_linear_quantized_transposed)
def _linear_quantized_transposed(
    dy: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None, format: str
) -> Tensor:
    """The gradient of the input of linear_quantized: dx = dy @ dequantised.

    Args:
        dy: [..., N], float32, float16 or bfloat16: the gradient of the output.
        packed: [N, C * bits / 32], uint32 or the same bits as int32.
        scales, zeros: of the rows [N, C], as expert_qmm's of [E, N, H].
        format: its name, as for expert_qmm; so is the multiple that C must be.

    Returns: [..., C] in the dtype of `dy`; dequantised and accumulated in float32.

    Raises: ValueError for a dtype, shape, device or format that does not fit.
    """
    weight = QuantizedWeight(packed, scales, zeros, Format.named(format))
    rows, first = wide(dy), 0
    out = rows.new_zeros(*dy.shape[:-1], weight.format.columns(packed.shape[1]))
    for values in in_blocks(weight):
        out += rows[..., first : first + len(values)] @ values.to(rows.dtype)
        first += len(values)
    return out.to(dy.dtype)


def _linear_backward(grad, asked, given):
    gradients = {"residual": grad}
    if given["factor"] != 1.0:
        grad = grad * given["factor"]
    if "x" in asked:
        weight = [given[name] for name in ARGUMENTS]
        gradients["x"] = torch.ops.moe_mps._linear_quantized_transposed(grad, *weight, given["format"])
    if "bias" in asked:
        rows = grad.reshape(math.prod(grad.shape[:-1]), grad.shape[-1])
        total = rows.sum(0, dtype=wide_dtype(grad))
        gradients["bias"] = total.to(given["bias"].dtype)
    return gradients


def _meta_linear_quantized(
    check, x, packed, scales, zeros, format, activation, activated, factor, dtype, **_
):
    rows, columns = check.dims("N C")
    weight = QuantizedWeight(packed, scales, zeros, Format.named(format, check))
    weight.check(check, "", (rows, columns), "N, C")
    _check_activated(check, activation, activated, factor, rows, columns)
    return x.new_empty(*x.shape[:-1], rows, dtype=x.dtype if dtype is None else NAMED_DTYPES[dtype])


@operator(
    "x[..., C] packed[N, _]:packed bias[N] residual[..., N]:x order[N]:int32 norm_weight[C]",
    _meta_linear_quantized,
    allowed={"activation": POINTWISE, "dtype": ("float32",)},
    dependences=("activated not without activation (without an activation)",),
    backward=Backward(
        _linear_backward,
        {"x": ARGUMENTS, "bias": (), "residual": ()},
        frozen=ARGUMENTS,
        unless=("order", "norm_weight", "activation", "dtype"),
    ),
    public="linear layers with weights from `quantize`",
)
def linear_quantized(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    *,
    format: str,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    order: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_weight_offset: float = 0.0,
    activation: str | None = None,
    activated: int | None = None,
    factor: float = 1.0,
    dtype: DtypeName | None = None,
) -> Tensor:
    """A linear layer with quantised weights: out = act(norm(x) @ dequantised^T + bias) + residual.

    Several layers of one input and one format are one call: concatenate the rows of their weights.

    Args:
        x: [..., C], float32, float16 or bfloat16. On Metal an infinite element may give NaN where the formula
            gives infinity, as in expert_qmm.
        packed: [N, C * bits / 32], uint32 or the same bits as int32.
        scales, zeros: of the rows [N, C], as expert_qmm's of [E, N, H].
        format: its name, as for expert_qmm; so is the multiple that C must be.
        bias: [N], float32, float16 or bfloat16: of the layer, not of the format.
        residual: [..., N] in the dtype of `x`.
        order: [N], int32, the numbers from 0 to N - 1: out[..., order[n]] has row n of the weight and `bias`.
            Other numbers are not refused: a column that none of them names is 0 on a CPU, and undefined on
            Metal.
        norm_weight: [C], float32, float16 or bfloat16. With it norm(x) is rms(x) * (norm_weight +
            norm_weight_offset), without it x. On Metal the norm of a single row joins the product and is not
            rounded, if its weight is float32 or has the dtype of `x` and the format has 3 bits or more; else
            it is a dispatch of its own.
        norm_eps, norm_weight_offset: of the norm, as of rms_norm.
        activation: silu, gelu, gelu_tanh, relu, relu2, or None: act(y) is factor * y. Otherwise it is
            activation(factor * y), and C is at least 1.
        activated: so many rows of the weight, the first, have the activation; None: all N.
        factor: other than 1.0 only if C is at least 1.
        dtype: torch.float32, for sums that are not rounded, or None: the dtype of `x`.

    Returns: [..., N] in `dtype`; dequantised and accumulated in float32. For more than a few rows of `x`
        the Metal kernels round what they dequantise to float16 where that is the dtype of `x`. Gradients
        reach `x`, `bias` and `residual` where there is no order, norm_weight, activation and dtype.

    Raises: ValueError for a dtype, shape, option, device or format that does not fit.

    Example:
        >>> from torch_moe_mps.quantization import quantize
        >>> w = quantize(torch.eye(32), mode="mxfp4")
        >>> bias = torch.full((32,), 10.0)
        >>> ops.linear_quantized(torch.arange(32.0), *w, format="mxfp4", bias=bias)[:3].tolist()
        [10.0, 11.0, 12.0]
    """
    normed = InputNorm(norm_weight, norm_eps, norm_weight_offset).applied_to(x)
    out = _product(normed, QuantizedWeight(packed, scales, zeros, Format.named(format)), bias)
    if activation is not None:
        some = out[..., :activated]
        some.copy_(POINTWISE[activation](some * factor))
    elif factor != 1.0:
        out *= factor
    if order is not None:
        out = torch.zeros_like(out).index_copy_(-1, order.long(), out)
    return (out if residual is None else out.add_(wide(residual))).to(
        x.dtype if dtype is None else torch.float32
    )


def packed_mlp(stack: str = "") -> str:
    """The tensors of an MLP, as an operator declares them; for a stack of MLPs, `stack` is "E, "."""
    packed, biases = f"[{stack}_, _]:packed", f"[{stack}_]"
    return f"gate_up_packed{packed} down_packed{packed} gate_up_bias{biases} down_bias[{stack}H]"


def check_packed_mlp(check: Check, hidden: int, arguments: dict[str, Any], stack: str = "") -> None:
    """Checks the weights of an MLP with `hidden` inputs."""
    activation = options_in(arguments, Activation)
    activation.check(check)
    name, down_name = arguments["format"], arguments["down_format"]
    gate_up = QuantizedWeight.among(arguments, "gate_up_", Format.named(name, check))
    down_format = Format.named(name if down_name is None else down_name, check, "down_format")
    down = QuantizedWeight.among(arguments, "down_", down_format)
    *experts, rows, _ = gate_up.packed.shape
    rows_name, intermediate = ("2I", rows // 2) if activation.gated else ("I", rows)
    if activation.gated and rows % 2 != 0:
        check.fail("gate_up_packed", "of an even number of rows 2I", tuple(gate_up.packed.shape))
    gate_up.check(check, "gate_up_", (*experts, rows, hidden), f"{stack}{rows_name}, H")
    down.check(check, "down_", (*experts, hidden, intermediate), f"{stack}H, I")
    bias = arguments["gate_up_bias"]
    if bias is not None:
        check.shape("gate_up_bias", bias, (*experts, rows), f"[{stack}{rows_name}]")


def mlp_outputs(
    x: Tensor,
    norm: InputNorm,
    gate_up: QuantizedWeight,
    down: QuantizedWeight,
    activation: Activation,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """Result of `mlp_quantized` for `x` without a residual, in float32."""
    hidden = activation.apply(_product(norm.applied_to(x), gate_up, gate_up_bias)).to(x.dtype)
    return _product(hidden, down, down_bias)


def _check_mlp(check, x, **arguments):
    check_packed_mlp(check, x.shape[-1], arguments)


@operator(f"x[..., H] {packed_mlp()} residual[..., H]:x norm_weight[H] -> x", _check_mlp)
def _mlp_quantized(
    x: Tensor,
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
    residual: Tensor | None = None,
    down_format: str | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-06,
    norm_weight_offset: float = 0.0,
) -> Tensor:
    """mlp_quantized, and what joins a layer around it into the same dispatches. It may change in any release.

        out = mlp_quantized(norm(x)) + residual

    Args:
        x, gate_up_packed, gate_up_scales, gate_up_zeros, down_packed, down_scales, down_zeros, format,
            gate_up_bias, down_bias, activation, alpha, limit, gated, interleaved, down_format: as for
            mlp_quantized.
        residual: [..., H] in the dtype of `x`.
        norm_weight, norm_eps, norm_weight_offset: the norm of `x`, as for linear_quantized.

    Returns: [..., H] in the dtype of `x`; sums in float32.

    Raises: ValueError for a dtype, shape, device, option or format that does not fit.
    """
    norm = InputNorm(norm_weight, norm_eps, norm_weight_offset)
    gate_up = QuantizedWeight(gate_up_packed, gate_up_scales, gate_up_zeros, Format.named(format))
    down = QuantizedWeight(down_packed, down_scales, down_zeros, Format.named(down_format or format))
    options = Activation(activation, alpha, limit, gated, interleaved)
    out = mlp_outputs(x, norm, gate_up, down, options, gate_up_bias, down_bias)
    return (out if residual is None else out.add_(wide(residual))).to(x.dtype)


@door(_mlp_quantized, public="MLPs and shared experts with weights from `quantize`")
def mlp_quantized(
    x: Tensor,
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
    down_format: str | None = None,
) -> Tensor:
    """A dense MLP, or a shared expert, with quantised weights:

        h   = act(gate_up @ x + gate_up_bias)
        out = down @ h + down_bias

    h is rounded to the dtype of `x`. An infinite element of `x` may make NaN on Metal where the formula gives
    infinity, as in expert_qmm.

    Args:
        x: [..., H], float32, float16 or bfloat16.
        gate_up_packed: [2I, H * bits / 32] ([I, ...] when not gated), uint32 or the same bits as int32: the
            rows of the gate, then of the up projection.
        gate_up_scales, gate_up_zeros: of the rows [2I, H], as expert_qmm's of [E, N, H].
        down_packed: [H, I * bits / 32].
        down_scales, down_zeros: of the rows [H, I].
        format: its name, as for expert_qmm; so are the multiples that H and I must be.
        gate_up_bias, down_bias: [2I] ([I] when not gated) and [H]: the layer's, not the format's.
        activation, alpha, limit, gated, interleaved: as for moe_experts.
        down_format: as for moe_experts_quantized.

    Returns: [..., H] in the dtype of `x`; sums in float32.

    Raises: ValueError for a dtype, shape, device, option or format that does not fit.

    In models, `_mlp_quantized` replaces it.

    Example:
        >>> from torch_moe_mps.quantization import quantize
        >>> gate_up, down = (quantize(torch.eye(32).repeat(n, 1), mode="mxfp4") for n in (2, 1))
        >>> x = torch.full((1, 32), 3.0)
        >>> out = ops.mlp_quantized(x, *gate_up, *down, format="mxfp4", activation="relu")
        >>> out[0, :2].tolist()  # relu(3) * 3
        [9.0, 9.0]
    """
    return inspect.unwrap(_mlp_quantized)(**locals())


def _meta_embedding_quantized(check, tokens, packed, scales, zeros, format, dtype):
    weight = QuantizedWeight(packed, scales, zeros, Format.named(format, check))
    shape = (packed.shape[0], weight.format.columns(packed.shape[1]))
    weight.check(check, "", shape, "V, C")
    return tokens.new_empty(*tokens.shape, shape[1], dtype=NAMED_DTYPES[dtype])


@operator(
    "tokens:id packed[V, _]:packed",
    _meta_embedding_quantized,
    public="embeddings with weights from `quantize`",
)
def embedding_quantized(
    tokens: Tensor,
    packed: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    *,
    format: str,
    dtype: DtypeName,
) -> Tensor:
    """Rows of a quantised matrix: out[...] = dequantised[tokens[...]].

    Args:
        tokens: [...], int32 or int64. A token outside [0, V) reads nothing and gives a row of zeros.
        packed: [V, C * bits / 32], uint32 or the same bits as int32.
        scales, zeros: of the rows [V, C], as expert_qmm's of [E, N, H].
        format: its name, as for expert_qmm.
        dtype: of the result: torch.float32, torch.float16 or torch.bfloat16.

    Returns: [..., C] in `dtype`; dequantised in float32, rounded once.

    Raises: ValueError for a dtype, shape, device or format that does not fit.

    Example:
        >>> from torch_moe_mps.quantization import quantize
        >>> table = quantize(torch.eye(32), mode="mxfp4")  # 32 is no token
        >>> tokens = torch.tensor([1, 0, 32])
        >>> rows = ops.embedding_quantized(tokens, *table, format="mxfp4", dtype=torch.float32)
        >>> rows[:, :2].tolist()
        [[0.0, 1.0], [1.0, 0.0], [0.0, 0.0]]
    """
    weight = QuantizedWeight(packed, scales, zeros, Format.named(format))
    rows, columns = packed.shape[0], weight.format.columns(packed.shape[1])
    flat = tokens.reshape(-1).long()
    if rows == 0:
        return scales.new_zeros((*tokens.shape, columns), dtype=NAMED_DTYPES[dtype])
    place = flat.clamp(0, rows - 1)
    out = weight.values(place).masked_fill_((place != flat).unsqueeze(-1), 0.0)
    return out.to(NAMED_DTYPES[dtype]).view(*tokens.shape, columns)


def _mlp(s):
    matrices = s.quantized("gate_up_", 2 * s.I, s.H, ()) | s.quantized("down_", s.H, s.I, ())
    return s.of("x[T, H]", format=s.format.name) | matrices


CALLS: Calls = {
    "linear_quantized": lambda s: s.of(
        "x[T, H] bias[I]", **s.quantized("", s.I, s.H, ()), format=s.format.name
    ),
    "_linear_quantized_transposed": lambda s: s.of(
        "dy[T, I]", **s.quantized("", s.I, s.H, ()), format=s.format.name
    ),
    "_mlp_quantized": _mlp,
    "mlp_quantized": _mlp,
    "embedding_quantized": lambda s: {
        **{"tokens": s.topk_ids, "format": s.format.name, "dtype": dtype_name(s.dtype)},
        **s.quantized("", s.E, s.H, ()),
    },
}
CHANGES: Changes = {
    "linear_quantized": lambda s: [
        {"x": s.strided, "bias": None},
        {"x": s.values(2, 0, s.H)},
        {"x": s.values(1, s.H), "residual": s.values(1, s.I), **s.norm},
        {"order": torch.arange(s.I - 1, -1, -1, dtype=torch.int32, device=s.device), **s.norm},
        {"activation": "silu", "activated": s.I - 5, "factor": 0.25},
        {"dtype": "float32"},
    ],
    "mlp_quantized": lambda s: [{"gate_up_bias": s.values(2 * s.I), "interleaved": True}],
    "_mlp_quantized": lambda s: [
        {"residual": s.strided, "gate_up_bias": s.values(2 * s.I), "interleaved": True},
        s.norm,
        {"x": s.values(1, s.H), **s.norm},
    ],
}
