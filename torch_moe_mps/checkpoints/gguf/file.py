"""The tensors of a GGUF file, and where transformers puts their rows in a model.

transformers renames, permutes and joins a file's tensors by architecture-specific code. To learn the row
order, that code runs on row numbers in place of values: if every row of the result is a row of the file, its
blocks are copied unchanged. It runs once for all layers, and for all files of a class of models.
"""

import copy
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..._text import first_line
from ...models.upstream.weights import (
    GGUF_CONFIG_MAPPING,
    WeightConverter,
    WeightRenaming,
    gguf,
    rename_source_key,
)
from ...quantization import Format, QuantizedWeight
from ...quantization.gguf import (
    VALUES_AT_ONCE,
    block_values,
    blocks_of,
    format_of_blocks,
    from_blocks,
)
from ..quantize.target import Target
from ..quantize.weights import as_int32
from .architectures import ARCHITECTURES, config_of, row_of
from .header import (
    Header,
    check_offsets,
    check_part,
    check_sizes,
    config_of_first_loader,
    header_of,
    present_parts,
    tensor_names_in,
)
from .named import Named

# {number: (name, values of a block, bytes of a block)} of types that the package `gguf` does not know.
NEWER_TYPES = {42: ("Q2_0", 64, 18)}
# Types that llama.cpp has given up, and no program reads any more.
REMOVED_TYPES = {
    **{4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8"},
    **{36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"},
}
# Entries of a config that say nothing of the order of rows, and differ from file to file.
_OF_ONE_FILE = ("_name_or_path", "dtype", "quantization_config", "transformers_version")
# {name that transformers' first loader has for an architecture: the one in files}
_OTHER_NAMES = {
    **{"qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "minimax_m2": "minimax-m2", "gpt_oss": "gpt-oss"},
    **{"mistral": "llama", "umt5": "t5"},
}
_DENSE = ("F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64")


class GgufTensor(NamedTuple):
    """A tensor of a file: `data` is a map of its bytes, uint8 [..., bytes of a row], from `offset` on."""

    name: str
    kind: str  # ggml's name of the type
    shape: tuple[int, ...]
    data: np.ndarray
    path: str = ""
    offset: int = 0

    @property
    def is_quantized(self) -> bool:
        return self.kind not in _DENSE

    @property
    def format(self) -> Format | None:
        """Format of its blocks."""
        return format_of_blocks(self.kind)

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    def values(self, data: np.ndarray | None = None) -> np.ndarray:
        """Dequantised float32 values of all rows, or of the given bytes.

        Raises: ValueError for a type that has none, or that neither the package `gguf` nor this one reads.
        """
        from gguf import GGMLQuantizationType, dequantize

        data = self.data if data is None else data
        try:
            return dequantize(data, GGMLQuantizationType[self.kind])
        except (NotImplementedError, KeyError):
            if format_of_blocks(self.kind) is not None:
                return from_blocks(torch.from_numpy(data), self.kind).values(slice(None)).numpy()
            expected = "of a type whose values are known"
            raise ValueError(f"moe_mps::gguf: {self.name} must be {expected}, got {self.kind}") from None


def known_types() -> dict[int, tuple[str, int, int]]:
    """{number: (name, values, bytes)} of all types, as in NEWER_TYPES."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    known = {kind: (GGMLQuantizationType(kind).name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
    return {int(kind): item for kind, item in known.items()} | NEWER_TYPES


def read_file(path: str) -> tuple[Mapping[str, Any], list[GgufTensor]]:
    """Metadata of a file, and its tensors as maps of its bytes.

    Args:
        path: of the file, or of its first part.

    Raises: ValueError, in one line, for a file that is no GGUF, is cut off or damaged, or lacks a part.
    """
    result, parts = list[GgufTensor](), present_parts(path)
    for number, part in enumerate(parts):
        try:
            header = header_of(part, is_first=number == 0)
            check_part(header.metadata, number, len(parts))
            result += _tensors_in(part, header)
            if number == 0:
                first = header
            if number == len(parts) - 1:
                _check_names(first, result)
        except (ValueError, OSError) as error:
            raise ValueError(
                f"moe_mps::gguf: {part} is damaged or not in GGUF ({first_line(error)})"
            ) from error
    return first.metadata, result


def _check_names(first: Header, tensors: list[GgufTensor]) -> None:
    """Raises: ValueError for tensors of all parts that are not those which the first one declares."""
    times = Counter(tensor.name for tensor in tensors)
    if twice := next((name for name, count in times.items() if count > 1), None):
        raise ValueError(f"{twice} must be among the tensors of all parts once, got it twice")
    declared = first.metadata.get("split.tensors.count", len(tensors))
    if declared != len(tensors):
        raise ValueError(f"all parts must have {declared} tensors by split.tensors.count, got {len(tensors)}")
    if not _other_contents(first.metadata):  # sizes of others have other keys
        check_sizes(first.metadata, [tensor.name for tensor in tensors])


def _other_contents(metadata: Mapping[str, Any]) -> str:
    """Words for what a file holds in place of a language model; none for one."""
    if metadata["general.architecture"] == "clip":
        return "that of a vision or audio tower (clip)"
    kind = metadata.get("general.type", "model")
    return "" if kind == "model" else f"one of the type {kind}"


def _tensors_in(path: str, header: Header) -> list[GgufTensor]:
    """The tensors of a file or a part. Raises: as `read_file`."""
    types, result, places = known_types(), [], []
    blob = np.memmap(path, mode="r", dtype=np.uint8)
    alignment = header.metadata.get("general.alignment", 32)
    start = -(-header.end // alignment) * alignment
    for name, shape, kind, offset in header.tensors:
        if kind in REMOVED_TYPES:
            raise ValueError(f"{name} has the type {REMOVED_TYPES[kind]}, which llama.cpp has given up")
        if kind not in types:
            raise ValueError(f"{name} must be of a type of ggml that is known, got {kind}")
        type_name, values, size = types[kind]
        if min(shape) < 1 or shape[-1] % values:
            expected = f"at least one row of whole blocks of {values} values"
            raise ValueError(f"{name} must have {expected}, got the shape {shape}")
        row = shape[-1] // values * size
        first, end = start + offset, start + offset + math.prod(shape[:-1]) * row
        if end > len(blob):
            raise ValueError(f"{name} ends at byte {end} of {len(blob)}")
        places.append((name, offset, end - first))
        data = blob[first:end].reshape(*shape[:-1], row)
        result.append(GgufTensor(name, type_name, shape, data, path, first))
    check_offsets(places, alignment, len(blob) - start)
    return result


def check_file(path: str) -> None:
    """Raises the errors of `read_file`, and ValueError for an architecture that is not read.

    Also for a file of a vision tower or an adapter, which is no model. Without the package `gguf`, which
    knows the types, nothing is checked.
    """
    if find_spec("gguf") is None:
        return
    metadata, _ = read_file(path)
    if other := _other_contents(metadata):
        raise ValueError(f"moe_mps::gguf: {path} must be the file of a language model, got {other}")
    known, architecture = read_architectures(), metadata["general.architecture"]
    if architecture not in known:
        raise ValueError(
            f"moe_mps::gguf: {path} must be of an architecture among {', '.join(known)}; got {architecture}"
        )


class _AroundLayers:
    """A model without its layers' modules, for transformers' table of names.

    Tensor names in layers contain the layer's index, so the table of one layer serves all. transformers would
    rebuild gguf's table for each module, which dominates loading time.
    """

    def __init__(self, module: nn.Module):
        self._module, self.state_dict = module, module.state_dict

    def named_children(self) -> list[tuple[str, "_AroundLayers"]]:
        """Models within the model: neither lists of layers nor modules that have no others."""
        children = [pair for pair in self._module.named_children() if any(pair[1].children())]
        return [(name, _AroundLayers(c)) for name, c in children if not isinstance(c, nn.ModuleList)]


class _Processed:
    """Names and values by transformers' first GGUF loader, which processes numpy arrays."""

    def __init__(self, architecture: str, model: PreTrainedModel):
        from ...models.upstream import modeling_gguf_pytorch_utils as first

        processor = first.TENSOR_PROCESSORS.get(architecture, first.TensorProcessor)
        self._processor = processor(config=model.config.to_dict())
        # The type of the model is another name than gguf's for some of them.
        layers = model.config.num_hidden_layers
        around = _AroundLayers(model)
        self._names = first.get_gguf_hf_weights_map(around, self._processor, architecture, layers)

    def _place(self, tensor: GgufTensor, values: np.ndarray, into: dict[str, Tensor]) -> None:
        result = self._processor.process(
            weights=values,
            name=tensor.name,
            tensor_key_mapping=self._names,
            parsed_parameters={"tensors": into},
        )
        if result.name in self._names:
            into[self._names[result.name]] = torch.from_numpy(np.copy(result.weights))

    def names(self, tensor: GgufTensor) -> Iterable[str]:
        """Names of the parameters that a tensor goes into."""
        keys = (tensor.name, tensor.name.removesuffix(".weight"))  # the latter of stacked experts
        return [self._names[key] for key in keys if key in self._names][:1]

    def value(self, name: str, values: list[tuple[GgufTensor, np.ndarray]]) -> Tensor:
        """A parameter made of the values of its tensors, or of numbers in their place."""
        result: dict[str, Tensor] = {}
        for tensor, item in values:
            self._place(tensor, item, result)
        return result[name]

    def inputs(self, name: str) -> Tensor | None:
        """Order of the inputs of a weight whose columns do not move; None for all, in order."""
        return None


class _Converted:
    """Names and values by its second GGUF loader, which has converters as of other checkpoints."""

    def __init__(self, architecture: str, model: PreTrainedModel):
        from ...models.upstream.weights import get_gguf_conversion_mapping

        with torch.device("cpu"):  # the model is made on the meta device
            mapping = get_gguf_conversion_mapping(architecture, model.config)
        self._renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self._of = {pattern: entry for entry in self._converters for pattern in entry.source_patterns}
        self._prefix, self._parameters = model.base_model_prefix, model.state_dict()
        self._patterns: dict[str, str | None] = {}  # {tensor or parameter: pattern}

    def names(self, tensor: GgufTensor) -> Iterable[str]:
        name, pattern = rename_source_key(
            tensor.name, self._renamings, self._converters, self._prefix, self._parameters
        )
        self._patterns[tensor.name] = self._patterns[name] = pattern
        return [name] if name in self._parameters else ()

    def value(self, name: str, values: list[tuple[GgufTensor, np.ndarray]]) -> Tensor:
        """A parameter made of the values of its tensors, or of row numbers in place of two columns."""
        pattern = self._patterns[name]
        if pattern is None:
            ((_, array),) = values
            return torch.from_numpy(np.array(array))
        converter = copy.deepcopy(self._of[pattern])
        of_rows = values[0][1].shape[-1] != values[0][0].shape[-1]  # they stand for rows
        converter.operations = [
            operation
            for operation in converter.operations
            if not (of_rows and hasattr(operation, "input_permutation"))
        ]
        for tensor, item in values:
            source = self._patterns[tensor.name]
            assert source is not None
            converter.add_tensor(name, tensor.name, source, torch.from_numpy(np.array(item)))
        if not converter.operations:
            ((_, array),) = values
            return torch.from_numpy(np.array(array))
        return converter.convert(name)[name]

    def inputs(self, name: str) -> Tensor | None:
        """Order of the inputs of a weight whose columns transformers moves; None for all, in order."""
        pattern = self._patterns[name]
        operations = [] if pattern is None else self._of[pattern].operations
        moved = [
            operation.input_permutation for operation in operations if hasattr(operation, "input_permutation")
        ]
        return moved[0] if moved else None


def placing_of(
    metadata: Mapping[str, Any], model: PreTrainedModel, names: Iterable[str] = ()
) -> _Processed | _Converted | Named:
    """Placement of a file's tensors, by our row or the loader of transformers that reads it.

    Args:
        metadata, names: of the file, and of its tensors.
    """
    from ...models.upstream.weights import is_gguf_arch_supported

    architecture = metadata["general.architecture"]
    if (row := row_of(metadata)) is not None:
        return Named(row, architecture, model, names)
    converts = is_gguf_arch_supported(architecture)
    return (_Converted if converts else _Processed)(architecture, model)


class GgufWeight:
    """A parameter that stays packed: its rows are rows of blocks of the file.

    Args:
        order: index of each row of the parameter among all rows of `tensors`.

    Attributes:
        tensors, order: as given.
        inputs: input permutation of the weight; None for the identity, or where whole blocks were permuted
            instead.
    """

    def __init__(self, target: Target, tensors: list[GgufTensor], order: Tensor, inputs: Tensor | None):
        self.tensors, self.inputs, self.order = tensors, inputs, order
        self._shape = order.shape if target.kind == "experts" else order.shape[1:]
        rows = order.flatten().numpy()
        self._order = None if (rows == np.arange(len(rows))).all() else rows
        self._blocks: np.ndarray | None = None  # the order of a row's blocks
        if inputs is not None:
            columns = inputs.argsort().view(-1, block_values(self.format))
            whole = columns[:, :1] + torch.arange(columns.shape[1])
            if torch.equal(columns, whole) and not bool((columns[:, 0] % columns.shape[1]).any()):
                self._blocks, self.inputs = (columns[:, 0] // columns.shape[1]).numpy(), None

    @property
    def moves_columns(self) -> bool:
        """True if columns of the parameter are not in the order of the file."""
        return self.inputs is not None or self._blocks is not None

    @property
    def format(self) -> Format:
        format = self.tensors[0].format
        assert format is not None
        return format

    def get_dtype(self) -> str:
        """The dtype of the blocks, as of safetensors' lazy tensors."""
        return "U8"

    def __getitem__(self, _: Any) -> "GgufWeight":
        """Itself: transformers' loader indexes tensors by `[...]`, then calls `to`."""
        return self

    def to(self, device: Any, dtype: None) -> QuantizedWeight:
        """The packed weight. Some rows are read at a time: memory beside it stays under about 25 MiB."""
        shape = (*self._shape, self.tensors[0].shape[-1])
        weight = blocks_of(shape, self.tensors[0].kind, self._some)
        return weight.map(lambda tensor: as_int32(tensor).to(device))

    def _some(self, rows: slice) -> Tensor:
        """The blocks [n, bytes] of some rows of the parameter."""
        count = sum(tensor.rows for tensor in self.tensors)
        wanted = np.arange(count)[rows] if self._order is None else self._order[rows]
        out = np.empty((len(wanted), self.tensors[0].data.shape[-1]), np.uint8)
        first = 0
        for tensor in self.tensors:
            in_tensor = (wanted >= first) & (wanted < first + tensor.rows)
            out[in_tensor] = tensor.data.reshape(tensor.rows, -1)[wanted[in_tensor] - first]
            first += tensor.rows
        if self._blocks is not None:
            out = out.reshape(len(out), len(self._blocks), -1)[:, self._blocks].reshape(out.shape)
        return torch.from_numpy(out)


class RowOrder(NamedTuple):
    """Indices of a file's rows that make up a parameter; `is_transposed`: its last dimensions are swapped."""

    rows: Tensor
    is_transposed: bool


# {what decides it: the order of a parameter}, of all files that this process has read
_ORDERS: dict[Hashable, RowOrder | None] = {}


def _config_of_class(model: Any) -> str:
    """A model's config as text, equal for all files of its class."""
    entries = {name: value for name, value in model.config.to_dict().items() if name not in _OF_ONE_FILE}
    return json.dumps(entries, sort_keys=True, default=str)


def _any_layer(name: str) -> str:
    """Name without the number of its layer; those of experts stay, which may stand in any order."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name, count=1)


class GgufFile:
    """A file, and transformers' code for its architecture.

    Attributes:
        parts: {parameter of the model: the tensors that it is made of}.
    """

    def __init__(self, path: str, model: PreTrainedModel):
        metadata, self.tensors = read_file(path)
        for tensor in self.tensors:
            if tensor.name.endswith(".scale"):  # NVFP4 files may have them, beside weights
                expected = "absent, for a factor of a whole tensor has no operator"
                raise ValueError(f"moe_mps::gguf: {tensor.name} must be {expected}, got {tensor.shape}")
        names = (tensor.name for tensor in self.tensors)
        self._placing = placing_of(metadata, model, names)
        self._class = metadata["general.architecture"], type(model), _config_of_class(model)
        self.parts: dict[str, list[GgufTensor]] = defaultdict(list)
        for tensor in self.tensors:
            for name in self._placing.names(tensor):
                self.parts[name].append(tensor)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a parameter as transformers makes it; None where that fails."""
        tensors = self.parts[name]
        if (order := self.order(name)) is not None:
            rows, columns = order.rows.shape, tensors[0].shape[-1]
            return (*rows[:-1], columns, rows[-1]) if order.is_transposed else (*rows, columns)
        stands = [(tensor, np.broadcast_to(np.float32(-1), tensor.shape)) for tensor in tensors]
        try:
            return tuple(self._placing.value(name, stands).shape)
        except (ValueError, IndexError, KeyError, RuntimeError):
            return None

    def value(self, name: str) -> Tensor:
        """A parameter, dequantised."""
        return self._placing.value(name, [(tensor, tensor.values()) for tensor in self.parts[name]])

    def value_of(self, target: Target, parameter: str) -> Tensor:
        """Value of a target's parameter, in its dtype: rows of the file are dequantised some at a time."""
        name, weight = f"{target.name}.{parameter}", target.dense(parameter)
        tensors, order = self.parts[name], self._rows(target, parameter)
        if order is None or self._placing.inputs(name) is not None:
            return self.value(name).to(weight.dtype)
        rows, first = order.flatten().numpy(), 0
        columns = tensors[0].shape[-1]
        out = torch.empty(len(rows), columns, dtype=weight.dtype)
        for tensor in tensors:
            data = tensor.data.reshape(tensor.rows, -1)
            wanted = np.flatnonzero((rows >= first) & (rows < first + tensor.rows))
            for some in np.array_split(wanted, -(-len(wanted) * columns // VALUES_AT_ONCE)):
                out[some] = torch.from_numpy(tensor.values(data[rows[some] - first])).to(out.dtype)
            first += tensor.rows
        return target.rows_first(out.view(target.rows_first(weight).shape)).view(weight.shape)

    def sources(self, target: Target, parameter: str) -> dict[str, GgufWeight]:
        """A parameter of a target if its rows are rows of blocks of one type; nothing if they are not.

        Gate and up projections of experts may be of two types; they are parameters of their own then.
        """
        name = f"{target.name}.{parameter}"
        tensors = self.parts.get(name, [])
        order = None if any(tensor.format is None for tensor in tensors) else self._rows(target, parameter)
        if order is None:
            return {}
        inputs = self._placing.inputs(name)
        if len({tensor.kind for tensor in tensors}) == 1:
            return {parameter: GgufWeight(target, tensors, order, inputs)}
        if parameter != "gate_up_proj" or len(tensors) != 2:
            return {}
        count, halves = tensors[0].rows, order.chunk(2, 1)
        if bool((halves[0] >= count).any() or (halves[1] < count).any()):
            return {}
        return {
            "gate_up_proj": GgufWeight(target, tensors[:1], halves[0], inputs),
            "up_proj": GgufWeight(target, tensors[1:], halves[1] - count, inputs),
        }

    def _rows(self, target: Target, parameter: str) -> Tensor | None:
        """Indices of the file's rows that make up a parameter; None if it has other rows, too."""
        order = self.order(f"{target.name}.{parameter}")
        weight = target.rows_first(getattr(target.module, parameter))
        if order is None:
            return None
        rows = order.rows if target.kind == "experts" else order.rows.unsqueeze(0)
        return rows if rows.shape == weight.shape[:-1] else None

    def order(self, name: str) -> RowOrder | None:
        """Rows of the file that make up a parameter; None if it has other rows, too, or is no matrix."""
        tensors = self.parts.get(name, [])
        shapes = tuple((_any_layer(tensor.name), tensor.shape) for tensor in tensors)
        key = *self._class, _any_layer(name), shapes
        if key not in _ORDERS:
            _ORDERS[key] = self.learned_order(name)
        return _ORDERS[key]

    def order_of_values(self, name: str) -> Tensor | None:
        """Number of each value of a parameter among those of its tensors; None where they are not these.

        For small parameters, such as biases: the numbers are float32 in part of transformers' code.
        """
        stands, first = [], 0
        for tensor in self.parts[name]:
            end = first + math.prod(tensor.shape)
            stands.append((tensor, np.arange(float(first), float(end)).reshape(tensor.shape)))
            first = end
        try:
            placed = self._placing.value(name, stands) if first < 1 << 24 else None
        except (ValueError, IndexError, KeyError, RuntimeError):
            return None
        if placed is None or not torch.equal(placed.flatten().sort().values.long(), torch.arange(first)):
            return None
        return placed.long()

    def learned_order(self, name: str) -> RowOrder | None:
        """Result of `order`, by a run of transformers' code.

        It runs on numbers in place of two columns, which most of it takes for a matrix.
        """
        tensors = self.parts.get(name, [])
        widths = {tensor.shape[-1] for tensor in tensors if len(tensor.shape) > 1}
        tries = (2, *widths) if len(widths) == 1 else ()
        orders = (self._order(name, tensors, columns) for columns in tries)
        return next((order for order in orders if order is not None), None)

    def _order(self, name: str, tensors: list[GgufTensor], columns: int) -> RowOrder | None:
        """The order of a parameter's rows, by numbers in so many columns; None if it has other rows."""
        stands, first = [], 1
        for tensor in tensors:
            end = first + tensor.rows
            numbers = np.arange(float(first * columns), float(end * columns))
            stands.append((tensor, numbers.reshape(*tensor.shape[:-1], columns)))
            first = end
        try:
            placed = self._placing.value(name, stands)
        except (ValueError, IndexError, KeyError, RuntimeError):
            return None
        for is_transposed in (False, True):
            whole = placed.mT if is_transposed and placed.dim() > 1 else placed
            rows = whole[..., :1] / columns
            expected = (rows * columns + torch.arange(columns)).to(whole.dtype)
            if bool(((rows >= 1) & (rows == rows.round())).all()) and torch.equal(whole, expected):
                return RowOrder(rows[..., 0].long() - 1, is_transposed)
        return None


def read_architectures() -> list[str]:
    """Names of all architectures whose files are read, as they stand in files."""
    others = ("general", "tokenizer", "deci", *_OTHER_NAMES)  # transformers has no class for deci
    by_transformers = {*GGUF_CONFIG_MAPPING, *gguf.GGUF_CONFIG_ARCHS, *_OTHER_NAMES.values(), "t5encoder"}
    return sorted({*ARCHITECTURES, *by_transformers}.difference(others))


def stated_config(path: str) -> dict[str, Any]:
    """Entries of the config that a file states, its "model_type" among them.

    Raises: ValueError, in one line, for a file that fails our checks, or whose architecture nobody reads;
        ImportError without the package `gguf`, where transformers needs it.
    """
    check_file(path)
    metadata, names = copy.deepcopy(header_of(path).metadata), tuple(tensor_names_in(path))
    if (row := row_of(metadata)) is not None:
        return config_of(row, metadata, names)
    if metadata["general.architecture"] in gguf.GGUF_CONFIG_ARCHS:
        stated: dict[str, Any] = gguf.get_gguf_config(metadata, names)
        return stated
    return config_of_first_loader(path)
