"""Attention of one token, and the rotation in front of it."""

from typing import Any

from torch import fx

from ..fakes import geometry
from ..fusion import Fusion
from ..nodes import (
    is_node,
    memory_of,
    tensor_of,
)
from ..tracing import as_recorded


def _is_of_one_token(
    Q: Any, V: Any, KEYS: fx.Node, VALUES: fx.Node, CACHED_K: fx.Node, CACHED_V: fx.Node, **_: Any
) -> bool:
    """True for queries of one token to a cache that ends with what the rotation writes."""
    ends = is_node(Q) and is_node(V) and _ends_with(CACHED_K, KEYS) and _ends_with(CACHED_V, VALUES)
    return ends and tensor_of(Q).shape[1] == 1


turn_in_attention = Fusion(
    "turn_in_attention",
    *(
        (
            f"{name}(_rope_cache_(Q, K, V, KEYS, VALUES, COS, SIN, *R), CACHED_K, CACHED_V, *A)",
            "_rope_attention_(Q, K, V, CACHED_K, CACHED_V, COS, SIN, *R, *A)",
        )
        for name in ("cached_attention", "_cached_attention")
    ),
    where=_is_of_one_token,
)


def _ends_with(cache: fx.Node, place: fx.Node) -> bool:
    """True if the last token of a cache [B, H, S, D] lies at a place in the same buffer."""
    if memory_of(cache) is not memory_of(place):
        return False
    (shape, stride, offset), (other_shape, other_stride, other_offset) = (
        geometry(tensor_of(item)) for item in (cache, place)
    )
    ends = offset + shape[2] * stride[2], other_offset + other_shape[2] * other_stride[2]
    pairs = zip((*stride, ends[0]), (*other_stride, ends[1]), strict=True)
    alike = [*shape[:2], shape[3]] == [*other_shape[:2], other_shape[3]]
    return alike and all(str(as_recorded(one)) == str(as_recorded(other)) for one, other in pairs)
