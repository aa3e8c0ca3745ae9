"""Bytes of a model's KV cache, measured by forwards on the meta device."""

import bisect
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from .basics.interface import experts_of
from .caches.cache import as_held
from .caches.deferred_states import bytes_beside
from .caches.growing import spare_for, window_spare
from .modules.stacked_experts import run_operators
from .upstream.calls import cache_among, call_on_shapes


class KVCache:
    """Bytes of a model's cache for one sequence.

    Args:
        states: bytes independent of the context, such as recurrent states.
        rates: {window in tokens, or None: bytes per token} of its layers.
        beside: maximum bytes for undoing rejected draft tokens in recurrent states.
    """

    def __init__(self, states: int, rates: dict[int | None, int], beside: int = 0):
        self.states, self.rates, self.beside = states, rates, beside

    @classmethod
    def of_model(cls, model: Any, bits: int = 16, more: int = 0) -> "KVCache | None":
        """Cache sizes from two short forwards on the meta device; None if these fail.

        Args:
            model: of transformers, on the meta device, and not accelerated.
            bits: of keys and values, as in `accelerate`.
            more: further layers as the last one, which draft.
        """
        few = 4  # tokens: twice as many are fewer than any sliding window has
        try:
            text = model.get_decoder()  # around it, models for images look at values
            with _on_shapes(text):
                before, after = _cached(text, few, bits), _cached(text, 2 * few, bits)
        except Exception:  # code that reads values, or knows no meta device: any error may come of it
            return None
        before, after = ([*layers, *layers[-1:] * more] for layers in (before, after))
        states, rates, beside = 0, Counter[int | None](), 0
        for (window, first, of_drafts), (_, second, _) in zip(before, after, strict=True):
            rate = (second - first) // few
            states += first - rate * few
            rates[window] += rate
            beside += of_drafts
        return cls(states, dict(rates), beside)

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
        return KVCache(self.states + other.states, rates, self.beside + other.beside)

    @property
    def token(self) -> int:
        """Bytes that each token adds to a long context."""
        return self.rates.get(None, 0)

    def at(self, context: int) -> int:
        """Bytes that the next token reads."""
        seen = {window: context if window is None else min(context, window) for window in self.rates}
        return self.states + sum(seen[window] * rate for window, rate in self.rates.items())

    def memory(self, context: int) -> int:
        """The most bytes that an accelerated model allocates, with room for more tokens and for drafts."""
        rooms = {
            window: spare_for(context) if window is None else window_spare(window) for window in self.rates
        }
        room = sum(rooms[window] * rate for window, rate in self.rates.items())
        return self.at(context) + room + self.beside

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


def _cached(model: Any, tokens: int, bits: int) -> list[tuple[int | None, int, int]]:
    """(sliding window or None, bytes, bytes for drafts beside its states) of each layer of the cache."""
    ids = torch.zeros((1, tokens), dtype=torch.long, device="meta")
    output = call_on_shapes(model, input_ids=ids)
    layers = cache_among(output).layers
    return [
        (getattr(layer, "sliding_window", None), _nbytes(as_held(layer, bits)), bytes_beside(layer))
        for layer in layers
    ]


def _nbytes(value: object) -> int:
    """The bytes of the floating-point tensors in a value, a list or a dict."""
    tensors = (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return sum(tensor.nbytes for tensor in tensors if tensor.is_floating_point())
