"""Prefill: a prompt is computed in chunks, behind its cached prefix."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ...transformers.caches.prompt_cache import kept_states, new_cache, takes_layers
from ...transformers.upstream.calls import cache_among, takes_positions
from ...transformers.upstream.models import LinearAttentionCacheLayerMixin
from ..prefix_cache.memory import CachedPrefix, Images, PrefixCache
from .scheduler import LARGEST_CHUNK

# Where states fit whole prefixes only: a template may end a prompt in another way than the next turn goes on,
# so this many tokens are computed again. Every so many tokens states are kept for prompts that share a
# document; of all, the first and the last are.
END, _EVERY, _FIRST, _LAST = 32, 4 * LARGEST_CHUNK, 2, 2


def turning(model: Any) -> dict[str, Any]:
    """{name: a module} of those that turn positions by `rope_deltas`, of the prompt that they read last."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "rope_deltas")}


@contextmanager
def turned(modules: Mapping[str, Any], moved: Mapping[str, Any]) -> Iterator[None]:
    """Inside the block, modules turn the moved positions of a prompt with images.

    Args:
        modules: of `turning`, which have their own again behind the block.
        moved: {name: the deltas}; None for those that are not in it.
    """
    before = {name: module.rope_deltas for name, module in modules.items()}
    try:
        for name, module in modules.items():
            module.rope_deltas = moved.get(name)
        yield
    finally:
        for name, module in modules.items():
            module.rope_deltas = before[name]


class Prefill:
    """A prompt that is computed behind its cached prefix, in one chunk where the model needs all of it.

    Args:
        ids: [1, T], on the CPU.
        prefix_cache: None for a prompt that is not cached.
        images: of the prompt.
        beside: inputs of the model that images are given as. Without them, a prompt whose images are not
            cached is the caller's to compute.
        modules: of `turning`.
        reads_whole: whether the model must compute a prompt in one call.

    Attributes:
        cached: the tokens and the cache so far.
        ids, prefix_cache, images: as they were given.
    """

    def __init__(
        self,
        model: Any,
        ids: Tensor,
        prefix_cache: PrefixCache | None,
        *,
        images: Images | None = None,
        beside: Mapping[str, Any] = MappingProxyType({}),
        modules: Mapping[str, Any] = MappingProxyType({}),
        reads_whole: bool = False,
    ):
        self.prefix_cache, self.images = prefix_cache, images
        self.ids, self._device, self._beside, self._modules = ids, model.device, beside, modules
        cache: Any = new_cache(model) if takes_layers(model) else None
        self.cached = CachedPrefix(ids[0, :0], cache)
        if prefix_cache is not None:
            prefix_cache.read(model)
            self.cached = prefix_cache.take(ids[0], cache, images)
        self._deltas = {} if self.cached.images is None else self.cached.images.moved
        self._end = ids.shape[1]
        self._is_whole = cache is None or reads_whole or self.has_new_images
        # Bamba's own code counts positions from the first token of a call. Stages of a pipeline decide alike:
        # their caches are of one config, and their forwards of one class.
        has_states = cache is not None and any(map(_has_states, cache.layers))
        self._tells_positions = has_states and not modules and takes_positions(model.forward)
        pauses = [] if self._is_whole else _pauses(self.cached, self._end)
        self._ends = [end for end in (*pauses, self._end) if end > len(self.cached.ids)]

    @property
    def has_new_images(self) -> bool:
        """Whether the next chunk is the whole prompt, with images that are not cached."""
        return self.images is not None and self.cached.images is None

    @property
    def chunks(self) -> int:
        """How many chunks are left, if none is shorter than it may be."""
        return sum(end > len(self.cached.ids) for end in self._ends)

    @property
    def moved(self) -> int:
        """How far positions are from the number of tokens, where there are images."""
        delta = next(reversed(self._deltas.values()), None)
        return 0 if delta is None else int(delta.reshape(-1)[0])

    @contextmanager
    def turning(self) -> Iterator[None]:
        """Block with a call of the model, whose modules turn positions as the prompt's images move them."""
        if self.has_new_images:
            self.cached.images = self.images
        with turned(self._modules, self._deltas):
            yield
            self._deltas = {name: module.rope_deltas for name, module in self._modules.items()}
        if self.cached.images is not None:
            self.cached.images.moved.update(self._deltas)

    @torch.no_grad()
    def compute(self, call: Callable[..., Any], most: int = LARGEST_CHUNK) -> Any:
        """Computes the next chunk, of at most so many tokens if it is not the whole prompt.

        Args:
            call: of the model, with its cache and inputs.

        Returns: what the call returns.
        """
        cached, start = self.cached, len(self.cached.ids)
        end = next(end for end in self._ends if end > start)
        if not self._is_whole:
            end = min(end, start + most)
        beside = self._beside if self.has_new_images else {}
        out = self._compute(call, self.ids[:, start:end], start, **beside, logits_to_keep=1)
        cached.ids = self.ids[0, :end]
        if self.prefix_cache is not None and end < self._end and _is_marked(end, self._end):
            _mark(cached)
        return out

    def decode(self, call: Callable[..., Any], ids: Tensor, start: int) -> Any:
        """Computes tokens [1, T] behind `start` others in the cache. Returns: what the call returns."""
        return self._compute(call, ids, start)

    def _compute(self, call: Callable[..., Any], ids: Tensor, start: int, **more: Any) -> Any:
        """A call with tokens [1, T] behind `start` others: the one place of its arguments."""
        inputs = {"input_ids": ids} | {n: v for n, v in more.items() if isinstance(v, Tensor)}
        if self._tells_positions:
            inputs["position_ids"] = torch.arange(start, start + ids.shape[1])[None]
        more |= {name: value.to(self._device) for name, value in inputs.items()}
        with self.turning():
            out = call(self.cached.cache, **more, use_cache=True)
        self.cached.cache = cache_among(out, self.cached.cache)
        return out


def _has_states(layer: Any) -> bool:
    return isinstance(layer, LinearAttentionCacheLayerMixin)


def _pauses(kept: CachedPrefix, prompt: int) -> list[int]:
    """The tokens up to which a prompt is computed before its end: chunks, and where its states are cached."""
    start = len(kept.ids)
    if not kept_states(kept.cache):
        return [*range(start + LARGEST_CHUNK, prompt, LARGEST_CHUNK)]
    ends = {*range((start // LARGEST_CHUNK + 1) * LARGEST_CHUNK, prompt, LARGEST_CHUNK), prompt - END}
    return sorted(end for end in ends if start < end < prompt)


def _is_marked(position: int, prompt: int) -> bool:
    return position == prompt - END or position % _EVERY == 0


def _mark(kept: CachedPrefix) -> None:
    """Keeps the states of the computed prefix, if they fit no longer prompt."""
    if states := kept_states(kept.cache):
        kept.states[len(kept.ids)] = states
    for position in sorted(kept.states)[_FIRST:-_LAST]:
        del kept.states[position]
