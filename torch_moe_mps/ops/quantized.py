"""The experts with quantised weights. Both formats run along the input dimension, 32 / bits values per word,
the first value in the lowest bits, as mlx.core.quantize writes them:

affine: q * scale + bias; q unsigned in 4 or 8 bits, one scale and one bias per group of 32, 64 or 128 values.
mxfp4:  e2m1(q) * 2^(scale - 127); one uint8 scale per group of 32 values, no biases (OCP microscaling).
"""

import torch
from torch import Tensor

from ._activations import apply_activation, check_activation
from ._checks import ACTIVATION_DTYPES, Check
from ._registry import operator
from .experts import (
    Groups,
    add_bias,
    check_bias,
    check_combine,
    check_slots,
    combine_experts,
    grouped_product,
    project_slots,
)

PACKED_DTYPES = (torch.uint32, torch.int32)
MODES = ("affine", "mxfp4")
BITS = {"affine": (4, 8), "mxfp4": (4,)}
GROUP_SIZES = {"affine": (32, 64, 128), "mxfp4": (32,)}
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def check_format(check: Check, bits: int, group_size: int, mode: str) -> None:
    check.choice("mode", mode, MODES)
    for argument, value, allowed in (("bits", bits, BITS), ("group_size", group_size, GROUP_SIZES)):
        if type(value) is not int or value not in allowed[mode]:
            check.fail(argument, " or ".join(map(str, allowed[mode])) + f" for mode {mode}", repr(value))


def _check_weight(
    check: Check,
    prefix: str,
    packed: Tensor,
    scales: Tensor,
    biases: Tensor | None,
    shape: tuple,
    meaning: str,
    bits: int,
    group_size: int,
    mode: str,
) -> None:
    """`shape` is that of the dense weight [E, rows, columns], `meaning` names its rows and columns."""
    rows_name, columns_name = meaning.split(", ")
    experts, rows, columns = shape
    if columns % group_size != 0:
        check.fail(
            f"{columns_name}, the input dimension of {prefix}packed,", f"a multiple of {group_size}", columns
        )
    check.dtype(f"{prefix}packed", packed, PACKED_DTYPES)
    words = f"[E, {rows_name}, {columns_name} * {bits} / 32]"
    check.shape(f"{prefix}packed", packed, (experts, rows, columns * bits // 32), words)
    groups = f"[E, {rows_name}, {columns_name} / {group_size}]"
    expected = (experts, rows, columns // group_size)
    if mode == "mxfp4":
        if biases is not None:
            check.fail(f"{prefix}biases", "None for mode mxfp4", f"a tensor of shape {tuple(biases.shape)}")
        check.dtype(f"{prefix}scales", scales, (torch.uint8,))
        check.shape(f"{prefix}scales", scales, expected, groups)
        return
    check.dtype(f"{prefix}scales", scales, ACTIVATION_DTYPES)
    check.shape(f"{prefix}scales", scales, expected, groups)
    if biases is None:
        check.fail(f"{prefix}biases", "a tensor for mode affine", None)
    check.dtype(f"{prefix}biases", biases, (scales.dtype,))
    check.shape(f"{prefix}biases", biases, expected, groups)


def unpack(packed: Tensor, bits: int, mode: str) -> Tensor:
    """[..., words] uint32 or int32 -> [..., words * 32 / bits] float32: the numbers that the codes stand for.

    Two 4-bit codes at a time by table: 3 times faster than shifting and converting, 19 times for mxfp4.
    """
    octets = packed.view(torch.int32).contiguous().view(torch.uint8)
    if bits == 8:
        return octets.float()
    values = E2M1_VALUES if mode == "mxfp4" else range(16)
    value = torch.tensor(values, dtype=torch.float32, device=packed.device)
    pairs = torch.stack((value.repeat(16), value.repeat_interleave(16)), dim=-1).view(torch.int64).flatten()
    chosen = pairs.index_select(0, octets.flatten().int())
    return chosen.view(torch.float32).view(*octets.shape[:-1], 2 * octets.shape[-1])


def e8m0(scales: Tensor) -> Tensor:
    """2^(scale - 127) from its bits: 0 is the subnormal 2^-127, 255 is inf, as in MLX."""
    exponent = scales.int()
    return torch.where(exponent == 0, 1 << 22, exponent << 23).view(torch.float32)


def dequantize_values(
    packed: Tensor, scales: Tensor, biases: Tensor | None, bits: int, group_size: int, mode: str
) -> Tensor:
    """[..., words], [..., groups] -> [..., groups * group_size] float32."""
    groups = unpack(packed, bits, mode).unflatten(-1, (-1, group_size))
    if mode == "mxfp4":
        return groups.mul_(e8m0(scales).unsqueeze(-1)).flatten(-2)
    return groups.mul_(scales.float().unsqueeze(-1)).add_(biases.float().unsqueeze(-1)).flatten(-2)


def _product(
    rows: Tensor, groups: Groups, packed: Tensor, scales: Tensor, biases: Tensor | None, format: tuple
) -> Tensor:
    """grouped_product in float32; experts are dequantised when their turn comes, one at a time."""

    def matrix(expert: int) -> Tensor:
        offsets = None if biases is None else biases[expert]
        return dequantize_values(packed[expert], scales[expert], offsets, *format).t()

    return grouped_product(rows.float(), groups, matrix, packed.shape[1])


def _meta_expert_qmm(check, x, packed, scales, biases, ids, bits, group_size, mode, bias=None):
    check_slots(check, x, ids)
    check_format(check, bits, group_size, mode)
    check.rank("packed", packed, (3,))
    experts, rows, _ = packed.shape
    _check_weight(
        check, "", packed, scales, biases, (experts, rows, x.shape[-1]), "N, H", bits, group_size, mode
    )
    check_bias(check, "bias", bias, (experts, rows), "[E, N]")
    check.same_device(x=x, packed=packed, scales=scales, biases=biases, ids=ids, bias=bias)
    return x.new_empty(*ids.shape, packed.shape[1])


@operator(
    "expert_qmm(Tensor x, Tensor packed, Tensor scales, Tensor? biases, Tensor ids, int bits, "
    "int group_size, str mode, Tensor? bias=None) -> Tensor",
    meta=_meta_expert_qmm,
)
def expert_qmm(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    biases: Tensor | None,
    ids: Tensor,
    bits: int,
    group_size: int,
    mode: str,
    bias: Tensor | None = None,
) -> Tensor:
    """expert_mm with quantised weights: out[t, k] = dequantised(ids[t, k]) @ x[t] + bias[ids[t, k]].

    Args:
        x: [T, H] or [T, K, H], float32, float16 or bfloat16. On Metal an infinite element may make NaN where
            the formula gives infinity: affine codes, scales and biases meet it apart.
        packed: [E, N, H * bits / 32], uint32 or the same bits as int32.
        scales: [E, N, H / group_size], float32, float16 or bfloat16; uint8 in mode mxfp4.
        biases: like `scales`; None in mode mxfp4.
        ids: [T, K] with K <= 64, int32 or int64. An id outside [0, E) reads nothing and gives a row of zeros.
        bits, group_size, mode: 4 or 8 bits, groups of 32, 64 or 128 in mode "affine"; 4 and 32 in "mxfp4".
        bias: [E, N], float32, float16 or bfloat16: of the layer, not of the format.

    Returns: [T, K, N] in the dtype of `x`; dequantised and accumulated in float32. For more than 32 tokens
        the Metal kernels round what they dequantise to the dtype of `x`.

    Raises: ValueError for a dtype, shape, device or format that does not fit.
    """

    def product(rows: Tensor, groups: Groups) -> Tensor:
        return _product(rows, groups, packed, scales, biases, (bits, group_size, mode))

    return project_slots(x, ids, packed.shape[0], packed.shape[1], bias, product)


def _meta_moe_experts_quantized(
    check,
    x,
    gate_up_packed,
    gate_up_scales,
    gate_up_biases,
    down_packed,
    down_scales,
    down_biases,
    ids,
    weights,
    bits,
    group_size,
    mode,
    *,
    gate_up_bias=None,
    down_bias=None,
    activation="silu",
    alpha=None,
    limit=None,
    gated=True,
    interleaved=False,
    shared_gate=None,
    shared_out=None,
    residual=None,
    gate_is_logit=False,
):
    check_combine(check, x, ids, weights, shared_gate, shared_out, residual, gate_is_logit)
    check_activation(check, activation, alpha, limit, gated, interleaved)
    check_format(check, bits, group_size, mode)
    check.rank("gate_up_packed", gate_up_packed, (3,))
    experts, rows, _ = gate_up_packed.shape
    hidden, intermediate = x.shape[1], rows // 2 if gated else rows
    rows_name = "2I" if gated else "I"
    if gated and rows % 2 != 0:
        check.fail("gate_up_packed", "of an even number of rows 2I", tuple(gate_up_packed.shape))
    gate_up, down = (experts, rows, hidden), (experts, hidden, intermediate)
    format = (bits, group_size, mode)
    _check_weight(
        check, "gate_up_", gate_up_packed, gate_up_scales, gate_up_biases, gate_up, f"{rows_name}, H", *format
    )
    _check_weight(check, "down_", down_packed, down_scales, down_biases, down, "H, I", *format)
    check_bias(check, "gate_up_bias", gate_up_bias, (experts, rows), f"[E, {rows_name}]")
    check_bias(check, "down_bias", down_bias, (experts, hidden), "[E, H]")
    check.same_device(
        x=x,
        gate_up_packed=gate_up_packed,
        gate_up_scales=gate_up_scales,
        gate_up_biases=gate_up_biases,
        down_packed=down_packed,
        down_scales=down_scales,
        down_biases=down_biases,
        ids=ids,
        weights=weights,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        shared_gate=shared_gate,
        shared_out=shared_out,
        residual=residual,
    )
    return x.new_empty(x.shape)


@operator(
    "moe_experts_quantized(Tensor x, Tensor gate_up_packed, Tensor gate_up_scales, Tensor? gate_up_biases, "
    "Tensor down_packed, Tensor down_scales, Tensor? down_biases, Tensor ids, Tensor weights, int bits, "
    "int group_size, str mode, *, Tensor? gate_up_bias=None, Tensor? down_bias=None, "
    'str activation="silu", float? alpha=None, float? limit=None, bool gated=True, bool interleaved=False, '
    "Tensor? shared_gate=None, Tensor? shared_out=None, Tensor? residual=None, "
    "bool gate_is_logit=False) -> Tensor",
    meta=_meta_moe_experts_quantized,
)
def moe_experts_quantized(
    x: Tensor,
    gate_up_packed: Tensor,
    gate_up_scales: Tensor,
    gate_up_biases: Tensor | None,
    down_packed: Tensor,
    down_scales: Tensor,
    down_biases: Tensor | None,
    ids: Tensor,
    weights: Tensor,
    bits: int,
    group_size: int,
    mode: str,
    *,
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
) -> Tensor:
    """moe_experts with quantised weights; the formula is the same, after dequantising in float32.

    As there, h is rounded to the dtype of `x`. For more than 32 tokens the Metal kernels also round what they
    dequantise and each y, so that a float16 beyond 65504 becomes infinite.

    Args:
        gate_up_packed: [E, 2I, H * bits / 32] ([E, I, ...] when not gated), uint32 or the same bits as int32.
        gate_up_scales, gate_up_biases: [E, 2I, H / group_size], float32, float16 or bfloat16;
            uint8 and None in mode mxfp4.
        down_packed: [E, H, I * bits / 32].
        down_scales, down_biases: [E, H, I / group_size].
        bits, group_size, mode: 4 or 8 bits, groups of 32, 64 or 128 in mode "affine"; 4 and 32 in "mxfp4".
            H and I must be multiples of group_size.
        gate_up_bias, down_bias: [E, 2I] ([E, I] when not gated) and [E, H]: the layer's, not the format's.
        x, ids, weights, activation, alpha, limit, gated, interleaved, shared_gate, shared_out, residual,
            gate_is_logit: as for moe_experts.

    Returns: [T, H] in the dtype of `x`.

    Raises: ValueError for a dtype, shape, device, option or format that does not fit.
    """
    format = (bits, group_size, mode)

    def experts(rows: Tensor, groups: Groups) -> Tensor:
        rows = _product(rows, groups, gate_up_packed, gate_up_scales, gate_up_biases, format)
        rows = add_bias(rows, groups, ids, gate_up_bias)
        hidden = apply_activation(rows, activation, alpha, limit, gated, interleaved).to(x.dtype)
        out = _product(hidden, groups, down_packed, down_scales, down_biases, format)
        return add_bias(out, groups, ids, down_bias)

    return combine_experts(
        x, ids, weights, gate_up_packed.shape[0], experts, shared_gate, shared_out, residual, gate_is_logit
    )
