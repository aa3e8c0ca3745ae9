"""State of a model after a prefix of tokens, as prefix caches keep it: cut, copied, and written in parts."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from ..basics.state import KVBits, state_in
from ..upstream.calls import takes_positions
from ..upstream.models import LinearAttentionCacheLayerMixin
from .cache import QuantizedCache, fewer_bits, grow, hands_cache_on
from .declared import is_in_layers
from .deferred_states import AnyKind, bytes_beside
from .layers import LayerBase
from .parts import CachePart, JoinedCache, block, classes_of
from .prompt_cache import can_be_cut, fits_one_prefix, kept_states, new_cache, prefix, takes_layers
from .state import LayerState, copy_of_cache, copy_of_layer, storages_of
from .tiled import TiledLayer


class PrefixState:
    """State of a model after the tokens of a prefix.

    Attributes:
        cache: of all layers.
        states: {position: {index of a layer: its attributes}}, copies of states that fit only the tokens up
            to this position.
    """

    def __init__(self, cache: Any, states: dict[int, dict[int, dict[str, Any]]]):
        self.cache, self.states = cache, states

    @property
    def has_states(self) -> bool:
        """True if a layer may hold a state that fits only this prefix: a recurrent one, or a window."""
        return any(map(fits_one_prefix, self.cache.layers))

    @property
    def has_blocks(self) -> bool:
        """True if a layer holds all tokens, which can be stored in blocks; an empty cache may get one."""
        return not self.cache.layers or not all(map(fits_one_prefix, self.cache.layers))

    @property
    def step(self) -> int:
        """Layers that hold all tokens can be cut exactly to any multiple of so many."""
        return max((layer.step for layer in self.cache.layers if isinstance(layer, LayerBase)), default=1)

    @property
    def tensors(self) -> list[Tensor]:
        layer_tensors = [t for layer in self.cache.layers for t in LayerState(layer).tensors().values()]
        return layer_tensors + [state for state in tree_leaves(self.states) if isinstance(state, Tensor)]

    def count_storages(self) -> dict[int, int]:
        """{address: bytes} of the memory of all tensors, free capacity included."""
        return storages_of(self.tensors)

    def rates(self, tokens: int) -> tuple[float, int]:
        """(the most bytes of a token, bytes beside tokens) of a sequence that has so many tokens now."""
        tiled = [layer.rates() for layer in self.cache.layers if _has_tiles(layer)]
        others = sum(LayerState(layer).memory() for layer in self.cache.layers if not _has_tiles(layer))
        return sum(rate for rate, _ in tiled) + others / tokens, sum(beside for _, beside in tiled)

    def memory_of_drafts(self, deferrable: Mapping[int, AnyKind]) -> int:
        """The most bytes that drafts take in addition to the states of a sequence.

        Args:
            deferrable: {number of a layer whose update may be deferred: the kind of its states}.
        """
        kinds = ([kind] if (kind := deferrable.get(n)) else [] for n in range(len(self.cache.layers)))
        return sum(map(bytes_beside, self.cache.layers, kinds))

    def mark(self, tokens: int) -> None:
        """Keeps copies of the states that fit only the tokens up to here."""
        if states := kept_states(self.cache):
            self.states[tokens] = states

    def longest(self, tokens: int) -> int:
        """The most tokens, up to `tokens`, of a prefix to which the state can be cut exactly."""
        growing = [layer for layer in self.cache.layers if isinstance(layer, LayerBase)]
        if all(map(can_be_cut, self.cache.layers)):
            return min((layer.longest(tokens) for layer in growing), default=tokens)
        positions = (position for position in self.states if position <= tokens)
        return max((p for p in positions if all(layer.longest(p) == p for layer in growing)), default=0)

    def cut(self, tokens: int) -> "PrefixState":
        """State after the first `tokens` tokens, as `longest` allows; this one is unchanged."""
        states = {position: state for position, state in self.states.items() if position <= tokens}
        return PrefixState(prefix(self.cache, tokens, self.states), states)

    def snapshot(self, tokens: int) -> "PrefixState | None":
        """A copy for a prefix of `tokens` tokens that later calls do not change.

        It shares the tensors that later calls append to. None for a cache with states outside of its layers.
        """
        if not is_in_layers(self.cache):
            return None
        cache = copy_of_cache(self.cache, [copy_of_layer(layer) for layer in self.cache.layers])
        copy = PrefixState(cache, {place: state for place, state in self.states.items() if place < tokens})
        copy.mark(tokens)
        return copy

    def block(self, start: int, end: int) -> CachePart:
        """The tokens from `start` to `end` of the layers that hold all tokens."""
        return CachePart(block(self.cache, start, end), classes_of(self.cache))

    def end(self, start: int, end: int) -> CachePart:
        """`block`, and the states that are kept at its end."""
        tokens = self.block(start, end)
        return tokens._replace(values={**tokens.values, **self.states.get(end, {})})

    def joining(self, tokens: int) -> JoinedCache:
        """This empty state's cache, to which the parts of a prefix of `tokens` tokens are added in order."""
        return JoinedCache(self.cache, tokens)


def _has_tiles(layer: Any) -> bool:
    return isinstance(layer, TiledLayer) and layer.get_seq_length() > 0


def empty_cache(model: PreTrainedModel, bits: KVBits | None = None) -> Any:
    """The cache that `generate` would make; None for a model whose states do not all lie in its layers.

    Args:
        bits: of keys and values, as in `accelerate`, also for a model that is not accelerated.
    """
    if (fewer := fewer_bits(bits)) is not None:
        return QuantizedCache(model.config, fewer)
    if not takes_layers(model):
        return None
    cache = new_cache(model)
    # Now, so that it is known where prefixes can be cut; a job does not walk through all modules.
    if (fewer := fewer_bits(state_in(model.get_decoder()).kv_bits)) is not None:
        grow(cache, fewer)
    return cache


def keeps_prompts(model: PreTrainedModel) -> bool:
    """True if all states of a model lie in a cache that grows with its tokens."""
    return takes_layers(model) and hands_cache_on(model)


def needs_positions(forward: Callable[..., Any], cache: Any) -> bool:
    """True for a forward that counts positions from the first token of a call, as Bamba's does."""
    has_states = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers)
    return has_states and takes_positions(forward)
