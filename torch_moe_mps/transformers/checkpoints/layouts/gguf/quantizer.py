"""GGUF files in from_pretrained of transformers: blocks stay packed, on our operators.

That is so where our own from_pretrained or a command loads, and in any program on a Mac for what transformers
itself does not keep packed there; all else it loads as without this package. Where tensors go is knowledge of
transformers (file.py). What cannot stay packed it dequantises, and the report says what and why.
"""

import importlib
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers import modeling_gguf_pytorch_utils
from transformers.integrations import gguf as reading
from transformers.integrations.gguf import reader
from transformers.integrations.gguf.kernels import get_gguf_kernel
from transformers.integrations.gguf.utils import is_gguf_arch_supported
from transformers.quantizers.quantizer_gguf import GgufHfQuantizer

from ....basics.report import QuantizationReport
from ....basics.scoped import having
from ....families import GGUF
from ...quantize.in_place import finish_loading
from ...quantize.sizes import add_stored, bytes_a_token
from ...quantize.targets import HasTargets, Reasons, Target, add_tied, quantizable, tie_quantized, tied_layers
from ...quantize.weights import quantized_names, store_empty, take_stored
from ..checking import check_scales
from .file import File, GgufRows, read_checked
from .header import reading_once

_asked: ContextVar[bool] = ContextVar("moe_mps_packs_gguf", default=False)


def packing() -> AbstractContextManager[bool]:
    """Files that are loaded inside the block stay packed here, wherever that is."""
    return having(_asked, True)


class Part:
    """What transformers' loader reads as one tensor of a packed parameter."""

    def __init__(self, source: GgufRows, number: int):
        self.source, self.number = source, number

    def __getitem__(self, _: Any) -> Tensor:
        return self.source.take(self.number)


class Dense:
    """What it reads as a parameter that is dequantised; `wanted` is it as a parameter of a target."""

    def __init__(self, file: File, name: str, wanted: tuple[Target, str] | None = None):
        self.file, self.name, self.wanted = file, name, wanted

    def __getitem__(self, _: Any) -> Tensor:
        return self.file.value(self.name) if self.wanted is None else self.file.value_of(*self.wanted)


def dense_state(file: str, model: Any, wanted: Mapping[str, tuple[Target, str]]) -> dict[str, Dense]:
    """{parameter of a model on the meta device: what it is in a GGUF file, dequantised when it is read}"""
    with torch.device("cpu"):
        whole = File(file, model)
    return {name: Dense(whole, name, wanted.get(name)) for name in whole.parts}


class GgufQuantizer(HasTargets, GgufHfQuantizer):
    """Loads the blocks of a GGUF file as packed weights, and accelerates the model.

    Attributes:
        report: the QuantizationReport of what is packed; `skipped` says what is not, and why.
    """

    report: QuantizationReport | None = None
    _is_theirs = False  # transformers loads the file as it would without this package

    @property
    def _packs(self) -> bool:
        return not (self._is_theirs or self.quantization_config.dequantize)

    def read_header(self, gguf_file: str) -> None:
        """transformers' second loader, and with it kernels from the Hub, is for what is not packed here."""
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
        self._file = File(kwargs["checkpoint_files"][0], model)
        self._sources: dict[str, GgufRows] = {}
        self.report = QuantizationReport(bytes_before=bytes_a_token(model))
        reasons, every = Reasons(model), quantizable(model)
        for target in every.values():
            if target.kind == "experts" or reasons.needs(target.name, target.module) is None:
                self._pack(target)
        self._targets = {name: target for name, target in every.items() if target.formats}
        tied, own = tied_layers(model), {*self._targets}
        add_tied(tied.items(), every, self._targets)
        self.report.shared |= {name: tied[name] for name in self._targets if name not in own}
        whole = {f"{target.name}.{p}" for target in self._targets.values() for p in target.formats}
        dense = [t for name, parts in self._file.parts.items() if name not in whole for t in parts]
        for tensor in dense:
            if tensor.is_quantized:
                tensor.values(tensor.data.reshape(tensor.rows, -1)[:1])  # raises what it would later
                why = "has no format here" if tensor.format is None else "cannot stay as it is in the model"
                self.report.skipped[tensor.name] = f"{tensor.kind.lower()}, which {why}"
        for target in self._targets.values():
            store_empty(target)
        tie_quantized(model)

    def _pack(self, target: Target) -> None:
        """Notes where a target's parameters come from if all of them can stay packed."""
        with torch.device("cpu"):  # the model is made on the meta device
            found = [self._file.sources(target, parameter) for parameter in target.parameters]
        for parameter, source in (pair for sources in found if all(found) for pair in sources.items()):
            target.formats[parameter] = source.format
            target.has_order = source.inputs is not None
            self._sources[f"{target.name}.{parameter}"] = source

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        if self._packs:
            return dtype if isinstance(param, Dense) else None
        return super().get_new_dtype(converter, param, dtype)

    def update_weight_conversions(self, weight_conversions: list, model: Any) -> list:
        """The names of `get_state_dict` are the model's."""
        return [] if self._packs else super().update_weight_conversions(weight_conversions, model)

    def get_state_dict(self, checkpoint_file: str, model: Any) -> dict[str, Any]:
        if not self._packs:
            return super().get_state_dict(checkpoint_file, model)
        state: dict[str, Any] = {
            name: Dense(self._file, name) for name in self._file.parts if name not in self._sources
        }
        for full, source in self._sources.items():
            owner, _, parameter = full.rpartition(".")
            present = model.get_submodule(owner)._parameters
            for number, name in enumerate(quantized_names(parameter)):
                if name in present:
                    state[f"{owner}.{name}"] = Part(source, number)
            if source.inputs is not None:
                state[f"{owner}.order"] = source.inputs.int()
        return state

    def place(self, model: Any, loaded: Callable[[str], bool] = lambda name: True) -> None:
        """Gives the modules whose names are `loaded` their packed weights."""
        for name in filter(loaded, list(self._targets)):
            target = self._targets.pop(name)
            for parameter in target.formats:
                source = self._sources.get(f"{name}.{parameter}")
                if source is not None and self.report is not None:
                    add_stored(self.report, target, parameter, source.format)
            take_stored(model, target)
        check_scales(model, loaded)

    def place_empty(self, model: Any, done: Callable[[str], bool]) -> None:
        """Gives the modules whose names are `done` packed weights without memory, and never real ones."""
        for name in filter(done, list(self._targets)):
            take_stored(model, self._targets.pop(name))

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
        model.hf_quantizer = self
        del self._file, self._sources, self._targets
        model._weight_conversions = None  # saved under the names of transformers
        finish_loading(model)
        return model


def _transformers_packs(gguf_file: str) -> bool:
    """Whether transformers keeps a file's blocks on this Mac: some architectures, with its kernels."""
    architecture = read_checked(gguf_file)[0]["general.architecture"]
    knows = architecture not in GGUF and is_gguf_arch_supported(architecture)
    return knows and get_gguf_kernel() is not False


def register_readers() -> None:
    """Lets transformers read headers with our checks, a header once, and the architectures of families."""
    reading.read_gguf_metadata = read_checked
    reader.read_gguf_metadata = read_checked  # for tokenizers
    modeling_gguf_pytorch_utils.load_gguf_checkpoint = reading_once(
        modeling_gguf_pytorch_utils.load_gguf_checkpoint
    )
    for name, reads in GGUF.items():
        reading.GGUF_ARCHS[name] = importlib.import_module(reads).conversions
