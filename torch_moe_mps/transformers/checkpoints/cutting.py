"""Models that transformers builds, and loads without some of their parts."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from transformers import PreTrainedModel

from ..basics.scoped import having

# Takes parts out of a model without weights, which will be on a device. Returns: what is called once the rest
# has its weights, or None.
Cut = Callable[[Any, torch.device], Callable[[], None] | None]
_CUT: ContextVar[Cut | None] = ContextVar("cut", default=None)


@contextmanager
def cutting(cut: Cut) -> Iterator[None]:
    """Block where models of `from_pretrained` are cut before their weights are read."""
    _cut_before_reading()
    with having(_CUT, cut):
        yield


@functools.cache
def _cut_before_reading() -> None:
    """Patches transformers to cut a model after it is built and before its weights are loaded."""
    load: Any = PreTrainedModel._load_pretrained_model

    @functools.wraps(load)
    def _load_pretrained_model(
        model: Any, state_dict: Any, files: Any, load_config: Any, *rest: Any, **named: Any
    ) -> Any:
        cut, complete = _CUT.get(), None
        if cut is not None:
            complete = cut(model, _device(load_config))
            if hasattr(load_config.hf_quantizer, "forget_absent"):
                load_config.hf_quantizer.forget_absent(model)
        loaded = load(model, state_dict, files, load_config, *rest, **named)
        if complete is not None:
            complete()
        return loaded

    PreTrainedModel._load_pretrained_model = staticmethod(_load_pretrained_model)


def _device(load_config: Any) -> torch.device:
    """Device of a model once it is loaded."""
    if (device := getattr(load_config.hf_quantizer, "device", None)) is not None:
        return device
    places = load_config.device_map or {"": "cpu"}
    return torch.device(places.get("", next(iter(places.values()))))
