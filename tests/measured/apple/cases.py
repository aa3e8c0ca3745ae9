"""Experts' matmuls of a shape and format: the package's operators, and what MLX does for the same."""

import functools
from dataclasses import dataclass

import numpy as np
import torch
from simulator.apple.count import Limit
from simulator.apple.facts import GPUS, Gpu
from simulator.apple.model import Measurement, Work
from simulator.apple.recorder import DEFAULT_LIMIT, Recorder, measure

from ..cases import formats
from ..cases import mlx as launches
from ..cases.experts import Case, Experts, Linear
from ..cases.formats import DENSE, DTYPES
from ..cases.mlx_launch import Launch, Matrices
from ..cases.values import Shapes
from . import mlx

FORMATS = {name: format_ for name, format_ in formats.FORMATS.items() if format_.bits}


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
    """The bytes of one expert's matrix, with scales and biases in 16 bits."""
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


def _case(shape: Shape, format_name: str, dtype: str, tokens: int, **kernels: bool) -> Case:
    name = format_name if format_name in FORMATS else "dense"
    if shape.alone:
        return Linear("", name, dtype, tokens, shape.hidden, shape.intermediate)
    sizes = (shape.experts, shape.slots, shape.hidden, shape.intermediate)
    return Experts("", name, dtype, tokens, *sizes, **kernels)


@functools.lru_cache(maxsize=2)
def _weights(*case) -> dict:
    """Weights without defined values: counts do not depend on them, and the simulator fills memory that it
    hands out."""
    return _case(*case, tokens=1).weights(Shapes("mps"))


def ours(
    shape: Shape,
    format_name: str,
    dtype: str,
    tokens: int,
    limit: Limit = DEFAULT_LIMIT,
    **kernels: bool,
) -> list[Row]:
    """What `_moe_experts*`, or for one matrix `linear_quantized` and `expert_mm`, of the package dispatch.

    `kernels`: of experts, `tensor_units` or `variants` in place of planned ones.
    """
    case, ids = _case(shape, format_name, dtype, tokens, **kernels), routing(shape, tokens)
    tensors = _weights(shape, format_name, dtype) | {
        "x": torch.randn(tokens, shape.hidden).to(DTYPES[dtype]).to("mps"),
        "ids": torch.from_numpy(ids).to("mps"),
        "weights": torch.rand(ids.shape).to("mps"),
    }
    h, i = shape.hidden, shape.intermediate
    if shape.alone:
        sizes = {"weight": ("matrix", i, h, i)}
    else:
        sizes = {"gate_up": ("gate+up", 2 * i, h, i), "down": ("down", h, i, h)}
    work = {}
    for name, (label, *of) in sizes.items():
        weight = tensors.get(name, tensors.get(f"{name}_packed"))
        work[weight] = _work(label, format_name, dtype, ids, *of)
    measurements = measure(functools.partial(case.call, tensors), work, limit)
    return [Row(m.work.label if m.work else "other", m) for m in measurements]


# MLX -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Peer:
    """A launch of MLX's, needed `repeats` times."""

    matrices: Matrices
    launch: Launch
    ids: np.ndarray
    x_per_pair: bool
    work: Work
    repeats: int = 1

    def measured(self, recorder: Recorder) -> Measurement:
        pairs, tokens = self.ids.size, len(self.ids)
        lists, x_rows = {}, pairs
        if "offsets" in self.launch.arguments:
            counts = np.bincount(self.ids.reshape(-1), minlength=self.matrices.experts)
            lists["offsets"] = np.cumsum([0, *counts[:-1]]).astype(np.int32)
        elif "rhs_indices" in self.launch.arguments or "mat_indices" in self.launch.arguments:
            rows = np.arange(pairs) if self.x_per_pair else np.arange(pairs) // self.ids.shape[1]
            lists = {"x_rows": rows.astype(np.uint32), "ids": self.ids.astype(np.uint32)}
            x_rows = pairs if self.x_per_pair else tokens
        return mlx.measure(self.matrices, self.launch, x_rows, pairs, self.work, recorder, lists)


def mlx_peers(shape: Shape, format_name: str, dtype: str, tokens: int, gpu: Gpu) -> list[Peer]:
    """What mlx_lm's SwitchGLU, or for one matrix a QuantizedLinear, multiplies: no sorting, no activation."""
    ids, h, i = routing(shape, tokens), shape.hidden, shape.intermediate
    format_ = FORMATS.get(format_name, DENSE)
    if shape.alone:
        m = Matrices(format_, dtype, i, h)
        work = _work("matrix", format_name, dtype, ids, i, h, i)
        return [Peer(m, launches.linear(gpu, m, tokens), ids, False, work)]
    peers = []
    for label, n, k, repeats in (("gate+up", i, h, 2), ("down", h, i, 1)):
        m, per_pair = Matrices(format_, dtype, n, k, shape.experts), label == "down"
        launch = launches.experts(m, tokens, shape.slots, ids.size if per_pair else tokens)
        work = _work(label, format_name, dtype, ids, n, k, n)
        peers.append(Peer(m, launch, ids, per_pair, work, repeats))
    return peers


def mlx_rows(peers: list[Peer]) -> list[Row]:
    recorder = Recorder()
    return [Row(p.work.label, p.measured(recorder), p.repeats) for p in peers]


DEFAULT_GPUS = tuple(GPUS[name] for name in ("M1", "M1 Max", "M4 Max"))
