"""What quantising a whole model by importance takes on a GPU, beside reading its weights from a disk."""

from collections.abc import Iterator

import torch
from simulator.apple.count import Limit
from simulator.apple.facts import Gpu
from simulator.apple.recorder import measure

WEIGHTS = 30e9
DISK_BYTES_PER_S = 5e9  # of a Mac's own
FORMATS = ("affine4_64", "affine8_64", "mxfp4", "nvfp4")
_SHAPE = 1, 512, 2048
_LIMIT = Limit(groups=16, slots=5e6)


def seconds(to: str, gpu: Gpu) -> tuple[float, float]:
    """Of WEIGHTS bfloat16 numbers: issuing instructions; and memory, with what is copied in and out."""
    weight = torch.randn(_SHAPE, dtype=torch.bfloat16).to("mps")
    importance = torch.rand(1, _SHAPE[-1]).to("mps")
    operator, results = torch.ops.moe_mps.quantize_by_importance, []
    (measured,) = measure(lambda: results.extend(operator(weight, importance, to)), {}, _LIMIT)
    packed, scales, biases, _ = results
    written = packed.nbytes + scales.nbytes + biases.nbytes
    copies = 2 * (weight.nbytes + written)  # read once, written once
    share = WEIGHTS / weight.numel() / 1e6
    return measured.bounds(gpu).issue * share, (measured.dram_bytes + copies) / gpu.dram_bytes_per_us * share


def table(gpus: list[Gpu]) -> Iterator[str]:
    """The lines of a table in Markdown."""
    reading = 2 * WEIGHTS / DISK_BYTES_PER_S
    yield f"| {WEIGHTS / 1e9:.0f} billion weights to | chip | instructions, s | memory, s | reading them, s |"
    yield "| --- | --- | ---: | ---: | ---: |"
    for to in FORMATS:
        for gpu in gpus:
            issue, memory = seconds(to, gpu)
            yield f"| {to} | {gpu.name} | {issue:.1f} | {memory:.1f} | {reading:.0f} |"
