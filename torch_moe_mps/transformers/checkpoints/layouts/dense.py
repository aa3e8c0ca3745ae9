"""Layout of dense checkpoints, and of checkpoints that are dequantised while loading."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ...basics.report import QuantizationReport
from ...upstream.weights import AutoHfQuantizer
from ..gguf.reading import Dense, checked_file
from ..own.config import FROM_GGUF
from ..quantize.streaming import QuantizeParameters, Stream
from ..quantize.target import Target
from .layout import Layout

if TYPE_CHECKING:  # transformers is not complete yet when its quantizers import ours
    from transformers import PreTrainedModel


class DenseLayout(Layout):
    """Layout whose loaded tensors are quantised one by one, by a stream.

    Args:
        source: the quantisation that is dequantised: FP8, or FROM_GGUF; None for a dense checkpoint.
    """

    stream: Stream

    def __init__(self, model: "PreTrainedModel", source: Mapping[str, Any] | None):
        super().__init__()
        self.model, self.source = model, source
        self.has_other_names = source is not None

    def start(self, wanted: Mapping[str, Target], report: QuantizationReport | None) -> QuantizationReport:
        assert report is not None  # something is wanted, or nothing of ours would read the checkpoint
        self.stream = Stream(wanted, report)
        return report

    def conversions(self, others: list) -> list:
        if self.source is None:
            return others
        if self.source == FROM_GGUF:
            return []
        # transformers has a place for our operation, but only in checkpoints that are not quantised.
        other = AutoHfQuantizer.from_config({**self.source, "dequantize": True}, pre_quantized=True)
        return QuantizeParameters(self.stream).after(other.update_weight_conversions(others, self.model))

    def state(self, file: str) -> dict[str, Any]:
        whole = checked_file(file, self.model)
        return {name: Dense(whole, name, self.stream.wanted.get(name)) for name in whole.parts}

    def finish(self, loaded: Callable[[str], bool]) -> None:
        self.stream.place(self.model, loaded)
