"""Random layers of quantised experts, and a check of one against the float64 oracle."""

import numpy as np
import torch

from support.expert_layers import IDS, random_ids, to_device
from support.layouts import lay
from support.oracles_experts import GGML, dequantise, numbers_of
from support.oracles_operators import checked
from support.sweep import in_sweep
from support.values import DTYPES, random

# Those that every path is tested with
FORMATS = ("affine4_32", "affine4_64", "affine4_128", "affine8_32", "affine8_64", "affine8_128", "mxfp4")


# By importance, too.
WEIGHED = tuple(f"affine{bits}_{size}" for bits in (2, 3, 4, 5, 6, 8) for size in (32, 64, 128))
ALL_FORMATS = (*WEIGHED, "mxfp4", "mxfp8", "nvfp4")


GGUF_FORMATS = tuple(GGML)
ONE_BIT = tuple(f"affine1_{group_size}" for group_size in (32, 64, 128))  # not by importance
OTHERS = ("nvfp4_global", "fp8_32", "fp8_128")  # of other quantisers: nothing is quantised to them here
EVERY_FORMAT = (*ALL_FORMATS, *ONE_BIT, *OTHERS, *GGUF_FORMATS)

# One format of each way of storing a weight; what is left of them is for the sweep.
ALWAYS = ("affine4_32", "mxfp4", "q4_k")
ALWAYS_OF_GGUF = ("q4_k", "q8_0", "iq2_xs")


def each(formats):
    """Test parameters for `formats`: those not in ALWAYS run only in the sweep."""
    return in_sweep(formats, ALWAYS)


def random_quantized(experts, rows, columns, format, dtype, seed):
    """packed, scales, zeros of values with a standard deviation near columns^-1/2; all codes occur."""
    bits, group_size, mode = numbers_of(format)
    generator = torch.Generator().manual_seed(seed)
    shape = (experts, rows, columns * bits // 32)
    packed = torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64).to(torch.int32)
    groups = (experts, rows, columns // group_size)
    if format in GGUF_FORMATS:
        return packed.view(torch.uint32), *random_ggml_scales(groups, columns, format, seed)
    if mode == "nvfp4":
        near = columns**-0.5 / 3 * (0.5 + torch.rand(groups, generator=generator))
        return packed.view(torch.uint32), near.to(torch.float8_e4m3fn).view(torch.uint8), None
    if mode == "nvfp4_global":  # of each row, as where matrices are joined
        scales = (4 + 200 * torch.rand(groups, generator=generator)).to(torch.float8_e4m3fn)
        factors = columns**-0.5 / 300 * (0.5 + torch.rand((experts, rows, 1), generator=generator))
        return packed.view(torch.uint32), scales.view(torch.uint8), factors.view(torch.int32)
    if mode.startswith(("mxfp8", "fp8")):
        octets = packed.view(torch.uint8)
        octets[octets & 0x7F == 0x7F] ^= 1  # which quantising never writes
    if mode.startswith("fp8"):
        scales = columns**-0.5 / 128 * torch.randn(groups, generator=generator)
        return packed.view(torch.uint32), scales.view(torch.int32), None
    if mode != "affine":
        largest = {"mxfp4": 3, "mxfp8": 128}[mode]
        middle = 127 - round(np.log2(largest * columns**0.5))
        scales = torch.randint(middle - 2, middle + 2, groups, generator=generator, dtype=torch.uint8)
        return packed.view(torch.uint32), scales, None
    scales = random(groups, torch.float32, seed + 1).abs() * columns**-0.5 * 4 / 2**bits
    zeros = -scales * (2**bits - 1) / 2 * (1 + 0.2 * random(groups, torch.float32, seed + 2))
    return packed.view(torch.uint32), scales.to(dtype), zeros.to(dtype)


def held(values):
    """As the package holds halves: their bits."""
    return values.half().view(torch.int16)


def random_ggml_scales(groups, columns, format, seed):
    *rows, count = groups
    kind = GGML[format]
    if kind.codebook:
        return random_point_scales((*rows, columns // 256), columns, kind, seed)
    unit = columns**-0.5 / (64 if format.startswith("iq4") else 2**kind.bits / 4)
    if not kind.integers:
        scales, zeros = (held(random(groups, torch.float32, seed + i) * unit) for i in (1, 2))
        return scales, zeros if kind.second else None
    bits, _, minima = kind.integers
    each = 2 if minima else 1
    generator = torch.Generator().manual_seed(seed + 1)
    octets = torch.randint(256, (*rows, count * each * bits // 8), generator=generator, dtype=torch.uint8)
    halves = random((*rows, columns // 256 * each), torch.float32, seed + 2) * unit / 2 ** (bits - 1)
    return octets, held(halves)


def random_point_scales(blocks, columns, kind, seed):
    """Scales up to 15 or 31, and points up to 1, 43 / 8 or 62 / 4."""
    largest, stream_bits = {1: 8, 2: 80, 3: 250}[kind.bits], kind.codebook.stream
    halves = held(random(blocks, torch.float32, seed + 2) * columns**-0.5 / largest)
    if not stream_bits:
        return halves, None
    generator = torch.Generator().manual_seed(seed + 1)
    *rows, count = blocks
    return torch.randint(256, (*rows, count * stream_bits), generator=generator, dtype=torch.uint8), halves


def dense(weight, format):
    return dequantise(*weight, format)


def place(weight, device, layout="contiguous"):
    return [None if tensor is None else lay_words(tensor, layout, device) for tensor in weight]


def lay_words(tensor, layout, device):
    """lay() for the packed words too: what surrounds them is no number then, only other words."""
    if tensor.dtype == torch.uint32:
        return lay(tensor.view(torch.int32), layout, device)
    return (
        lay(tensor.int(), layout, device).to(tensor.dtype)
        if tensor.dtype in (torch.uint8, torch.int16)
        else lay(tensor, layout, device)
    )


def check_layer(device, shape, format, dtype, seed, scale_dtype=None, ids=None, down_format=None, **options):
    tokens, slots, experts, hidden, intermediate = shape
    rows = 2 * intermediate if options.get("gated", True) else intermediate
    scale_dtype = scale_dtype or dtype
    gate_up = random_quantized(experts, rows, hidden, format, scale_dtype, seed)
    down = random_quantized(experts, hidden, intermediate, down_format or format, scale_dtype, seed + 3)
    x = random((tokens, hidden), dtype, seed + 6)
    if ids is None:
        ids = random_ids(tokens, slots, experts, seed + 7, IDS[seed % 2])
    weights = random((tokens, slots), torch.float32, seed + 8).softmax(-1)
    x, ids, weights = (tensor.to(device) for tensor in (x, ids, weights))
    placed = (*place(gate_up, device), *place(down, device))
    options = to_device(options, device)
    if down_format:
        options["down_format"] = down_format
    checked("_moe_experts_quantized", x, weights, ids, *placed, format, **options)


def random_matrix(rows, columns, format, dtype, seed):
    """packed, scales, zeros of [rows, columns]."""
    return [
        None if tensor is None else tensor[0]
        for tensor in random_quantized(1, rows, columns, format, dtype, seed)
    ]


def check_linear(device, shape, format, dtype, seed, *, scale_dtype=None, bias=False, layout="contiguous"):
    """`shape`: leading dimensions of x, C, N."""
    *leading, columns, rows = shape
    weight = place(random_matrix(rows, columns, format, scale_dtype or dtype, seed), device, layout)
    x = lay(random((*leading, columns), dtype, seed + 5), layout, device)
    bias = lay(random((rows,), DTYPES[seed % 3], seed + 6), layout, device) if bias else None
    assert checked("linear_quantized", x, *weight, format, bias).dtype == dtype


def check_mlp(device, shape, format, dtype, seed, *, down_format=None, scale_dtype=None, **options):
    """`shape`: T, H, I. The tensors among the options are on the CPU."""
    tokens, hidden, intermediate = shape
    rows = 2 * intermediate if options.get("gated", True) else intermediate
    down_format, scale_dtype = down_format or format, scale_dtype or dtype
    gate_up = random_matrix(rows, hidden, format, scale_dtype, seed)
    down = random_matrix(hidden, intermediate, down_format, scale_dtype, seed + 3)
    x = random((tokens, hidden), dtype, seed + 6)
    options = to_device(options, device)
    if down_format != format:
        options["down_format"] = down_format
    checked("_mlp_quantized", x.to(device), *place(gate_up, device), *place(down, device), format, **options)


BITS_OF = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def bits_of(tensor):
    return tensor.view(BITS_OF[tensor.element_size()])
