"""What MLX dispatches for attention: scaled_dot_product_attention.cpp of 0.32.

Of few tokens it is two passes. sdpa_vector_2pass_1_gqa, for one token without a mask, is left out: no header
says when MLX takes it.
"""

import struct

from .attention import Attention
from .mlx_launch import TYPES, Launch, ints, longs

HEADERS = ("utils.h", "sdpa_vector.h")
WIDTHS = (64, 96, 128, 256)


def has_kernel(case: Attention) -> bool:
    """ScaledDotProductAttention::use_fallback."""
    plain = case.bits == 16 and not case.gated
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
