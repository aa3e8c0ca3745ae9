"""Bytes of a model's KV cache, measured by forwards on the meta device."""

import bisect
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from .._limits import KV_BITS
from ..ops.families.tiles import TILE
from .basics.interface import experts_of
from .basics.state import KVBits
from .caches.cache import as_held, fewer_bits
from .caches.classes import growing_class
from .caches.deferred_states import bytes_beside
from .caches.growing import spare_for, window_spare
from .caches.tiled import MOST_DENSE, SPARE, TiledLayer, tile_bytes
from .modules.stacked_experts import run_operators
from .upstream.calls import cache_among, call_on_shapes


class KVCache:
    """Bytes of a model's cache for one sequence.

    Args:
        states: bytes independent of the context, such as recurrent states.
        rates: {window in tokens, or None: bytes per token} of its layers.
        beside: maximum bytes for undoing rejected draft tokens in recurrent states.
        tile: bytes of a tile of all layers whose keys and values lie in tiles.
        dense: bytes of a token of these layers that is not in a tile.
    """

    def __init__(
        self, states: int, rates: dict[int | None, int], beside: int = 0, tile: int = 0, dense: int = 0
    ):
        self.states, self.rates, self.beside = states, rates, beside
        self.tile, self.dense = tile, dense

    @classmethod
    def of_model(cls, model: Any, bits: KVBits = 16, more: int = 0) -> "KVCache | None":
        """Cache sizes from two short forwards on the meta device; None if these fail.

        Args:
            model: of transformers, on the meta device, and not accelerated.
            bits: of keys and values, as in `accelerate`.
            more: further layers as the last one, which draft.
        """
        found = cls.by_bits(model, more)
        return None if found is None else found[bits]

    @classmethod
    def by_bits(cls, model: Any, more: int = 0) -> "dict[KVBits, KVCache] | None":
        """`of_model` for each of KV_BITS, from the same two forwards."""
        few = 4  # tokens: twice as many are fewer than any sliding window has
        try:
            text = model.get_decoder()  # around it, models for images look at values
            with _on_shapes(text):
                pairs = list(zip(_cached(text, few), _cached(text, 2 * few), strict=True))
            pairs += pairs[-1:] * more
            of_layers = {bits: [cls._of_layer(*pair, few, bits) for pair in pairs] for bits in KV_BITS}
        except Exception:  # code that reads values, or knows no meta device: any error may come of it
            return None
        return {bits: sum(layers, cls(0, {})) for bits, layers in of_layers.items()}

    @classmethod
    def _of_layer(cls, first: Any, second: Any, tokens: int, bits: KVBits) -> "KVCache":
        """Sizes of a layer, from its states after `tokens` tokens and after twice as many."""
        plain: Any = type(first)
        has_tiles = issubclass(growing_class(plain, fewer_bits(bits)) or plain, TiledLayer)
        tile = tile_bytes(first.keys, first.values, bits) if has_tiles else 0
        before, after = (_nbytes(as_held(layer, 16 if has_tiles else bits)) for layer in (first, second))
        rate, beside = (after - before) // tokens, bytes_beside(first)
        states = before - rate * tokens
        if tile:
            return cls(states, {}, beside, tile, rate)
        return cls(states, {getattr(first, "sliding_window", None): rate}, beside)

    @classmethod
    def of_block_drafter(cls, config: Any, dtype: torch.dtype) -> "KVCache":
        """Key-value cache of an assistant that drafts blocks of tokens (DFlash), from its config."""
        token = 2 * config.num_key_value_heads * config.head_dim * dtype.itemsize
        kinds = Counter(config.layer_types)
        sliding = kinds.pop("sliding_attention", 0)
        rates = {None: token * kinds.total()} | ({config.sliding_window: token * sliding} if sliding else {})
        return cls(0, rates)

    def __add__(self, other: "KVCache") -> "KVCache":
        rates = Counter(self.rates) + Counter(other.rates)
        return KVCache(
            self.states + other.states,
            dict(rates),
            self.beside + other.beside,
            self.tile + other.tile,
            self.dense + other.dense,
        )

    @property
    def token(self) -> int:
        """Bytes that each token adds to a long context."""
        return self.rates.get(None, 0) + self.tile // TILE

    def at(self, context: int) -> int:
        """Bytes that the next token reads."""
        seen = {window: context if window is None else min(context, window) for window in self.rates}
        dense, tiles = _tokens_in_tiles(context)
        rates = sum(seen[window] * rate for window, rate in self.rates.items())
        return self.states + rates + dense * self.dense + tiles * self.tile

    def memory(self, context: int) -> int:
        """The most bytes that an accelerated model allocates, with room for more tokens and for drafts."""
        rooms = {
            window: spare_for(context) if window is None else window_spare(window) for window in self.rates
        }
        room = sum(rooms[window] * rate for window, rate in self.rates.items())
        full = context // TILE
        in_tiles = (full + spare_for(full * TILE) // TILE) * self.tile
        in_tiles += (SPARE if context <= SPARE else min(context + SPARE, MOST_DENSE)) * self.dense
        return KVCache(self.states, self.rates).at(context) + room + self.beside + in_tiles

    def tokens_in(self, space: int, longest: int) -> int:
        """Number of tokens, at most `longest`, that fit into `space` bytes."""
        return bisect.bisect_right(range(1, longest + 1), space, key=self.memory)


@contextmanager
def _on_shapes(model: Any) -> Iterator[None]:
    """Block where recognised dense experts run the operators: their own code reads values."""
    classes = {module: type(module) for module in experts_of(model).values()}
    training = model.training
    try:
        model.eval()
        for module in classes:
            run_operators(module)
        with torch.no_grad():
            yield
    finally:
        model.train(training)
        for module, cls in classes.items():
            module.__class__ = cls


def _cached(model: Any, tokens: int) -> list[Any]:
    """The layers of the cache after so many tokens."""
    ids = torch.zeros((1, tokens), dtype=torch.long, device="meta")
    layers: list[Any] = cache_among(call_on_shapes(model, input_ids=ids)).layers
    return layers


def _tokens_in_tiles(context: int) -> tuple[int, int]:
    """Tokens of a context that are read as they are, and the number of tiles with the others."""
    own = max(context - 1, 0) // TILE * TILE  # where the last token's tile begins
    return min(own, TILE) + context - own, max(own // TILE - 1, 0)


def _nbytes(value: object) -> int:
    """The bytes of the floating-point tensors in a value, a list or a dict."""
    tensors = (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return sum(tensor.nbytes for tensor in tensors if tensor.is_floating_point())
