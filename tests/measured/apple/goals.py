"""What Qwen3-30B-A3B takes in 4 bit: a token, several sequences, and a long prompt."""

from collections.abc import Iterator

import torch
from simulator.apple.facts import START_US, Gpu
from simulator.apple.recorder import Recorder, measure

from ..cases import mlx_attention
from ..cases.attention import Attention
from . import mlx
from .cases import Row, Shape, mlx_peers, mlx_rows, ours
from .tokens import TOKENS

LAYERS, HEADS, KEY_HEADS, WIDTH = 48, 32, 4, 128
EXPERTS = Shape(128, 8, 2048, 768)
# q, k and v together, and the output
LINEARS = [
    Shape(1, 1, *sizes, alone=True) for sizes in ((2048, (HEADS + 2 * KEY_HEADS) * WIDTH), (4096, 2048))
]
PROMPT = 8192
KEYS, SEQUENCES = 1_000, 8


def _attention(tokens: int) -> list[Row]:
    q, k, v = (
        torch.empty(1, heads, tokens, WIDTH, dtype=torch.bfloat16, device="mps")
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    )
    found = measure(lambda: torch.ops.moe_mps.cached_attention(q, k, v, scale=WIDTH**-0.5))
    return [Row("attention", one) for one in found]


def _attention_of_mlx(tokens: int) -> list[Row]:
    launch = mlx_attention.steel_attention(
        Attention(HEADS, KEY_HEADS, tokens, tokens, WIDTH, WIDTH, dtype="bf16")
    )
    heads = {"q": HEADS, "k": KEY_HEADS, "v": KEY_HEADS, "out": HEADS}
    arrays = {name: mlx.array("bf16", count, tokens, WIDTH) for name, count in heads.items()}
    return [Row("attention", mlx.run(launch, arrays, Recorder()))]


def prompt(tokens: int, gpu: Gpu, of_mlx: bool = False) -> dict[str, float]:
    """{part of a layer: seconds}, without norms and routers, nor what MLX sorts and activates."""
    parts = {"experts": [EXPERTS], "linear layers": LINEARS}

    def rows(shape: Shape) -> list[Row]:
        if of_mlx:
            return mlx_rows(mlx_peers(shape, "int4", "bf16", tokens, gpu))
        return ours(shape, "int4", "bf16", tokens)

    found = {name: [row for shape in shapes for row in rows(shape)] for name, shapes in parts.items()}
    found["attention"] = (_attention_of_mlx if of_mlx else _attention)(tokens)
    return {
        name: LAYERS * sum(row.repeats * row.measurement.bounds(gpu).predicted_us for row in of) / 1e6
        for name, of in found.items()
    }


def _cell(parts: dict[str, float]) -> str:
    return f"{sum(parts.values()):.1f} s: " + ", ".join(f"{name} {each:.2f}" for name, each in parts.items())


def table(gpus: list[Gpu], tokens: int = PROMPT, of_mlx: bool = False) -> Iterator[str]:
    """The lines of a table in Markdown, with the prompt of MLX's kernels if it is asked for."""
    token = TOKENS[0]
    head = f"| chip | a token after {KEYS:,} keys | {SEQUENCES} sequences | a prompt of {tokens:,} |"
    yield head + " by MLX |" * of_mlx
    yield "|---|---:|---:|---|" + "---|" * of_mlx
    for gpu in gpus:
        torch.ops.moe_mps._plan_for(gpu.cores)
        try:
            parts = prompt(tokens, gpu)
        finally:
            torch.ops.moe_mps._plan_for(0)
        step = token.verifying(SEQUENCES)
        speed, most = (SEQUENCES * 1e3 / ms for ms in (step.ms(gpu, START_US[0], 1.0), step.bytes_ms(gpu)))
        yield (
            f"| {gpu.name} | {token.behind(KEYS).ms(gpu, START_US[0], 1.0):.2f} ms "
            f"| {speed:.0f} tokens/s of {most:.0f} by bytes | {_cell(parts)} |"
        ) + (f" {_cell(prompt(tokens, gpu, of_mlx=True))} |" if of_mlx else "")
