"""What Qwen3-30B-A3B takes in 4 bit: a token, several sequences, and a long prompt."""

from collections.abc import Iterator

import torch
from simulator.apple.facts import START_US, Gpu
from simulator.apple.model import Measurement
from simulator.apple.recorder import measure

from .cases import Shape, ours
from .tokens import TOKENS

LAYERS, HEADS, KEY_HEADS, WIDTH = 48, 32, 4, 128
EXPERTS = Shape(128, 8, 2048, 768)
# q, k and v together, and the output
LINEARS = [
    Shape(1, 1, *sizes, alone=True) for sizes in ((2048, (HEADS + 2 * KEY_HEADS) * WIDTH), (4096, 2048))
]
PROMPT = 8192
KEYS, SEQUENCES = 1_000, 8


def _attention(tokens: int) -> list[Measurement]:
    q, k, v = (
        torch.empty(1, heads, tokens, WIDTH, dtype=torch.bfloat16, device="mps")
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    )
    return measure(lambda: torch.ops.moe_mps.attention(q, k, v, WIDTH**-0.5))


def prompt(tokens: int) -> dict[str, list[Measurement]]:
    """{part of a layer: its dispatches}, without norms and routers."""
    parts = {"experts": [EXPERTS], "linear layers": LINEARS}
    found = {
        name: [row.measurement for shape in shapes for row in ours(shape, "int4", "bf16", tokens)]
        for name, shapes in parts.items()
    }
    return found | {"attention": _attention(tokens)}


def table(gpus: list[Gpu], tokens: int = PROMPT) -> Iterator[str]:
    """The lines of a table in Markdown."""
    token = TOKENS[0]
    yield f"| chip | a token behind {KEYS:,} keys | {SEQUENCES} sequences | a prompt of {tokens:,} |"
    yield "| --- | ---: | ---: | --- |"
    for gpu in gpus:
        torch.ops.moe_mps._plan_for(gpu.cores)
        try:
            parts = prompt(tokens)
        finally:
            torch.ops.moe_mps._plan_for(0)
        seconds = {
            name: LAYERS * sum(one.bounds(gpu).predicted_us for one in of) / 1e6 for name, of in parts.items()
        }
        step = token.verifying(SEQUENCES)
        speed, most = (SEQUENCES * 1e3 / ms for ms in (step.ms(gpu, START_US[0], 1.0), step.bytes_ms(gpu)))
        whole = ", ".join(f"{name} {each:.2f}" for name, each in seconds.items())
        yield (
            f"| {gpu.name} | {token.behind(KEYS).ms(gpu, START_US[0], 1.0):.2f} ms "
            f"| {speed:.0f} tokens/s of {most:.0f} by bytes | {sum(seconds.values()):.1f} s: {whole} |"
        )
