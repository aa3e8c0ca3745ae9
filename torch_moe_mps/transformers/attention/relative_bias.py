"""Biases of relative positions, without memory for each pair of a token and a key until something looks.

Each token has a bias for each distance of a key: a product of its states with a matrix. The attention of this
package takes the biases by distance, and of a prompt those of some tokens at a time.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..basics.deferred import Deferred

_ATEN = torch.ops.aten
# What a model does to its bias: each of these gives an element for each element.
_OF_ELEMENTS = (_ATEN._to_copy.default, _ATEN.mul.Tensor)
MOST_BYTES = 128 * 2**20  # of biases that a prompt has at a time


class RelativeBias(Deferred):
    """[B, Hq, T, S]: what is added to scores.

    Attributes:
        states: [B, T, Hq, R].
        bank: [R, E], the biases at each distance.
        make: gives the elements by the model's own code.
        steps: what was done to them since, of which each is (function, arguments, options) behind the bias.
    """

    states: Tensor
    bank: Tensor
    make: Callable[[], Tensor]
    steps: tuple[tuple[Any, tuple[Any, ...], dict[str, Any]], ...]
    _elements: Tensor | None

    @staticmethod
    def __new__(
        cls,
        states: Tensor,
        bank: Tensor,
        keys: int,
        dtype: torch.dtype,
        make: Callable[[], Tensor],
        steps: tuple[tuple[Any, tuple[Any, ...], dict[str, Any]], ...] = (),
    ) -> "RelativeBias":
        batch, tokens, heads, _ = states.shape
        shape = batch, heads, tokens, keys
        own = {"states": states, "bank": bank, "make": make, "steps": steps, "_elements": None}
        made: RelativeBias = cls.made(shape, dtype, states.device, **own)
        return made

    def elements(self) -> Tensor:
        if self._elements is None:
            elements = self.make()
            for function, arguments, options in self.steps:
                elements = function(elements, *arguments, **options)
            self._elements = elements
        return self._elements

    def by_distance(self, start: int, stop: int) -> Tensor:
        """[B, T', Hq, E] of the tokens from `start` to `stop`, as the operator `attention` takes it."""
        biases = (self.states[:, start:stop] @ self.bank).transpose(1, 2)
        for function, arguments, options in self.steps:
            given = (_of_tokens(argument, start, stop) for argument in arguments)
            biases = function(biases, *given, **options)
        return biases.transpose(1, 2)

    def tokens_at_once(self) -> int:
        batch, _, heads, _ = self.states.shape
        return max(1, MOST_BYTES // max(1, batch * heads * self.bank.shape[1] * self.element_size()))

    @classmethod
    def without_elements(cls, func: Any, args: Any, kwargs: Any) -> Any:
        if func in _OF_ELEMENTS and type(args[0]) is cls and all(map(_is_of_rows, args[1:])):
            bias, *arguments = args
            like = [arg.new_empty((), device="meta") if isinstance(arg, Tensor) else arg for arg in arguments]
            given = {name: value for name, value in kwargs.items() if name != "device"}
            dtype = func(torch.empty(1, dtype=bias.dtype, device="meta"), *like, **given).dtype
            steps = (*bias.steps, (func, tuple(arguments), kwargs))
            keys = bias.shape[3]
            return cls(bias.states, bias.bank, keys, dtype, bias.make, steps)
        return NotImplemented


def _is_of_rows(argument: object) -> bool:
    """Whether it is the same for all keys, so that it can be applied to biases of distances, too."""
    if type(argument) is Tensor or isinstance(argument, torch._subclasses.FakeTensor):
        return argument.dim() <= 4 and argument.shape[-1:] in ((), (1,))
    return not isinstance(argument, Tensor)


def _of_tokens(argument: Any, start: int, stop: int) -> Any:
    if isinstance(argument, Tensor) and argument.dim() > 1 and argument.shape[-2] != 1:
        return argument[..., start:stop, :]
    return argument
