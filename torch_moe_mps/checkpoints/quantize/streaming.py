"""Hands parameters from transformers' loader, one at a time, to the layout that quantises them."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from ..._environment import set_one_thread
from ..._extension import torch_version
from ...models.upstream.weights import ConversionOps, WeightConverter
from ..layouts.operations import only


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
