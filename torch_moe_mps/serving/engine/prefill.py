"""Prompts are read in pieces, behind what is kept of them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...transformers.caches.prompt_cache import kept_states, new_cache, takes_layers
from ...transformers.upstream.caches import LinearAttentionCacheLayerMixin
from ...transformers.upstream.calls import cache_among
from ..prefix_cache.memory import CachedPrefix, Images, PrefixCache
from .stand_in import turned

AT_ONCE = 2048  # tokens of a prompt
# Where states fit whole prefixes only: a template may end a prompt in another way than the next turn goes on,
# so this many tokens are computed again. Every so many tokens states are kept for prompts that share a
# document; of all, the first and the last are.
_END, _EVERY, _FIRST, _LAST = 32, 4 * AT_ONCE, 2, 2
_ROTATE: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()  # {model: whether it has rotary embeddings}


class PromptReader:
    """A prompt that a model reads behind the part of it that is kept, in one piece where it must.

    Args:
        ids: [1, T], on the CPU.
        prompts: that are kept; None for a prompt of which nothing is.
        images: of the prompt.
        beside: inputs of the model that images are given as. Without them, a prompt whose images are not
            kept is the caller's to read.
        modules: of `turning`.
        reads_whole: whether the model must read a prompt in one call.

    Attributes:
        kept: the tokens and the cache so far.
        prompts, images: as they were given.
    """

    def __init__(
        self,
        model: Any,
        ids: Tensor,
        prompts: PrefixCache | None,
        *,
        images: Images | None = None,
        beside: Mapping[str, Any] = MappingProxyType({}),
        modules: Mapping[str, Any] = MappingProxyType({}),
        reads_whole: bool = False,
    ):
        self.prompts, self.images = prompts, images
        self._ids, self._device, self._beside, self._modules = ids, model.device, beside, modules
        cache: Any = new_cache(model) if takes_layers(model) else None
        self.kept = CachedPrefix(ids[0, :0], cache)
        if prompts is not None:
            prompts.read(model)
            self.kept = prompts.take(ids[0], cache, images)
        self._deltas = {} if self.kept.images is None else self.kept.images.moved
        self._end = ids.shape[1]
        self._is_whole = cache is None or reads_whole or self.has_new_images
        # Bamba's own code counts positions from the first token of a call.
        has_states = cache is not None and any(map(_has_states, cache.layers))
        self._tells_positions = has_states and not modules and _rotates(model)
        pauses = [] if self._is_whole else _pauses(self.kept, self._end)
        self._ends = [end for end in (*pauses, self._end) if end > len(self.kept.ids)]

    @property
    def has_new_images(self) -> bool:
        """Whether the next piece is the whole prompt, with images that are not kept."""
        return self.images is not None and self.kept.images is None

    @property
    def pieces(self) -> int:
        """How many pieces are left, if none is shorter than it may be."""
        return sum(end > len(self.kept.ids) for end in self._ends)

    @property
    def moved(self) -> int:
        """How far positions are from the number of tokens, where there are images."""
        delta = next(reversed(self._deltas.values()), None)
        return 0 if delta is None else int(delta.reshape(-1)[0])

    @contextmanager
    def turning(self) -> Iterator[None]:
        """Block with a call of the model, whose modules turn positions as the prompt's images move them."""
        if self.has_new_images:
            self.kept.images = self.images
        with turned(self._modules, self._deltas):
            yield
            self._deltas = {name: module.rope_deltas for name, module in self._modules.items()}
        if self.kept.images is not None:
            self.kept.images.moved.update(self._deltas)

    @torch.no_grad()
    def read(self, call: Callable[..., Any], most: int = AT_ONCE) -> Any:
        """Reads the next piece, of at most so many tokens if it is not the whole prompt.

        Args:
            call: of the model, with its cache and inputs.

        Returns: what the call returns.
        """
        kept, start = self.kept, len(self.kept.ids)
        end = next(end for end in self._ends if end > start)
        if not self._is_whole:
            end = min(end, start + most)
        inputs = {"input_ids": self._ids[:, start:end], **(self._beside if self.has_new_images else {})}
        if self._tells_positions:
            inputs["position_ids"] = torch.arange(start, end)[None]
        inputs = {name: value.to(self._device) for name, value in inputs.items()}
        with self.turning():
            out = call(kept.cache, **inputs, use_cache=True, logits_to_keep=1)
        kept.cache, kept.ids = cache_among(out, kept.cache), self._ids[0, :end]
        if self.prompts is not None and end < self._end and _is_marked(end, self._end):
            _mark(kept)
        return out


def _has_states(layer: Any) -> bool:
    return isinstance(layer, LinearAttentionCacheLayerMixin)


def _rotates(model: Any) -> bool:
    """Whether a model has rotary embeddings: asked once, as all of its modules are for it."""
    if model not in _ROTATE:
        _ROTATE[model] = any(hasattr(module, "inv_freq") for module in model.modules())
    return _ROTATE[model]


def _pauses(kept: CachedPrefix, prompt: int) -> list[int]:
    """The tokens up to which a prompt is computed before its end: pieces, and where its states are kept."""
    start = len(kept.ids)
    if not kept_states(kept.cache):
        return [*range(start + AT_ONCE, prompt, AT_ONCE)]
    ends = {*range((start // AT_ONCE + 1) * AT_ONCE, prompt, AT_ONCE), prompt - _END}
    return sorted(end for end in ends if start < end < prompt)


def _is_marked(position: int, prompt: int) -> bool:
    return position == prompt - _END or position % _EVERY == 0


def _mark(kept: CachedPrefix) -> None:
    """Keeps the states of what is computed so far, if they fit no longer prompt."""
    if states := kept_states(kept.cache):
        kept.states[len(kept.ids)] = states
    for position in sorted(kept.states)[_FIRST:-_LAST]:
        del kept.states[position]
