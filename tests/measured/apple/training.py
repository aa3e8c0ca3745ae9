"""Steps of fine-tuning by LoRA: what products with frozen 4-bit matrices take, beside MLX's kernels."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from simulator.apple.count import Limit
from simulator.apple.facts import GPUS, Gpu
from simulator.apple.model import Measurement, Work
from simulator.apple.recorder import Recorder, measure

from ..cases import mlx as launches
from ..cases import mlx_quantized
from ..cases.mlx_launch import Launch, Matrices
from . import mlx
from .cases import FORMATS, Shape, routing

FORMAT, DTYPE = "int4", "bf16"
TOKENS = (512, 2048)
_LIMIT = Limit(groups=16, slots=5e6)
_LINEAR = 4096, 4096  # a matrix alone that stands for all


@dataclass(frozen=True)
class Model:
    """Frozen matrices by their multiply-adds for a token; those of the head are outside of checkpoints."""

    name: str
    linears: int
    head: int
    experts: tuple[int, int] = (0, 0)  # of gate and up, and of down


# Layers, widths and vocabulary as in their configs: q, k, v, o; gate and up, down; the head.
_QWEN3 = 48 * 2048 * (4096 + 2 * 512 + 4096)
_LLAMA = 32 * 4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336)
MODELS = (
    Model("Qwen3-30B-A3B", _QWEN3, 151936 * 2048, (48 * 8 * 2 * 768 * 2048, 48 * 8 * 2048 * 768)),
    Model("Llama 3.1 8B", _LLAMA, 128256 * 4096),
)
EXPERTS = {"gate+up": Shape(128, 8, 2048, 1536), "down": Shape(128, 8, 768, 2048)}


@functools.cache
def ours(rows: int, columns: int, experts: int, slots: int, tokens: int, backward: bool) -> Measurement:
    """The product, or the transposed one, of `tokens` tokens; with experts of each of their slots."""
    stack = (experts, rows) if experts else (rows,)
    words = torch.zeros(*stack, columns // 8, dtype=torch.int32, device="mps")
    scales = torch.ones(*stack, columns // 64, dtype=torch.bfloat16, device="mps")
    shape = (tokens, slots) if experts else (tokens,)
    x = torch.ones(*shape, rows if backward else columns, dtype=torch.bfloat16, device="mps")
    work = {words: Work("product", tokens * max(1, slots) * rows * columns)}
    ops, name = torch.ops.moe_mps, FORMATS[FORMAT].name
    if experts:
        ids = torch.from_numpy(routing(Shape(experts, slots, columns, rows), tokens)).to("mps")
        operator = ops._expert_qmm_transposed if backward else ops.expert_qmm
        call = functools.partial(operator, x, words, scales, scales, ids, name)
    elif backward:
        call = functools.partial(ops._linear_quantized_transposed, x, words, scales, scales, name)
    else:
        call = functools.partial(ops.linear_quantized, x, words, scales, scales, None, name)
    return next(m for m in measure(call, work, _LIMIT) if m.work)


@functools.cache
def theirs(rows: int, columns: int, experts: int, slots: int, tokens: int, backward: bool) -> Measurement:
    m, pairs = Matrices(FORMATS[FORMAT], DTYPE, rows, columns, max(1, experts)), tokens * max(1, slots)
    lists = {}
    if experts:
        launch = mlx_quantized.gather_qmm_rhs(m, pairs, backward=backward)
        ids = routing(Shape(experts, slots, columns, rows), tokens)
        counts = np.bincount(ids.reshape(-1), minlength=experts)
        lists["offsets"] = (np.cumsum(counts) - counts).astype(np.int32)
    else:
        launch = mlx_quantized.qmm_n(m, tokens) if backward else launches.linear(GPUS["M1 Max"], m, tokens)
    recorder = Recorder(limit=_LIMIT)
    _run(m, launch, pairs, backward, lists, recorder)
    measurement = recorder.measurements[-1]
    measurement.work = Work("product", pairs * rows * columns)
    return measurement


def _run(
    m: Matrices, launch: Launch, pairs: int, backward: bool, lists: dict[str, np.ndarray], recorder: Recorder
) -> None:
    width, out = (m.rows, m.inputs) if backward else (m.inputs, m.rows)
    arrays = {"x": mlx.array(m.dtype, pairs, width), "out": mlx.array(m.dtype, pairs, out)}
    mlx.run(launch, {**mlx.weights(m), **arrays, **lists}, recorder)


def tokens_per_second(model: Model, tokens: int, gpu: Gpu, side) -> float:
    """With checkpoints: each product of a layer twice, its transposed one once; those of the head once."""

    def us_of(macs: int, rows: int, columns: int, experts: int, slots: int, forwards: int) -> float:
        times = {False: forwards, True: 1}
        total = 0.0
        for backward, count in times.items():
            m = side(rows, columns, experts, slots, tokens, backward)
            total += count * m.bounds(gpu).predicted_us * macs * tokens / m.work.macs
        return total

    us = us_of(model.linears, *_LINEAR, 0, 0, 2) + us_of(model.head, *_LINEAR, 0, 0, 1)
    for macs, shape in zip(model.experts, EXPERTS.values(), strict=True):
        if macs:
            us += us_of(macs, shape.intermediate, shape.hidden, shape.experts, shape.slots, 2)
    return tokens / us * 1e6


def table(gpus: list[Gpu]) -> Iterator[str]:
    """The lines of a table in Markdown."""
    yield "| model | chip | tokens a step | tokens/s at most, ours | MLX's kernels |"
    yield "| --- | --- | ---: | ---: | ---: |"
    for model in MODELS:
        for gpu in gpus:
            for tokens in TOKENS:
                both = (tokens_per_second(model, tokens, gpu, side) for side in (ours, theirs))
                yield f"| {model.name} | {gpu.name} | {tokens} | {' | '.join(f'{n:.0f}' for n in both)} |"
