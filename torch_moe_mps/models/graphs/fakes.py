"""Fake results of operators: taken from an equal call before, or from the mode."""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ..basics.scoped import Bounded

_ATEN = torch.ops.aten


class _Like:
    """Likeness of a fake tensor, from which others are made without its mode.

    Attributes:
        plain: a meta tensor like it, which keeps what torch knows of its symbols: sizes that are given to a
            new tensor are compared anew.
    """

    def __init__(self, fake: FakeTensor) -> None:
        self.device = fake.fake_device
        with in_kernel_invocation_manager(fake.fake_mode):
            self.plain = _ATEN.alias.default(fake)

    @classmethod
    def of(cls, value: Any) -> Any:
        return cls(value) if isinstance(value, FakeTensor) else value


_MOST_KNOWN = 10_000
_known = Bounded(_MOST_KNOWN)  # {call without symbols: what it gave}, of all recorders


class FakeResults:
    """Fake tensors for one recording.

    Args:
        env: has the symbols.
        alive: ids of tensors that stay until the recording ends, as keys.
    """

    def __init__(self, env: ShapeEnv, alive: dict[int, Any]) -> None:
        self._alive = alive
        self.mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
        self.mode.cache_enabled = False  # `of` has a cache, whose entries take a third of the time
        self._keys: dict[int, tuple[Any, ...]] = {}  # by id of a fake tensor
        self._has_symbols = False  # the key that is made now
        self._results = Bounded(_MOST_KNOWN)  # {call: what it gave}, of calls with symbols

    def end(self) -> None:
        """The recording has ended: none of its tensors stays alive here."""
        self._alive, self._keys, self._results = {}, {}, Bounded(_MOST_KNOWN)

    def empty(self, like: Tensor, sizes: tuple[Any, ...], dtype: torch.dtype | None = None) -> Any:
        """A fake tensor. The mode's own from_tensor, which keeps shared storages, is slow."""
        options: dict[str, Any] = {"dtype": dtype or like.dtype, "device": like.device}
        stride = None if like.is_contiguous() else like.stride()
        key = (*sizes,), stride, *options.values()
        has_symbols = any(isinstance(size, torch.SymInt) for size in sizes)
        if not has_symbols and key in _known:
            return self._like(_known[key])
        with self.mode:
            fake: Any
            if stride is None:
                fake = torch.empty(sizes, **options)
            else:
                fake = torch.empty_strided(sizes, stride, **options)
        if not has_symbols:
            _known[key] = _Like(fake)
        return fake

    def of(self, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Result of an operator, taken from an equal call before: layers and modules make many of these."""
        if func._schema.is_mutable and func.namespace != "moe_mps":  # it may change a tensor's shape
            self._keys = {}
            return func(*args, **kwargs)
        self._has_symbols = False
        key = func, torch.get_default_dtype(), self._key(args), self._key([*kwargs.items()])
        known = self._results if self._has_symbols else _known
        if key in known:
            like = known[key]
            return [*map(self._like, like)] if isinstance(like, list) else self._like(like)
        result = func(*args, **kwargs)
        if all(id(item) not in self._alive and not _has_bits(item) for item in listed(result)):
            of_list = isinstance(result, (list, tuple))
            known[key] = [*map(_Like.of, result)] if of_list else _Like.of(result)
        return result

    def _key(self, value: Any) -> Any:
        """A key of an argument: equal if dtype, device, sizes and strides are, or the value itself."""
        if isinstance(value, FakeTensor):
            self._has_symbols |= value._has_symbolic_sizes_strides
            key = self._keys.get(id(value))
            if key is None:
                key = value.dtype, value.fake_device, _has_bits(value), *map(self._key, geometry(value))
                if id(value) in self._alive:  # it stays alive
                    self._keys[id(value)] = key
            return key
        if isinstance(value, torch.SymInt):
            self._has_symbols = True
            return value.node.expr
        if isinstance(value, (list, tuple)):
            return tuple(map(self._key, value))
        return type(value), value

    def _like(self, known: Any) -> Any:
        """A new fake tensor like another one; both may share memory, which nobody asks of fake tensors."""
        if not isinstance(known, _Like):
            return known
        return FakeTensor(self.mode, known.plain, known.device)


def listed(result: Any) -> Any:
    return result if isinstance(result, (list, tuple)) else [result]


def _has_bits(value: Any) -> bool:
    """True if a tensor has the conjugate or the negative bit."""
    return isinstance(value, Tensor) and (value.is_conj() or value.is_neg())


def geometry(tensor: Tensor) -> tuple[Any, Any, Any]:
    return tensor.shape, tensor.stride(), tensor.storage_offset()
