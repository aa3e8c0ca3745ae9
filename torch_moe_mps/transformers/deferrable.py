"""Layers whose recurrent state updates can be deferred, found by trials on a copy of each module.

Modules that ignore cached states when they get several tokens are found in the same way.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..models.basics.state import original_class
from ..models.caches.deferred_states import (
    KINDS,
    AnyKind,
    DeferredLayer,
    can_defer,
    committed,
    deferred,
    states_of,
)
from ..models.caches.prompt_cache import new_cache
from ..models.caches.state import LayerState, copy_of_layer
from ..models.trials.comparing import agrees, tried
from ..models.trials.draws import normal
from ..models.trials.forms import first_form
from ..models.trials.memory import on_the_cpu
from ..models.trials.replicas import LinearCache, replica_of, width_of
from ..models.upstream.calls import cache_argument, needed_arguments
from ..models.upstream.models import CacheLayerMixin, LinearAttentionLayer
from .install import is_rewritten, run_as, runs_with_cache

_PROMPT, _DRAFTS = 5, 4  # tokens
_RIGHT = (3, 1)  # accepted draft tokens, of two rows


@on_the_cpu()
def deferrable_layers(model: PreTrainedModel) -> dict[int, AnyKind]:
    """{number of a layer whose tokens can be taken back without a copy of its states: the kind of these}.

    None in a model that is compiled: its graphs do not see uncommitted tokens.
    """
    layers = _layers_with_states(model)
    if not layers or any(map(_is_compiled, model.modules())):
        return {}
    kinds: dict[int, set[AnyKind | None]] = {number: set() for number in layers}
    for module, number in _readers(model, layers):
        kinds[number].add(_kind_of(module, len(layers[number].conv_states)))
    found = {number: next(iter(of_layer)) for number, of_layer in kinds.items() if len(of_layer) == 1}
    return {number: kind for number, kind in found.items() if kind is not None}


@on_the_cpu()
def forgets_states(model: PreTrainedModel) -> bool:
    """True if modules ignore cached state when they get several tokens.

    Mamba-1's eager forward does. Modules that a trial cannot run may. One module of each class and forward is
    tried.
    """
    layers = _layers_with_states(model)
    readers = {type(module): (module, number) for module, number in _readers(model, layers)}
    return not all(
        first_form(module, (2,), _chunks, cls, len(layers[number].conv_states))
        for cls, (module, number) in readers.items()
    )


def _layers_with_states(model: PreTrainedModel) -> dict[int, Any]:
    """{number: layer of a new cache} for layers of linear attention."""
    cache = tried(new_cache, model)
    layers = enumerate([] if cache is None else cache.layers)
    return {number: layer for number, layer in layers if isinstance(layer, LinearAttentionLayer)}


def _reads_keys_alone(module: nn.Module, layer: Any) -> bool:
    """True if a module is the attention beside linear attention, in a layer of the cache for both."""
    return isinstance(layer, CacheLayerMixin) and isinstance(getattr(module, "is_causal", None), bool)


def _kind_of(module: nn.Module, states: int) -> AnyKind | None:
    """Kind of recurrent states that a module can restore, or None.

    Args:
        states: how many the layer has of each kind.
    """
    if not is_rewritten(module):
        return None
    kind: AnyKind | None = first_form(module, KINDS, _kinds, type(module), states)
    return None if kind is None else kind.of(module)


def _is_compiled(module: nn.Module) -> bool:
    forward = vars(module).get("forward")
    is_by_torch = module._compiled_call_impl is not None or hasattr(forward, "_torchdynamo_orig_callable")
    return is_by_torch or hasattr(module, "_orig_mod")  # torch.compile(model) holds the model so


def _readers(model: nn.Module, layers: dict[int, Any]) -> Iterator[tuple[nn.Module, int]]:
    """The innermost modules that read states of these layers of a cache, and the numbers of the layers."""
    if not layers:
        return
    found = {module for module in model.modules() if hasattr(module, "layer_idx") and runs_with_cache(module)}
    for module in found:
        number: Any = module.layer_idx
        if any(inner in found for inner in module.modules() if inner is not module):
            continue
        if number in layers and not _reads_keys_alone(module, layers[number]):
            yield module, number


def _kinds(module: nn.Module, cls: type[nn.Module], states: int) -> Callable[[AnyKind], bool]:
    """{kind of states: True if a copy of the module can restore them}."""
    return functools.partial(_takes_back, _replica_that_runs(module), states)


def _replica_that_runs(module: nn.Module) -> Any:
    """Copy of a module with the same replaced forward."""
    replica = replica_of(module)
    if is_rewritten(module):
        run_as(replica, module)
    return replica


def _chunks(module: nn.Module, cls: type[nn.Module], states: int) -> Callable[[int], bool]:
    """True if a copy of the module continues from the first of two chunks of a prompt."""
    return lambda _: _goes_on(_replica_that_runs(module), states)


def _goes_on(replica: Any, states: int) -> bool:
    """True if a prompt in two chunks gives the same result as in one."""
    found = []
    x = normal(1, _PROMPT + _DRAFTS, _width_of(replica, states))
    for chunks in ((_PROMPT + _DRAFTS,), (_PROMPT, _DRAFTS)):
        cache = LinearCache(states, replica.layer_idx)
        results = [_result(replica, chunk, cache) for chunk in x.split(chunks, 1)]
        found.append([torch.cat(results, 1), *(state.clone() for state in cache.states())])
    whole, in_pieces = found
    return agrees(in_pieces, whole, 1e-3)


def _takes_back(replica: Any, states: int, kind: AnyKind) -> bool:
    """True if rows that have lost different numbers of tokens go on as if these had never been."""
    x = normal(len(_RIGHT), _PROMPT + _DRAFTS + 1, _width_of(replica, states))
    prompt, drafts, token = x.split((_PROMPT, _DRAFTS, 1), 1)
    cache = LinearCache(states, replica.layer_idx)
    _result(replica, prompt, cache)
    if not can_defer(cache.layer):
        return False
    kind = kind.of(replica)
    layer = deferred(cache.layer, kind)
    cache.layer = layer
    of_drafts = _result(replica, drafts, cache)
    layer.set_counts(torch.tensor(_RIGHT, dtype=torch.int32)[:, None])
    behind = [_copies(committed(_row_of(layer, row), right, kind)) for row, right in enumerate(_RIGHT)]
    found = _result(replica, token, cache)
    for row, right in enumerate(_RIGHT):
        one = slice(row, row + 1)
        alone = LinearCache(states, replica.layer_idx)
        _result(replica, prompt[one], alone)
        expected = [_result(replica, drafts[one, n : n + 1], alone) for n in range(right)]
        before = _copies(alone.layer)
        expected.append(_result(replica, token[one], alone))
        ours = torch.cat((of_drafts[one, :right], found[one]), 1)
        theirs = [torch.cat(expected, 1), *before, *_copies(alone.layer)]
        if not agrees([ours, *behind[row], *_copies(_row_of(layer, row))], theirs, 1e-4):
            return False
    return True


def _width_of(replica: Any, states: int) -> int:
    return width_of(replica, lambda x: _result(replica, x, LinearCache(states, replica.layer_idx)))


def _row_of(layer: Any, row: int) -> Any:
    """A copy of a layer with the states of one row."""
    copied = copy_of_layer(layer)
    tensors = LayerState(copied).tensors()
    LayerState(copied).put({name: tensor[row : row + 1].clone() for name, tensor in tensors.items()})
    return copied


def _copies(layer: Any) -> list[Tensor]:
    return [state.clone() for state in states_of(layer).values()]


def _result(replica: nn.Module, x: Tensor, cache: Any) -> Tensor:
    """All that a module returns for each token."""
    eager_forward = original_class(replica).forward
    arguments = needed_arguments(eager_forward, cache) | cache_argument(eager_forward, cache)
    if isinstance(cache.layer, DeferredLayer):
        cache.layer.show_uncommitted()
    result: Any = replica(x, **arguments)
    parts = result if isinstance(result, tuple) else (result,)
    states = cache.states()  # returned by some, too
    of_tokens = [part for part in parts if part is not None and not any(part.equal(s) for s in states)]
    return torch.cat([part.flatten(2) for part in of_tokens], -1)
