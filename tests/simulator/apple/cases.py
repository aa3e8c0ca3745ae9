"""Experts' matmuls of a shape and format: the package's operators, and what MLX does for the same."""

import functools
from dataclasses import dataclass

import numpy as np
import torch

from . import mlx, mlx_dense
from .count import Limit
from .facts import GPUS, Gpu
from .model import Measurement, Work
from .recorder import DEFAULT_LIMIT, Recorder, measure

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
FORMATS = {
    **{f"int{bits}": mlx.Format(bits, 64, "affine") for bits in (2, 3, 4, 5, 6, 8)},
    "mxfp4": mlx.Format(4, 32, "mxfp4"),
    "mxfp8": mlx.Format(8, 32, "mxfp8"),
    "nvfp4": mlx.Format(4, 16, "nvfp4"),
}


@dataclass(frozen=True)
class Shape:
    """`slots` of `experts` a token, hidden -> 2 x intermediate -> hidden; or one matrix alone."""

    experts: int
    slots: int
    hidden: int
    intermediate: int
    alone: bool = False  # [intermediate, hidden] without an activation

    def __str__(self) -> str:
        if self.alone:
            return f"one matrix, {self.hidden} -> {self.intermediate}"
        sizes = f"{self.hidden} -> 2 x {self.intermediate} -> {self.hidden}"
        return f"{self.experts} experts, {self.slots} a token, {sizes}"


@dataclass(frozen=True)
class Row:
    """One dispatch of a table; `repeats` of it are needed."""

    matmul: str
    measurement: Measurement
    repeats: int = 1


def routing(shape: Shape, tokens: int, seed: int = 1) -> np.ndarray:
    """[tokens, slots] ids, each expert as likely as any other."""
    random = np.random.RandomState(seed)
    return np.array(
        [random.choice(shape.experts, shape.slots, replace=False) for _ in range(tokens)], np.int32
    )


def matrix_bytes(format_name: str, rows: int, inputs: int) -> int:
    """Of one expert's matrix, scales and offsets included (of 16 bits)."""
    if format_name not in FORMATS:
        return rows * inputs * DTYPES[format_name].itemsize
    f = FORMATS[format_name]
    return rows * inputs * f.bits // 8 + rows * inputs // f.group * (4 if f.mode == "affine" else 1)


def _work(
    label: str, format_name: str, dtype: str, ids: np.ndarray, rows: int, inputs: int, outputs: int
) -> Work:
    used = len(np.unique(ids))
    activations = (inputs + outputs) * ids.size * DTYPES[dtype].itemsize
    return Work(label, ids.size * rows * inputs, used * matrix_bytes(format_name, rows, inputs) + activations)


# Ours ------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=2)
def _weights(format_name: str, dtype: str, experts: int, rows: int, inputs: int) -> tuple:
    """Of any values: counts do not depend on them, and the simulator fills memory that it hands out."""
    if format_name not in FORMATS:
        return (torch.empty(experts, rows, inputs, dtype=DTYPES[format_name], device="mps"),)
    f = FORMATS[format_name]
    packed = torch.empty(experts, rows, inputs * f.bits // 32, dtype=torch.int32, device="mps")
    groups = (experts, rows, inputs // f.group)
    if f.mode != "affine":
        return packed, torch.empty(groups, dtype=torch.uint8, device="mps"), None
    return packed, *(torch.empty(groups, dtype=DTYPES[dtype], device="mps") for _ in range(2))


def _format_arguments(format_name: str) -> tuple:
    f = FORMATS.get(format_name)
    return (f.bits, f.group, f.mode) if f else ()


def ours(shape: Shape, format_name: str, dtype: str, tokens: int, limit: Limit = DEFAULT_LIMIT) -> list[Row]:
    """What `moe_experts*`, or for one matrix `linear_quantized` and `expert_mm`, of the package dispatch."""
    ids = routing(shape, tokens)
    x = torch.randn(tokens, shape.hidden).to(DTYPES[dtype]).to("mps")
    placed = torch.from_numpy(ids).to("mps")
    call = _alone if shape.alone else _experts
    measurements = measure(*call(shape, format_name, dtype, x, placed, ids), limit)
    return [Row(m.work.label if m.work else "other", m) for m in measurements]


def _experts(shape: Shape, format_name: str, dtype: str, x, placed, ids: np.ndarray) -> tuple:
    """The call of an operator, and the work of its dispatches."""
    h, i = shape.hidden, shape.intermediate
    first = _weights(format_name, dtype, shape.experts, 2 * i, h)
    second = _weights(format_name, dtype, shape.experts, h, i)
    weights = torch.rand(ids.shape).to("mps")
    work = {
        first[0]: _work("gate+up", format_name, dtype, ids, 2 * i, h, i),
        second[0]: _work("down", format_name, dtype, ids, h, i, h),
    }
    format_ = _format_arguments(format_name)
    operator = torch.ops.moe_mps.moe_experts_quantized if format_ else torch.ops.moe_mps.moe_experts
    return functools.partial(operator, x, *first, *second, placed, weights, *format_), work


def _alone(shape: Shape, format_name: str, dtype: str, x, placed, ids: np.ndarray) -> tuple:
    """The call of an operator, and the work of its dispatches."""
    weight = _weights(format_name, dtype, 1, shape.intermediate, shape.hidden)
    work = {
        weight[0]: _work(
            "matrix", format_name, dtype, ids, shape.intermediate, shape.hidden, shape.intermediate
        )
    }
    format_ = _format_arguments(format_name)
    if not format_:
        return functools.partial(torch.ops.moe_mps.expert_mm, x, *weight, placed), work
    matrix = [None if part is None else part[0] for part in weight]
    return functools.partial(torch.ops.moe_mps.linear_quantized, x, *matrix, None, *format_), work


# MLX -------------------------------------------------------------------------------------------------


def zeros(type_: type, *shape: int) -> np.ndarray:
    """On a page's boundary, as Metal's buffers are: sectors are counted by addresses."""
    size, page = int(np.prod(shape)) * np.dtype(type_).itemsize, 4096
    memory = np.zeros(size + page, np.uint8)
    start = -memory.ctypes.data % page
    return memory[start : start + size].view(type_).reshape(shape)


def array(dtype: str, *shape: int) -> np.ndarray:
    return zeros(np.float32 if dtype == "f32" else np.uint16, *shape)


@functools.lru_cache(maxsize=2)
def matrices(f: mlx.Format, dtype: str, experts: int, rows: int, inputs: int) -> mlx.Matrices:
    weights = {"w": zeros(np.uint32, experts, rows, inputs * f.bits // 32)}
    groups = (experts, rows, inputs // f.group)
    if f.mode != "affine":
        weights["scales"] = zeros(np.uint8, *groups)
    else:
        weights["scales"], weights["biases"] = array(dtype, *groups), array(dtype, *groups)
    return mlx.Matrices(weights, f, experts, rows, inputs)


@dataclass(frozen=True)
class Peer:
    """A launch of MLX's, needed `repeats` times."""

    launch: mlx.Launch
    work: Work
    repeats: int = 1


def mlx_peers(shape: Shape, format_name: str, dtype: str, tokens: int, gpu: Gpu) -> list[Peer]:
    """What mlx_lm's SwitchGLU, or for one matrix a QuantizedLinear, multiplies: no sorting, no activation."""
    ids, h, i = routing(shape, tokens), shape.hidden, shape.intermediate
    if shape.alone:
        launch = _one_matrix(gpu, format_name, dtype, array(dtype, tokens, h), array(dtype, tokens, i))
        return [Peer(launch, _work("matrix", format_name, dtype, ids, i, h, i))]
    peers = []
    for label, n, k, repeats in (("gate+up", i, h, 2), ("down", h, i, 1)):
        launch = _gathered(shape, format_name, dtype, ids, n, k, label == "down")
        peers.append(Peer(launch, _work(label, format_name, dtype, ids, n, k, n), repeats))
    return peers


def mlx_rows(peers: list[Peer]) -> list[Row]:
    recorder = Recorder()
    return [Row(p.work.label, mlx.measure(p.launch, p.work, recorder), p.repeats) for p in peers]


def _one_matrix(gpu: Gpu, format_name: str, dtype: str, x: np.ndarray, out: np.ndarray) -> mlx.Launch:
    rows, inputs = out.shape[1], x.shape[1]
    if format_name in FORMATS:
        matrix = matrices(FORMATS[format_name], dtype, 1, rows, inputs)
        return mlx.quantized_matmul(gpu, matrix, x, out, dtype)
    return mlx_dense.matmul(gpu, array(dtype, rows, inputs), x, out, dtype)


def _gathered(
    shape: Shape, format_name: str, dtype: str, ids: np.ndarray, rows: int, inputs: int, x_per_pair: bool
) -> mlx.Launch:
    out, (tokens, slots) = array(dtype, ids.size, rows), ids.shape
    quantised = format_name in FORMATS
    if quantised:
        weights = matrices(FORMATS[format_name], dtype, shape.experts, rows, inputs)
        is_sorted = mlx.is_sorted_product(ids.size, shape.experts)
    else:
        weights = array(dtype, shape.experts, rows, inputs)
        is_sorted = mlx_dense.is_sorted_product(ids.size)
    if is_sorted:
        counts = np.bincount(ids.reshape(-1), minlength=shape.experts)
        offsets = np.concatenate([[0], np.cumsum(counts)[:-1]])
        product = mlx.gather_qmm_rhs if quantised else mlx_dense.gather_mm_rhs
        return product(weights, array(dtype, ids.size, inputs), offsets, out, dtype)
    x_rows = np.arange(ids.size) if x_per_pair else np.repeat(np.arange(tokens), slots)
    x = array(dtype, ids.size if x_per_pair else tokens, inputs)
    product = mlx.gather_qmv if quantised else mlx_dense.gather_mv
    return product(weights, x, x_rows.reshape(ids.shape), ids, out, dtype)


DEFAULT_GPUS = tuple(GPUS[name] for name in ("M1", "M1 Max", "M4 Max"))
