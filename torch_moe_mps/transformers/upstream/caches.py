"""Classes of layers of caches."""

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
]
