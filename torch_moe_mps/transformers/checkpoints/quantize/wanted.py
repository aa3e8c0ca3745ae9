"""Weights that a recipe quantises beyond what a checkpoint has quantised."""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from ....ops._checks import Check
from ....quantization import Format
from ...basics.report import QuantizationReport
from ...modules.linears import formats_in
from .in_place import quantize_targets
from .sizes import quantized_bytes
from .target import Target
from .weights import requantize, share

_CHECK = Check("quantize")


class Wanted:
    """Weights that are still to quantise, or to requantise.

    Attributes:
        dense: {name: target} of the checkpoint's dense weights.
        again: {name: (formats, dtype of the scales)} of its weights with more bits.
    """

    def __init__(self, dense: dict[str, Target] | None = None):
        self.dense = {} if dense is None else dense
        self.again: dict[str, tuple[dict[str, Format], torch.dtype]] = {}

    def compare(
        self, stored: Mapping[str, Target], report: QuantizationReport | None, may_again: bool
    ) -> None:
        """Moves stored weights from `dense` to `again` where they would shrink and `may_again`.

        Raises: ValueError if nothing is left although another format was asked for.
        """
        asked: set[Format] = set()
        kinds = {target.kind for target in stored.values()}
        main_kind = "experts" if "experts" in kinds else "linears"  # a recipe may give the others more
        for name in [name for name in stored if name in self.dense]:
            target, wanted = stored[name], self.dense.pop(name)
            smaller = _smaller(wanted, target)
            if smaller and may_again:
                wanted.formats = smaller
                wanted.check_columns(_CHECK)
                target.importance = wanted.importance
                self.again[name] = smaller, wanted.dtype
            elif report is not None:
                has = " and ".join(dict.fromkeys(map(str, target.formats.values())))
                report.skipped[name] = f"already {has}"
                if target.kind == main_kind:
                    asked.update({*wanted.formats.values()} - {*target.formats.values()})
        if asked and may_again and not self.dense and not self.again:
            has = _named({format for target in stored.values() for format in target.formats.values()})
            _CHECK.fail("bits", f"fewer than in the checkpoint, which has {has}", _named(asked))

    def quantize(
        self,
        model: nn.Module,
        stored: Mapping[str, Target],
        loaded: Callable[[str], bool],
        report: QuantizationReport | None,
    ) -> None:
        """Quantises the wanted weights of the `loaded` modules, `stored` ones included."""
        dense = {name: self.dense.pop(name) for name in filter(loaded, [*self.dense])}
        if report is not None:
            self._quantize_again(stored, report)
            left = {name: target for name, target in dense.items() if not formats_in(target.module)}
            quantize_targets("quantize", model, left, report, progress=False)

    def _quantize_again(self, stored: Mapping[str, Target], report: QuantizationReport) -> None:
        """Requantises weights stored with too many bits, tied layers once."""
        again = [name for name in stored if name in self.again]
        codes = {name: id(stored[name].module._buffers.get("packed", name)) for name in again}
        sources = {codes[name]: name for name in reversed(again)}
        for name, source in [(name, sources[codes[name]]) for name in again]:
            formats, dtype = self.again.pop(name)
            if source == name:
                report.modules[name] = requantize(stored[name], formats, dtype)
            else:
                share(stored[source], stored[name])
                report.shared[name] = source

    def resolve(self, name: str, stored: dict[str, Target]) -> Target:
        """Removes a target from the weights to quantise. Returns: it, with its final formats."""
        target = stored.pop(name, None) or self.dense.pop(name)
        target.formats |= self.again.pop(name, ({}, None))[0]
        return target


def _smaller(wanted: Target, stored: Target) -> dict[str, Format]:
    """Requested formats that take fewer bytes than the stored ones."""
    result = {}
    for parameter, format in wanted.formats.items():
        weight = wanted.rows_first(getattr(wanted.module, parameter))
        if quantized_bytes(weight, format) < quantized_bytes(weight, stored.formats[parameter]):
            result[parameter] = format
    return result


def _named(formats: set[Format]) -> str:
    return " and ".join(sorted(map(str, formats)))
