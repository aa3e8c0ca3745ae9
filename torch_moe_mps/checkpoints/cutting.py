"""Loading by a subclass of a model's class: without parts of the model, or from a GGUF file."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from ..models.basics.scoped import having

# Takes parts out of a model without weights, which will be on a device. Returns: what is called once the rest
# has its weights, or None.
Cut = Callable[[Any, torch.device], Callable[[], None] | None]
_CUT: ContextVar[Cut | None] = ContextVar("cut", default=None)


@contextmanager
def cutting(cut: Cut) -> Iterator[None]:
    """Block where models of `loading_class` are cut before their weights are read."""
    with having(_CUT, cut):
        yield


def is_cutting() -> bool:
    return _CUT.get() is not None


@functools.cache
def loading_class(cls: Any) -> Any:
    """Subclass of a model's class whose `from_pretrained` cuts the model, or reads a GGUF file.

    The model is one of `cls` once its weights are read.
    """

    def load(model: Any, state_dict: Any, files: Any, load_config: Any, *rest: Any, **named: Any) -> Any:
        """`_load_pretrained_model` of the class, after the cut and with the state of a GGUF file."""
        model.__class__ = cls
        cut, complete, quantizer = _CUT.get(), None, load_config.hf_quantizer
        if cut is not None:
            complete = cut(model, _device(load_config))
            if hasattr(quantizer, "forget_absent"):
                quantizer.forget_absent(model)
        if state_dict is not None:
            state_dict = quantizer.state()
        loaded = cls._load_pretrained_model(model, state_dict, files, load_config, *rest, **named)
        if complete is not None:
            complete()
        return loaded

    members = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(cls.__name__, (cls,), {**members, "_load_pretrained_model": staticmethod(load)})


def _device(load_config: Any) -> torch.device:
    """Device of a model once it is loaded."""
    if (device := getattr(load_config.hf_quantizer, "device", None)) is not None:
        return device
    places = load_config.device_map or {"": "cpu"}
    return torch.device(places.get("", next(iter(places.values()))))
