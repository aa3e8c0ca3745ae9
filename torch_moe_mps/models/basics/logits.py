"""Logits in float32 where `generate` and the commands widen them anyway, and logits without a distribution.

An output head has its sums in float32. A 16-bit model rounds them; in bfloat16 those between 16 and 32 get
steps of 0.125, so that tokens tie and a greedy answer turns with any rounding. Activations in float16 may
overflow: NaN in a model's states stays in its cache, so that the last token of an answer shows it, too.
"""

import functools
from contextvars import ContextVar
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from .scoped import having

_WIDE: ContextVar[bool] = ContextVar("moe_mps_wide_logits", default=False)

wide_logits = functools.partial(having, _WIDE, True)  # a block whose calls of models have such logits
are_wide = _WIDE.get


def mark_head(model: nn.Module) -> None:
    """Lets the quantised output heads of a model give such logits; a dense one rounds, as torch does."""
    for module in model.modules():
        get: Any = getattr(module, "get_output_embeddings", None)
        head = None if get is None else get()
        if head is not None and hasattr(head, "is_head"):
            head.is_head = True


_WATCHED: WeakSet[nn.Module] = WeakSet()  # first children of models, which their stand-ins share
_OVERFLOW = "float16 is too small for its activations: load it with dtype bfloat16"


def watch(model: nn.Module) -> None:
    """Lets `no_distribution` name the dtype of a model whose activations may overflow."""
    _WATCHED.add(next(model.children()))


def is_watched(model: nn.Module) -> bool:
    return next(model.children(), None) in _WATCHED


def no_distribution(model: nn.Module) -> RuntimeError:
    """The error of an answer whose next token has no distribution to be chosen from."""
    text = (
        "moe_mps::sample: logits must be finite or -inf, and not all -inf, to draw a token, "
        "got NaN, +inf or -inf alone: the answer ends there"
    )
    return RuntimeError(f"{text}; {_OVERFLOW}" if is_watched(model) else text)


def is_missing(largest: Tensor) -> Tensor:
    """True for rows whose maximum logit is NaN or -inf, where no token can be sampled."""
    return largest != largest.clamp_min(torch.finfo(largest.dtype).min)
