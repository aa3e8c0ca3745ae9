"""Layers of a model whose states may lag behind, as a twin of each module that reads some shows."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .basics.state import original_class
from .caches.cache import grow_cache
from .caches.lagging import can_lag, lagging
from .caches.prompt_cache import new_cache
from .install import is_rewritten, rewrite
from .modules.rules.trial import FewDirections, agrees, linear_cache, on_the_cpu, twin_of, verdict
from .upstream.caches import LinearAttentionLayer
from .upstream.calls import cache_name, needed_arguments

_PROMPT, _GUESSES = 5, 4  # tokens
_RIGHT = (3, 1)  # guesses that hold, of two rows


@on_the_cpu()
def lagging_layers(model: PreTrainedModel) -> frozenset[int]:
    """Numbers of the layers whose tokens can be taken back without a copy of their states.

    None in a model that is compiled: its graphs do not see what is pending behind a state.
    """
    layers = enumerate(new_cache(model).layers)
    readers: dict[int, list[nn.Module]] = {
        n: [] for n, layer in layers if type(layer) is LinearAttentionLayer
    }
    if not readers or any(map(_is_compiled, model.modules())):
        return frozenset()
    for module in _readers(model):
        number: Any = module.layer_idx
        if number in readers:
            readers[number].append(module)
    return frozenset(
        n
        for n, modules in readers.items()
        if modules and all(is_rewritten(m) and bool(verdict(m, _takes_back, type(m))) for m in modules)
    )


def _is_compiled(module: nn.Module) -> bool:
    forward = vars(module).get("forward")
    is_by_torch = module._compiled_call_impl is not None or hasattr(forward, "_torchdynamo_orig_callable")
    return is_by_torch or hasattr(module, "_orig_mod")  # torch.compile(model) holds the model so


def _readers(model: nn.Module) -> Iterator[nn.Module]:
    """The innermost modules of a layer that get a cache."""
    found = {m for m in model.modules() if hasattr(m, "layer_idx") and cache_name(original_class(m).forward)}
    for module in found:
        if not any(inner in found for inner in module.modules() if inner is not module):
            yield module


def _takes_back(module: nn.Module, cls: type[nn.Module]) -> bool:
    """Whether rows that have lost different numbers of tokens go on as if these had never been."""
    twin = twin_of(module, layer_idx=0)
    rewrite(twin)
    if type(twin) is not cls:  # an operator is refused on the model's device
        return False
    linear = next(part for part in twin.modules() if isinstance(part, FewDirections))
    x = torch.randn(len(_RIGHT), _PROMPT + _GUESSES + 1, linear.in_features)
    prompt, guesses, token = x.split((_PROMPT, _GUESSES, 1), 1)
    cache = linear_cache()
    _result(twin, prompt, cache)
    if not can_lag(cache.layers[0]):
        return False
    layer = lagging(cache.layers[0])
    cache.layers[0] = layer
    of_guesses = _result(twin, guesses, cache)
    layer.set_counts(torch.tensor(_RIGHT, dtype=torch.int32)[:, None])
    found = _result(twin, token, cache)
    for row, right in enumerate(_RIGHT):
        one = slice(row, row + 1)
        alone = linear_cache()
        _result(twin, prompt[one], alone)
        expected = [_result(twin, guesses[one, n : n + 1], alone) for n in range(right)]
        expected.append(_result(twin, token[one], alone))
        own = torch.cat((of_guesses[one, :right], found[one]), 1)
        states = [(at.conv_states[0][-1:], at.recurrent_states[0]) for at in alone.layers]
        ours = layer.conv_states[0][one], layer.recurrent_states[0][one]
        if not agrees((own, *ours), (torch.cat(expected, 1), *states[0]), 1e-4):
            return False
    return True


def _result(twin: nn.Module, x: Tensor, cache: Any) -> Tensor:
    arguments = needed_arguments(original_class(twin).forward, cache)
    grow_cache(twin, (), arguments)
    result: Any = twin(x, **arguments)
    return result[0] if isinstance(result, tuple) else result
