"""Uses of a layer's weight in the code around it that a quantised layer does not allow."""

import functools
import inspect
import re
import types
from collections.abc import Iterator

# A weight that is read as a whole: LazyWeight has its dtype, device, shape and elements.
_READ = re.compile(r"(?<!isinstance\()\bself\.(\w+)\.weight\b(?!\.(?:dtype|device|shape)\b|\[)")
# A branch that runs in training alone.
_TRAINING = re.compile(r"^([ \t]*)if (?:[\w.]+ and )*self\.training\b[^:]*:\n(?:\1[ \t]+.*\n|\s*\n)+", re.M)
_WRITTEN = re.compile(r"\b\w+\.([\w.]+)\.weight(?:\.data)?\.[a-z]\w*_\(")


def use_of_weight(cls: type, child: str) -> str | None:
    """The reason to leave a child dense: methods of a class read its weight as LazyWeight does not allow.

    Functions with "cuda" in their names, and branches for training, never run on quantised layers.
    """
    read, has_source = _weights_read_by(cls)
    if child in read:
        return "the code around it reads its weight"
    return None if has_source else "the code around it, which has no source, may read its weight"


@functools.cache
def _weights_read_by(cls: type) -> tuple[set[str], bool]:
    """(children whose weights methods read, True if all methods have their source)."""
    read, has_source = set[str](), True
    for base in cls.__mro__:
        if base is not object and not base.__module__.startswith("torch."):
            for name, source in _sources_of(base):
                has_source &= source is not None or name.startswith("__")
                read.update(_READ.findall(source or ""))
    return read, has_source


@functools.cache
def weights_written_by(cls: type) -> frozenset[str]:
    """Ends of the names of layers whose weights methods of a class change in place: "attention.output"."""
    return frozenset(written for _, source in _sources_of(cls) for written in _WRITTEN.findall(source or ""))


@functools.cache
def _sources_of(cls: type) -> tuple[tuple[str, str | None], ...]:
    """(name, source or None) of the methods that a class defines and that run in inference.

    Read once for a class: all models of transformers share the bases with most of the methods.
    """
    return tuple(_read_sources(cls))


def _read_sources(cls: type) -> Iterator[tuple[str, str | None]]:
    for name, function in vars(cls).items():
        method = inspect.unwrap(function) if inspect.isfunction(function) else None
        if isinstance(method, types.FunctionType) and "cuda" not in name and name != "_init_weights":
            try:
                yield name, _TRAINING.sub("", inspect.getsource(method))
            except OSError:
                yield name, None
