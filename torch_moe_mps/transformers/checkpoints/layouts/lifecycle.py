"""Base class of quantizers: allocates quantised weights, installs them when loaded, completes the model."""

from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn

from ...basics.report import QuantizationReport
from ..quantize.in_place import finish_loading, refuse_dequantizing
from ..quantize.streaming import one_by_one, threads_crash
from ..quantize.target import Target
from ..quantize.tied import tie_quantized
from ..quantize.weights import store_empty
from .checking import check_scales
from .layout import Layout


class Lifecycle:
    """Base of the quantizers of transformers that read layouts.

    Attributes:
        layout: the part of the checkpoint still to read.
        report: the weights quantised or packed while loading; None for none.
    """

    layout: Layout
    report: QuantizationReport | None = None
    get_state_dict: Callable[[str, Any], Any]  # HfQuantizer has it

    def forget_absent(self, model: nn.Module) -> None:
        """Drops weights that the model no longer has."""
        self.layout.forget_absent(model)

    def make_room(self, model: nn.Module) -> None:
        """Allocates uninitialised quantised weights for the layout's targets, tied as the dense ones."""
        for target in self.layout.targets.values():
            store_empty(target)
        tie_quantized(model)
        self._reading = one_by_one(threads_crash())  # ends with this object where loading fails
        self._reading.__enter__()

    def place(self, model: Any, loaded: Callable[[str], bool] = lambda name: True) -> dict[str, Target]:
        """Installs the quantised weights of the `loaded` modules. Returns: their targets.

        Raises: ValueError for a weight that cannot be quantised, is missing, of a wrong dtype or not finite.
        """
        self.layout.finish(loaded)
        stored = self.layout.install(model, loaded)
        self.layout.check(model, loaded)
        check_scales(model, stored.__contains__)
        if self.layout.has_other_names:
            model._weight_conversions = None  # saved under the names of transformers
        return stored

    def place_empty(self, model: nn.Module, done: Callable[[str], bool]) -> None:
        """Gives the `done` modules quantised weights on the meta device, in place of real ones."""
        self.layout.install(model, done)

    def close(self, model: Any) -> None:
        """Ends loading, once the model has all its weights."""
        self._reading.__exit__(None, None, None)
        del self._reading
        if self.report is not None:
            model.hf_quantizer = self
        self.layout = Layout()
        finish_loading(model)

    def _dequantize(self, model: Any, dtype: Any = None) -> NoReturn:
        refuse_dequantizing()
