"""Quantises weights while a checkpoint is loaded: at most one dense parameter exists at a time.

transformers hands over each parameter once its tensors are read. The quantised tensors are kept here until
everything is loaded; until then a parameter on the meta device takes their place in the model, to be tied or
initialised.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...._environment import set_one_thread
from ...._extension import torch_version
from ....ops._checks import Check
from ....quantization import QuantizedWeight
from ...basics.report import QuantizationReport
from ...upstream.weights import ConversionOps, WeightConverter
from ..layouts.operations import only
from .target import Target
from .tied import tied_layers
from .weights import quantize_parameter, release_cache, replace

if TYPE_CHECKING:  # transformers is not complete yet when its quantizers import ours
    from transformers import PreTrainedModel

_CHECK = Check("quantize")


class Stream:
    """Quantises the weights of a model on the meta device while they are read.

    Args:
        targets: the weights to quantise, with their formats.
        report: gets the quantised weights.

    Attributes:
        wanted: {full name of a parameter: (target, name in the target)}.
    """

    def __init__(self, targets: Mapping[str, Target], report: QuantizationReport):
        self.wanted: dict[str, tuple[Target, str]] = {}
        for target in targets.values():
            target.check_columns(_CHECK)
            self.wanted |= {f"{target.name}.{name}": (target, name) for name in target.formats}
        self.report = report
        self._done: dict[str, QuantizedWeight] = {}
        self._errors: list[ValueError] = []

    def quantize(self, name: str, weight: Tensor) -> None:
        """Quantises a loaded parameter; `place` raises its error, which transformers would only log."""
        target, parameter = self.wanted[name]
        expected = getattr(target.module, parameter)
        expected._is_hf_initialized = True
        if self._errors:
            return
        try:
            _CHECK.shape(name, weight, tuple(expected.shape), "that of the model")
            self._done[name], entry = quantize_parameter(target, parameter, target.rows_first(weight))
            release_cache(self._done[name].packed.device)
            self.report.modules.setdefault(target.name, []).append(entry)
        except ValueError as error:
            self._errors.append(error)

    def place(self, model: "PreTrainedModel", loaded: Callable[[str], bool]) -> None:
        """Installs the quantised weights of the `loaded` modules; others stay dense.

        Raises: ValueError for the first parameter that could not be quantised.
        """
        if self._errors:
            raise self._errors[0]
        self._unite_tied(model)
        own = {name: found for name, found in self.wanted.items() if loaded(found[0].name)}
        # Tied modules share one parameter by now, no matter which of them was in the checkpoint.
        names = {id(getattr(t.module, p)): name for name, (t, p) in own.items() if name in self._done}
        for target in {id(target): target for target, _ in own.values()}.values():
            sources = {p: names.get(id(getattr(target.module, p))) for p in target.formats}
            result = {parameter: source for parameter, source in sources.items() if source is not None}
            if len(result) < len(sources):
                continue
            replace(model, target, {p: self._done[source] for p, source in result.items()})
            for parameter, source in result.items():
                if source != f"{target.name}.{parameter}":
                    self.report.shared[target.name] = source.rpartition(".")[0]
        for name in own:
            del self.wanted[name]
            self._done.pop(name, None)

    def _unite_tied(self, model: nn.Module) -> None:
        """Shares one weight between tied layers whose weights are equal."""
        for names in tied_layers(model).items():
            first, second = (self._done.get(f"{name}.weight") for name in names)
            if first is not None and second is not None and all(map(_equal, first, second)):
                self._done[f"{names[0]}.weight"] = second
                self.report.modules.pop(names[0])
                self.report.shared[names[0]] = names[1]


def _equal(first: Tensor | None, second: Tensor | None) -> bool:
    return first is second or (first is not None and second is not None and torch.equal(first, second))


class QuantizeParameters(ConversionOps):
    """Converter operation that passes parameters from the loader to the stream."""

    def __init__(self, stream: Stream):
        self.stream = stream

    def __deepcopy__(self, memo: dict) -> "QuantizeParameters":
        """Itself: the loader copies converters for each parameter, which share one stream."""
        return self

    def convert(self, input_dict: dict, missing_keys: set[str], **kwargs: Any) -> dict[str, Any]:
        if len(input_dict) == 1:  # among a converter's operations, names are not whole yet
            input_dict = {kwargs["full_layer_name"]: input_dict.popitem()[1]}
        for name in input_dict.keys() & self.stream.wanted.keys():
            self.stream.quantize(name, only(input_dict.pop(name)))
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


class _OneByOne:
    """Sets transformers to one loading thread while any thread of ours loads."""

    def __init__(self) -> None:
        self._lock, self._loading = threading.Lock(), 0
        self._before: str | None = None

    @contextlib.contextmanager
    def __call__(self, enabled: bool) -> Iterator[None]:
        """Context where transformers loads with one thread; four would outrun quantising."""
        if not enabled:
            yield
            return
        with self._lock:
            if self._loading == 0:
                self._before = set_one_thread("1")
            self._loading += 1
        try:
            yield
        finally:
            with self._lock:
                self._loading -= 1
                if self._loading == 0:
                    set_one_thread(self._before)


one_by_one = _OneByOne()


def threads_crash() -> bool:
    """True before torch 2.15 on a Mac: threads that convert dtypes on MPS side by side crash
    (pytorch#167541, #197836)."""
    return sys.platform == "darwin" and torch_version() < (2, 15)
