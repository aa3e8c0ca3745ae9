"""Entries of a cache for layers that another process has."""

from typing import Any

from torch import Tensor

from ...ops.families.tiles import WIDTH
from ..upstream.models import CacheLayerMixin, LinearAttentionCacheLayerMixin
from .separate import Separate
from .tiled import TiledLayer


def count_tokens(cache: Any, index: int, hidden: Tensor, convolves: bool) -> None:
    """Gives the entry of a cache for a layer as many tokens as if the layer were here."""
    layer = cache.layers[index] if index < len(cache.layers) else None
    batch, tokens = hidden.shape[:2]
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        for state in range(layer.number_of_states if convolves else 0):
            layer.update_conv_state(hidden.new_zeros(batch, 1, tokens), state, conv_kernel_size=1)
    if isinstance(layer, Separate):
        for one in layer.layers:
            number = hidden.new_zeros(1, 1, tokens, _width(one))
            one.update(number, number)
    elif layer is None or isinstance(layer, CacheLayerMixin):
        number = hidden.new_zeros(batch, 1, tokens, _width(layer))
        cache.update(number, number, index)


def _width(layer: Any) -> int:
    """The width of heads that stand for those elsewhere: a layer of tiles keeps what it keeps there."""
    return WIDTH if isinstance(layer, TiledLayer) else 1
