"""RMSNorm and LayerNorm, by themselves and fused with the residual stream.

rms(x) = x * rsqrt(mean(x^2) + norm_eps), over the last dimension, in float32, rounded once when stored.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._checks import wide
from .._registry import operator
from .._sample import Calls, Changes, Sample

GATE_ACTIVATIONS = ("silu", "sigmoid")


def normed(x: Tensor, norm_weight: Tensor | None, norm_eps: float, norm_weight_offset: float = 0.0) -> Tensor:
    """rms(x) * (norm_weight + norm_weight_offset), in float32."""
    x = wide(x)
    x = x * x.square().mean(-1, keepdim=True).add_(norm_eps).rsqrt_()
    if norm_weight is None:
        return x
    norm_weight = wide(norm_weight)
    return x.mul_(norm_weight + norm_weight_offset if norm_weight_offset else norm_weight)


class InputNorm(NamedTuple):
    """Arguments of the optional RMSNorm of an operator's input."""

    norm_weight: Tensor | None = None
    norm_eps: float = 1e-6
    norm_weight_offset: float = 0.0

    def applied_to(self, x: Tensor) -> Tensor:
        if self.norm_weight is None:
            return x
        return normed(x, self.norm_weight, self.norm_eps, self.norm_weight_offset).to(x.dtype)


# The norm alone


def _check_offset(check, norm_weight, norm_weight_offset, **_):
    if norm_weight is None and norm_weight_offset != 0.0:
        check.fail("norm_weight_offset", "0.0 without a weight", norm_weight_offset)


@operator("x[..., H] norm_weight[H] bias[H] -> x", _check_offset, public="norms of models")
def layer_norm(
    x: Tensor,
    norm_weight: Tensor | None,
    bias: Tensor | None,
    *,
    norm_eps: float,
    norm_weight_offset: float = 0.0,
) -> Tensor:
    """LayerNorm: rms(x - mean(x)) * (norm_weight + norm_weight_offset) + bias.

    The mean is taken away before squares are summed, in float32; the result is rounded once.

    Args:
        x: [..., H], float32, float16 or bfloat16.
        norm_weight: [H], any of the three dtypes, or None: 1.
        bias: [H], any of the three dtypes, or None: 0.
        norm_eps: of the mean of squares.
        norm_weight_offset: 0.0 without a weight.

    Returns: [..., H] in the dtype of `x`.

    Raises: ValueError for a dtype, shape, number or device that does not fit.

    Example:
        >>> ops.layer_norm(torch.tensor([[1.0, 3.0]]), None, torch.tensor([0.0, 5.0]), norm_eps=0.0).tolist()
        [[-1.0, 6.0]]
    """
    return _layer_normed(x, norm_weight, bias, norm_eps, norm_weight_offset).to(x.dtype)


def _layer_normed(
    x: Tensor, norm_weight: Tensor | None, bias: Tensor | None, norm_eps: float, norm_weight_offset: float
) -> Tensor:
    x = wide(x)
    x = normed(x - x.mean(-1, keepdim=True), norm_weight, norm_eps, norm_weight_offset)
    return x if bias is None else x + wide(bias)


def _check_rows(check, x, norm_weight, **others):
    """A weight [N, H] has a row for each of the last rows of the input."""
    if norm_weight is not None and norm_weight.dim() == 2:
        check.shape("norm_weight", norm_weight, x.shape[-2:], "[N, H] of the input")
    _check_offset(check, norm_weight, **others)


@operator("x[..., H] norm_weight[H]|[_, H] -> x", _check_rows, public="norms of models")
def rms_norm(
    x: Tensor,
    norm_weight: Tensor | None,
    *,
    norm_eps: float,
    norm_weight_offset: float = 0.0,
    factor: float = 1.0,
) -> Tensor:
    """RMSNorm: rms(x) * (norm_weight + norm_weight_offset) * factor, without a weight rms(x) * factor.

    aten's `_fused_rms_norm` is one dispatch on MPS too, but takes no offset and requires a weight of the
    input's dtype; in all other cases `torch.nn.functional.rms_norm` runs one operation after the other.
    Models that round the normed row before they multiply it by the weight differ by at most 2 ulp.

    Args:
        x: [..., H], float32, float16 or bfloat16. Rows at equal distances are read where they lie.
        norm_weight: [H], any of the three dtypes, or None; for an input [..., N, H] also [N, H], a row of
            weights for each of N rows: groups of columns that are normed apart.
        norm_eps: added to the mean of squares.
        norm_weight_offset: 1.0 for zero-centred weights; 0.0 without a weight.
        factor: of the result, before it is rounded (latents of Dots3).

    Returns: [..., H] in the dtype of `x`.

    Raises: ValueError for a dtype, shape or device that does not fit.

    Example:
        >>> ops.rms_norm(torch.tensor([[2.0, -2.0]]), torch.tensor([1.0, 3.0]), norm_eps=0.0).tolist()
        [[1.0, -3.0]]
    """
    out = normed(x, norm_weight, norm_eps, norm_weight_offset)
    return (out if factor == 1.0 else out.mul_(factor)).to(x.dtype)


def _check_group(check, x, group_size, **_):
    if group_size is not None and (group_size < 1 or x.shape[-1] % group_size):
        check.fail("group_size", f"a divisor of the {x.shape[-1]} columns", group_size)


@operator(
    "x[..., H] gate[..., H]:x norm_weight[H] -> x",
    _check_group,
    allowed={"activation": GATE_ACTIVATIONS},
    public="the norm after linear attention",
)
def rms_norm_gated(
    x: Tensor,
    gate: Tensor,
    norm_weight: Tensor,
    *,
    norm_eps: float,
    norm_weight_offset: float = 0.0,
    activation: str = "silu",
    gate_first: bool = False,
    group_size: int | None = None,
) -> Tensor:
    """Gated RMSNorm: rms(x) * (norm_weight + norm_weight_offset) * activation(gate).

    With `gate_first` it is rms(x * activation(gate)) * (norm_weight + norm_weight_offset), as in Mamba-2.
    Models that round the normed row and its product with the weight differ by at most 3 ulp.

    Args:
        x, gate: [..., H], float32, float16 or bfloat16, of one dtype.
        norm_weight: [H], any of the three dtypes.
        norm_eps: added to the mean of squares.
        norm_weight_offset: 1.0 for zero-centred weights.
        activation: of the gate, "silu" or "sigmoid".
        gate_first: the gate comes before the norm.
        group_size: so many neighbouring columns are normed together; None: all H.

    Returns: [..., H] in the dtype of `x`.

    Raises: ValueError for a dtype, shape, choice or device that does not fit.

    Example:
        >>> x, gate, norm_weight = torch.tensor([[2.0, -2.0]]), torch.zeros(1, 2), torch.tensor([1.0, 3.0])
        >>> ops.rms_norm_gated(x, gate, norm_weight, norm_eps=0.0, activation="sigmoid").tolist()
        [[0.5, -1.5]]
    """
    function = torch.sigmoid if activation == "sigmoid" else torch.nn.functional.silu
    factor = function(wide(gate))
    rows = wide(x) * factor if gate_first else wide(x)
    width = group_size or max(1, x.shape[-1])
    y = normed(rows.unflatten(-1, (x.shape[-1] // width, width)), None, norm_eps).flatten(-2)
    y = y * (wide(norm_weight) + norm_weight_offset)
    return (y if gate_first else y * factor).to(x.dtype)


# The norm of the input, added to the residual


@operator("residual[..., H] x[..., H]:residual norm_weight[H] -> residual", public="covers a source kernel")
def fused_norm_add(
    residual: Tensor, x: Tensor, norm_weight: Tensor, *, norm_eps: float, norm_weight_offset: float = 0.0
) -> Tensor:
    """Residual plus RMSNorm: residual + rms(x) * (norm_weight + norm_weight_offset).

    Args:
        residual, x: [..., H], float32, float16 or bfloat16, of one dtype.
        norm_weight: [H], any of the three dtypes.
        norm_eps: added to the mean of squares.
        norm_weight_offset: 1.0 for zero-centred weights.

    Returns: [..., H] in the dtype of `residual`.

    Raises: ValueError for a dtype, shape or device that does not fit.

    Stands for the source kernel fused_norm_add_f32; docs/operators.md has the differences.

    Example:
        >>> residual, x, norm_weight = torch.ones(1, 2), torch.tensor([[2.0, -2.0]]), torch.tensor([3.0, 4.0])
        >>> ops.fused_norm_add(residual, x, norm_weight, norm_eps=0.0).tolist()
        [[4.0, -3.0]]
    """
    return (wide(residual) + normed(x, norm_weight, norm_eps, norm_weight_offset)).to(residual.dtype)


@operator(
    "residual[..., H] x[..., H]:residual norm_weight[H] scalar[1]|[H]|[] -> residual",
    public="covers a source kernel",
)
def fused_norm_add_scalar(
    residual: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    scalar: Tensor,
    *,
    norm_eps: float,
    norm_weight_offset: float = 0.0,
) -> Tensor:
    """Scaled residual plus RMSNorm: (residual + rms(x) * (norm_weight + norm_weight_offset)) * scalar.

    Args:
        residual, x, norm_weight, norm_eps, norm_weight_offset: as for fused_norm_add.
        scalar: 1 or H elements, any of the three dtypes: the layer's scale.

    Returns: [..., H] in the dtype of `residual`.

    Raises: ValueError for a dtype, shape or device that does not fit.

    Stands for the source kernel fused_norm_add_scalar_f32; docs/operators.md has the differences.

    Example:
        >>> residual, x, norm_weight = torch.ones(1, 2), torch.tensor([[2.0, -2.0]]), torch.tensor([3.0, 4.0])
        >>> ops.fused_norm_add_scalar(residual, x, norm_weight, torch.tensor([10.0]), norm_eps=0.0).tolist()
        [[40.0, -30.0]]
    """
    total = wide(residual) + normed(x, norm_weight, norm_eps, norm_weight_offset)
    return (total * wide(scalar)).to(residual.dtype)


# The norm of the sum


def _meta_residual_norm(check, residual, **_):
    return residual.new_empty(residual.shape), residual.new_empty(residual.shape)


@operator(
    "residual[..., H] x[..., H]:residual norm_weight[H]", _meta_residual_norm, public="covers a source kernel"
)
def fused_residual_norm(
    residual: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    *,
    norm_eps: float,
    norm_weight_offset: float = 0.0,
    factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Residual sum s = residual + x * factor, and its norm: rms(s) * (norm_weight + norm_weight_offset), s.

    In 16 bit s is rounded first, because the residual stream carries the rounded s; the norm is taken of it.

    Args:
        residual, x, norm_weight, norm_eps, norm_weight_offset: as for fused_norm_add.
        factor: of the input, whose product is not rounded (Granite, MiniMax).

    Returns: the normed sum and the sum, both like `residual`.

    Raises: ValueError for a dtype, shape or device that does not fit.

    Stands for the source kernel fused_residual_norm_f32; docs/operators.md has the differences.

    Example:
        >>> residual, x, norm_weight = torch.ones(1, 2), torch.tensor([[1.0, -3.0]]), torch.tensor([3.0, 4.0])
        >>> normed, total = ops.fused_residual_norm(residual, x, norm_weight, norm_eps=0.0)
        >>> normed.tolist(), total.tolist()
        ([[3.0, -4.0]], [[2.0, -2.0]])
    """
    total = (wide(residual) + wide(x) * factor).to(residual.dtype)
    result = normed(total, norm_weight, norm_eps, norm_weight_offset).to(residual.dtype)
    return result, total


def _meta_residual_layer_norm(check, residual, norm_weight, norm_weight_offset, **_):
    _check_offset(check, norm_weight, norm_weight_offset)
    return _meta_residual_norm(check, residual)


@operator(
    "residual[..., H] x[..., H]:residual norm_weight[H] bias[H]",
    _meta_residual_layer_norm,
    public="the residual norm of models with LayerNorm",
)
def fused_residual_layer_norm(
    residual: Tensor,
    x: Tensor,
    norm_weight: Tensor | None,
    bias: Tensor | None,
    *,
    norm_eps: float,
    norm_weight_offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Residual sum s = residual + x, and its LayerNorm: (layer_norm(s), s).

    In 16 bit s is rounded first, as in fused_residual_norm.

    Args:
        residual, x: [..., H], float32, float16 or bfloat16, of one dtype.
        norm_weight, bias, norm_eps, norm_weight_offset: as for layer_norm.

    Returns: the normed sum and the sum, both like `residual`.

    Raises: ValueError for a dtype, shape, number or device that does not fit.

    Example:
        >>> residual, x = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 1.0]])
        >>> normed, total = ops.fused_residual_layer_norm(residual, x, None, None, norm_eps=0.0)
        >>> normed.tolist(), total.tolist()
        ([[-1.0, 1.0]], [[1.0, 3.0]])
    """
    total = residual + x
    return _layer_normed(total, norm_weight, bias, norm_eps, norm_weight_offset).to(residual.dtype), total


@operator(
    "residual[..., H] x[..., H]:residual norm_weight[H] scalar[1]|[H]|[] -> residual",
    public="covers a source kernel",
)
def fused_residual_norm_scalar(
    residual: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    scalar: Tensor,
    *,
    norm_eps: float,
    norm_weight_offset: float = 0.0,
) -> Tensor:
    """Scaled RMSNorm of a residual sum: rms(residual + x) * (norm_weight + norm_weight_offset) * scalar.

    In 16 bit the sum is rounded before the norm, as in fused_residual_norm.

    Args:
        residual, x, norm_weight, norm_eps, norm_weight_offset: as for fused_norm_add.
        scalar: 1 or H elements, any of the three dtypes.

    Returns: [..., H] in the dtype of `residual`.

    Raises: ValueError for a dtype, shape or device that does not fit.

    In models, `fused_residual_norm` with a factor replaces it.

    Stands for the source kernel fused_residual_norm_scalar_f32; docs/operators.md has the differences.

    Example:
        >>> residual, x, norm_weight = torch.ones(1, 2), torch.tensor([[1.0, -3.0]]), torch.tensor([3.0, 4.0])
        >>> scalar = torch.tensor([10.0])
        >>> ops.fused_residual_norm_scalar(residual, x, norm_weight, scalar, norm_eps=0.0).tolist()
        [[30.0, -40.0]]
    """
    result = normed(residual + x, norm_weight, norm_eps, norm_weight_offset)
    return (result * wide(scalar)).to(residual.dtype)


def _norm(s: Sample) -> dict[str, Any]:
    return {"norm_weight": s.values(s.H, dtype=torch.float32), "norm_eps": 1e-6}


def _wide(s: Sample) -> dict[str, Any]:
    """Rows that several simdgroups take."""
    return s.of("x[2, 4100] norm_weight[4100]")


CALLS: Calls = {
    **dict.fromkeys(("rms_norm", "layer_norm", "rms_norm_gated", "fused_norm_add"), _norm),
    "fused_norm_add_scalar": _norm,
    **dict.fromkeys(
        ("fused_residual_norm", "fused_residual_layer_norm"),
        lambda s: {**_norm(s), "x": s.values(s.T, s.H)},
    ),
    "fused_residual_norm_scalar": lambda s: {**_norm(s), "scalar": s.values(s.H)},
}
CHANGES: Changes = {
    "rms_norm": lambda s: [
        {"x": s.strided, "norm_weight": None},
        {"norm_weight_offset": 1.0},
        _wide(s),
        {"norm_weight": s.values(s.T, s.H)},
    ],
    "layer_norm": lambda s: [
        {"x": s.strided, "norm_weight": None, "bias": None},
        {"norm_weight_offset": 1.0, "bias": None},
        _wide(s),
    ],
    "rms_norm_gated": lambda s: [
        {"x": s.strided, "gate": s.strided, "norm_weight_offset": 1.0},
        {"activation": "sigmoid", "gate_first": True, "group_size": 16},
        _wide(s),
    ],
    "fused_norm_add": lambda s: [{"x": s.strided, "norm_weight_offset": 1.0}, _wide(s)],
    "fused_residual_norm": lambda s: [
        {"residual": s.strided, "factor": 0.22},
        _wide(s) | {"residual": s.values(2, 4100)},
    ],
    "fused_residual_layer_norm": lambda s: [
        {"residual": s.strided, "norm_weight": None, "bias": s.values(s.H)},
        {"norm_weight_offset": 1.0},
        _wide(s) | {"residual": s.values(2, 4100)},
    ],
}
