"""Classes of layers of caches, and facts about the models that use them."""

from typing import Any

from transformers import cache_utils
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

# Plain caches, whose layers are made to grow in place: DFlash's came with 5.24.
GROWING = (DynamicCache, *(cls for cls in [getattr(cache_utils, "DFlashCache", None)] if cls is not None))

# Methods of a cache that read and write the states of linear attention.
STATE_METHODS = frozenset(
    ("get_conv_state", "update_conv_state", "get_recurrent_state", "update_recurrent_state")
)

# Names of configs for the tokens that an indexer selects together: it counts them from the first of all rows.
_TOGETHER = ("index_kpool", "indexer_compress_ratio", "index_block_size")

__all__ = [
    "GROWING",
    "STATE_METHODS",
    "Cache",
    "CacheLayerMixin",
    "DummyLayer",
    "DynamicCache",
    "DynamicIndexedLayer",
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "LinearAttentionCacheLayerMixin",
    "LinearAttentionLayer",
    "chosen_together",
]


def chosen_together(config: Any) -> dict[str, int]:
    """{name in a config: tokens that an indexer selects together, counted from the first of all rows}"""
    return {name: getattr(config, name, None) or 1 for name in _TOGETHER}
