"""Activations in float16 that overflow: noticed where the logits of a token have no distribution.

NaN in a model's states stays in its cache, so that the last token of an answer shows it, too.
"""

from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

# {first child of a model, which its stand-ins share: called when activations overflow; returns what to do}
_WATCHED: WeakKeyDictionary[nn.Module, Callable[[], str]] = WeakKeyDictionary()


def watch(model: nn.Module, on_overflow: Callable[[], str]) -> None:
    """Lets `no_distribution` tell of a model whose activations may overflow."""
    _WATCHED[next(model.children())] = on_overflow


def is_watched(model: nn.Module) -> bool:
    return next(model.children(), None) in _WATCHED


def no_distribution(model: nn.Module) -> RuntimeError:
    """The error of an answer whose next token has no distribution to be chosen from."""
    text = (
        "moe_mps::sample: logits must be finite or -inf, and not all -inf, to draw a token, "
        "got NaN, +inf or -inf alone: the answer ends there"
    )
    return RuntimeError(f"{text}; {_WATCHED[next(model.children())]()}" if is_watched(model) else text)


def is_missing(largest: Tensor) -> Tensor:
    """Whether the largest logit of a row is no token's: NaN, or -inf, which no token has then."""
    return largest != largest.clamp_min(torch.finfo(largest.dtype).min)
