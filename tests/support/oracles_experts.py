"""The experts in numpy and float64, and how far a right implementation may be from that.

An implementation rounds the result of each matmul and the activation to the dtype of x once or not at all,
and sums in float32. Such errors are independent of each other, so their standard deviation follows from the
oracle's own values; `Estimate` carries it along. A test allows DEVIATIONS of it: no room for a wrong
row, a lost term, or sums in 16 bit.
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from support.oracles import FORMATS, LARGEST, exact, sigmoid, spacing

DEVIATIONS = 5
erf = np.vectorize(math.erf, otypes=[np.float64])


class Estimate(NamedTuple):
    value: np.ndarray
    deviation: np.ndarray


def roundoff(dtype: torch.dtype) -> float:
    return 2.0 ** -FORMATS[dtype][0]


def rounded(value: np.ndarray, deviation: np.ndarray, dtype: torch.dtype) -> Estimate:
    """With a rounding of the value to the dtype. What overflows there may become anything."""
    overflows = abs(value) > 0.99 * FORMATS[dtype][2]
    return Estimate(value, np.where(overflows, LARGEST, deviation + roundoff(dtype) * abs(value)))


def multiply(x: Estimate, weight: np.ndarray, dtype: torch.dtype, rounded_weight: bool) -> Estimate:
    """rows [n, C] times weight [N, C]: float32 sums, one rounding of the result and perhaps of the weight."""
    spread = np.sqrt(x.value**2 @ (weight**2).T)
    sums = roundoff(torch.float32) * math.sqrt(weight.shape[1]) * spread
    value = x.value @ weight.T
    inherited = np.sqrt(x.deviation**2 @ (weight**2).T)
    weights = roundoff(dtype) * spread if rounded_weight else 0.0
    return rounded(value, np.sqrt(inherited**2 + sums**2 + weights**2), dtype)


def pointwise(x: np.ndarray, activation: str) -> np.ndarray:
    if activation == "silu":
        return x * sigmoid(x)
    if activation == "gelu":
        return 0.5 * x * (1 + erf(x / math.sqrt(2)))
    if activation == "gelu_tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    positive = np.maximum(x, 0.0)
    return positive if activation == "relu" else positive**2


def activate(rows: Estimate, options: dict, dtype: torch.dtype) -> Estimate:
    """[n, 2I] -> [n, I], or [n, I] -> [n, I] when not gated."""
    activation = options.get("activation", "silu")
    if not options.get("gated", True):
        gate, up = rows, Estimate(np.ones_like(rows.value), np.zeros_like(rows.value))
    elif options.get("interleaved", False):
        gate, up = (Estimate(*(part[:, i::2] for part in rows)) for i in range(2))
    else:
        half = rows.value.shape[1] // 2
        gate, up = (Estimate(*(part[:, i * half : (i + 1) * half] for part in rows)) for i in range(2))
    g, u = gate.value, up.value
    slope: Any = 1.2  # at most, of all activations but relu2
    if activation == "relu2":
        # (g + d)^2 - g^2 = (2 g + d) d, where d is up to DEVIATIONS of its deviation. At 0 only d is left.
        slope = 2 * np.maximum(g, 0.0) + DEVIATIONS * gate.deviation
    if activation in ("swiglu_oai", "silu_clamped"):
        limit = options.get("limit")
        limit = 7.0 if limit is None else limit
        g, u = np.minimum(g, limit), np.clip(u, -limit, limit)
    if activation == "silu_capped":
        limit = options["limit"]
        u, acted = np.clip(u, -limit, limit), np.minimum(pointwise(g, "silu"), limit)
    elif activation == "swiglu_oai":
        alpha = options.get("alpha")
        u, acted = u + 1, g * sigmoid((1.702 if alpha is None else alpha) * g)
    else:
        acted = pointwise(g, "silu" if activation == "silu_clamped" else activation)
    value = acted * u
    # exp and erf in float32 are right to a few units of the last place of the argument.
    error = (slope * (gate.deviation + 8 * roundoff(torch.float32) * abs(g)) * u) ** 2 + (
        acted * up.deviation
    ) ** 2
    return rounded(value, np.sqrt(error), dtype)


def pairs_by_expert(ids: Tensor, num_experts: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """(expert, tokens, slots) of the ids inside [0, E)."""
    table = ids.cpu().numpy()
    for expert in np.unique(table[(table >= 0) & (table < num_experts)]):
        yield expert, *np.nonzero(table == expert)


def expert_mm(x, weight, ids, bias=None, *, rounded_weight=False, dtype=None) -> Estimate:
    """[T, K, N] in `dtype`, or x's; x is a tensor, weight [E, N, C] an array, whatever it was packed as."""
    rows, dtype = exact(x), dtype or x.dtype
    value = np.zeros((*ids.shape, weight.shape[1]))
    deviation = np.zeros_like(value)
    for e, t, k in pairs_by_expert(ids, len(weight)):
        x_rows = rows[t, k] if rows.ndim == 3 else rows[t]
        out = multiply(Estimate(x_rows, np.zeros_like(x_rows)), weight[e], dtype, rounded_weight)
        value[t, k], deviation[t, k] = out
        if bias is not None:
            value[t, k] += exact(bias)[e]
            deviation[t, k] += roundoff(dtype) * abs(value[t, k])
    return Estimate(value, deviation)


def moe_experts(x, gate_up, down, ids, weights, options: dict, *, rounded_weight=False) -> Estimate:
    """[T, H]; gate_up [E, 2I, H] or [E, I, H] and down [E, H, I] are arrays, `options` the keywords."""
    rows = Estimate(exact(x), np.zeros(x.shape))
    return moe_experts_of_rows(
        x.dtype, rows, gate_up, down, ids, weights, options, rounded_weight=rounded_weight
    )


def moe_experts_of_rows(
    dtype, x: Estimate, gate_up, down, ids, weights, options: dict, *, rounded_weight=False
) -> Estimate:
    """The same of inputs that are computed, and of weights that may be."""
    rows = x.value
    scales, spread = (
        weights if isinstance(weights, Estimate) else Estimate(exact(weights), np.zeros(weights.shape))
    )
    biases = [options.get(name) for name in ("gate_up_bias", "down_bias")]
    gate_up_bias, down_bias = (None if bias is None else exact(bias) for bias in biases)
    value, variance = np.zeros_like(rows), np.zeros_like(rows)
    for e, t, k in pairs_by_expert(ids, len(gate_up)):
        x_rows = Estimate(*(part[t] for part in x))
        if options.get("weights_on_inputs"):
            scale = scales[t, k][:, None]
            error = (scale * x_rows.deviation) ** 2 + (spread[t, k][:, None] * x_rows.value) ** 2
            error += (2 * roundoff(dtype) * scale * x_rows.value) ** 2  # of the weight, and of the product
            x_rows = Estimate(scale * x_rows.value, np.sqrt(error))
        hidden = add(multiply(x_rows, gate_up[e], dtype, rounded_weight), gate_up_bias, e, dtype)
        hidden = activate(hidden, options, dtype)
        out = add(multiply(hidden, down[e], dtype, rounded_weight), down_bias, e, dtype)
        of_weights = np.zeros((len(t), 1)) if options.get("weights_on_inputs") else spread[t, k][:, None]
        scale = np.ones((len(t), 1)) if options.get("weights_on_inputs") else scales[t, k][:, None]
        np.add.at(value, t, scale * out.value)
        np.add.at(variance, t, (scale * out.deviation) ** 2 + (of_weights * out.value) ** 2)
    if options.get("has_identity"):
        share = np.where(ids.cpu().numpy() >= len(gate_up), scales, 0.0)
        value += share.sum(1, keepdims=True) * x.value
        of_input = x.deviation + 4 * roundoff(torch.float32) * abs(x.value)
        of_input = of_input + roundoff(dtype) * abs(x.value)  # a norm may be rounded
        variance += (abs(share).sum(1, keepdims=True) * of_input) ** 2
    size = abs(value)
    shared = options.get("shared_out")
    if shared is not None:
        shared = shared if isinstance(shared, Estimate) else Estimate(exact(shared), np.zeros(shared.shape))
        gate = np.ones(len(rows))
        if options.get("shared_gate") is not None:
            gate = exact(options["shared_gate"]).reshape(-1)
            gate = sigmoid(gate) if options.get("gate_is_logit", False) else gate
        value += gate[:, None] * shared.value
        size += abs(gate[:, None] * shared.value)
        variance += (gate[:, None] * shared.deviation) ** 2
    if options.get("residual") is not None:
        residual = exact(options["residual"]).reshape(value.shape)
        value += residual
        size += abs(residual)
    return Estimate(value, np.sqrt(variance) + 4 * roundoff(torch.float32) * size)


def add(out: Estimate, bias: np.ndarray | None, expert: int, dtype: torch.dtype) -> Estimate:
    if bias is None:
        return out
    return rounded(out.value + bias[expert], out.deviation, dtype)


def assert_close(actual: Tensor, expected: Estimate) -> None:
    """Within DEVIATIONS of the error that is to be expected, after the rounding of the result."""
    assert tuple(actual.shape) == expected.value.shape
    assert actual.is_contiguous()
    allowed = DEVIATIONS * expected.deviation + spacing(expected.value, actual.dtype)
    error = abs(exact(actual) - expected.value)
    assert (error <= allowed).all(), f"{np.nanmax(error / allowed):.3g} times the allowed error"


# Formats


def e2m1(code: np.ndarray) -> np.ndarray:
    """One sign, two exponent and one mantissa bit; exponent 0 is subnormal, the bias is 1."""
    sign, exponent, mantissa = code >> 3, (code >> 1) & 3, code & 1
    magnitude = np.where(exponent == 0, 0.5 * mantissa, (1 + 0.5 * mantissa) * 2.0 ** (exponent - 1.0))
    return np.where(sign == 1, -magnitude, magnitude)


def e4m3(code: np.ndarray) -> np.ndarray:
    """One sign, four exponent and three mantissa bits; exponent 0 is subnormal, the bias is 7."""
    sign, exponent, mantissa = code >> 7, (code >> 3) & 15, code & 7
    magnitude = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    return np.where(sign == 1, -magnitude, magnitude)


def codes_of(packed: Tensor, bits: int) -> np.ndarray:
    """[..., words] -> [..., words * 32 / bits]: the lowest bits first, whatever words they lie in.

    Eight codes fill as many bytes as a code has bits; they are taken out of one 64-bit number.
    """
    octets = np.ascontiguousarray(packed.cpu().view(torch.int32).numpy()).view(np.uint8)
    eights = np.zeros((*octets.shape[:-1], octets.shape[-1] // bits, 8), np.uint8)
    eights[..., :bits] = octets.reshape(*eights.shape[:-1], bits)
    codes = (eights.view(np.uint64) >> (bits * np.arange(8, dtype=np.uint64))) & np.uint64(2**bits - 1)
    return codes.reshape(*octets.shape[:-1], eights.shape[-2] * 8)


GRIDS = Path(__file__).parents[2] / "torch_moe_mps" / "shaders" / "matmul" / "grids.txt"
FLOATS = {
    **{"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)},
    **{"nvfp4_global": (4, 16), "fp8_32": (8, 32), "fp8_128": (8, 128)},
}  # {format whose codes are floats: (bits, group_size)}


class Integers(NamedTuple):
    """Of blocks of 256: factors of scales, less `centre`, and with `minima` others of minima."""

    bits: int
    centre: int = 0
    minima: bool = False


class Codebook(NamedTuple):
    """Bits of a small scale, a point's number beyond eight, shifts, and the stream of 32 values."""

    scale: int
    number: int
    shifts: int
    stream: int


class Ggml(NamedTuple):
    """A type of ggml, by its source.

    Attributes:
        bits, group_size: of a code, and how many values share a scale.
        halves: the bytes of a block at which its float16 numbers begin.
        centre: is subtracted from codes.
        second: a half is added to the values.
    """

    bits: int
    group_size: int
    halves: tuple[int, ...]
    centre: float = 0
    second: bool = False
    integers: Integers | None = None
    codebook: Codebook | None = None

    @property
    def minima(self) -> bool:
        return self.second or (self.integers is not None and self.integers.minima)


GGML = {
    "q1_0": Ggml(1, 128, (0,), centre=0.5),
    "q2_0": Ggml(2, 64, (0,), centre=1),
    "q4_0": Ggml(4, 32, (0,), centre=8),
    "q4_1": Ggml(4, 32, (0, 2), second=True),
    "q5_0": Ggml(5, 32, (0,), centre=16),
    "q5_1": Ggml(5, 32, (0, 2), second=True),
    "q8_0": Ggml(8, 32, (0,), centre=128),
    "q2_k": Ggml(2, 16, (80, 82), integers=Integers(4, minima=True)),
    "q3_k": Ggml(3, 16, (108,), centre=4, integers=Integers(6, 32)),
    "q4_k": Ggml(4, 32, (0, 2), integers=Integers(6, minima=True)),
    "q5_k": Ggml(5, 32, (0, 2), integers=Integers(6, minima=True)),
    "q6_k": Ggml(6, 16, (208,), centre=32, integers=Integers(8, 128)),
    "iq4_nl": Ggml(4, 32, (0,)),
    "iq4_xs": Ggml(4, 32, (0,), integers=Integers(6, 32)),
    "tq2_0": Ggml(2, 256, (64,), centre=1),
    "iq1_s": Ggml(1, 32, (0,), codebook=Codebook(3, 3, 1, 16)),
    "iq1_m": Ggml(1, 16, (), codebook=Codebook(3, 3, 4, 22)),
    "iq2_xxs": Ggml(2, 32, (0,), codebook=Codebook(4, 0, 0, 0)),
    "iq2_xs": Ggml(2, 16, (0,), codebook=Codebook(4, 1, 0, 8)),
    "iq2_s": Ggml(2, 16, (0,), codebook=Codebook(4, 2, 0, 16)),
    "iq3_xxs": Ggml(3, 32, (0,), codebook=Codebook(4, 0, 0, 0)),
    "iq3_s": Ggml(3, 32, (0,), codebook=Codebook(4, 1, 0, 12)),
}
SEARCHED = tuple(name for name, kind in GGML.items() if kind.integers)  # `quantize` writes them


def numbers_of(format: str) -> tuple[int, int, str]:
    """bits, group_size, mode."""
    affine = re.fullmatch(r"affine(\d)_(\d+)", format)
    if affine:
        return int(affine[1]), int(affine[2]), "affine"
    return (*(FLOATS.get(format) or GGML[format][:2]), format)


def group_of(format: str) -> int:
    """What columns are a multiple of."""
    in_superblocks = format in GGML and (GGML[format].integers or GGML[format].codebook)
    return 256 if in_superblocks else numbers_of(format)[1]


def dequantise(packed: Tensor, scales: Tensor, biases: Tensor | None, format: str) -> np.ndarray:
    """[..., words] -> [..., words * 32 / bits] in float64."""
    bits, group_size, _ = numbers_of(format)
    if format in GGML and (codebook := GGML[format].codebook):
        return point_values(packed, scales, biases, format, codebook)
    shape = *packed.shape[:-1], packed.shape[-1] * 32 // bits
    codes = codes_of(packed, bits).reshape(*shape[:-1], shape[-1] // group_size, group_size)
    if format in GGML:
        return ggml_values(codes, scales, biases, format).reshape(shape)
    if format not in FLOATS:
        return (codes * exact(scales)[..., None] + exact(biases)[..., None]).reshape(shape)
    if format.startswith("fp8"):
        factors = floats_of(scales)
    else:
        octets = scales.cpu().numpy().astype(np.int64)
        factors = e4m3(octets) if group_size == 16 else np.exp2(octets - 127.0)
    if format == "nvfp4_global":
        factors = factors * floats_of(biases)
    numbers = e2m1(np.arange(16)) if bits == 4 else e4m3(np.arange(256))
    return (numbers[codes] * factors[..., None]).reshape(shape)


def floats_of(bits: Tensor) -> np.ndarray:
    return bits.cpu().numpy().view(np.float32).astype(np.float64)


def halves_of(bits: Tensor) -> np.ndarray:
    return bits.cpu().numpy().view(np.float16).astype(np.float64)


# ggml's levels of iq4_nl and iq4_xs.
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def ggml_values(codes: np.ndarray, scales: Tensor, biases: Tensor | None, format: str) -> np.ndarray:
    """Of codes [..., groups, values], with the tensors that the package keeps beside them."""
    if format.startswith("iq4"):
        codes = np.array(IQ4)[codes]
    codes = codes.astype(np.float64) - GGML[format].centre
    integers = GGML[format].integers
    if integers is None:
        values = codes * halves_of(scales)[..., None] * (2 if format == "q1_0" else 1)
        return values if biases is None else values + halves_of(biases)[..., None]
    bits, centre, minima = integers
    digits = np.unpackbits(scales.cpu().numpy(), axis=-1, bitorder="little")
    factors = digits.reshape(*codes.shape[:-1], 1 + minima, bits) @ (1 << np.arange(bits)) - centre
    blocks = *codes.shape[:-2], codes.shape[-2] * codes.shape[-1] // 256
    halves = halves_of(biases).reshape(*blocks, 1, 1 + minima)
    products = factors.reshape(*blocks, 256 // codes.shape[-1], 1 + minima) * halves
    products = products.reshape(factors.shape)
    values = codes * products[..., :1]
    return values - products[..., 1:] if minima else values


def fields(words: np.ndarray, first: int, bits: int, count: int) -> np.ndarray:
    """`count` numbers of `bits` bits, the first from bit `first` of int64 words on: [..., count]."""
    return words[..., None] >> first + bits * np.arange(count) & (1 << bits) - 1


def grid_of(format: str) -> np.ndarray:
    """[points, values], of the package's file: a machine that replays recordings has no package gguf."""
    lines = (line.split() for line in GRIDS.read_text().splitlines() if not line.startswith("#"))
    _, count, levels, digits = next(line for line in lines if format.startswith(line[0]))
    level = np.array([float(number) for number in levels.split(",")])
    points = [n for n in range(4 * len(digits)) if int(digits[n // 4], 16) >> n % 4 & 1]
    return level[np.array(points)[:, None] // len(level) ** np.arange(int(count)) % len(level)]


def point_values(
    packed: Tensor, scales: Tensor, biases: Tensor | None, format: str, kind: Codebook
) -> np.ndarray:
    """Values in ggml's codebook formats, whose bits the table at the top of _weight_formats.py places."""
    bits, group_size, _ = numbers_of(format)
    scale_bits, number_bits, shifts, stream_bits = kind
    grid, groups = grid_of(format), 32 // group_size
    words = packed.cpu().view(torch.int32).numpy().view(np.uint32).astype(np.int64)
    words = words.reshape(*packed.shape[:-1], packed.shape[-1] // bits, bits)
    points = 32 // grid.shape[1]
    low = np.concatenate([fields(words[..., i], 0, 8, 4) for i in range(points // 4)], -1)
    more = np.zeros(words.shape[:-1], np.int64)
    if stream_bits:
        digits = np.unpackbits(scales.cpu().numpy(), axis=-1, bitorder="little").astype(np.int64)
        blocks = digits.reshape(*words.shape[:-2], words.shape[-2] // 8, 8 * stream_bits)
        if format == "iq1_m":  # sixteen bits of each 32 values, then six
            parts = [blocks[..., 128:].reshape(*blocks.shape[:-1], 8, 6), blocks[..., :128]]
            blocks = np.concatenate([parts[0], parts[1].reshape(*blocks.shape[:-1], 8, 16)], -1)
        more = (blocks.reshape(*words.shape[:-1], stream_bits) << np.arange(stream_bits)).sum(-1)
    if bits > 1 and stream_bits < 12:
        more = more | words[..., -1] >> 28 << stream_bits
    first = groups * scale_bits
    numbers = low | fields(more, first, number_bits, points) << 8 if number_bits else low
    values = grid[numbers].reshape(*words.shape[:-1], 4, 8)
    if bits > 1:
        flags = np.empty(values.shape, np.int64)
        for i in range(8):
            flags[..., i] = fields(words[..., -1], i % 2 * 16 + i // 2 * 4, 1, 4)
        if stream_bits < 12:
            flags[..., 7] = flags[..., :7].sum(-1) % 2
        values = np.where(flags == 1, -values, values)
    else:
        values = values + 0.125 - 0.25 * fields(more, first + number_bits * points, 1, shifts)[..., None]
    halves = halves_of(scales if biases is None else biases)
    factors = (2 * fields(more, 0, scale_bits, groups) + 1) / (1, 8, 4)[bits - 1]
    factors = factors.reshape(*halves.shape, 8 * groups) * halves[..., None]
    values = values.reshape(*factors.shape, group_size) * factors[..., None]
    return values.reshape(*packed.shape[:-1], packed.shape[-1] * 32 // bits)
