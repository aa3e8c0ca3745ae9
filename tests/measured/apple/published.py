"""Published measurements of MLX's kernels, and what the model predicts for them: how we know that it is
right.

The figures are of the issues and pull requests named, by their authors' clocks. They are of kernels of about
100 us and more, or ratios of these: shorter ones are mostly the start and end of a dispatch.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from simulator.apple.count import Limit
from simulator.apple.facts import GPUS, Gpu
from simulator.apple.model import Measurement, Work
from simulator.apple.recorder import Recorder

from ..cases import mlx_dense
from ..cases.formats import DENSE, Format
from ..cases.mlx_launch import Launch, Matrices
from ..cases.mlx_quantized import gather_qmm_rhs, qmm, qmv, qmv_wide
from . import cases, mlx

BAND = (0.75, 1.25)


@dataclass(frozen=True)
class Published:
    """`measured` in `unit` on a GPU; `predict` gives the model's value for it.

    `band`: where predicted / measured must lie, for `reason` if not BAND. Of throughput it is measured /
    predicted, so that above 1 the model is always the slower one.
    """

    what: str
    gpu: str
    source: str
    unit: str
    measured: float
    predict: Callable[[Gpu], float]
    band: tuple[float, float] = BAND
    reason: str = ""

    def ratio(self) -> float:
        predicted = self.predict(GPUS[self.gpu])
        return self.measured / predicted if self.unit == "TFLOPS" else predicted / self.measured


def _measured(m: Matrices, launch: Launch, count: int, dram_bytes: int, **lists) -> Measurement:
    work = Work("", count * m.rows * m.inputs, dram_bytes)
    recorder = Recorder(limit=Limit(groups=32, slots=5e6))
    return mlx.measure(m, launch, count, count, work, recorder, lists)


@functools.cache
def one_matrix(
    kernel: Callable[..., Launch], vectors: int, inputs: int, rows: int, format_: Format, dtype: str = "bf16"
) -> Measurement:
    """A quantised matrix [rows, inputs] and `vectors` rows of x, by one of MLX's kernels."""
    m = Matrices(format_, dtype, rows, inputs)
    bytes_ = rows * inputs * format_.bits // 8 + rows * inputs // format_.group * 4
    return _measured(m, kernel(m, vectors), vectors, bytes_)


def gathered(
    rows_per_expert: int, inputs: int, rows: int, format_: Format, dtype: str, **options
) -> Measurement:
    """gather_qmm_rhs with as many rows for each of eight experts."""
    m = Matrices(format_, dtype, rows, inputs, experts=8)
    pairs = m.experts * rows_per_expert
    offsets = (np.arange(m.experts) * rows_per_expert).astype(np.int32)
    return _measured(m, gather_qmm_rhs(m, pairs, **options), pairs, 0, offsets=offsets)


def gemv_wide(vectors: int, inputs: int, rows: int) -> Measurement:
    m = Matrices(DENSE, "f16", rows, inputs)
    return _measured(m, mlx_dense.gemv_wide(m, vectors), vectors, rows * inputs * 2)


def us(measurement: Measurement, gpu: Gpu) -> float:
    return measurement.bounds(gpu).predicted_us


def tflops(measurement: Measurement, gpu: Gpu) -> float:
    return 2 * measurement.work.macs / us(measurement, gpu) / 1e6


def _cold_vectors() -> Iterator[Published]:
    source = "mlx #3863, #3852"
    for bits, vectors, measured in (
        *((4, 1, 129), (4, 2, 129), (4, 3, 132), (4, 4, 165), (4, 6, 263), (4, 8, 323), (4, 9, 405)),
        *((2, 1, 72), (2, 3, 129)),
    ):
        kernel, format_ = qmv if vectors == 1 else qmv_wide, Format(bits, 128, "affine")
        yield Published(
            f"{kernel.__name__} {bits} bit, {vectors} rows, 5120 -> 17408",
            "M3 Max",
            source,
            "us",
            measured,
            lambda gpu, k=kernel, v=vectors, f=format_: us(one_matrix(k, v, 5120, 17408, f), gpu),
        )


def _slopes() -> Iterator[Published]:
    format_ = Format(4, 64, "affine")
    yield Published(
        "qmv 4 bit, 5120 -> 17408, another row of x",
        "M3 Ultra",
        "mlx #4265",
        "us",
        (252 - 76) / 6,
        lambda gpu: one_matrix(qmv, 8, 5120, 17408, format_).bounds(gpu).issue / 8,
    )
    yield Published(
        "qmv 4 bit, 7.11e9 weights of Mistral 7B, another row of x",
        "M2 Ultra",
        "mlx #2031",
        "ms",
        (25.431 - 19.4) / 2,
        lambda gpu: (
            one_matrix(qmv, 8, 4096, 4096, format_, "f16").bounds(gpu).issue / (8 * 4096**2) * 7.11e9 / 1e3
        ),
    )


_SMALL = "fixed costs hide in the time of one row, which the model has none of (40 to 121 us)"


def _relative_to_one() -> Iterator[Published]:
    format_ = Format(4, 64, "affine")
    for inputs, rows, measured in (
        (4096, 24576, {2: 1.03, 3: 1.22, 4: 1.47, 6: 2.07, 8: 2.69}),
        (12288, 4096, {2: 1.18, 3: 1.40, 4: 1.52, 6: 2.05, 8: 2.46}),
        (4096, 4096, {2: 1.20, 3: 1.35, 4: 1.57, 6: 1.99, 8: 2.01}),
    ):
        for vectors, value in measured.items():
            outside = rows == inputs == 4096 and vectors == 8
            yield Published(
                f"qmv_wide 4 bit, {vectors} rows over 1, {inputs} -> {rows}",
                "M4 Pro",
                "mlx #3839",
                "times",
                value,
                lambda gpu, v=vectors, i=inputs, r=rows: (
                    us(one_matrix(qmv_wide, v, i, r, format_), gpu)
                    / us(one_matrix(qmv, 1, i, r, format_), gpu)
                ),
                (1.25, 1.55) if outside else BAND,
                _SMALL if outside else "",
            )


def _wide_over_single() -> Iterator[Published]:
    format_ = Format(4, 64, "affine")
    for gpu, vectors, measured in (
        *(("M3 Ultra", 2, 1.1), ("M3 Ultra", 4, 1.4), ("M4 Pro", 2, 1.2), ("M5 Max", 2, 1.3)),
        *(("M2 Pro", 2, 1.0), ("M2 Pro", 4, 1.0)),
    ):
        no_gain = gpu == "M2 Pro"
        yield Published(
            f"qmv over qmv_wide 4 bit, {vectors} rows, 3840 -> 15360",
            gpu,
            "mlx #3764",
            "times",
            measured,
            lambda gpu, v=vectors: (
                us(one_matrix(qmv, v, 3840, 15360, format_), gpu)
                / us(one_matrix(qmv_wide, v, 3840, 15360, format_), gpu)
            ),
            reason="no gain, without a figure: MLX keeps it off there" if no_gain else "",
        )


def _products() -> Iterator[Published]:
    for rows_block, vectors, microseconds in ((32, 32, 513), (32, 16, 509), (16, 16, 306)):
        yield Published(
            f"qmm_t of {rows_block} rows, 4 bit, {vectors} rows, 5120 -> 17408",
            "M3 Max",
            "mlx #3863",
            "TFLOPS",
            2 * vectors * 17408 * 5120 / microseconds / 1e6,
            lambda gpu, v=vectors, b=rows_block: tflops(
                one_matrix(functools.partial(qmm, rows_block=b), v, 5120, 17408, Format(4, 128, "affine")),
                gpu,
            ),
        )
    yield Published(
        "qmm_t 4 bit, many rows",
        "M3 Ultra",
        "mlx #4246",
        "TFLOPS",
        20.5,
        lambda gpu: tflops(one_matrix(qmm, 512, 4096, 4096, Format(4, 64, "affine")), gpu),
    )
    yield Published(
        "gather_qmm_rhs 4 bit, 43 rows an expert",
        "M3 Ultra",
        "mlx #4246",
        "TFLOPS",
        14.2,
        lambda gpu: tflops(gathered(43, 2048, 2048, Format(4, 64, "affine"), "bf16"), gpu),
    )


def _tiles() -> Iterator[Published]:
    format_, larger = Format(4, 128, "affine"), (32, 64, 32, 2, 2)
    for rows, measured in ((32, 1.136), (64, 1.20), (128, 1.20)):
        yield Published(
            f"gather_qmm_rhs tiles of 32 x 64 over 16 x 32, {rows} rows an expert",
            "M3 Max",
            "mlx #3918",
            "times",
            measured,
            lambda gpu, n=rows: (
                gathered(n, 2048, 512, format_, "f16").slots_per_mac(gpu)
                / gathered(n, 2048, 512, format_, "f16", tile=larger).slots_per_mac(gpu)
            ),
        )


def _dense() -> Iterator[Published]:
    for vectors, measured in ((2, 768), (4, 917), (8, 1181)):
        yield Published(
            f"gemv_wide f16, {vectors} rows, 2048 -> 32000",
            "M1 Pro 14",
            "mlx #3967",
            "us",
            measured,
            lambda gpu, v=vectors: us(gemv_wide(v, 2048, 32000), gpu),
        )


@dataclass(frozen=True)
class Direct:
    """A gemm whose simdgroups decode weights into fragments, over one that stages them: instructions, and the
    least and the most of its time."""

    instructions: float
    least: float
    most: float


def direct_over_staged(vectors: int, inputs: int, rows: int, gpu: Gpu) -> Direct:
    """Of our kernel with K split and MLX's, int4 in groups of 64, float16."""
    shape = cases.Shape(1, 1, inputs, rows, alone=True)
    (own,) = (r.measurement for r in cases.ours(shape, "int4", "f16", vectors) if r.measurement.work)
    assert "_split_" in own.kernel
    staged = one_matrix(qmm, vectors, inputs, rows, Format(4, 64, "affine"), "f16")
    of_own, of_staged = own.range_us(gpu), staged.range_us(gpu)
    return Direct(
        own.slots_per_mac(gpu) / staged.slots_per_mac(gpu),
        of_own[0] / of_staged[1],
        of_own[1] / of_staged[0],
    )


def published() -> list[Published]:
    groups = (_cold_vectors, _slopes, _relative_to_one, _wide_over_single, _products, _tiles, _dense)
    return [entry for group in groups for entry in group()]


def report() -> str:
    """One line for each measurement: what the model says of it."""
    lines = [f"{'ratio':>5} {'band':>11}  above 1 the model is slower than was measured"]
    for p in published():
        value = f"{p.measured:.4g} {p.unit} measured on {p.gpu} ({p.source})"
        reason = f"; {p.reason}" if p.reason else ""
        lines.append(f"{p.ratio():5.2f} {p.band[0]:.2f} to {p.band[1]:.2f}  {p.what}: {value}{reason}")
    return "\n".join(lines)
