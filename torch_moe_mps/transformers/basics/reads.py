"""The attributes that a rewritten forward rests on, so that a later change is noticed.

A rewritten forward depends on the values that attributes had when they were read (`if self.norm_topk_prob`),
and a formula on what a submodule computed. `holds` compares them with the values now.
"""

import types
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .scoped import having
from .state import STATE

_PLAIN = (bool, int, float, str, tuple)
_PLACES = ("", "_parameters", "_buffers", "_modules")
_MISSING = "<no attribute>"
_TENSOR = "<a tensor>"  # its values are read when they are needed
_current: ContextVar[dict | None] = ContextVar("moe_mps_reads", default=None)


class Read(NamedTuple):
    """An attribute of a module, or of an object that it has: its path and its value when read.

    `kept_in`: which dictionary of the module has it, "" for its `__dict__`; None for a path, a property or an
    attribute of the class.
    """

    owner: Any
    path: str
    value: object
    kept_in: str | None


def recording() -> AbstractContextManager[dict[tuple[int, str], Read]]:
    """Collects what `depends_on` notes while the context is open."""
    return having(_current, {})


def depends_on(owner: Any, path: str, value: object = None) -> None:
    """Notes an attribute that a decision rests on: its value now, or another one that is given.

    Without `recording` around it nothing happens.
    """
    reads = _current.get()
    if reads is None:
        return
    value = _value(owner, path) if value is None else value
    if not isinstance(value, types.MethodType):
        own = vars(owner)
        kept_in = next((name for name in _PLACES if path in (own.get(name, ()) if name else own)), None)
        reads[id(owner), path] = Read(owner, path, value, kept_in)


def _value(owner: Any, path: str) -> object:
    value: object = owner
    for name in path.split("."):
        value = getattr(value, name, _MISSING)
    return _TENSOR if isinstance(value, Tensor) else value


def kept(reads: dict[tuple[int, str], Read]) -> tuple[tuple, ...]:
    """Values for `holds` to compare, as plain tuples: Python takes them apart faster than named ones."""
    return tuple(map(tuple, reads.values()))


# torch.compile asks for an argument that it knows, so this takes the module.
@torch.compiler.assume_constant_result
def holds(module: nn.Module) -> bool:
    """Whether a module, and others in it, still have the attributes that its rewritten forward rests on."""
    for owner, path, value, kept_in in module.__dict__[STATE].reads:
        own = owner.__dict__  # getattr on a module is slow
        if kept_in and path not in own:
            own = own[kept_in]
        now = own.get(path)
        if now is not None and (now is value or (value is _TENSOR and isinstance(now, Tensor))):
            continue
        now = _value(owner, path)
        if now is not value and not (isinstance(value, _PLAIN) and type(now) is type(value) and now == value):
            return False
    return True
