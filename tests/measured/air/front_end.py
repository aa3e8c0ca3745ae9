"""The front end's share of the cost model's error: AIR of MLX's kernels beside our IR of the same source.

Both go through the same passes and get the same costs, so that they differ by what the two front ends made of
the source. Apple's back end, which makes instructions of AIR, is in neither.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import macos
from simulator import metallib
from simulator.apple.air import AirLowering, flow_of
from simulator.apple.facts import COSTS
from simulator.apple.kernel import model_of
from simulator.apple.lower import Lowering
from simulator.apple.model import GROUPS
from simulator.apple.static import block_classes, macs, main_loop

from ..apple import mlx
from ..cases import mlx_attention, mlx_dense, mlx_quantized


class Kernel(NamedTuple):
    """A kernel of MLX: its name in mlx.metallib, and the instance of a template that it is."""

    name: str
    headers: tuple[str, ...]
    template: str
    constants: tuple[tuple[int, int], ...] = ()


_AFFINE, _FLOATING = mlx_quantized.AFFINE, mlx_quantized.FLOATING
KERNELS = (
    Kernel(
        "affine_qmv_fast_float16_t_gs_64_b_4_batch_0_pr_0_hgs_0_r_4",
        _AFFINE,
        "affine_qmv_fast<float16_t, 64, 4, false>",
    ),
    Kernel(
        "affine_qmv_fast_bfloat16_t_gs_64_b_4_batch_0_pr_0_hgs_0_r_4",
        _AFFINE,
        "affine_qmv_fast<bfloat16_t, 64, 4, false>",
    ),
    Kernel(
        "affine_qmv_fast_float16_t_gs_64_b_8_batch_0_pr_0_hgs_0_r_4",
        _AFFINE,
        "affine_qmv_fast<float16_t, 64, 8, false>",
    ),
    Kernel(
        "mxfp4_qmv_fast_bfloat16_t_gs_32_b_4_batch_0_pr_0_hgs_0_r_4",
        _FLOATING,
        "fp_qmv_fast<bfloat16_t, 32, 4, false>",
    ),
    Kernel(
        "affine_qmv_wide_float16_t_gs_64_b_4_nv_4_kl_8_batch_0",
        _AFFINE,
        "affine_qmv_wide<float16_t, 64, 4, 4, 8, false>",
    ),
    Kernel(
        "affine_gather_qmv_fast_float16_t_gs_64_b_4",
        _AFFINE,
        "affine_gather_qmv_fast<float16_t, 64, 4>",
    ),
    Kernel(
        "affine_qmm_t_float16_t_gs_64_b_4_alN_true_batch_0",
        _AFFINE,
        "affine_qmm_t<float16_t, 64, 4, true, false>",
    ),
    Kernel(
        "affine_gather_qmm_rhs_nt_float16_t_gs_64_b_4_bm_16_bn_32_bk_32_wm_1_wn_2",
        _AFFINE,
        "affine_gather_qmm_rhs<float16_t, 64, 4, 16, 32, 32, 1, 2, true>",
        ((200, True), (201, True), (202, True)),
    ),
    Kernel(
        "gemv_float16_bm4_bn1_sm1_sn32_tm4_tn4_nc0_axpby0",
        mlx_dense.GEMV,
        "gemv<float16_t, 4, 1, 1, 32, 4, 4, false, false>",
    ),
    Kernel(
        "gemv_wide_float16_nv4_kl32",
        mlx_dense.GEMV,
        "gemv_wide<float16_t, 4, 32>",
        ((0, False), (1, False)),
    ),
    Kernel(
        "sdpa_vector_2pass_1_float16_t_128_128",
        mlx_attention.HEADERS,
        "sdpa_vector_2pass_1<float16_t, 128, 128, 4>",
        (*((number, False) for number in range(20, 26)), (26, 128)),
    ),
)


class Loop(NamedTuple):
    """The main loop of a kernel: its instructions by class, on an M1."""

    classes: Counter

    @property
    def slots_per_mac(self) -> float:
        return sum(COSTS[name].slots * count for name, count in self.classes.items()) / macs(self.classes)

    def groups(self) -> dict[str, float]:
        """Instructions for each multiply-add, by group of classes."""
        of_all = macs(self.classes)
        return {
            group: sum(self.classes[c] for c in names.split()) / of_all for group, names in GROUPS.items()
        }


def wheel() -> Path:
    """MLX's compiled kernels for macOS, downloaded once."""
    return macos.unpacked(macos.METAL_CPP, r"mlx/lib/mlx\.metallib$", "-metallib") / "mlx/lib/mlx.metallib"


def compiled(library: Path) -> dict[str, str]:
    """{name: AIR} of the kernels."""
    names = "|".join(kernel.name for kernel in KERNELS)
    return metallib.assembly(metallib.kernels(library, f"^({names})$"))


def apples(kernel: Kernel, air: dict[str, str]) -> Loop:
    """The main loop in AIR."""
    flow = flow_of(air[kernel.name], kernel.name, dict(kernel.constants))
    return Loop(main_loop(flow.function, block_classes(flow, AirLowering(flow, native=False))))


def ours(kernel: Kernel) -> Loop:
    """The main loop in our IR."""
    library = mlx.library(kernel.headers, kernel.template, kernel.constants)
    flow = model_of(library.kernel("kernel")).flow
    return Loop(main_loop(flow.function, block_classes(flow, Lowering(flow, native=False))))


def table() -> Iterator[str]:
    """The lines of a table in Markdown."""
    yield "| kernel of MLX, its main loop | slots/MAC in AIR | in our IR | ratio | instructions that differ |"
    yield "| --- | ---: | ---: | ---: | --- |"
    air = compiled(wheel())
    for kernel in KERNELS:
        theirs, own = apples(kernel, air), ours(kernel)
        slots, own_slots = theirs.slots_per_mac, own.slots_per_mac
        of_own = own.groups()
        differ = ", ".join(
            f"{group} {count:.2f} / {of_own[group]:.2f}"
            for group, count in theirs.groups().items()
            if abs(count - of_own[group]) > 0.005
        )
        yield f"| {kernel.template} | {slots:.2f} | {own_slots:.2f} | {own_slots / slots:.2f} | {differ} |"
