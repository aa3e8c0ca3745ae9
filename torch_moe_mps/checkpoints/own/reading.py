"""Reads checkpoints in our layout, and the experts of gpt-oss in MXFP4, which have the same bits."""

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...models.basics.interface import is_transposed
from ...models.basics.report import QuantizationReport
from ...models.upstream.weights import WeightConverter
from ...quantization import Format, QuantizedWeight, dequantize
from ..layouts.checking import check_files
from ..layouts.converters import Cast, NamedConverter
from ..layouts.operations import Operation, packed_blocks
from ..layouts.streaming import StreamingLayout
from ..quantize.target import Target
from ..quantize.weights import quantized_names
from .config import QuantizationConfig


class OwnLayout(StreamingLayout):
    """Quantised parts of a model, by the config of a checkpoint.

    Raises: ValueError for a name that the model does not have.
    """

    def __init__(self, model: PreTrainedModel, files: Sequence[str], config: QuantizationConfig):
        super().__init__(model)
        self.files, self.config = files, config
        self.absent, self.targets = config.absent, config.targets(model)
        self._dense: list[tuple[Target, str]] = []  # parameters that are dequantised

    def drop_float8(self, wanted: Mapping[str, Target]) -> None:
        before = dict(self.targets)
        super().drop_float8(wanted)
        dropped = (before[name] for name in before.keys() - self.targets.keys())
        self._dense = [(target, parameter) for target in dropped for parameter in target.formats]

    def start(
        self, wanted: Mapping[str, Target], report: QuantizationReport | None
    ) -> QuantizationReport | None:
        """The report of the quantisation, as it was passed, after comparing files with the model.

        Raises: ValueError for a tensor in the files whose shape or dtype differs from the model's.
        """
        check_files(self.model, self.files)
        super().start(wanted, report)
        return report

    def conversions(self, others: list) -> list:
        """Converters that read MXFP4 blocks of gpt-oss as packed weights, and dequantise dense parameters."""
        result = [*itertools.starmap(self._dequantized, self._dense), *self.streamed(others)]
        if Format(mode="mxfp4") not in self.config.formats():
            return result
        return result + [
            WeightConverter(f"{name}_blocks", f"{name}_packed", [packed_blocks()])
            for name in ("gate_up_proj", "down_proj")
        ]

    def _dequantized(self, target: Target, parameter: str) -> NamedConverter:
        """Converter of 8-bit floats in our layout to a dense parameter, which a recipe may quantise."""
        packed, scales, _ = (f"{target.name}.{part}" for part in quantized_names(parameter))
        is_turned = is_transposed(target.module) if target.kind == "experts" else target.is_transposed

        def read(tensors: list[Tensor]) -> list[Tensor]:
            weight = QuantizedWeight(tensors[0], tensors[1], None, target.formats[parameter])
            values = dequantize(weight, torch.float32)
            return [values.mT if is_turned else values]

        operations = [Operation(read), Cast(), self.operation]
        return NamedConverter([packed, scales], [f"{target.name}.{parameter}"], operations)
