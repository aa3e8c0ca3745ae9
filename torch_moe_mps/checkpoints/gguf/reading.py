"""Layout of a GGUF file: weights that stay packed, and parameters that are dequantised."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...models.basics.report import QuantizationReport
from ..absent import beside_text
from ..layouts.converters import NamedConverter
from ..layouts.layout import Layout
from ..layouts.operations import Operation
from ..layouts.streaming import StreamingLayout
from ..quantize.reasons import Reasons
from ..quantize.sizes import add_stored, bytes_a_token
from ..quantize.target import Target, quantizable
from ..quantize.tied import add_tied, tied_layers
from ..quantize.weights import quantized_names
from .checking import check_declared
from .file import GgufFile, GgufWeight


class Dense:
    """A parameter that transformers' loader reads dequantised.

    Args:
        wanted: a target and its parameter, for a value in its dtype; None for all other parameters.
    """

    def __init__(self, file: GgufFile, name: str, wanted: tuple[Target, str] | None = None):
        self.file, self.name, self.wanted = file, name, wanted

    def __getitem__(self, _: Any) -> Tensor:
        return self.file.value(self.name) if self.wanted is None else self.file.value_of(*self.wanted)

    def get_dtype(self) -> str:
        """The dtype of the values, as of safetensors' lazy tensors."""
        return "F32"


def checked_file(path: str, model: Any) -> GgufFile:
    """The file, for a model on the meta device.

    Raises: ValueError for a file that has not what its metadata declares.
    """
    with torch.device("cpu"):  # the model is made on the meta device
        file = GgufFile(path, model)
        check_declared(file, model, path)
    return file


class GgufLayout(Layout):
    """Layout of the weights that stay packed.

    Attributes:
        sources: {parameter: its packed weight in the file}.
        report: the packed weights; `skipped` lists the others, with reasons.

    Raises: ValueError for a file that has not what its metadata declares, or that cannot be read.
    """

    has_other_names = True

    def __init__(self, model: Any, file: str):
        super().__init__()
        self.model, self.file = model, checked_file(file, model)
        self.absent = beside_text(model)
        self.report, self.dense_bytes = QuantizationReport(), bytes_a_token(model)
        self.sources: dict[str, GgufWeight] = {}
        reasons, every = Reasons(model), quantizable(model)
        for target in every.values():
            if target.kind == "experts" or reasons.needs(target.name, target.module) is None:
                self._pack(target)
        self.targets = {name: target for name, target in every.items() if target.formats}
        tied = tied_layers(model)
        self._agree_on_tied(tied)
        before = {*self.targets}
        add_tied(tied, every, self.targets)
        self.report.shared |= {name: tied[name] for name in self.targets if name not in before}
        self._note_dense()

    def _agree_on_tied(self, tied: Mapping[str, str]) -> None:
        """Leaves both of two tied layers dense if one of them is and the file has both."""
        for name, other in tied.items():
            if name in self.targets and other not in self.targets:
                self._leave_dense(name)
            elif other in self.targets and name not in self.targets and f"{name}.weight" in self.file.parts:
                self._leave_dense(other)

    def _note_dense(self) -> None:
        """Adds quantised tensors that are dense in the model to the report, with reasons.

        Raises: ValueError for an unreadable tensor.
        """
        whole = {f"{target.name}.{p}" for target in self.targets.values() for p in target.formats}
        dense = [t for name, parts in self.file.parts.items() if name not in whole for t in parts]
        for tensor in dense:
            if tensor.is_quantized:
                tensor.values(tensor.data.reshape(tensor.rows, -1)[:1])  # raises what it would later
                why = "has no format here" if tensor.format is None else "cannot stay as it is in the model"
                self.report.skipped[tensor.name] = f"{tensor.kind.lower()}, which {why}"

    def _pack(self, target: Target) -> None:
        """Adds a target whose parameters can all stay packed."""
        with torch.device("cpu"):  # the model is made on the meta device
            result = [self.file.sources(target, parameter) for parameter in target.parameters]
        for parameter, source in (pair for sources in result if all(result) for pair in sources.items()):
            target.formats[parameter] = source.format
            target.has_order = source.inputs is not None
            self.sources[f"{target.name}.{parameter}"] = source

    def _leave_dense(self, name: str) -> None:
        target = self.targets.pop(name)
        for parameter in target.formats:
            del self.sources[f"{name}.{parameter}"]
        target.formats.clear()

    def start(self, wanted: Mapping[str, Target], report: QuantizationReport | None) -> QuantizationReport:
        return self.report

    def warn(self) -> None:
        """Warns of tensors that were dequantised."""
        if names := [*self.report.skipped]:
            some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            warnings.warn(
                f"torch_moe_mps: {len(names)} tensors of the GGUF file cannot stay packed and were "
                f"dequantised: {some}; model.hf_quantizer.report has them all",
                stacklevel=3,
            )

    def state(self) -> dict[str, Any]:
        """{name of a parameter: its packed or dense source}, as transformers' loader takes a state dict."""
        state: dict[str, Any] = {name: Dense(self.file, name) for name in self.file.parts} | self.sources
        for name, weight in self.sources.items():
            if weight.inputs is not None:
                state[f"{name.rpartition('.')[0]}.order"] = weight.inputs.int()
        return state

    def conversions(self, others: list) -> list[NamedConverter]:
        """Converters of packed weights alone: all other names of `state` are the model's."""
        return [*map(self._unpacked, self.sources)]

    def _unpacked(self, name: str) -> NamedConverter:
        owner, _, parameter = name.rpartition(".")
        present = self.model.get_submodule(owner)._parameters
        names = [f"{owner}.{part}" for part in quantized_names(parameter) if part in present]
        return NamedConverter([name], names, [Operation(_tensors)])

    def check(self, model: Any, loaded: Callable[[str], bool]) -> None:
        """Nothing: the file was checked before it was read."""

    def finish(self, loaded: Callable[[str], bool]) -> None:
        """Adds the weights of the `loaded` modules that stayed packed to the report."""
        for name in filter(loaded, self.targets):
            for parameter in self.targets[name].formats:
                source = self.sources.get(f"{name}.{parameter}")
                if source is not None:
                    add_stored(self.report, self.targets[name], parameter, source.format)


class DequantizedGguf(StreamingLayout):
    """Layout of a GGUF file whose weights are dequantised, and quantised anew where a recipe asks for it."""

    has_other_names = True

    def __init__(self, model: Any, file: str):
        super().__init__(model)
        self.file = checked_file(file, model)  # before parts are cut out of the model
        self.absent = beside_text(model)

    def conversions(self, others: list) -> list:
        return []

    def state(self) -> dict[str, Any]:
        """{name of a parameter: its values}, as transformers' loader takes a state dict."""
        return {name: Dense(self.file, name, self.wanted.get(name)) for name in self.file.parts}


def _tensors(weights: list[Any]) -> list[Tensor]:
    (weight,) = weights
    return [tensor for tensor in weight if tensor is not None]
