"""Classes of layers that grow in place, each for a class of transformers and the bits that it holds."""

import functools
from typing import Any

from ..._limits import KV_FORMATS
from ...ops.families.attention import CACHE_BITS
from ..basics.state import KVBits
from ..upstream.models import (
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)
from .declared import GROWING_CLASSES, declaration_of
from .layers import Growing, GrowingIndexed, GrowingWindow, LayerBase
from .tiled import TiledLayer, tiled_declaration


@functools.cache
def growing_class(plain: type, bits: KVBits | None = None) -> type | None:
    """The class that does what `plain` does and grows in place, or None if there is none.

    A layer that holds more than the keys and values of all tokens, or less (a window, an indexer, a
    recurrence), holds 8 bits where `bits` are fewer.
    """
    base = _base_of(plain)
    if base is None:
        return None
    declared = declaration_of(plain)
    if bits in KV_FORMATS:
        if base is not Growing or issubclass(plain, LinearAttentionCacheLayerMixin):
            return growing_class(plain, CACHE_BITS)
        base, declared = TiledLayer, tiled_declaration(plain)
    bases = (base,) if issubclass(base, plain) else (base, plain) if base.is_first else (plain, base)
    # transformers registers a class under its _layer_type for all models, so this one must have none.
    attributes = {
        "_layer_type": None,
        "plain": plain,
        "bits": bits,
        "declared": declared,
        "empty": staticmethod(_empty_layer),
    }
    if base is TiledLayer:
        attributes["dense_class"] = growing_class(plain)
    return type(f"Growing{plain.__name__}", bases, attributes)


def holds_more_bits(plain: type, bits: KVBits | None) -> bool:
    """True if layers of a class hold more bits than these."""
    return bits in KV_FORMATS and getattr(growing_class(plain, bits), "bits", bits) != bits


def _base_of(plain: Any) -> Any:
    result = next(filter(None, (class_of(plain) for class_of in GROWING_CLASSES)), None)
    update = getattr(plain, "update", None)
    if result is not None or issubclass(plain, LayerBase):
        return result
    if update is DynamicLayer.update:
        return GrowingIndexed if issubclass(plain, DynamicIndexedLayer) else Growing
    return GrowingWindow if update is DynamicSlidingWindowLayer.update else None


def _empty_layer(plain: type, bits: KVBits | None) -> Any:
    """A layer without its state, as pickle makes it."""
    cls: Any = growing_class(plain, bits)
    return object.__new__(cls)
