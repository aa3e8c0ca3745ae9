"""Base class of checkpoint layouts: the steps of a transformers quantizer that reads a checkpoint.

`targets` and `absent` describe the files. `start` is called once the targets have allocated weights,
`conversions` gives transformers' loader its converters, and `finish` and `install` put quantised weights into
the modules after each loaded part.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from ...models.basics.report import QuantizationReport
from ...quantization import Format
from ..quantize.target import Target, present
from ..quantize.weights import install_stored
from .checking import check_loaded


class Section(NamedTuple):
    """A part of a checkpoint's files that is read as a model of its own.

    Attributes:
        names: of its tensors in the files.
        mapping: transformers' conversions that make them the model's.
    """

    names: re.Pattern[str]
    mapping: list[Any]


class Layout:
    """Contents of a checkpoint, by the parts of a model. The base class has none.

    Attributes:
        targets: {name: target} of what stays quantised, and was not taken yet.
        absent: names of parts of the model that the checkpoint lacks.
        has_other_names: whether its tensors have names that the model is not saved under.
        dense_bytes: bytes that a token would read of the dense weights, for a report; 0 counts stored ones.
    """

    absent: Sequence[str] = ()
    has_other_names = False
    dense_bytes = 0

    def __init__(self) -> None:
        self.targets: dict[str, Target] = {}

    def stored_formats(self) -> dict[str, Format]:
        """{parameter: format}"""
        return {
            f"{t.name}.{name}": format for t in self.targets.values() for name, format in t.formats.items()
        }

    def drop_float8(self, wanted: Mapping[str, Target]) -> None:
        """Drops the targets whose 8-bit floats a recipe quantises."""

    def start(
        self, wanted: Mapping[str, Target], report: QuantizationReport | None
    ) -> QuantizationReport | None:
        """Begins to read, once the targets have quantised weights without values.

        Args:
            wanted: dense weights of the checkpoint to quantise.
            report: for the weights that are asked for; None if none are.

        Returns: the report, with what the layout has to say.
        """
        return report

    def conversions(self, others: list) -> list:
        """The converters of transformers' loader; `others` are those for a dense checkpoint of the model."""
        return others

    def state(self) -> dict[str, Any]:
        """{name: lazy tensor} of a GGUF file, by the names of the model and of converters."""
        raise NotImplementedError

    def warn(self) -> None:
        """Warns of tensors that did not stay packed."""

    def forget_absent(self, model: nn.Module) -> None:
        """Drops targets that the model no longer has."""
        self.targets = present(model, self.targets)

    def finish(self, loaded: Callable[[str], bool]) -> None:
        """Completes the modules whose names are `loaded` once the loader has read their tensors.

        Raises: ValueError for what could not be read.
        """

    def check(self, model: PreTrainedModel, loaded: Callable[[str], bool]) -> None:
        """Raises: ValueError for a tensor of `loaded` modules that is missing or wrong."""
        check_loaded(model, loaded)

    def install(self, model: nn.Module, loaded: Callable[[str], bool]) -> dict[str, Target]:
        """Replaces the `loaded` targets by quantised modules. Returns: these targets."""
        installed = {name: self.targets.pop(name) for name in filter(loaded, [*self.targets])}
        for target in installed.values():
            install_stored(model, target)
        return installed
