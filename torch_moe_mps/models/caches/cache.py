"""The caches that a model is called with: their layers grow in place from then on, or hold fewer bits."""

import functools
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import (
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
    StaticCache,
)

from ..._limits import KV_FORMATS
from ...ops.families.attention import CACHE_BITS
from ...selfcheck.long_sums import ROWS, TERMS, warn_of_eager_attention
from ..basics.residency import follow_moved
from ..basics.state import KVBits, state_in, state_of
from ..upstream.calls import cache_among, cache_argument, cache_name, decoder_cache
from ..upstream.models import GROWING, CacheLayerMixin
from .classes import growing_class, holds_more_bits
from .declared import is_in_layers
from .deferred_states import DeferredLayer
from .held import HeldEntries
from .in_layers import cache_class
from .layers import LayerBase
from .quantized_states import QuantizedStates, can_be_quantized
from .separate import Separate
from .state import LayerState

_STATE_OF_MODULE = "conv1d_state"  # the attribute of a module that keeps states
# Whether `generate` makes the calls, and their positions from those of the prompt.
FOLLOWS = ContextVar("moe_mps_follows", default=False)


def grow_caches_in_place(model: nn.Module, bits: KVBits | None = None) -> None:
    """Make the caches that a model is called with grow in place, from the next call on.

    Args:
        bits: of keys and values, as in `accelerate`.
    """
    for module in _decoders(model):
        if bits is not None:
            state_of(module).kv_bits = bits
        if grow_cache not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(grow_cache, with_kwargs=True)


def restore_caches(model: nn.Module) -> None:
    """Undoes `grow_caches_in_place`. A cache that grows in place goes on doing so."""
    for module in model.modules():
        for key in [key for key, hook in module._forward_pre_hooks.items() if hook is grow_cache]:
            del module._forward_pre_hooks[key]
            del module._forward_pre_hooks_with_kwargs[key]


def grow_cache(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Runs before a decoder: gives layers of a plain cache classes that grow in place, or hold fewer bits.

    Weights that have moved are kept resident again.

    Returns: the arguments of the call where its cache is made here, else None.
    """
    given = None
    cache = decoder_cache(cache_among(kwargs))
    if cache is None:
        if (cache := _cache_in_layers(module, args, kwargs)) is None:
            return None
        given = args, kwargs | cache_argument(module, cache)
    bits = fewer_bits(state_in(module).kv_bits)
    is_plain = (type(cache) in GROWING or is_in_layers(cache)) and not cache.offloading
    if bits and (type(cache) is StaticCache or (is_plain and torch.compiler.is_compiling())):
        _refuse_bits(cache, bits)
    if torch.compiler.is_compiling():
        return given
    follow_moved()
    if _has_long_sums(module, cache, args, kwargs):
        warn_of_eager_attention(type(module).__name__)
    if is_plain:
        if (unknown := grow(cache, bits)) is not None:
            _warn_of(type(module).__name__, unknown)
        _prepare(cache, kwargs.get("position_ids", args[2] if len(args) > 2 else None))
    elif bits and not isinstance(cache, QuantizedCache):
        _warn_of_16_bits(cache, bits)
    return given


def _has_long_sums(module: Any, cache: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True for a prompt whose eager attention on mps sums very many terms (selfcheck/long_sums.py)."""
    states = kwargs.get("inputs_embeds")
    tokens = kwargs.get("input_ids", args[0] if args else None) if states is None else states
    if tokens is None or tokens.shape[1] < ROWS or tokens.device.type != "mps":
        return False
    is_eager = getattr(module.config, "_attn_implementation", None) == "eager"
    return is_eager and cache.get_seq_length() + tokens.shape[1] >= TERMS


def _cache_in_layers(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A cache for a call that would make the model create a list of states; None for any other call."""
    uses = kwargs.get("use_cache")
    uses = getattr(module.config, "use_cache", False) if uses is None else uses
    if not uses or module.training or torch.compiler.is_compiling() or len(args) > 1:
        return None
    cls = cache_class(module)
    return None if cls is DynamicCache else cls(config=module.config.get_text_config(decoder=True))


def fewer_bits(bits: KVBits | None) -> KVBits | None:
    """`bits` of keys and values; None for 16, which are as the model makes them."""
    return bits if bits == CACHE_BITS or bits in KV_FORMATS else None


def _warn_of_16_bits(cache: Any, bits: KVBits) -> None:
    """Warns that a cache keeps 16 bits although fewer were requested."""
    name = f"{'an offloaded ' if getattr(cache, 'offloading', False) else ''}{type(cache).__name__}"
    warnings.warn(
        f"torch_moe_mps: kv_bits={bits!r} is not for {name}, which keeps keys and values as they are",
        stacklevel=3,
    )


def _prepare(cache: Any, positions: Tensor | None) -> None:
    """Shows the layers what a call may ask for: uncommitted tokens, and whether its positions are theirs."""
    for layer in cache.layers:
        if isinstance(layer, DeferredLayer):
            layer.show_uncommitted()
    if positions is not None:
        _note_positions(cache, positions)


def _refuse_bits(cache: Any, bits: KVBits) -> NoReturn:
    """Raises: RuntimeError for what would fill a cache with 16 bits."""
    got = "a StaticCache" if type(cache) is StaticCache else "a compiled call, which needs a StaticCache"
    raise RuntimeError(
        f"torch_moe_mps: kv_bits={bits!r} needs a DynamicCache, as generate() makes it by default, got "
        f"{got}; accelerate(model, kv_bits=16) keeps 16 bits"
    )


def grow(cache: Any, bits: KVBits | None) -> str | None:
    """Lets the layers of a cache grow in place, and hold so many bits.

    Returns: the name of a class of layers that holds keys and is not known, if there is one.
    """
    unknown = None
    for layer in cache.layers:
        plain: Any = type(layer)
        cls = growing_class(plain, bits)
        if cls is not None:
            if holds_more_bits(plain, bits):
                _warn_of_more_bits(bits)
            layer.__class__ = cls
        elif isinstance(layer, CacheLayerMixin) and not isinstance(layer, LayerBase | Separate):
            unknown = plain.__name__
    return unknown


@functools.cache
def _warn_of(model: str, layer: str) -> None:
    """Warns once that the caches of a model have layers of a class that is not known."""
    warnings.warn(
        f"torch_moe_mps: the cache of {model} does not grow in place, and every token copies it: {layer} is "
        "no class of layers that is known",
        stacklevel=2,
    )


@functools.cache
def _warn_of_more_bits(bits: KVBits) -> None:
    """Warns once that some layers hold more bits than requested."""
    warnings.warn(
        f"torch_moe_mps: kv_bits={bits!r} is for layers that hold the keys and values of all tokens; layers "
        "with a sliding window, an indexer or states hold 8 bits",
        stacklevel=2,
    )


def _note_positions(cache: Any, positions: Tensor) -> None:
    """Compares a call's positions with the cache's, where its layers count tokens by the latter.

    The GPU has the positions, so that this takes as long as a token. A token of `generate` has the positions
    that follow from its cache. They are not known while a token is captured. Several tokens end the capture.
    """
    layers = [layer for layer in cache.layers if isinstance(layer, HeldEntries) and layer.is_in_order]
    tokens = positions.shape[-1]
    if not layers or (tokens == 1 and (FOLLOWS.get() or type(positions) is FakeTensor)):
        return
    first = layers[0].cumulative_length
    in_order = torch.arange(first, first + tokens, device=positions.device)
    if not bool((positions == in_order).all()):
        for layer in layers:
            layer.is_in_order = False


class QuantizedCache(DynamicCache):
    """A DynamicCache that holds keys and values in 8 or 4 bits: half or a quarter of the memory of 16.

    Heads whose width is no multiple of 32 stay in 16 bits. Layers with a sliding window, an indexer or states
    hold 8 bits at least.

    Args:
        config: of the model that will use the cache.
        bits: of keys and values, as in `accelerate`.
    """

    def __init__(self, config: PreTrainedConfig, bits: KVBits = CACHE_BITS) -> None:
        super().__init__(config=config)
        grow(self, bits)


def as_held(layer: Any, bits: KVBits) -> dict[str, Any]:
    """The attributes of a layer of a plain cache; keys and values as a model with these kv_bits has them.

    Args:
        bits: 8 or 16, or fewer for a layer that holds 8 then.
    """
    plain: Any = type(layer)
    cls: Any = growing_class(plain, fewer_bits(bits))
    values = LayerState(layer).values()
    if getattr(cls, "bits", None) is not None and can_be_quantized(layer.keys, layer.values):
        values |= {
            name: QuantizedStates.empty(values[name], values[name].shape[2]) for name in ("keys", "values")
        }
    return values


def _decoders(model: nn.Module) -> Iterator[nn.Module]:
    """The innermost models of transformers that take a cache; calls of the outer models reach them."""
    result = {m for m in model.modules() if isinstance(m, PreTrainedModel) and takes_cache(m)}
    for module in result:
        if not any(inner in result for inner in module.modules() if inner is not module):
            yield module


def takes_cache(model: nn.Module) -> bool:
    """True if a model's forward has an argument for its cache."""
    return cache_name(model.forward) is not None


def hands_cache_on(model: PreTrainedModel) -> bool:
    """True if the states of a conversation are all in the cache of a call.

    RWKV has a list of states; RecurrentGemma's modules have them.
    """
    keeps_states = any(hasattr(module, _STATE_OF_MODULE) for module in model.modules())
    return takes_cache(model) and not keeps_states
