"""Trial of a fingerprint on a small model, once a process.

A fingerprint reads how Python keeps attributes, which each version of Python may do otherwise. What it does
not reach could change without a captured token noticing: nothing is captured where a change here is missed.
"""

import functools
from collections.abc import Iterator
from typing import Any

from torch import nn

from .fingerprint import Fingerprint


class _Config:
    def __init__(self) -> None:
        self.size = 1
        self.sizes = [1, 2]


class _Layer(nn.Module):
    def __init__(self, config: _Config) -> None:
        super().__init__()
        self.config = config
        self.number = 1
        self.act_fn = nn.Identity()


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = _Config()
        self.layers = nn.ModuleList(_Layer(self.config) for _ in range(2))


class _Other(_Layer):
    pass


@functools.cache
def unnoticed_change() -> str | None:
    """A change of a model that no fingerprint notices; None if each is noticed."""
    model = _Model()
    fingerprint = Fingerprint(model)
    if not fingerprint.holds():
        return "nothing has changed"
    return next((change for change in _changes(model) if fingerprint.holds()), None)


def _changes(model: _Model) -> Iterator[str]:
    """Makes one change of a model after the other, each but the last undone, and yields its name."""
    layers, config = model.layers, model.config
    first: Any = layers[0]
    second: Any = layers[1]

    layers[0], layers[1] = second, first
    yield "layers were swapped"
    layers[0], layers[1] = first, second

    act_fn, first.act_fn = first.act_fn, nn.ReLU()
    yield "a module was replaced"
    first.act_fn = act_fn

    first.number = 2
    yield "an attribute of a module was changed"
    first.number = 1

    config.size = 2
    yield "the config was changed"
    config.size = 1

    config.sizes[0] = 2
    yield "a list of the config was changed"
    config.sizes[0] = 1

    hook = first.register_forward_hook(lambda *_: None)
    yield "a hook was put on a module"
    hook.remove()

    first.__class__ = _Other
    yield "the class of a module was changed"
    first.__class__ = _Layer

    del layers[1]
    yield "a layer was removed"
