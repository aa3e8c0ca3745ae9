"""Cache of a drafter: the tokens of each draft are taken back after it."""

from typing import Any

from .batched import reserve, take_back, why_not_cut
from .state import LayerState
from .tiled import TiledLayer


class DraftCache:
    """A cache of one sequence whose last tokens can be taken back.

    Args:
        cache: of transformers, with growing layers.
    """

    def __init__(self, cache: Any):
        self.cache = cache

    def memory(self) -> int:
        """Bytes of the cached tokens, without spare capacity."""
        return sum(LayerState(layer).memory() for layer in self.cache.layers)

    def reserve(self, tokens: int, layer: int | None = None) -> None:
        """Reserves capacity for tokens of a layer, or of all layers, so that these can be taken back."""
        for each in self._layers(layer):
            if isinstance(each, TiledLayer):
                each.settle(tokens)
            else:
                reserve(each, 1, tokens)

    def take_back(self, tokens: int, layer: int | None = None) -> None:
        """Drops the last tokens of a layer, or of all layers."""
        for each in self._layers(layer):
            if isinstance(each, TiledLayer):
                each.crop(-tokens)
            else:
                take_back(each, tokens, each.get_seq_length() - tokens)

    def why_not_cut(self) -> str | None:
        """Why no token can be taken back, for a person; None if tokens can be."""
        return why_not_cut(self.cache)

    def _layers(self, layer: int | None) -> list[Any]:
        layers: list[Any] = self.cache.layers
        return layers if layer is None else [layers[layer]]
