"""Chunked prefill of a prompt, after its cached prefix."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..._limits import LARGEST_CHUNK
from ...models.programs import cache_among, empty_cache, needs_positions
from ..prefix_cache.memory import CachedPrefix, Images, PrefixCache

# Where states fit whole prefixes only: a template may end a prompt in another way than the next turn goes on,
# so this many tokens are computed again. Every so many tokens states are kept for prompts that share a
# document; of all, the first and the last are.
END, _EVERY, _FIRST, _LAST = 32, 4 * LARGEST_CHUNK, 2, 2


def modules_with_rope_deltas(model: Any) -> dict[str, Any]:
    """{name: module} of the modules that keep M-RoPE offsets of the last prompt in `rope_deltas`."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "rope_deltas")}


@contextmanager
def with_rope_deltas(modules: Mapping[str, Any], moved: Mapping[str, Any]) -> Iterator[None]:
    """Context where modules use a prompt's M-RoPE offsets.

    Args:
        modules: from `modules_with_rope_deltas`; their offsets are restored on exit.
        moved: {name: offsets}; missing names get None.
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
    """The prefill of one prompt, after its cached prefix.

    Args:
        ids: [1, T], on the CPU.
        prefix_cache: None for a prompt that is not cached.
        images: of the prompt.
        beside: model inputs of the images. Without them, the caller computes a prompt with uncached images.
        modules: from `modules_with_rope_deltas`.
        reads_whole: True if the model must compute a prompt in one call.

    Attributes:
        cached: the computed tokens and their cache.
        ids, prefix_cache, images: the arguments.
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
        cache = empty_cache(model)
        self.cached = CachedPrefix(ids[0, :0], cache)
        if prefix_cache is not None:
            prefix_cache.read(model)
            self.cached = prefix_cache.take(ids[0], cache, images)
        self._deltas = {} if self.cached.images is None else self.cached.images.moved
        self._end = ids.shape[1]
        self._is_whole = cache is None or reads_whole or self.has_new_images
        # Pipeline stages decide alike: their caches are of one config, and their forwards of one class.
        self._tells_positions = cache is not None and not modules and needs_positions(model.forward, cache)
        self._last_mark = (self._end - END) // self.cached.step * self.cached.step
        pauses = [] if self._is_whole else _pauses(self.cached, self._end, self._last_mark)
        self._ends = [end for end in (*pauses, self._end) if end > len(self.cached.ids)]

    @property
    def has_new_images(self) -> bool:
        """True if the prompt has images that are not cached; it is then computed in one chunk."""
        return self.images is not None and self.cached.images is None

    @property
    def chunks(self) -> int:
        """Number of chunks left, if each has its maximum size."""
        return sum(end > len(self.cached.ids) for end in self._ends)

    @property
    def moved(self) -> int:
        """M-RoPE offset of positions against the number of tokens; 0 without images."""
        delta = next(reversed(self._deltas.values()), None)
        return 0 if delta is None else int(delta.reshape(-1)[0])

    @contextmanager
    def own_rope_deltas(self) -> Iterator[None]:
        """Context of a model call that uses and records the prompt's M-RoPE offsets."""
        if self.has_new_images:
            self.cached.images = self.images
        with with_rope_deltas(self._modules, self._deltas):
            yield
            self._deltas = {name: module.rope_deltas for name, module in self._modules.items()}
        if self.cached.images is not None:
            self.cached.images.moved.update(self._deltas)

    @torch.no_grad()
    def compute(self, call: Callable[..., Any], chunk: int = LARGEST_CHUNK) -> Any:
        """Computes the next chunk.

        Args:
            call: calls the model with a cache and inputs.
            chunk: maximum number of tokens, unless the prompt must be computed whole.

        Returns: the result of `call`.
        """
        cached, start = self.cached, len(self.cached.ids)
        end = next(end for end in self._ends if end > start)
        if not self._is_whole:
            end = min(end, start + chunk)
        beside = self._beside if self.has_new_images else {}
        out = self._compute(call, self.ids[:, start:end], start, **beside, logits_to_keep=1)
        cached.ids = self.ids[0, :end]
        if (
            self.prefix_cache is not None
            and end < self._end
            and (end == self._last_mark or end % _EVERY == 0)
        ):
            _mark(cached)
        return out

    def decode(self, call: Callable[..., Any], ids: Tensor, start: int) -> Any:
        """Computes tokens [1, T] after `start` cached ones. Returns: the result of `call`."""
        return self._compute(call, ids, start)

    def _compute(self, call: Callable[..., Any], ids: Tensor, start: int, **more: Any) -> Any:
        """Calls the model for tokens [1, T] after `start` cached ones, and stores the returned cache."""
        inputs = {"input_ids": ids} | {n: v for n, v in more.items() if isinstance(v, Tensor)}
        if self._tells_positions:
            inputs["position_ids"] = torch.arange(start, start + ids.shape[1])[None]
        more |= {name: value.to(self._device) for name, value in inputs.items()}
        with self.own_rope_deltas():
            out = call(self.cached.cache, **more, use_cache=True)
        self.cached.cache = cache_among(out, self.cached.cache)
        return out


def _pauses(kept: CachedPrefix, prompt: int, last_mark: int) -> list[int]:
    """Positions at which prefill pauses: chunk ends, and where recurrent states are cached."""
    start = len(kept.ids)
    if not kept.has_states:
        return [*range(start + LARGEST_CHUNK, prompt, LARGEST_CHUNK)]
    ends = {*range((start // LARGEST_CHUNK + 1) * LARGEST_CHUNK, prompt, LARGEST_CHUNK), last_mark}
    return sorted(end for end in ends if start < end < prompt)


def _mark(kept: CachedPrefix) -> None:
    """Caches the recurrent states of the computed prefix, keeping the first and last positions."""
    kept.mark(len(kept.ids))
    for position in sorted(kept.states)[_FIRST:-_LAST]:
        del kept.states[position]
