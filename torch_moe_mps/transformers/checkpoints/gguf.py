"""GGUF files: transformers reads them and says where tensors go; blocks stay packed, on our operators.

transformers renames a file's tensors, moves their rows and joins them by code for each architecture. To learn
what it does with blocks, that code runs on numbers in place of values, two for each row: where every row of
the result is a row of the file, its blocks are taken as they are. All else is dequantised by transformers,
and the report says what and why.

This is for the architectures of transformers' first loader. Those of its second, which keeps blocks itself,
are left to it.
"""

import bisect
import functools
import math
import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers.integrations import gguf as reading
from transformers.integrations.gguf import reader
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.quantizer_gguf import GgufHfQuantizer

from ...ops._checks import first_line
from ...quantization import Format, QuantizedWeight
from ...quantization.gguf import format_of_blocks, from_blocks
from ..report import QuantizationReport, QuantizedProjection
from .saving import mark_quantized
from .sizes import bytes_a_token
from .targets import Reasons, Target, quantizable, tie_quantized, tied_layers
from .weights import quantized_names, store_empty, take_stored, words

if TYPE_CHECKING:  # transformers is not complete yet when its quantizers import ours
    from transformers import PreTrainedModel


class Source:
    """A parameter whose rows are rows of the file: `order` numbers those of `tensors` one after the other."""

    def __init__(self, target: Target, tensors: list[Any], order: Tensor):
        self.target, self.tensors, self.order = target, tensors, order
        self._left: dict[int, Tensor] = {}
        self._lock = Lock()  # transformers loads in several threads

    @property
    def format(self) -> Format | None:
        """Of all its tensors; None where they differ."""
        formats = {format_of_blocks(tensor.tensor_type.name) for tensor in self.tensors}
        return formats.pop() if len(formats) == 1 else None

    def take(self, number: int) -> Tensor:
        """One of the tensors of the packed parameter. Blocks are taken apart once for all of them."""
        with self._lock:
            if number not in self._left:
                self._left = {n: words(t) for n, t in enumerate(self._weight()) if t is not None}
            return self._left.pop(number)

    def _weight(self) -> QuantizedWeight:
        rows = [torch.from_numpy(np.array(t.data)).view(-1, t.data.shape[-1]) for t in self.tensors]
        blocks = rows[0] if len(rows) == 1 else torch.cat(rows)
        order = self.order.flatten()
        if not torch.equal(order, torch.arange(len(blocks))):
            blocks = blocks[order]
        assert self.format is not None
        rows_of = self.order.shape if self.target.kind == "experts" else self.order.shape[1:]
        return from_blocks(blocks.view(*rows_of, -1), self.format)


class Part:
    """What transformers' loader reads as one tensor of a packed parameter."""

    def __init__(self, source: Source, number: int):
        self.source, self.number = source, number

    def __getitem__(self, _: Any) -> Tensor:
        return self.source.take(self.number)


class File:
    """A file and transformers' code for its architecture."""

    def __init__(self, path: str, model: "PreTrainedModel"):
        from gguf import GGUFReader
        from transformers import modeling_gguf_pytorch_utils as legacy

        self.tensors = GGUFReader(path).tensors
        header = legacy.load_gguf_checkpoint(path)
        architecture = header["config"].get("model_type", "")
        names = {**legacy.TENSOR_PROCESSORS}
        stored = reading.read_gguf_metadata(path)[0]["general.architecture"]
        processor = names.get(stored, names.get(architecture, legacy.TensorProcessor))
        self._processor = processor(config=header["config"])
        self._names: Mapping[str, str] = legacy.get_gguf_hf_weights_map(model, self._processor)

    def placed(self, tensor: Any, values: np.ndarray, into: dict[str, Tensor]) -> None:
        """Adds values that stand for a tensor to the model's parameters, as transformers' loader does."""
        result = self._processor.process(
            weights=values,
            name=tensor.name,
            tensor_key_mapping=self._names,
            parsed_parameters={"tensors": into},
        )
        if result.name in self._names:
            into[self._names[result.name]] = torch.from_numpy(np.copy(result.weights))

    def sources(self, targets: Mapping[str, tuple[Target, str]]) -> dict[str, Source]:
        """{name: source} of the parameters among `targets` whose rows are rows of blocks of the file."""
        numbers: dict[str, Tensor] = {}
        starts: list[int] = []
        packed: list[Any] = []
        total = 1
        for tensor in self.tensors:
            if format_of_blocks(tensor.tensor_type.name) is None:
                continue
            count = int(np.prod(tensor.data.shape[:-1]))
            rows = 2.0 * np.arange(total, total + count)
            try:
                self.placed(
                    tensor, np.stack((rows, rows + 1), -1).reshape(*tensor.data.shape[:-1], 2), numbers
                )
            except (ValueError, IndexError, RuntimeError):  # what it does is not done to rows
                continue
            starts.append(total)
            packed.append(tensor)
            total += count
        found = {}
        for name, (target, parameter) in targets.items():
            if name not in numbers:
                continue
            weight = target.rows_first(getattr(target.module, parameter))
            pairs = target.rows_first(numbers[name])
            if pairs.shape != (*weight.shape[:-1], 2):
                continue
            first = pairs[..., 0]
            if not bool((first % 2 == 0).all() and (first > 0).all() and (pairs[..., 1] == first + 1).all()):
                continue
            order = (first // 2).long()
            among = sorted(
                {
                    bisect.bisect_right(starts, int(n)) - 1
                    for n in order[:, :: max(1, order.shape[1] - 1)].unique()
                }
            )
            own = torch.cat([torch.arange(starts[i], starts[i] + _rows(packed[i])) for i in among])
            places = torch.searchsorted(own, order.flatten()).clamp(max=len(own) - 1)
            if torch.equal(own[places], order.flatten()):
                found[name] = Source(target, [packed[i] for i in among], places.view(order.shape))
        return found


def _rows(tensor: Any) -> int:
    return int(np.prod(tensor.data.shape[:-1]))


def check_file(path: str) -> None:
    """Raises: ValueError, in one line, for a file that is no GGUF, is cut off or damaged.

    Reads the header alone. Without the package `gguf`, which knows the types, nothing is checked.
    """
    if find_spec("gguf") is None:
        return
    from gguf import GGML_QUANT_SIZES

    try:
        blob = reader._mapped(path)
        metadata, count, place = reader._read_metadata(blob, path)
        tensors, place = reader._read_tensor_table(blob, count, place)
        alignment = int(metadata.get("general.alignment", 32))
        start = -(-place // alignment) * alignment
        for name, shape, kind, offset in tensors:
            if kind not in GGML_QUANT_SIZES:
                raise ValueError(f"{name} has the unknown type {kind}")
            values, size = GGML_QUANT_SIZES[kind]
            if not shape or min(shape) < 1 or shape[-1] % values:
                raise ValueError(f"{name} has the shape {shape}")
            end = start + offset + math.prod(shape) // values * size
            if end > len(blob):
                raise ValueError(f"{name} ends at byte {end} of {len(blob)}")
    except Exception as error:  # also of struct and numpy
        raise ValueError(f"moe_mps::gguf: {path} is damaged or no GGUF file ({first_line(error)})") from error


class Quantizer(GgufHfQuantizer):
    """Loads the blocks of a GGUF file as packed weights, and accelerates the model.

    Attributes:
        report: the QuantizationReport of what is packed; `skipped` says what is not, and why.
    """

    report: QuantizationReport | None = None

    @property
    def _packs(self) -> bool:
        return not (self.supported or self.quantization_config.dequantize)

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        super()._process_model_before_weight_loading(model, **kwargs)
        if not self._packs:
            return
        self._file = File(kwargs["checkpoint_files"][0], model)
        self._sources: dict[str, Source] = {}
        self.report = QuantizationReport(bytes_before=bytes_a_token(model))
        reasons, every = Reasons(model), quantizable(model)
        named = {f"{t.name}.{p}": (t, p) for t in every.values() for p in t.parameters}
        with torch.device("cpu"):  # the model is made on the meta device
            found = self._file.sources(named)
        in_blocks = {t.name for t in self._file.tensors if _is_quantized(t)}
        packed_names: set[str] = set()
        for name, target in every.items():
            paths = [f"{name}.{parameter}" for parameter in target.parameters]
            own = {path: found[path] for path in paths if path in found}
            formats = [source.format for source in own.values()]
            needs = None if target.kind == "experts" else reasons.needs(name, target.module)
            if needs is None and len(own) == len(paths) and None not in formats:
                target.formats = {p: f for p, f in zip(target.parameters, formats, strict=True) if f}
                self._sources |= own
                packed_names |= {t.name for source in own.values() for t in source.tensors}
        self._targets = {name: target for name, target in every.items() if target.formats}
        for name, other in tied_layers(model).items():
            if other in self._targets and name in every and name not in self._targets:
                every[name].formats = dict(self._targets[other].formats)
                self._targets[name] = every[name]
                self.report.shared[name] = other
        for name in sorted(in_blocks - packed_names):
            tensor = next(t for t in self._file.tensors if t.name == name)
            kind = tensor.tensor_type.name.lower()
            known = format_of_blocks(kind) is not None
            why = "cannot stay as it is in the model" if known else "has no packed format"
            self.report.skipped[name] = f"{kind}, which {why}"
        self._rest = [t for t in self._file.tensors if t.name not in packed_names]
        for full, source in self._sources.items():
            target, parameter = named[full]
            weight = getattr(target.module, parameter)
            format = target.formats[parameter]
            nbytes = sum(t.data.nbytes for t in source.tensors)
            entry = QuantizedProjection(parameter, 0.0, weight.nbytes, nbytes, format)
            self.report.modules.setdefault(target.name, []).append(entry)
        for target in self._targets.values():
            store_empty(target)
        tie_quantized(model)

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        return None if isinstance(param, Part) else super().get_new_dtype(converter, param, dtype)

    def get_state_dict(self, checkpoint_file: str, model: Any) -> dict[str, Any]:
        if not self._packs:
            return super().get_state_dict(checkpoint_file, model)
        from gguf import dequantize

        state: dict[str, Any] = {}
        for tensor in self._rest:
            self._file.placed(tensor, dequantize(tensor.data, tensor.tensor_type), state)
        state = {name: tensor.to(self.dtype) for name, tensor in state.items()}
        for full, source in self._sources.items():
            owner, _, parameter = full.rpartition(".")
            present = model.get_submodule(owner)._parameters
            for number, name in enumerate(quantized_names(parameter)):
                if name in present:
                    state[f"{owner}.{name}"] = Part(source, number)
        return state

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if not self._packs:
            return super()._process_model_after_weight_loading(model, **kwargs)
        from ..accelerate import accelerate

        for target in self._targets.values():
            take_stored(model, target)
        report = self.report
        assert report is not None
        report.bytes_after = bytes_a_token(model)
        if report.skipped:
            names = ", ".join(list(report.skipped)[:3]) + (", ..." if len(report.skipped) > 3 else "")
            warnings.warn(
                f"torch_moe_mps: {len(report.skipped)} tensors of the GGUF file cannot stay packed and were "
                f"dequantised: {names}; model.hf_quantizer.report has them all",
                stacklevel=2,
            )
        model.hf_quantizer = self
        del self._file, self._sources, self._targets, self._rest
        model.requires_grad_(False)
        mark_quantized(model)
        accelerate(model)
        return model


def _is_quantized(tensor: Any) -> bool:
    return tensor.tensor_type.name not in ("F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64")


def _checked(read: Callable) -> Callable:
    """transformers reads the config first: a bad file is refused there."""

    @functools.wraps(read)
    def read_checked(gguf_path: str, *args: Any, **kwargs: Any) -> Any:
        check_file(gguf_path)
        return read(gguf_path, *args, **kwargs)

    return read_checked


reading.read_gguf_metadata = _checked(reading.read_gguf_metadata)
AUTO_QUANTIZER_MAPPING["gguf"] = Quantizer
