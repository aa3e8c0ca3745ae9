"""Declarations of what the layers of a cache hold.

Each class of layers, transformers' and ours, is declared once: its tensors with their axes, its numbers, how
tokens are taken back, whether its update can be deferred, and how sequences are batched. Whatever copies,
cuts, saves, counts, batches or captures a cache reads the declaration. A layer of another class is left to
transformers' code: it is neither batched, kept nor captured.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from transformers import DynamicCache

from ...ops.families.tiles import TILE
from .in_layers import InLayers


class Axes(NamedTuple):
    """Batch and time dimension of a tensor; None for a dimension that it lacks.

    `tokens`: for so many tokens it has an entry along the time dimension; 0 where older entries go.
    """

    batch: int | None = 0
    time: int | None = None
    tokens: int = 1


class Trim(Enum):
    """Way to take the last tokens back: any, while a window has not moved on, or by a copy from before."""

    TOKENS = "tokens"
    WINDOW = "window"
    COPY = "copy"


class Batched(Enum):
    """Layout of the sequences of a batch in a layer.

    Side by side with a common end; so unless indexers of the model choose several keys together; each in a
    layer of its own; not at all.
    """

    ALIGNED = "aligned"
    BY_KEYS = "by keys"
    EACH = "each"
    NEVER = "never"


@dataclass(frozen=True)
class DeclaredLayer:
    """Contents of a layer of a cache, by the names of its attributes. A layer may lack some of them.

    Attributes:
        tensors: {attribute: axes}, or None in place of a tensor.
        mappings: {attribute: axes of the tensors in this dictionary, None for numbers}.
        numbers: attributes that are numbers, dtypes and devices.
        derived: attributes that files, pickles and batches leave out: they are computed again of the others.
        trim, batched: as these say.
        defers: whether the update of its states can wait until it is known which tokens are accepted.
    """

    tensors: Mapping[str, Axes] = field(default_factory=dict)
    mappings: Mapping[str, Axes | None] = field(default_factory=dict)
    numbers: tuple[str, ...] = ()
    derived: frozenset[str] = frozenset()
    trim: Trim = Trim.TOKENS
    batched: Batched = Batched.ALIGNED
    defers: bool = False

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """All attributes."""
        return (*self.tensors, *self.mappings, *self.numbers)

    def with_more(self, other: "DeclaredLayer | None" = None, **changed: Any) -> "DeclaredLayer":
        """A declaration of what both hold, taken back as the stricter one says, with some fields changed."""
        if other is None:
            return dataclasses.replace(self, **changed)
        order = [*Trim]
        return DeclaredLayer(
            {**self.tensors, **other.tensors},
            {**self.mappings, **other.mappings},
            (*self.numbers, *(name for name in other.numbers if name not in self.numbers)),
            self.derived | other.derived,
            max(self.trim, other.trim, key=order.index),
            self.batched,
            self.defers or other.defers,
        ).with_more(**changed)


# Functions of a model's own class of layers: the class that grows in place, or None if that is another's.
GROWING_CLASSES: list[Callable[[Any], Any]] = []

TOKENS, INDEX, STATE, SHARED = Axes(0, 2), Axes(0, 1), Axes(0), Axes(None)
_KEYS = DeclaredLayer({"keys": TOKENS, "values": TOKENS}, numbers=("is_initialized", "device", "dtype"))
WINDOW = _KEYS.with_more(
    DeclaredLayer(
        {"_sliding_window_tensor": SHARED},
        numbers=("sliding_window", "cumulative_length", "record_past"),
        trim=Trim.WINDOW,
    )
)
_INDEX = DeclaredLayer(
    {"indexer_keys": INDEX, "indexer_position_ids": Axes(1, 2), "pools": INDEX},
    numbers=("is_indexer_initialized", "indexer_dtype", "indexer_device", "rate", "is_padded"),
    derived=frozenset(("pools",)),
)
_LINEAR = DeclaredLayer(
    mappings={
        "conv_states": STATE, "recurrent_states": STATE, "is_conv_states_initialized": None,
        "is_recurrent_states_initialized": None, "has_previous_state": None, "conv_kernel_size": None,
    },
    numbers=("number_of_states", "device", "dtype", "record_past"),
    trim=Trim.COPY,
    defers=True,
)  # fmt: skip
_DENSE, _TILES = TOKENS._replace(tokens=0), TOKENS._replace(tokens=TILE)
TILES = DeclaredLayer(
    {"keys": _DENSE, "values": _DENSE, "key_tiles": _TILES, "value_tiles": _TILES}, numbers=("left_out",)
)
BLOCKS = _KEYS.with_more(DeclaredLayer({"idx_keys": TOKENS}), batched=Batched.BY_KEYS)
# {name of a class of transformers: what it holds}
_OF_TRANSFORMERS = {
    "DynamicLayer": _KEYS,
    "DynamicSlidingWindowLayer": WINDOW,
    "DynamicIndexedLayer": _KEYS.with_more(_INDEX, batched=Batched.BY_KEYS),
    "LinearAttentionLayer": _LINEAR,
    "LinearAttentionAndFullAttentionLayer": _KEYS.with_more(_LINEAR),
    "LinearAttentionAndSlidingWindowAttentionLayer": WINDOW.with_more(_LINEAR),
    "DummyLayer": _KEYS,
    "UnlimitedOcrDynamicReferenceSlidingWindowLayer": WINDOW.with_more(
        DeclaredLayer(
            {"prefill_keys": TOKENS, "prefill_values": TOKENS},
            numbers=("prefill_length", "prefill_cumulative_length"),
        ),
        batched=Batched.NEVER,
    ),
}


def declaration_of(cls: Any) -> DeclaredLayer | None:
    """The declaration of a class of layers; None for an unknown one."""
    found: DeclaredLayer | None = _declaration_of(cls)
    return found


@functools.cache
def _declaration_of(cls: Any) -> DeclaredLayer | None:
    declaration: DeclaredLayer | None = getattr(cls, "declared", None)
    if declaration is None and cls.__module__.partition(".")[0] == "transformers":
        declaration = _OF_TRANSFORMERS.get(cls.__name__)
    if declaration is not None:
        return declaration
    growing: Any = next(filter(None, (of(cls) for of in GROWING_CLASSES)), None)
    return None if growing is None else growing.declared


def declared(layer: Any) -> DeclaredLayer:
    """The declaration of a layer. Raises: ValueError for a class without one."""
    found = declaration_of(type(layer))
    if found is None:
        kind = type(layer).__name__
        raise ValueError(f"torch_moe_mps: layers of a cache must be of declared classes, got a {kind}")
    return found


def is_in_layers(cache: Any) -> bool:
    """True if all states of a cache lie in layers whose classes are declared."""
    is_known = type(cache) is DynamicCache or isinstance(cache, InLayers)
    return is_known and all(declaration_of(type(layer)) is not None for layer in cache.layers)
