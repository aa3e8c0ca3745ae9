"""Converters between MLX's tensors and our parameters, for reading and for writing."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn

from ...models.basics.interface import count_of, experts_of, is_transposed
from ...models.modules.experts import is_interleaved
from ...models.upstream.weights import Concatenate, ConversionOps, Interleave, Transpose
from ...quantization import TENSORS, Format
from ..layouts.converters import Cast, NamedConverter
from ..quantize.weights import quantized_names
from .names import MlxNames
from .operations import as_stored, dequantized, halves, joined_stacks, one_less, stacked

PARTS = ("weight", "scales", "biases")  # tensors of a quantised matrix in MLX


class RowConverters:
    """Converters for a model whose modules are quantised as in the checkpoint.

    Args:
        names: of the model.
        halved: whether MLX has a kv_b_proj in two halves, by the name of its weight.
        stored: {parameter: formats} of the weights that are dense here and quantised in MLX.
    """

    def __init__(
        self,
        names: MlxNames,
        halved: Callable[[str], bool],
        stored: Mapping[str, list[Format | None]] = MappingProxyType({}),
    ):
        self.names, self.model, self.halved, self.stored = names, names.model, halved, stored

    def of(self, state: Mapping[str, Tensor]) -> Iterator[NamedConverter]:
        """Converters for parameters and buffers of whole modules."""
        experts = experts_of(self.model)
        for owner, module in experts.items():
            if any(name.startswith(f"{owner}.") for name in state):
                yield from self._experts(owner, module)
        inside = tuple(f"{name}." for name in experts)
        for name, tensor in state.items():
            if not name.startswith(inside):
                yield from self._layer(name, tensor)

    def _layer(self, name: str, tensor: Tensor) -> Iterator[NamedConverter]:
        """The converter of a tensor outside of experts; none for a tensor that mlx-lm drops."""
        owner, _, part = name.rpartition(".")
        module = self.model.get_submodule(owner)
        packed = getattr(module, "packed", None) is not None and part in TENSORS
        dense = f"{owner}.weight".lstrip(".") if packed else name
        theirs = self.names.of(dense)
        if self.halved(dense):
            if part in ("weight", "packed"):
                yield self._halves(owner, theirs[0], module)
        elif packed:
            ends = dict(zip(TENSORS, PARTS, strict=True))
            sources = [f"{other.removesuffix('weight')}{ends[part]}" for other in theirs]
            yield NamedConverter(sources, [name], [as_stored(), *_concatenated(sources, 0), Cast()])
        elif name in self.stored:
            operation = dequantized(self.stored[name], _rows_of(tensor))
            yield NamedConverter(_matrices(theirs, self.stored[name]), [name], [operation, Cast()])
        elif not self.names.is_dropped(name):
            operations: list[ConversionOps] = [*_concatenated(theirs, 0)]
            if tensor.dim() == 3 and tensor.shape[1] == 1:
                operations.append(Transpose(1, 2))  # a convolution
            if self.names.has_one_more(name):
                operations.append(one_less())
            yield NamedConverter(theirs, [name], [*operations, Cast()])

    def _halves(self, owner: str, theirs: str, module: nn.Module) -> NamedConverter:
        """The converter of MLX's embed_q and unembed_out to kv_b_proj."""
        attention, config = theirs.removesuffix("kv_b_proj.weight"), self.model.config.get_text_config()
        format: Format | None = getattr(module, "format", None)
        formats = self.stored.get(f"{owner}.weight", [None, format])
        parts = [f"{attention}{half}.weight" for half in ("embed_q", "unembed_out")]
        names = ("weight",) if format is None else TENSORS if format.has_zeros else TENSORS[:2]
        ours = [f"{owner}.{name}" for name in names]
        operation = halves(formats, config.num_attention_heads, config.qk_nope_head_dim, format)
        return NamedConverter(_matrices(parts, formats), ours, [operation, Cast()])

    def _experts(self, name: str, module: nn.Module) -> Iterator[NamedConverter]:
        """The converters of an experts module, packed or dense."""
        interleaved, count = is_interleaved(module), count_of(module)
        is_apart = self.names.architecture.apart is not None
        for projection, modules in self.names.of_experts(name, module).items():
            join = [stacked(count, len(modules) // count)] if is_apart else _concatenated(modules, 1)
            join += [Interleave(1, inverse=True)] if interleaved and join else []
            quantized = [*zip(quantized_names(projection), PARTS, strict=True)]
            if hasattr(module, quantized[0][0]):
                for ours, part in quantized:
                    if getattr(module, ours, None) is not None:
                        operations = [as_stored(), *join, Cast()]
                        yield NamedConverter(_ends(modules, part), [f"{name}.{ours}"], operations)
            else:
                weights, first = _ends(modules, "weight"), join[:1]
                if (formats := self.stored.get(f"{name}.{projection}")) is not None:
                    joined = partial(joined_stacks, count) if is_apart else partial(torch.cat, dim=1)
                    first = [dequantized(formats, joined)]
                    weights = _matrices(weights, formats)
                transposed = [
                    *first,
                    *join[1:],
                    *([Transpose(1, 2)] if is_transposed(module) else []),
                    Cast(),
                ]
                yield NamedConverter(weights, [f"{name}.{projection}"], transposed)
            if getattr(module, f"{projection}_bias", None) is not None:
                yield NamedConverter(_ends(modules, "bias"), [f"{name}.{projection}_bias"], [*join, Cast()])


def _ends(modules: Sequence[str], *ends: str) -> list[str]:
    return [f"{module}.{end}" for module in modules for end in ends]


def _matrices(weights: Sequence[str], formats: Sequence[Format | None]) -> list[str]:
    """The names of the tensors of matrices of MLX."""
    names: list[str] = []
    for weight, format in zip(weights, formats, strict=True):
        parts = PARTS[:1] if format is None else PARTS if format.has_zeros else PARTS[:2]
        names += _ends([weight.removesuffix(".weight")], *parts)
    return names


def _concatenated(names: list[str], dim: int) -> list[ConversionOps]:
    return [Concatenate(dim)] if len(names) > 1 else []


def _rows_of(tensor: Tensor) -> Callable[[list[Tensor]], Tensor]:
    shape = tensor.shape
    return lambda matrices: torch.cat(matrices).view(shape)
