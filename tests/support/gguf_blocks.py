"""Random blocks of every type of ggml, by the package `gguf`."""

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from support.oracles_experts import GGML

# Where the halves of a block are: of types that have a format, and of others.
HALVES = {name: kind.halves for name, kind in GGML.items()} | {"mxfp4": (), "nvfp4": (), "tq1_0": (52,)}
OTHERS = {"q8_k": (0,), "q8_1": (0, 2)}  # have no format


# Values and bytes of a block, by name: those of the package, and as llama.cpp's source has them.
SIZES = {kind.name.lower(): sizes for kind, sizes in GGML_QUANT_SIZES.items()} | {"q2_0": (64, 18)}


def type_of(name: str) -> GGMLQuantizationType:
    return GGMLQuantizationType[name.upper()]


def values_of(blocks: np.ndarray, name: str) -> np.ndarray:
    """float32 [R, C] of blocks [R, bytes]: by the package, or for what it does not know by the definition."""
    if name not in ("q1_0", "q2_0"):
        return dequantize(blocks, type_of(name))
    bits = int(name[1])
    parts = blocks.reshape(-1, SIZES[name][1])
    halves = parts[:, :2].copy().view(np.float16).astype(np.float32)
    digits = np.unpackbits(parts[:, 2:], axis=1, bitorder="little").reshape(len(parts), -1, bits)
    codes = (digits << np.arange(bits)).sum(-1).astype(np.float32)
    return (halves * (2 * codes - 1 if bits == 1 else codes - 1)).reshape(len(blocks), -1)


def random_blocks(name: str, shape: tuple[int, ...], seed: int = 0, scale: float = 0.02) -> np.ndarray:
    """The bytes [..., R, bytes of a row] of values [..., R, C]: any bits, and finite halves of both signs."""
    values, size = SIZES[name]
    *rows, columns = shape
    count = int(np.prod(rows)) * columns // values
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (count, size), dtype=np.uint8)
    for number in range(max(1, len((HALVES | OTHERS)[name]))):
        set_half(blocks, name, number, (generator.standard_normal(count) * scale).astype(np.float16))
    if name == "mxfp4":
        blocks[:, 0] = generator.integers(115, 121, count)
    if name == "nvfp4":
        blocks[:, :4] = generator.integers(1, 16, (count, 4))
    return blocks.reshape(*rows, columns // values * size)


def set_half(blocks: np.ndarray, name: str, number: int, halves: np.ndarray) -> None:
    """Writes one of the halves of blocks [n, bytes], which of those that the type has; types without stay."""
    if name == "iq1_m":  # its bits are above four other numbers
        bits = halves.view(np.uint16)[:, None] >> np.arange(0, 16, 4)
        blocks[:, 49:56:2] = blocks[:, 49:56:2] & 15 | (bits & 15) << 4
    for first in (HALVES | OTHERS)[name][number : number + 1]:
        blocks[:, first : first + 2] = halves[:, None].view(np.uint8)
