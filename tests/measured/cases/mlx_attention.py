"""What MLX dispatches for attention: scaled_dot_product_attention.cpp of 0.32.

Of few tokens it is two passes, of a prompt one. sdpa_vector_2pass_1_gqa, for one token without a mask, is
left out: no header says when MLX takes it.
"""

import struct

from .attention import Attention
from .mlx_launch import TYPES, Launch, ceil_div, ints, longs

HEADERS = ("utils.h", "sdpa_vector.h")
STEEL_HEADERS = ("utils.h", "steel/attn/kernels/steel_attention.h")
WIDTHS = (64, 96, 128, 256)


def has_kernel(case: Attention) -> bool:
    """ScaledDotProductAttention::use_fallback."""
    plain = type(case) is Attention and case.bits == 16 and not case.gated
    return plain and case.tokens <= 8 and case.width == case.value_width and case.width in WIDTHS


def blocks_of_keys(case: Attention) -> int:
    """Of a GPU of the largest class, by the simdgroups that share a head of keys."""
    simdgroups = case.heads // case.key_heads * case.tokens
    if simdgroups <= 2 and case.keys > 8192:
        return 256
    if simdgroups >= 6 and case.keys >= 16384:
        return 512 if case.keys < 65536 else 1024
    return 128


def sdpa_vector(case: Attention) -> tuple[Launch, Launch]:
    """Partial results of blocks of keys, and their sum."""
    types, blocks = f"{TYPES[case.dtype]}, {case.width}", blocks_of_keys(case)
    constants = {20: False, 21: False, 22: case.tokens > 1, 23: False, 24: False, 25: False, 26: blocks}
    head, key = longs(case.keys * case.width), longs(case.width)
    arguments: dict[str, str | bytes] = {
        **{"queries": "q", "keys": "k", "values": "v", "out": "partials", "sums": "sums", "maxs": "highest"},
        "N": ints(case.keys),
        **{"k_head_stride": head, "k_seq_stride": key, "v_head_stride": head, "v_seq_stride": key},
        "scale": struct.pack("f", case.scale),
    }
    first = Launch(
        HEADERS,
        f"sdpa_vector_2pass_1<{types}, {case.value_width}, 4>",
        (case.key_heads, 1, blocks),
        (32, case.heads // case.key_heads, case.tokens),
        arguments,
        constants,
    )
    sums = {
        "partials": "partials",
        "sums": "sums",
        "maxs": "highest",
        "out": "result0",
        "blocks": ints(blocks),
    }
    grid = (case.heads, case.tokens, 1)
    return first, Launch(HEADERS, f"sdpa_vector_2pass_2<{types}>", grid, (1024, 1, 1), sums, constants)


def steel_attention(case: Attention) -> Launch:
    """A prompt with a causal mask: sdpa_full_self_attention_metal, before the M5."""
    queries, keys, simdgroups = 32, 16 if case.width >= 128 else 32, 4
    counts = ceil_div(case.tokens, queries), ceil_div(case.keys, keys)
    whole = case.tokens // queries, case.keys // keys
    rest = case.tokens % queries, case.keys % keys
    sizes = ints(1, case.heads, case.width, case.tokens, case.keys, case.heads // case.key_heads)
    blocks = ints(*counts, *whole, *rest, case.keys - case.tokens)
    strides = [
        longs(heads * rows * width, rows * width, width)
        for heads, rows, width in (
            (case.heads, case.tokens, case.width),
            (case.key_heads, case.keys, case.width),
            (case.key_heads, case.keys, case.value_width),
            (case.heads, case.tokens, case.value_width),
        )
    ]
    params = sizes + struct.pack("f", case.scale) + blocks
    widths = f"{queries}, {keys}, {case.width}, {case.value_width}"
    return Launch(
        STEEL_HEADERS,
        f"attention<{TYPES[case.dtype]}, {widths}, {simdgroups}, 1, bool, float>",
        (counts[0], case.heads, 1),
        (32, simdgroups, 1),
        {"Q": "q", "K": "k", "V": "v", "O": "out", "params": params + b"".join(strides)},
        {200: not rest[0], 201: not rest[1], 300: False, 301: True, 302: False, 303: False},
    )
