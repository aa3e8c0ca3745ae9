"""What MLX dispatches for the products of the cases, and on which Apple GPU: its launches' only home.

Its host code is in no wheel, so its choices are written down here; each function names its counterpart. The
tensor units of the M5 ("nax" kernels) are left out.
"""

from simulator.apple.facts import Gpu

from . import mlx_dense, mlx_quantized
from .mlx_launch import Launch, Matrices


def linear(gpu: Gpu, m: Matrices, count: int) -> Launch:
    """`count` rows of x times one matrix: QuantizedLinear or Linear."""
    return (mlx_quantized.quantized_matmul if m.format.bits else mlx_dense.matmul)(gpu, m, count)


def experts(m: Matrices, tokens: int, slots: int, x_rows: int) -> Launch:
    """An expert's matrix times a row of x for each pair: a product of mlx_lm's SwitchGLU.

    It binds "offsets", with a row of x for each pair in the order of experts, or "x_rows" and "ids".
    """
    pairs = tokens * slots
    is_sorted = pairs >= 64  # SwitchGLU orders pairs by expert from here on
    if m.format.bits == 0:  # GatherMM::eval_gpu
        gather, gather_sorted = mlx_dense.gather_mv, mlx_dense.gather_mm_rhs
    else:  # GatherQMM::eval_gpu
        gather, gather_sorted = mlx_quantized.gather_qmv, mlx_quantized.gather_qmm_rhs
        is_sorted = is_sorted and pairs // m.experts >= 4
    return gather_sorted(m, pairs) if is_sorted else gather(m, tokens, slots, x_rows)
