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

__all__ = [
    "GROWING",
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
