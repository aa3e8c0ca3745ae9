"""The cache of MiniMax-01 with all states in its layers, as other models have them."""

from transformers import DynamicCache

from ...caches.in_layers import InLayers
from ...upstream import MiniMaxCache


class MiniMaxLayers(InLayers, MiniMaxCache):
    """A MiniMaxCache, which the model insists on, without a list of states."""

    __init__ = DynamicCache.__init__
    __len__ = DynamicCache.__len__
    batch_repeat_interleave = DynamicCache.batch_repeat_interleave
    batch_select_indices = DynamicCache.batch_select_indices
