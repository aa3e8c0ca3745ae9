"""Quantises weights while a dense checkpoint is loaded: at most one dense parameter exists at a time.

transformers hands over each parameter once its tensors are read. The quantised tensors are kept here until
everything is loaded; until then a parameter on the meta device takes their place in the model, to be tied or
initialised.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import (
    ConversionOps,
    MergeModulelist,
    WeightConverter,
    WeightTransform,
)
from transformers.quantizers.base import HfQuantizer

from ...ops._checks import Check
from ...quantization import QuantizedWeight
from ...quantization.formats import CHUNK
from ..report import QuantizationReport
from .recipe import Recipe
from .sizes import bytes_a_token
from .targets import Target, present, tied_layers, weights_of
from .weights import quantize_pieces, release_cache, replace

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
            target.check_columns(_CHECK)
            self.wanted |= {f"{target.name}.{name}": (target, name) for name in target.formats}
        self.model = model
        self.original_conversions: list = []
        self.report = QuantizationReport(skipped=weights.dense, bytes_before=bytes_a_token(model))
        self._done: dict[str, QuantizedWeight] = {}
        self._errors: list[ValueError] = []

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

    def place(self, model: "PreTrainedModel", loaded: Callable[[str], bool]) -> dict[str, Target]:
        """Puts the quantised tensors into those targets whose names are `loaded`.

        Returns: {name: target} of those that the checkpoint lacked.

        Raises: ValueError for the first parameter that could not be quantised.
        """
        if self._errors:
            raise self._errors[0]
        used = {id(_original(conversion)) for conversion in model._weight_conversions}
        model._weight_conversions = [c for c in self.original_conversions if id(c) in used]
        self._unite_tied(model)
        targets = {name: self.targets.pop(name) for name in filter(loaded, list(self.targets))}
        own = {f"{t.name}.{parameter}": (t, parameter) for t in targets.values() for parameter in t.formats}
        # Tied modules share one parameter by now, no matter which of them was in the checkpoint.
        names = {id(getattr(t.module, p)): name for name, (t, p) in own.items() if name in self._done}
        rest = {}
        for target in targets.values():
            sources = {p: names.get(id(getattr(target.module, p))) for p in target.formats}
            found = {parameter: source for parameter, source in sources.items() if source is not None}
            if len(found) < len(sources):
                rest[target.name] = target
                continue
            replace(model, target, {p: self._done[source] for p, source in found.items()})
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


class QuantizeParameters(ConversionOps):
    """Hands parameters from the loader to the stream, so that the loader has nothing to set."""

    def __init__(self, stream: Stream):
        self.stream = stream

    def __deepcopy__(self, memo: dict) -> "QuantizeParameters":
        """The loader copies its converters for every parameter, but there is only one stream."""
        return self

    def convert(self, input_dict: dict, missing_keys: set[str], **kwargs: Any) -> dict[str, Any]:
        others = {name: value for name, value in input_dict.items() if name not in self.stream.wanted}
        for name in input_dict.keys() - others.keys():
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


class QuantizeConverted(ConversionOps):
    """The operations of a converter; the stream takes the result if it is a parameter to be quantised.

    Experts that are stored one by one are merged and quantised some at a time. The first operation stacks a
    list of tensors and the others treat each expert separately, so some of the experts give a piece of the
    parameter.
    """

    def __init__(self, stream: Stream, converter: WeightConverter):
        self.stream, self.converter = stream, converter
        # transformers must not cast what an operation of a quantizer reads.
        self.hf_quantizer = any(
            getattr(operation, "hf_quantizer", None) for operation in converter.operations
        )

    def __deepcopy__(self, memo: dict) -> "QuantizeConverted":
        return self

    def convert(self, input_dict: dict, **kwargs: Any) -> dict[str, Any]:
        name = kwargs["full_layer_name"]
        if name in self.stream.wanted and merges(self.converter):
            pieces = self._pieces(input_dict, **kwargs)
        else:
            made = self._converted(input_dict, **kwargs)
            if name not in self.stream.wanted or len(made) != 1:
                return made
            pieces = _taken(made, *made)
        self.stream.quantize(name, pieces)
        kwargs["missing_keys"].discard(name)
        return {}

    def _converted(self, tensors: dict, **kwargs: Any) -> dict[str, Any]:
        for operation in self.converter.operations:
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
            (piece,) = self._converted(some, **kwargs).values()
            del some
            yield piece


def merges(converter: WeightConverter) -> bool:
    """Whether a converter stacks experts that are stored one by one."""
    stacks = any(isinstance(o, MergeModulelist) and o.dim == 0 for o in converter.operations)
    return stacks and len(converter.target_patterns) == 1


def streaming_converters(converters: list, stream: Stream, dequantizer: HfQuantizer | None = None) -> list:
    """transformers' converters of a checkpoint, changed so that what they make is quantised.

    All parameters of a dense checkpoint but merged experts pass through QuantizeParameters. If another
    quantizer dequantises the checkpoint (FP8), each parameter passes through one of its converters.
    """
    stream.original_conversions = list(converters)
    every = converters
    if dequantizer is not None:
        every = dequantizer.update_weight_conversions(converters, stream.model)
    changed = []
    for each in every:
        if isinstance(each, WeightConverter) and (dequantizer is not None or merges(each)):
            names = [*each._original_source_patterns], [*each._original_target_patterns]
            each = each.copy(*names, operations=[QuantizeConverted(stream, each)])
        changed.append(each)
    return changed


def _original(conversion: WeightTransform) -> WeightTransform:
    """The converter of transformers in whose place `streaming_converters` has put one."""
    first = next(iter(getattr(conversion, "operations", ())), None)
    return first.converter if isinstance(first, QuantizeConverted) else conversion
