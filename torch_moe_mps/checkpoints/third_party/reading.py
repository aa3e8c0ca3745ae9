"""Layout of checkpoints quantised by other libraries, and its converters.

Modules are named as in a dense checkpoint, so transformers' converters say which matrices a parameter is made
of. They treat the rows of codes, scales and biases alike, for example to join experts.
"""

import copy
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..._text import first_line
from ...models.basics.interface import is_experts, is_transposed
from ...models.modules.experts import is_interleaved
from ...models.upstream.weights import (
    Concatenate,
    Interleave,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    apply_renamings,
    dot_natural_key,
    rename_source_key,
)
from ...ops._checks import Check
from ...quantization import QuantizedWeight
from ...quantization.formats import ErrorSums
from ..layouts.checking import DENSE, check_tensor
from ..layouts.converters import NamedConverter
from ..layouts.layout import Section
from ..layouts.operations import Operation, only
from ..layouts.streaming import StreamingLayout
from ..quantize.reasons import Reasons
from ..quantize.sizes import add_stored
from ..quantize.target import Target, quantizable
from ..quantize.tied import add_tied, tied_layers
from ..quantize.weights import quantized_names
from ..stacks import conversions_of
from .layouts import UNREAD, Matrix, StackedExperts, Stored, TensorFiles, alike
from .schemes import Schemes

_CHECK = Check("load")
# Tensors that no converter takes: shapes, groups and zeros, which are read before, and those for activations.
_UNREAD = rf"[._](g_idx|weight_shape|weight_zero_point)$|{UNREAD}"
# Tensors of a matrix that is not dense, by what follows the name of the module, or that of a stack.
_QUANTISED = {"weight_packed", "weight_scale", "weight_scale_inv", "qweight", "qzeros", "scales"}
_STACKED = ("_weight_scale", "_scale_inv", "_scale", "_packed")


class _Place(NamedTuple):
    """The place of a matrix in the model.

    Attributes:
        key: the name that its dense weight would have.
        pattern: of the converter that takes it, or None.
    """

    key: str
    pattern: str | None


class _Part(NamedTuple):
    """A matrix that a parameter is made of."""

    place: _Place
    matrix: Matrix


_Found = tuple[str, _Place, Stored | StackedExperts]  # for the parameter of this name


class ThirdPartyLayout(StreamingLayout):
    """Layout of a checkpoint that another library quantised.

    Args:
        stored: the quantisation in the config.
        section: of the files that the model is; None is all of them.

    Attributes:
        report: their sizes, and the rounding errors of inexact conversions.

    Raises: ValueError for matrices that do not fit the model, or that no format holds.
    """

    has_other_names = True

    def __init__(
        self,
        model: PreTrainedModel,
        files: list[str],
        stored: Mapping[str, Any],
        section: Section | None = None,
    ):
        super().__init__(model)
        self.files = TensorFiles(files, section and section.names)
        ignored = {*(model._keys_to_ignore_on_load_unexpected or ()), _UNREAD}
        model._keys_to_ignore_on_load_unexpected = ignored
        mapping = section.mapping if section else conversions_of(model)
        self._renamings = [item for item in mapping if isinstance(item, WeightRenaming)]
        self._converters = [item for item in mapping if isinstance(item, WeightConverter)]
        self._apart = self._of_experts_apart()
        self._converters += self._apart
        self._of = {
            pattern: converter for converter in self._converters for pattern in converter.source_patterns
        }
        self._parts: dict[str, list[_Part]] = defaultdict(list)
        with torch.device("cpu"):  # the model is made on the meta device
            self._find(Schemes(stored))
        every, reasons = quantizable(model), Reasons(model)
        for name in self._parts:
            owner, _, parameter = name.rpartition(".")
            target = every.get(owner)
            if target and parameter in target.parameters and not self._must_be_dense(reasons, target):
                self._take(target, parameter, name)
        for target in self.targets.values():
            for parameter in {*target.parameters} - {*target.formats}:
                expected = "quantised as the other matrices are"
                _CHECK.fail(target.path(parameter), expected, "dense, or in another layout")
        add_tied(tied_layers(model), every, self.targets)

    def _take(self, target: Target, parameter: str, name: str) -> None:
        """Adds a parameter to its target, in the format of its matrices."""
        matrices = alike(name, [part.matrix for part in self._parts[name]])
        parts = [part._replace(matrix=m) for part, m in zip(self._parts[name], matrices, strict=True)]
        self._parts[name] = parts
        target.formats[parameter] = matrices[0].format
        self.targets[target.name] = target

    def _of_experts_apart(self) -> list[WeightConverter]:
        """Converters for experts stored as modules, of models whose dense checkpoints stack them."""
        converters: dict[str, WeightConverter] = {}
        for name, module in self.model.named_modules():
            end = ".".join(name.split(".")[-2:])  # all layers have this end
            down = getattr(module, "down_proj", None)
            if f"{end}.down_proj" in converters or not isinstance(down, torch.Tensor) or down.dim() != 3:
                continue
            dense, prefix = f"{name}.0.down_proj.weight", self.model.base_model_prefix
            if rename_source_key(dense, self._renamings, self._converters, prefix, {})[1] is not None:
                continue
            first = ("gate_proj", "up_proj") if hasattr(module, "gate_up_proj") else ("up_proj",)
            join = [Concatenate(1)] if len(first) > 1 else []
            join += [Interleave(1, inverse=True)] if is_interleaved(module) else []
            turn = [Transpose(1, 2)] if _is_transposed(module) else []
            for target, sources, joined in (
                ("gate_up_proj" if len(first) > 1 else "up_proj", first, join),
                ("down_proj", ("down_proj",), []),
            ):
                for part, parameter, transposed in (("weight", target, turn), ("bias", f"{target}_bias", [])):
                    patterns = [rf"{re.escape(end)}.*.{source}.{part}$" for source in sources]
                    operations = [MergeModulelist(0), *joined, *transposed]
                    target_name = f"{end}.{parameter}"
                    converters[target_name] = WeightConverter(patterns, target_name, operations)
        return [*converters.values()]

    def _must_be_dense(self, reasons: Reasons, target: Target) -> bool:
        return target.kind != "experts" and reasons.needs(target.name, target.module) is not None

    def _find(self, schemes: Schemes) -> None:
        """Fills `_parts`, in the order of the experts; nothing is read before all tensors are as declared."""
        state = self.model.state_dict()
        result = [*self._modules(state, schemes), *self._stacks(state, schemes)]
        self._check_whole(state, result)
        for name, place, stored in result:
            self._parts[name].append(_Part(place, stored.matrix()))

    def _check_whole(self, state: Mapping[str, Tensor], found: list[_Found]) -> None:
        """Checks the dense weights, and that each parameter is made of tensors for all of it.

        Raises: ValueError if it is not.
        """
        empty: dict[str, list[tuple[_Place, Tensor]]] = defaultdict(list)
        for name, place, stored in found:
            empty[name].append((place, torch.empty(stored.shape, device="meta")))
        quantised = {*empty}
        quantized_keys = {name for _, _, stored in found for name in stored.names}
        for name, place, shape in self._dense_parts(state, quantized_keys):
            if name in quantised:
                _CHECK.fail(place.key, f"quantised as the other matrices of {name} are", "a dense one")
            empty[name].append((place, torch.empty(shape, device="meta")))
        for name, parts in empty.items():
            places, tensors = zip(*parts, strict=True)
            try:
                results = self._made(name, places, tensors)
            except RuntimeError as error:
                if name in quantised:
                    _CHECK.fail(name, f"made of matrices that fit, as {places[0].key}", first_line(error))
                continue  # it may be code that reads values
            for item, tensor in results.items():
                if item in state and tensor.shape != (shape := state[item].shape):
                    got = f"{tuple(tensor.shape)}, made of {len(parts)} such as {places[0].key}"
                    _CHECK.fail(item, f"of shape {tuple(shape)}", got)

    def _dense_parts(
        self, state: Mapping[str, Tensor], quantized_keys: Collection[str]
    ) -> Iterator[tuple[str, _Place, tuple[int, ...]]]:
        """Yields (parameter, place, shape) of dense tensors that are parts of one, after checking them."""
        for key, shape in self.files.shapes.items():
            if key in quantized_keys or re.search(_UNREAD, key):
                continue
            name, pattern = self._renamed(key, state)
            if name in state:
                dtype = self.files.dtypes[key]
                shapes = [tuple(state[name].shape)] if pattern is None else [shape]
                dtypes = DENSE if state[name].is_floating_point() else [dtype]
                check_tensor(key, (dtype, shape), dtypes, shapes)
            if pattern is not None:
                yield name, _Place(apply_renamings(key, self._renamings), pattern), shape

    def _renamed(self, key: str, state: Mapping[str, Tensor]) -> tuple[str, str | None]:
        """Name of the parameter of a key, and the pattern of its converter, or None."""
        prefix = self.model.base_model_prefix
        return rename_source_key(key, self._renamings, self._converters, prefix, state)

    def _modules(self, state: Mapping[str, Tensor], schemes: Schemes) -> Iterator[_Found]:
        """Yields (parameter, place, tensors) of each quantised matrix of the checkpoint."""
        for module in sorted(self.files.beside, key=dot_natural_key):
            key = f"{module}.weight"
            is_dense = self.files.dtypes.get(key, "F32") in DENSE
            if is_dense and not _QUANTISED & {*self.files.beside[module]}:
                continue
            name, pattern = self._renamed(key, state)
            if (weight := state.get(name)) is None:
                continue
            if weight.dim() < 2:
                _CHECK.fail(key, "dense in the checkpoint", f"one of {self.files.dtypes.get(key, 'codes')}")
            scheme = schemes.of((module, name.removesuffix(".weight")))
            stored = Stored(self.files, module, self._shape(name, pattern, weight), scheme)
            yield name, _Place(apply_renamings(key, self._renamings), pattern), stored

    def _stacks(self, state: Mapping[str, Tensor], schemes: Schemes) -> Iterator[_Found]:
        """Experts that the checkpoint stacks in one parameter."""
        ends = ((key, end) for key in self.files.shapes for end in _STACKED if key.endswith(end))
        codes = (key for key, dtype in self.files.dtypes.items() if dtype not in DENSE)
        for key in sorted({*(key.removesuffix(end) for key, end in ends), *codes}):
            name = apply_renamings(key, self._renamings)
            weight = state.get(name)
            if weight is None or weight.dim() != 3 or name.endswith(".weight"):  # a weight is a module's own
                continue
            transposed = self._is_transposed(name)
            experts, rows, columns = (weight.mT if transposed else weight).shape
            shape, scheme = (experts, rows, columns), schemes.of((key, name))
            yield name, _Place(name, None), StackedExperts(self.files, key, shape, scheme, transposed)

    def _is_transposed(self, name: str) -> bool:
        """True if a parameter of stacked experts is transposed."""
        return _is_transposed(self.model.get_submodule(name.rpartition(".")[0]))

    def _shape(self, name: str, pattern: str | None, weight: Tensor) -> tuple[int, int]:
        """Shape of a module's matrix: gate and up of experts are halves of a parameter."""
        transposed = weight.dim() == 3 and self._is_transposed(name)
        rows, columns = (weight.mT if transposed else weight).shape[-2:]
        joined = 1 if pattern is None else len(self._of[pattern].source_patterns)
        return rows // joined, columns

    def conversions(self, others: list) -> list:
        """Converters of quantised weights, once targets have them, in front of the others."""
        rows = [self._row(name, parts) for name, parts in self._parts.items()]
        return [*rows, *self.streamed([*self._apart, *others])]

    def _row(self, name: str, parts: list[_Part]) -> NamedConverter:
        """The converter of a parameter's matrices: to packed weights of a target, else to dense ones."""
        owner, _, parameter = name.rpartition(".")
        names = [apply_renamings(n, self._renamings) for part in parts for n in part.matrix.names]
        target = self.targets.get(owner)
        if target is None:
            dense = Operation(lambda tensors: [self._dense(name, parts, tensors)])
            return NamedConverter(names, [name], [dense, self.operation], force_cpu=True)
        ours = [n for n in quantized_names(parameter) if n in target.module._parameters]
        parameters = [f"{owner}.{n}" for n in ours]

        def read(tensors: list[Tensor]) -> list[Tensor]:
            try:
                weight = self._weight(name, target, parameter, parts, tensors)
            except ValueError as error:  # transformers would only mention it in its report
                self._errors.append(error)
                return [torch.zeros_like(self.model.get_parameter(n), device="cpu") for n in parameters]
            return [tensor for tensor in weight if tensor is not None]

        return NamedConverter(names, parameters, [Operation(read)], force_cpu=True)

    def _weight(
        self, name: str, target: Target, parameter: str, parts: list[_Part], tensors: list[Tensor]
    ) -> QuantizedWeight:
        """The packed weight that the matrices of a parameter are joined to; adds it to the report."""
        errors, rest = ErrorSums(), iter(tensors)
        weights = [part.matrix.read([next(rest) for _ in part.matrix.names], errors) for part in parts]
        joined: list[Any] = [
            None if any(t is None for t in item) else self._joined(name, parts, [*item])
            for item in zip(*weights, strict=True)
        ]
        if target.kind == "experts":
            joined = [None if t is None else target.rows_first(t).contiguous() for t in joined]
        packed, scales, biases = joined
        weight = QuantizedWeight(packed, scales, biases, target.formats[parameter])
        add_stored(self.report, target, parameter, weight.format, errors.relative)
        return weight

    def _dense(self, name: str, parts: list[_Part], tensors: list[Tensor]) -> Tensor:
        """Dense value of a parameter that a quantised layer cannot hold, or that a recipe quantises."""
        parameter, rest = self.model.get_parameter_or_buffer(name), iter(tensors)
        # Only the converter that joins them has them all, and frees them as it does.
        values = (
            part.matrix.dense([next(rest) for _ in part.matrix.names]).to(parameter.dtype) for part in parts
        )
        try:
            return self._joined(name, parts, values)
        except ValueError as error:
            self._errors.append(error)
            return torch.zeros_like(parameter, device="cpu")

    def _joined(self, name: str, parts: list[_Part], tensors: Iterable[Tensor]) -> Tensor:
        """Parameter that transformers makes of the matrices, or of other tensors with their rows."""
        places = [part.place for part in parts]
        results = self._made(name, places, tensors)
        if {*results} != {name}:
            _CHECK.fail(
                name, "a parameter made of whole matrices", f"{sorted(results)} made of {places[0].key}"
            )
        return results[name]

    def _made(self, name: str, places: Sequence[_Place], tensors: Iterable[Tensor]) -> dict[str, Tensor]:
        """{parameter: tensor} that transformers makes of tensors, or of one as it is."""
        if places[0].pattern is None:
            tensor, *_ = tensors
            return {name: tensor.mT if tensor.dim() == 3 and self._is_transposed(name) else tensor}
        converter = copy.deepcopy(self._of[places[0].pattern])
        for place, tensor in zip(places, tensors, strict=True):
            assert place.pattern is not None
            converter.add_tensor(name, place.key, place.pattern, tensor)
        results = converter.convert(name, model=self.model, config=self.model.config)
        return {item: only(tensor) for item, tensor in results.items()}

    def forget_absent(self, model: nn.Module) -> None:
        super().forget_absent(model)
        present = model.state_dict()
        self._parts = defaultdict(list, {
            name: parts for name, parts in self._parts.items()
            if name in present or name.rpartition(".")[0] in self.targets
        })  # fmt: skip


def _is_transposed(experts: Any) -> bool:
    """True if experts are stacked as [experts, columns, rows]."""
    if is_experts(experts):
        return is_transposed(experts)
    first = getattr(experts, "gate_up_proj", None)
    return first is not None and bool(first.shape[1] == experts.down_proj.shape[2])
