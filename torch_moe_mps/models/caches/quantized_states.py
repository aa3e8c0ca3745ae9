"""Keys or values of a cache in 8 bits, which the operator `cached_attention` reads without decoding."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..._weight_formats import GROUP_SIZES
from ...ops._checks import ACTIVATION_DTYPES
from ...ops.families.attention import CACHE_BITS, values_in
from ..basics.tensors import Deferred

_ATEN = torch.ops.aten
PLAIN = (Tensor, FakeTensor)  # without a meaning of its own; fake while a token is captured
# Operators along a dimension, with the position of that argument: they apply to codes and scales alike.
_OF_A_DIMENSION = {_ATEN.slice.Tensor: 1, _ATEN.index_select.default: 1}
_OF_EVERYTHING = {_ATEN.detach.default, _ATEN.alias.default, _ATEN.clone.default}


def group_size(width: int) -> int | None:
    """The largest size of groups that divides the width of a head; None if none does."""
    return next((size for size in sorted(GROUP_SIZES["affine"], reverse=True) if width % size == 0), None)


def can_be_quantized(*states: Tensor) -> bool:
    return all(
        type(tensor) in PLAIN
        and tensor.dim() == 4
        and tensor.dtype in ACTIVATION_DTYPES
        and tensor.shape[3] > 0
        and group_size(tensor.shape[3]) is not None
        for tensor in states
    )


class QuantizedStates(Deferred):
    """[B, Hk, S, D] in 8 bits; its elements are the dequantised numbers, made anew for each reader.

    Slices and index_select of tokens and batches stay quantised. Only `write` and `zero_` change it.

    Attributes:
        packed, scales, zeros: [B, Hk, S, D / 4], and twice [B, Hk, S, D / group], as
            `torch.ops.moe_mps.cached_attention` takes them.
    """

    packed: Tensor
    scales: Tensor
    zeros: Tensor

    @staticmethod
    def __new__(cls, packed: Tensor, scales: Tensor, zeros: Tensor) -> "QuantizedStates":
        *rows, words = packed.shape
        shape, attributes = (
            (*rows, words * 32 // CACHE_BITS),
            {"packed": packed, "scales": scales, "zeros": zeros},
        )
        return cls.made(shape, scales.dtype, scales.device, **attributes)

    @classmethod
    def empty(cls, like: Tensor, tokens: int, widths: Sequence[int] = ()) -> "QuantizedStates":
        """Uninitialised, for `tokens` tokens of the states `like`, [B, Hk, T, D].

        `widths`: of several that lie side by side, `like` among them.
        """
        *rows, _, width = like.shape
        size = group_size(math.gcd(*(widths or (width,))))
        width = sum(widths) or width
        assert size is not None
        packed = like.new_empty((*rows, tokens, width * CACHE_BITS // 32), dtype=torch.int32)
        scales, zeros = (like.new_empty((*rows, tokens, width // size)) for _ in range(2))
        return cls(packed, scales, zeros)

    def map(self, function: Callable[[Tensor], Tensor]) -> "QuantizedStates":
        return QuantizedStates(function(self.packed), function(self.scales), function(self.zeros))

    def tokens(self, start: int, count: int) -> "QuantizedStates":
        """A view of some tokens."""
        return self.map(lambda tensor: tensor.narrow(2, start, count))

    def columns(self, widths: Sequence[int]) -> "list[QuantizedStates]":
        """Views of neighbouring columns of these widths, which whole groups fill."""
        parts = []
        for tensor in self.parts():
            shares = [width * tensor.shape[3] // self.shape[3] for width in widths]
            parts.append(tensor.split(shares, 3))
        return [QuantizedStates(*part) for part in zip(*parts, strict=True)]

    def write(self, start: int, states: Tensor) -> None:
        """Tokens from `start` on become these states."""
        if isinstance(states, QuantizedStates):
            for part, other in zip(self.parts(), states.parts(), strict=True):
                part.narrow(2, start, states.shape[2]).copy_(other)
        else:
            torch.ops.moe_mps._write_cache_quantized_(states, *self.parts(), start)

    def elements(self) -> Tensor:
        return values_in(*self.parts()).to(self.dtype)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return sum(part.nbytes for part in self.parts())

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.packed, self.scales, self.zeros

    def __deepcopy__(self, memo: dict[int, Any]) -> "QuantizedStates":
        copied = self.map(lambda tensor: tensor.clone(memory_format=torch.contiguous_format))
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return QuantizedStates, self.parts()

    @classmethod
    def without_elements(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """Result of an operator of aten on packed tensors; NotImplemented if it needs elements."""
        first = args[0] if args else None
        if not isinstance(first, QuantizedStates):
            return NotImplemented
        position = _OF_A_DIMENSION.get(func)
        dim = 0 if position is None or len(args) <= position else args[position]
        rows = position is not None and dim % first.dim() < first.dim() - 1
        moves = func is _ATEN._to_copy.default and kwargs.get("dtype") in (None, first.dtype)
        if moves:
            kwargs = {name: value for name, value in kwargs.items() if name != "dtype"}
        if rows or moves or func in _OF_EVERYTHING:
            return first.map(lambda tensor: func(tensor, *args[1:], **kwargs))
        if func is _ATEN.zero_.default:
            for part in first.parts():
                part.zero_()
            return first
        if func._schema.is_mutable:
            raise RuntimeError(
                f"torch_moe_mps: keys and values in 8 bits must be left as they are, got {func}"
            )
        return NotImplemented
