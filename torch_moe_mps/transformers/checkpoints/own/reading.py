"""Reads checkpoints in our layout, and the experts of gpt-oss in MXFP4, which have the same bits."""

from collections.abc import Mapping, Sequence

from torch import nn

from ....quantization import Format
from ...basics.report import QuantizationReport
from ...upstream.weights import WeightConverter
from ..layouts.checking import check_files
from ..layouts.layout import Layout
from ..layouts.operations import packed_blocks
from ..quantize.target import Target
from .config import QuantizationConfig


class OwnLayout(Layout):
    """Quantised parts of a model, by the config of a checkpoint.

    Raises: ValueError for a name that the model does not have.
    """

    def __init__(self, model: nn.Module, files: Sequence[str], config: QuantizationConfig):
        super().__init__()
        self.model, self.files, self.config = model, files, config
        self.absent, self.targets = config.absent, config.targets(model)

    def start(
        self, wanted: Mapping[str, Target], report: QuantizationReport | None
    ) -> QuantizationReport | None:
        """Raises: ValueError for a tensor in the files whose shape or dtype differs from the model's."""
        check_files(self.model, self.files)
        return report

    def conversions(self, others: list) -> list:
        """Reads MXFP4 blocks, as gpt-oss has them, as packed weights."""
        if Format(mode="mxfp4") not in self.config.formats():
            return others
        return others + [
            WeightConverter(f"{name}_blocks", f"{name}_packed", [packed_blocks()])
            for name in ("gate_up_proj", "down_proj")
        ]
