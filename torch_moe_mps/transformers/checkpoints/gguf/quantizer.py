"""GGUF files in from_pretrained of transformers: blocks stay packed, on our operators.

That is so where our own from_pretrained or a command loads, and in any program on a Mac for what transformers
itself does not keep packed there; all else it loads as without this package. Where tensors go is knowledge of
transformers (file.py). What cannot stay packed it dequantises, and the report says what and why.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from torch_moe_mps_autoload import GGUF_FAMILIES

from ...basics.scoped import having
from ...upstream.weights import GgufHfQuantizer, get_gguf_kernel, is_gguf_arch_supported
from ..layouts.lifecycle import Lifecycle
from ..quantize.sizes import bytes_a_token
from .file import checked_headers, read_checked
from .reading import Dense, GgufLayout

_asked: ContextVar[bool] = ContextVar("moe_mps_packs_gguf", default=False)


@contextmanager
def packing() -> Iterator[None]:
    """Context where GGUF files are validated and stay packed on any device."""
    with having(_asked, True), checked_headers():
        yield


class GgufQuantizer(Lifecycle, GgufHfQuantizer):
    """Loads the blocks of a GGUF file as packed weights, and accelerates the model.

    `report.skipped` lists the weights that are not packed, with reasons.
    """

    layout: GgufLayout
    _is_theirs = False  # transformers loads the file as it would without this package

    @property
    def _packs(self) -> bool:
        return not (self._is_theirs or self.quantization_config.dequantize)

    def read_header(self, gguf_file: str) -> None:
        """transformers' second loader, with kernels from the Hub, loads the weights not packed here."""
        self._is_theirs = not _asked.get() and (
            not torch.backends.mps.is_available() or _transformers_packs(gguf_file)
        )
        if not self._packs:
            super().read_header(gguf_file)

    def update_dtype(self, dtype: torch.dtype | None) -> torch.dtype:
        if self._packs and dtype is not None:  # without transformers' advice against 16 bits
            self.dtype = dtype
            return dtype
        return super().update_dtype(dtype)

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        super()._process_model_before_weight_loading(model, **kwargs)
        if not self._packs:
            return
        self.layout = GgufLayout(model, kwargs["checkpoint_files"][0])
        self.report = self.layout.report
        self.make_room(model)

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        if self._packs:
            return dtype if isinstance(param, Dense) else None
        return super().get_new_dtype(converter, param, dtype)

    def update_weight_conversions(self, weight_conversions: list, model: Any) -> list:
        if self._packs:
            return self.layout.conversions(weight_conversions)
        return super().update_weight_conversions(weight_conversions, model)

    def get_state_dict(self, checkpoint_file: str, model: Any) -> dict[str, Any]:
        return self.layout.state() if self._packs else super().get_state_dict(checkpoint_file, model)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if not self._packs:
            return super()._process_model_after_weight_loading(model, **kwargs)
        report = self.report
        assert report is not None
        self.place(model)
        report.bytes_after = bytes_a_token(model)
        if names := [*report.skipped]:
            some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            warnings.warn(
                f"torch_moe_mps: {len(names)} tensors of the GGUF file cannot stay packed and were "
                f"dequantised: {some}; model.hf_quantizer.report has them all",
                stacklevel=2,
            )
        self.close(model)
        return model


def _transformers_packs(gguf_file: str) -> bool:
    """True if transformers itself keeps a file's blocks packed on this Mac."""
    architecture = read_checked(gguf_file)[0]["general.architecture"]
    knows = architecture not in GGUF_FAMILIES and is_gguf_arch_supported(architecture)
    return knows and get_gguf_kernel() is not False
