"""Quantises weights while a dense checkpoint is loaded: at most one dense parameter exists at a time.

transformers hands over each parameter once its tensors are read. The quantised tensors are kept here until
everything is loaded; until then the model has a parameter on the meta device in their place, to be tied or
initialised.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, MergeModulelist, WeightConverter
from transformers.quantizers.base import HfQuantizer

from ...ops._checks import Check
from ...quantization import QuantizedWeight
from ...quantization.formats import CHUNK
from ..report import QuantizationReport
from .recipe import Recipe
from .sizes import bytes_a_token
from .targets import Target, present, tied_layers, weights_of
from .weights import check_columns, dense_dtype, quantize_pieces, release_cache, replace

if TYPE_CHECKING:  # transformers is not complete yet when its quantizers import ours
    from transformers import PreTrainedModel

_CHECK = Check("quantize")


class Stream:
    """Quantises the weights of a model on the meta device as they are read.

    Attributes:
        wanted: {full name of a parameter: (target, name in the target)}.
        report: what was done.
    """

    def __init__(self, model: nn.Module, recipe: Recipe):
        weights = weights_of(model, recipe)
        self.targets = weights.targets
        self.wanted: dict[str, tuple[Target, str]] = {}
        for target in self.targets.values():
            for parameter, format in target.formats.items():
                check_columns(_CHECK, target, parameter, format)
                self.wanted[f"{target.name}.{parameter}"] = (target, parameter)
        self.model = model
        self.original_conversions: list = []
        self.report = QuantizationReport(skipped=weights.dense, bytes_before=bytes_a_token(model))
        self._done: dict[str, QuantizedWeight] = {}
        self._errors: list[ValueError] = []
        self._replaced: list[tuple[WeightConverter, WeightConverter]] = []

    def forget_absent(self) -> None:
        """The model was cut: weights that it no longer has are not wanted."""
        self.targets = present(self.model, self.targets)
        self.wanted = {name: found for name, found in self.wanted.items() if found[0].name in self.targets}
        self.report.bytes_before = bytes_a_token(self.model)

    def quantize(self, name: str, pieces: Iterable[Tensor]) -> None:
        """Quantises the parameter called `name`, given in pieces of its first dimension.

        An error is kept for `place`, because transformers would only mention it in its report.
        """
        target, parameter = self.wanted[name]
        expected = getattr(target.module, parameter)
        expected._is_hf_initialized = True
        if self._errors:
            return
        try:
            self._done[name], entry = quantize_pieces(_CHECK, target, parameter, pieces)
            release_cache(self._done[name].packed)
            self.report.modules.setdefault(target.name, []).append(entry)
        except ValueError as error:
            self._errors.append(error)

    def replaced(self, converter: WeightConverter, operations: list[ConversionOps]) -> WeightConverter:
        """A copy of a converter with other operations; the original is kept for saving."""
        sources, targets = converter._original_source_patterns, converter._original_target_patterns
        ours = converter.copy(list(sources), list(targets), operations=operations)
        self._replaced.append((ours, converter))
        return ours

    def place(self, model: "PreTrainedModel", loaded: Callable[[str], bool]) -> dict[str, Target]:
        """Puts the quantised tensors into those targets whose names are `loaded`.

        Returns: {name: target} of those that the checkpoint lacked.

        Raises: ValueError for the first parameter that could not be quantised.
        """
        if self._errors:
            raise self._errors[0]
        used = {id(theirs) for ours, theirs in self._replaced if ours.was_used()}
        used |= {id(conversion) for conversion in model._weight_conversions}
        model._weight_conversions = [c for c in self.original_conversions if id(c) in used]
        self._unite_tied(model)
        targets = {name: self.targets.pop(name) for name in filter(loaded, list(self.targets))}
        own = {f"{t.name}.{parameter}": (t, parameter) for t in targets.values() for parameter in t.formats}
        # Tied modules share one parameter by now, no matter which of them was in the checkpoint.
        names = {id(getattr(t.module, p)): name for name, (t, p) in own.items() if name in self._done}
        rest = {}
        for target in targets.values():
            dtype = dense_dtype(target)
            sources = {p: names.get(id(getattr(target.module, p))) for p in target.formats}
            found = {parameter: source for parameter, source in sources.items() if source is not None}
            if len(found) < len(sources):
                rest[target.name] = target
                continue
            replace(model, target, {p: self._done[source] for p, source in found.items()}, dtype)
            for parameter, source in found.items():
                if source != f"{target.name}.{parameter}":
                    self.report.shared[target.name] = source.rpartition(".")[0]
        for name in own:
            del self.wanted[name]
            self._done.pop(name, None)
        return rest

    def _unite_tied(self, model: nn.Module) -> None:
        """If the checkpoint has equal weights for two tied layers, keeps one of them."""
        for names in tied_layers(model).items():
            first, second = (self._done.get(f"{name}.weight") for name in names)
            if first is not None and second is not None and all(map(_equal, first, second)):
                self._done[f"{names[0]}.weight"] = second
                self.report.modules.pop(names[0])
                self.report.shared[names[0]] = names[1]


def _equal(first: Tensor | None, second: Tensor | None) -> bool:
    return first is second or (first is not None and second is not None and torch.equal(first, second))


class QuantizeParameter(ConversionOps):
    """Takes parameters from the loader into the stream, so that the loader has nothing to set."""

    def __init__(self, stream: Stream):
        self.stream = stream

    def __deepcopy__(self, memo: dict) -> "QuantizeParameter":
        """The loader copies its converters for every parameter, but there is only one stream."""
        return self

    def convert(self, input_dict: dict, missing_keys: set[str], **kwargs: Any) -> dict[str, Tensor]:
        others = {name: value for name, value in input_dict.items() if name not in self.stream.wanted}
        for name in input_dict.keys() - others.keys():
            if input_dict[name] is not _QUANTIZED:
                self.stream.quantize(name, _taken(input_dict, name))
            missing_keys.discard(name)
        return others


def _taken(tensors: dict, name: str) -> Iterator[Tensor]:
    """A tensor, or those of a list, without other references, so that memory is freed after quantising."""
    value = tensors.pop(name)
    values = value if isinstance(value, list) else [value]
    del value
    while values:
        yield values.pop(0)


# What QuantizeMerged returns instead of a tensor.
_QUANTIZED = object()


class QuantizeMerged(ConversionOps):
    """Merges experts that are stored one by one, and quantises them some at a time.

    `operations` are those of transformers: the first stacks a list of tensors, the others treat each expert
    separately. For some of the experts, they return a piece of the parameter.
    """

    def __init__(self, stream: Stream, operations: list[ConversionOps]):
        self.stream = stream
        self.operations = operations
        # transformers must not cast what an operation of a quantizer reads.
        self.hf_quantizer = next(filter(None, (getattr(o, "hf_quantizer", None) for o in operations)), None)

    def __deepcopy__(self, memo: dict) -> "QuantizeMerged":
        return self

    def convert(self, input_dict: dict, full_layer_name: str, **kwargs: Any) -> dict:
        if full_layer_name not in self.stream.wanted:
            return self._merge(input_dict, full_layer_name=full_layer_name, **kwargs)
        merged = self._pieces(input_dict, full_layer_name=full_layer_name, **kwargs)
        self.stream.quantize(full_layer_name, merged)
        return {full_layer_name: _QUANTIZED}

    def _merge(self, tensors: dict, **kwargs: Any) -> dict:
        for operation in self.operations:
            tensors = operation.convert(tensors, **kwargs)
        return tensors

    def _pieces(self, tensors: dict[str, list], **kwargs: Any) -> Iterator[Tensor]:
        experts = max(map(len, tensors.values()))
        elements = sum(values[0].numel() for values in tensors.values())
        step = max(1, CHUNK // elements)
        for first in range(0, experts, step):
            some = {pattern: values[first : first + step] for pattern, values in tensors.items()}
            for values in tensors.values():  # what was read is freed as it is quantised
                values[first : first + step] = [None] * len(values[first : first + step])
            (piece,) = self._merge(some, **kwargs).values()
            del some
            yield piece


def streaming_converters(converters: list, stream: Stream, dequantizer: HfQuantizer | None = None) -> list:
    """transformers' converters of a checkpoint, changed so that weights are quantised.

    Experts are merged in pieces. If another quantizer dequantises the checkpoint (FP8), each parameter passes
    through one of its converters, and our operation is the last of each.
    """
    stream.original_conversions = list(converters)
    if dequantizer is None:
        return [
            stream.replaced(c, [QuantizeMerged(stream, c.operations)]) if _merges(c) else c
            for c in converters
        ]
    found = []
    for converter in dequantizer.update_weight_conversions(converters, stream.model):
        if isinstance(converter, WeightConverter):
            operations = converter.operations
            operations = [QuantizeMerged(stream, operations)] if _merges(converter) else list(operations)
            converter = stream.replaced(converter, [*operations, QuantizeConverted(stream)])
        found.append(converter)
    return found


def _merges(converter: object) -> bool:
    if not isinstance(converter, WeightConverter) or len(converter.target_patterns) != 1:
        return False
    return any(isinstance(o, MergeModulelist) and o.dim == 0 for o in converter.operations)


class QuantizeConverted(QuantizeParameter):
    """QuantizeParameter as the last operation of a converter, where tensors are named by patterns."""

    def convert(self, input_dict: dict, missing_keys: set[str], **kwargs: Any) -> dict:
        full_layer_name = kwargs["full_layer_name"]
        if len(input_dict) != 1 or full_layer_name not in self.stream.wanted:
            return input_dict
        (value,) = input_dict.values()
        return super().convert({full_layer_name: value}, missing_keys=missing_keys)
