"""A matrix for each head of an attention, times what each head has of a token."""

import torch
from torch import Tensor

from .._checks import ACTIVATION_DTYPES, NAMED_DTYPES, Check, dtype_name, widened
from .._decoded import decoded
from .._formats import Format, QuantizedWeight
from .._registry import operator
from .._sample import Calls, Changes


def _meta_heads(
    check: Check,
    x: Tensor,
    rows: int,
    columns: int,
    transposed: bool,
    appended: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Checks what does not depend on how the matrices [Hq, rows, columns] are stored. Returns: the output."""
    inputs, outputs = (rows, columns) if transposed else (columns, rows)
    if x.shape[3] != inputs:
        which = "rows" if transposed else "columns"
        check.fail("x", f"of a last dimension of {inputs}, the {which} of a matrix", tuple(x.shape))
    outputs += 0 if appended is None else appended.shape[3]
    return x.new_empty((*x.shape[:3], outputs), dtype=dtype)


def _product(
    x: Tensor, matrices: Tensor, transposed: bool, appended: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """`matrices`: [Hq, rows, columns]."""
    rows, matrices = widened(x, matrices)
    out = torch.einsum("bthr,hrc->bthc" if transposed else "bthc,hrc->bthr", rows, matrices).to(dtype)
    return out if appended is None else torch.cat((out, appended), -1)


def _meta_heads_mm(check, x, weight, transposed, appended):
    wider = x.dtype == torch.float32 and not transposed
    check.dtype("weight", weight, ACTIVATION_DTYPES if wider else (x.dtype,))
    return _meta_heads(check, x, weight.shape[1], weight.shape[2], transposed, appended, weight.dtype)


@operator(
    "x[B, T, Hq, _] weight[Hq, _, _]:any appended[B, T, Hq, _]:x",
    _meta_heads_mm,
    dependences=("appended not unless transposed",),
)
def _heads_mm(
    x: Tensor, weight: Tensor, *, transposed: bool = False, appended: Tensor | None = None
) -> Tensor:
    """Matrix product for each head: weight[h] @ x[b, t, h], or weight[h]^T @ x[b, t, h] and what is appended.

    Latent attention asks for both: the two matrices of a head that expand its latents into keys and values
    become factors of its queries and its results.

    Args:
        x: [B, T, Hq, C] in float32, such as the results of `cached_attention` in that dtype, or in the dtype
            of `weight`, which costs a copy on mps; with `transposed` [B, T, Hq, R] in the dtype of `weight`.
            Any strides.
        weight: [Hq, R, C], float32, float16 or bfloat16. The rows of all heads may be some of each head's
            rows in a matrix, `matrix.view(Hq, -1, C)[:, first:last]`: they are read where they lie. With
            other strides they are copied in each call.
        transposed: sums go over the rows of a matrix instead of its columns.
        appended: with `transposed`, [B, T, Hq, N] in the dtype of `x`, any strides: what stands behind the
            products, such as the rotated part of a query.

    Returns: [B, T, Hq, R], or [B, T, Hq, C + N], in the dtype of `weight`; accumulated in float32.

    Raises: ValueError for a dtype, shape or device that does not fit.
    """
    return _product(x, weight, transposed, appended, weight.dtype)


def _meta_heads_quantized(check, x, packed, scales, zeros, format, transposed, appended, dtype):
    stored = Format.named(format, check)
    rows, columns = packed.shape[1], stored.columns(packed.shape[2])
    wanted = x.dtype if dtype is None else NAMED_DTYPES[dtype]
    if transposed:
        check.among_dtypes("dtype", wanted, (x.dtype,))
    out = _meta_heads(check, x, rows, columns, transposed, appended, wanted)
    QuantizedWeight(packed, scales, zeros, stored).check(check, "", (x.shape[2], rows, columns), "Hq, R, C")
    return out


@operator(
    "x[B, T, Hq, _] packed[Hq, _, _]:packed appended[B, T, Hq, _]:x",
    _meta_heads_quantized,
    dependences=("appended not unless transposed",),
)
def _heads_quantized(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    format: str,
    *,
    transposed: bool = False,
    appended: Tensor | None = None,
    dtype: str | None = None,
) -> Tensor:
    """_heads_mm with quantised weights, whose groups lie along C for both directions.

    Args:
        x: [B, T, Hq, C], or [B, T, Hq, R] with `transposed`; float32, float16 or bfloat16; any strides. On
            mps only float32 is read without a copy unless transposed. On Metal an infinite element may give
            NaN where the formula gives infinity, as in expert_qmm.
        packed: [Hq, R, C * bits / 32], uint32 or the same bits as int32. As the weight of _heads_mm it may be
            some of each head's rows in a matrix; likewise `scales` and `zeros`, the same rows.
        scales, zeros: of the rows [Hq, R, C], as expert_qmm's of [E, N, H].
        format: its name, as for expert_qmm; so is the multiple that C must be.
        transposed, appended: as for _heads_mm.
        dtype: of the result: "float32", "float16" or "bfloat16"; None: the dtype of `x`, as always with
            `transposed`.

    Returns: [B, T, Hq, R], or [B, T, Hq, C + N], in `dtype`; dequantised and accumulated in float32.

    Raises: ValueError for a dtype, shape, device or format that does not fit.
    """
    weight = QuantizedWeight(packed, scales, zeros, Format.named(format))
    wanted = x.dtype if dtype is None else NAMED_DTYPES[dtype]
    return _product(x, decoded(weight), transposed, appended, wanted)


CALLS: Calls = {
    "_heads_quantized": lambda s: {
        **s.of("x[2, T, 4, I]", **s.quantized("", s.I, s.H, (4,)), format=s.format.name),
        **s.of("appended[2, T, 4, 6]", transposed=True),
    },
    "_heads_mm": lambda s: s.of("x[2, T, 4, 16] weight[4, 16, 40] appended[2, T, 4, 6]", transposed=True),
}
CHANGES: Changes = {
    "_heads_quantized": lambda s: [
        s.of("x[1, T, 4, H]:float32", dtype=dtype_name(s.dtype), transposed=False, appended=None),
    ],
    "_heads_mm": lambda s: [
        s.of("x[1, T, 4, 40]:float32", transposed=False, appended=None),
        s.of("x[1, 1, 4, 40]", transposed=False, appended=None),
        s.of("x[1, 1, 4, 16]", appended=None),
    ],
}
