"""Batched caches of layers whose tokens cannot share a common end: each sequence has a layer of its own.

Pools and blocks of keys are counted from a sequence's first token, and compressed keys from its positions, so
that sequences of other lengths cannot lie side by side in one tensor. The model's call is one for all
sequences: projections, experts and heads compute them together. Only the modules that read such a layer run
once for each sequence, with its row of every argument and its own layer: what they compute is what they
compute alone.
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache

from ..basics.tensors import Deferred
from ..upstream import GradientCheckpointingLayer
from ..upstream.calls import cache_name
from ..upstream.models import CacheLayerMixin
from .declared import Batched, DeclaredLayer, declared
from .state import copy_of_cache

_TABLES = "position_embeddings"  # the argument of modules that may have tables of all tokens
_MASK = "attention_mask"


class Separate(CacheLayerMixin):
    """A layer of a batched cache that has a layer for each sequence.

    Attributes:
        layers: of the sequences, in their order.
    """

    _layer_type = None
    declared = DeclaredLayer(batched=Batched.EACH)

    def __init__(self, layers: Iterable[Any]):
        super().__init__()
        self.layers, self.is_initialized = [*layers], True
        self.is_sliding = bool(getattr(self.layers[0], "is_sliding", False))

    def get_seq_length(self) -> int:
        """Tokens of the longest sequence."""
        return max(layer.get_seq_length() for layer in self.layers)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return max((layer.get_mask_sizes(query_length) for layer in self.layers), key=sum)

    def get_max_length(self) -> int:
        return -1

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        raise self._refused()

    def update(self, *args: Any, **kwargs: Any) -> Any:
        raise self._refused()

    def _refused(self) -> RuntimeError:
        kind = type(self.layers[0]).__name__
        return RuntimeError(f"torch_moe_mps: a {kind} must be updated for each sequence, got all at once")

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """[position_dims, B, S], zeros in front of shorter sequences: some models keep all positions here."""
        position_ids = [layer.indexer_position_ids for layer in self.layers]
        if any(positions is None for positions in position_ids):
            return None
        longest = max(positions.shape[-1] for positions in position_ids)
        return torch.cat(
            [F.pad(positions, (longest - positions.shape[-1], 0)) for positions in position_ids], 1
        )

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Tensor) -> None:
        new = positions.shape[-1] - max(layer.indexer_position_ids.shape[-1] for layer in self.layers)
        for row, layer in enumerate(self.layers):
            count = layer.indexer_position_ids.shape[-1] + new
            row_positions = positions[:, row : row + 1, positions.shape[-1] - count :]
            layer.indexer_position_ids = (
                row_positions.contiguous()
            )  # so that strides do not follow the longest


def is_separate(layer: Any, pools: bool) -> bool:
    """True if each sequence of a batch has this layer for itself.

    Args:
        pools: whether indexers of the model choose several keys together.
    """
    batched = declared(layer).batched
    return batched is Batched.EACH or (pools and batched is Batched.BY_KEYS)


def reads_a_layer(module: nn.Module) -> bool:
    """True for a module that reads one layer of the cache: attention, or a module inside, but no block."""
    takes_cache = cache_name(type(module).forward) is not None
    return takes_cache and hasattr(module, "layer_idx") and not isinstance(module, GradientCheckpointingLayer)


def by_sequence(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that runs once for each sequence of a batch where each has the module's layer for itself."""

    @functools.wraps(forward)
    def of_sequences(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        cache = next((value for value in (*kwargs.values(), *args) if isinstance(value, Cache)), None)
        number: Any = getattr(self, "layer_idx", None)
        layers = getattr(cache, "layers", ())
        layer = layers[number] if type(number) is int and 0 <= number < len(layers) else None
        if type(layer) is not Separate:
            return forward(self, *args, **kwargs)
        bound = inspect.signature(forward).bind(self, *args, **kwargs)
        return _joined([_of_row(forward, bound, cache, number, row) for row in range(len(layer.layers))])

    return of_sequences


def _of_row(
    forward: Callable[..., Any], bound: inspect.BoundArguments, cache: Any, number: int, row: int
) -> Any:
    """The result of a forward for one sequence, with its layers of the cache."""
    rows = len(cache.layers[number].layers)
    alone = copy_of_cache(cache, [_layer_of(layer, row) for layer in cache.layers])
    arguments: dict[str, Any] = {}
    for key, value in bound.arguments.items():
        if bound.signature.parameters[key].kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= {inner: _row(item, row, rows) for inner, item in value.items()}
        else:
            arguments[key] = _row(value, row, rows)
    module = arguments.pop("self")
    arguments = {key: alone if value is cache else value for key, value in arguments.items()}
    tokens = next(value for value in arguments.values() if isinstance(value, Tensor)).shape[1]
    keys = alone.layers[number].get_mask_sizes(tokens)[0]
    if isinstance(mask := arguments.get(_MASK), Tensor):
        arguments[_MASK] = _mask_of(mask, tokens, keys)
    if isinstance(tables := arguments.get(_TABLES), tuple):
        arguments[_TABLES] = tuple(
            table if table.shape[1] == tokens else table[:, -keys:] for table in tables
        )
    return forward(module, **arguments)


def _joined(results: list[Any]) -> Any:
    """The results of all sequences as one; None for what has another shape in each, as attention weights."""
    if isinstance(results[0], tuple):
        return tuple(map(_joined, map(list, zip(*results, strict=True))))
    if not isinstance(results[0], Tensor) or len({result.shape for result in results}) > 1:
        return None
    return torch.cat(results)


def _row(value: Any, row: int, rows: int) -> Any:
    """A sequence's row of an argument; masks of order are made anew."""
    if isinstance(value, Deferred):
        return value
    if isinstance(value, Tensor):
        return value[row : row + 1] if value.dim() > 0 and value.shape[0] == rows else value
    if isinstance(value, tuple):
        return tuple(_row(item, row, rows) for item in value)
    return {key: _row(item, row, rows) for key, item in value.items()} if isinstance(value, dict) else value


def _mask_of(mask: Tensor, tokens: int, keys: int) -> Tensor:
    """The mask of a sequence alone: it has no padding."""
    if isinstance(mask, Deferred):
        alone: Any = mask
        return alone.of_one(keys)
    return mask if mask.shape[-1] == tokens else mask[..., -keys:]


def _layer_of(layer: Any, row: int) -> Any:
    return layer.layers[row] if isinstance(layer, Separate) else layer
