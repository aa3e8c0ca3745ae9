"""Classes of layers of caches, and facts about the models that use them."""

from typing import Any

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

# Types of models whose own code in transformers 5.23 forgets a cache where several tokens follow it,
# or gives no cache back: a prompt in pieces would be another one.
READ_WHOLE = ("bamba", "falcon_mamba", "jamba", "mamba", "zamba")
# Names of configs for the tokens that an indexer chooses together: it counts them from the first of all rows.
_TOGETHER = ("index_kpool", "indexer_compress_ratio", "index_block_size")

__all__ = [
    "READ_WHOLE",
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
    """{name in a config: tokens that an indexer chooses together, counted from the first of all rows}"""
    return {name: getattr(config, name, None) or 1 for name in _TOGETHER}
