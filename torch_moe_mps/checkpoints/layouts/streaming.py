"""Layouts whose weights are quantised while they are read.

transformers hands over each parameter once its tensors are read, so that one dense parameter exists at a
time. The quantised tensors are kept here until everything is loaded. Until then a parameter on the meta
device takes their place in the model, to be tied or initialised.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..._faults import release_cache
from ...models.basics.report import QuantizationReport
from ...ops._checks import Check
from ...quantization import QuantizedWeight
from ..quantize.target import Target
from ..quantize.tied import tied_layers, tied_pairs
from ..quantize.weights import quantize_parameter, replace
from .converters import QuantizeParameters
from .layout import Layout

_CHECK = Check("quantize")


class StreamingLayout(Layout):
    """Layout that quantises dense parameters one by one while it reads them; that of a dense checkpoint.

    Attributes:
        wanted: {full name of a parameter: (target, name in the target)}.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model, self.report = model, QuantizationReport()
        self.wanted: dict[str, tuple[Target, str]] = {}
        self._done: dict[str, QuantizedWeight] = {}
        self._errors: list[ValueError] = []

    def start(
        self, wanted: Mapping[str, Target], report: QuantizationReport | None
    ) -> QuantizationReport | None:
        """Begins to quantise the wanted weights. Returns: the report that it fills."""
        self.report, self.wanted = report or self.report, {}
        for target in wanted.values():
            target.check_columns(_CHECK)
            self.wanted |= {f"{target.name}.{name}": (target, name) for name in target.formats}
        return self.report

    def drop_float8(self, wanted: Mapping[str, Target]) -> None:
        """Drops the targets of 8-bit floats: their values count as dense where a recipe is asked for.

        Args:
            wanted: weights to quantise. Targets that have the format asked for already stay.
        """
        dropped = {name for name, target in self.targets.items() if _is_float8(target)}
        dropped |= {name for name, other in tied_pairs(tied_layers(self.model)) if other in dropped}
        for name in dropped & self.targets.keys():
            if name not in wanted or wanted[name].formats != self.targets[name].formats:
                del self.targets[name]

    @property
    def operation(self) -> QuantizeParameters:
        """Operation of a converter that quantises its parameter."""
        return QuantizeParameters(self.wanted, self.quantize)

    def streamed(self, converters: list) -> list:
        """The converters, with our operation behind them if some weight is wanted."""
        return self.operation.after(converters) if self.wanted else converters

    def quantize(self, name: str, weight: Tensor) -> None:
        """Quantises a loaded parameter; `finish` raises its error, which transformers would only log."""
        target, parameter = self.wanted[name]
        expected = getattr(target.module, parameter)
        expected._is_hf_initialized = True
        if self._errors:
            return
        try:
            weight = target.read(weight)
            _CHECK.shape(name, weight, tuple(expected.shape), "that of the model")
            self._done[name], entry = quantize_parameter(target, parameter, target.rows_first(weight))
            release_cache(self._done[name].packed.device)
            self.report.modules.setdefault(target.name, []).append(entry)
        except ValueError as error:
            self._errors.append(error)

    def finish(self, loaded: Callable[[str], bool]) -> None:
        """Installs the quantised weights of the `loaded` modules; others stay dense.

        Raises: ValueError for the first parameter that could not be quantised.
        """
        if self._errors:
            raise self._errors[0]
        self._unite_tied()
        installed = {name: found for name, found in self.wanted.items() if loaded(found[0].name)}
        # Tied modules share one parameter by now, no matter which of them was in the checkpoint.
        names = {id(getattr(t.module, p)): name for name, (t, p) in installed.items() if name in self._done}
        for target in {id(target): target for target, _ in installed.values()}.values():
            sources = {p: names.get(id(getattr(target.module, p))) for p in target.formats}
            result = {parameter: source for parameter, source in sources.items() if source is not None}
            if len(result) < len(sources):
                continue
            replace(self.model, target, {p: self._done[source] for p, source in result.items()})
            for parameter, source in result.items():
                if source != f"{target.name}.{parameter}":
                    self.report.shared[target.name] = source.rpartition(".")[0]
        for name in installed:
            del self.wanted[name]
            self._done.pop(name, None)

    def _unite_tied(self) -> None:
        """Shares one weight between tied layers whose weights are equal."""
        for names in tied_layers(self.model).items():
            first, second = (self._done.get(f"{name}.weight") for name in names)
            if first is not None and second is not None and all(map(_equal, first, second)):
                self._done[f"{names[0]}.weight"] = second
                self.report.modules.pop(names[0])
                self.report.shared[names[0]] = names[1]


def _is_float8(target: Target) -> bool:
    """True if the checkpoint has the weights of a target in 8-bit floats."""
    return all(format.number_type == "e4m3" for format in target.formats.values())


def _equal(first: Tensor | None, second: Tensor | None) -> bool:
    return first is second or (first is not None and second is not None and torch.equal(first, second))
