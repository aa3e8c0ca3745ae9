"""Converters of transformers' loader for full names, and the operations that end a converter."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ...models.upstream.weights import ConversionOps, WeightConverter, WeightTransform
from .operations import Operation, only


class NamedConverter(WeightConverter):
    """A converter between tensors and parameters given by full names, not patterns."""

    def __init__(
        self,
        source_patterns: list[str],
        target_patterns: list[str],
        operations: list[ConversionOps],
        force_cpu: bool = False,
    ):
        # WeightConverter allows several names on one side only.
        WeightTransform.__init__(self, source_patterns, target_patterns)
        converter: Any = self
        converter.operations, converter.force_cpu = operations, force_cpu

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        if source_key in self.source_patterns:
            return self.target_patterns[0], source_key
        return source_key, None

    def of(self, tensors: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
        """Parameters made of named tensors; a converter can be used once."""
        target = self.target_patterns[0]
        for name in self.source_patterns:
            self.add_tensor(target, name, name, tensors[name])
        return self.convert(target, model=model, config=model.config)


class Cast(ConversionOps):
    """Casts tensors to the dtypes of the model's parameters and buffers, as the last operation."""

    hf_quantizer = True

    def convert(self, input_dict: dict, target_patterns: list[str], model: Any, **kwargs: Any) -> dict:
        named = zip(target_patterns, map(only, input_dict.values()), strict=True)
        return {name: tensor.to(model.get_parameter_or_buffer(name).dtype) for name, tensor in named}

    @property
    def reverse_op(self) -> Operation:
        return Operation(list)


class QuantizeParameters(ConversionOps):
    """Converter operation that passes parameters from the loader to a layout.

    Args:
        wanted: names of the parameters to quantise.
        quantize: takes a parameter of these, and its name.
    """

    def __init__(self, wanted: Mapping[str, object], quantize: Callable[[str, Tensor], None]):
        self.wanted, self.quantize = wanted, quantize

    def __deepcopy__(self, memo: dict) -> "QuantizeParameters":
        """Itself: the loader copies converters for each parameter, which share one layout."""
        return self

    def convert(self, input_dict: dict, missing_keys: set[str], **kwargs: Any) -> dict[str, Any]:
        if len(input_dict) == 1:  # among a converter's operations, names are not whole yet
            input_dict = {kwargs["full_layer_name"]: input_dict.popitem()[1]}
        for name in input_dict.keys() & self.wanted.keys():
            self.quantize(name, only(input_dict.pop(name)))
            missing_keys.discard(name)
        return input_dict

    def after(self, converters: list) -> list:
        """Copies of the converters, which hand what they make to this operation."""
        return [
            converter.copy(
                [*converter._original_source_patterns],
                [*converter._original_target_patterns],
                operations=[*converter.operations, self],
            )
            if isinstance(converter, WeightConverter)
            else converter
            for converter in converters
        ]
