"""Operations of transformers' converters, from tensors of MLX to parameters; each has a reverse.

Joining, interleaving and transposing are operations that transformers has.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps

from ....quantization import Format, dequantize
from ..blocks import only
from ..weights import words


class Each(ConversionOps):
    """A function of each tensor, with its reverse."""

    hf_quantizer = True  # transformers leaves the dtype as it is stored

    def __init__(self, function: Callable[[Tensor], Tensor], reverse: Callable[[Tensor], Tensor]):
        self.function, self.reverse = function, reverse

    def convert(
        self, input_dict: dict, source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict:
        made = {name: self.function(only({name: value})) for name, value in input_dict.items()}
        if len(made) == len(target_patterns) == 1:
            return dict(zip(target_patterns, made.values(), strict=True))
        return made  # another operation joins them, or has split them

    @property
    def reverse_op(self) -> "Each":
        return Each(self.reverse, self.function)


def renamed() -> Each:
    return Each(lambda tensor: tensor, lambda tensor: tensor)


def as_words() -> Each:
    """uint32 and what goes with it: MLX's words, scales and biases are ours."""
    return Each(words, lambda t: t.view(torch.uint32) if t.dtype == torch.int32 else t)


def one_less() -> Each:
    return Each(lambda tensor: tensor - 1, lambda tensor: tensor + 1)


class Stack(ConversionOps):
    """A vector for gate and one for up -> [experts, 2]."""

    hf_quantizer = True

    def convert(
        self, input_dict: dict, source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict:
        vectors = [only({name: input_dict[name]}) for name in source_patterns]
        return {target_patterns[0]: torch.stack(vectors, 1)}

    @property
    def reverse_op(self) -> "Unstack":
        return Unstack()


class Unstack(Stack):
    def convert(
        self, input_dict: dict, source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict:
        return dict(zip(target_patterns, only(input_dict).unbind(1), strict=True))


class Dequantize(ConversionOps):
    """Makes a dense parameter of matrices that may be quantised.

    Args:
        formats: of each matrix; None is dense.
        join: the parameter made of the dense matrices.
    """

    hf_quantizer = True

    def __init__(self, formats: Sequence[Format | None], join: Callable[[list[Tensor]], Tensor]):
        self.formats, self.join = formats, join

    def convert(
        self, input_dict: dict, source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict:
        rest = iter([only({name: input_dict[name]}) for name in source_patterns])
        return {target_patterns[0]: self.join([*self._matrices(rest)])}

    def _matrices(self, rest: Iterator[Tensor]) -> Iterator[Tensor]:
        for format in self.formats:
            if format is None:
                yield next(rest)
            else:
                packed, scales = next(rest), next(rest)
                biases = next(rest) if format.has_biases else None
                yield dequantize(packed, scales, biases, **format.to_dict())


class Halves(Dequantize):
    """embed_q [heads, rank, nope] and unembed_out [heads, v, rank] -> kv_b_proj [heads * (nope + v), rank].

    Args:
        formats: of both in MLX.
        heads, nope: sizes of kv_b_proj.
        format: of kv_b_proj, to write it. embed_q is transposed, so it is dequantised.
    """

    def __init__(self, formats: Sequence[Format | None], heads: int, nope: int, format: Format | None):
        super().__init__(formats, lambda both: torch.cat((both[0].mT, both[1]), 1).flatten(0, 1).contiguous())
        self.heads, self.nope, self.format = heads, nope, format

    @property
    def reverse_op(self) -> "SplitHalves":
        return SplitHalves(self.formats, self.heads, self.nope, self.format)


class SplitHalves(Halves):
    def convert(
        self, input_dict: dict, source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict:
        parts = [only({name: input_dict[name]}) for name in source_patterns]
        rows = [tensor.detach().unflatten(0, (self.heads, -1)) for tensor in parts]
        q, v = ([tensor[:, half] for tensor in rows] for half in (slice(self.nope), slice(self.nope, None)))
        if self.format is None:
            return dict(zip(target_patterns, (q[0].mT, v[0]), strict=True))
        packed, scales, *biases = (tensor.contiguous() for tensor in q)
        dense = dequantize(packed, scales, biases[0] if biases else None, **self.format.to_dict())
        return dict(zip(target_patterns, (dense.mT, *map(as_words().reverse, v)), strict=True))
