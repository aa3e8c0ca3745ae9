"""Which parameters of a model a checkpoint of another library has quantised, and the converters for them.

Modules are named as in a dense checkpoint, so transformers' converters say which matrices a parameter is made
of. What they do to rows, such as joining those of experts, they do to codes, scales and biases alike.
"""

import copy
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
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

from ....ops._checks import Check
from ....quantization import QuantizedWeight
from ....quantization.formats import ErrorSums
from ...basics.report import QuantizationReport
from ...modules.experts import is_interleaved
from ..mlx.operations import Cast
from ..mlx.rows import NamedConverter
from ..operations import Operation
from ..sizes import add_stored
from ..targets import Reasons, Target, add_tied, quantizable, tied_layers, tied_pairs
from ..weights import quantized_names
from .layouts import CODES, STACKED, Files, Matrix, alike, matrix_of, stack_of

if TYPE_CHECKING:  # transformers is not complete yet when its quantizers import ours
    from transformers import PreTrainedModel

_CHECK = Check("load")
# Shapes, orders that are read before, and what is for activations, keys and values, which stay as they are.
_UNREAD = r"(\.(g_idx|weight_shape)|[._](input|output|[kqv])_(global_)?(scale|zero_point))$"


class _Part(NamedTuple):
    """A matrix that a parameter is made of.

    Attributes:
        key: the name that its dense weight would have.
        pattern: of the converter that takes it, or None.
    """

    key: str
    pattern: str | None
    matrix: Matrix


class Reading:
    """What a checkpoint of another library contains of a model.

    Args:
        stored: the quantisation in the config.

    Attributes:
        targets: {name: target} of what stays quantised.
        report: their sizes, and the errors of what is not exact.

    Raises: ValueError for matrices that do not fit the model, or that no format holds.
    """

    absent: tuple[str, ...] = ()

    def __init__(self, model: "PreTrainedModel", files: list[str], stored: Mapping[str, Any]):
        _check_transforms(stored)
        self.model, self.files, self.targets = model, Files(files), dict[str, Target]()
        self.report = QuantizationReport()
        self._errors: list[ValueError] = []
        ignored = {*(model._keys_to_ignore_on_load_unexpected or ()), _UNREAD}
        model._keys_to_ignore_on_load_unexpected = ignored
        mapping = get_model_conversion_mapping(model, None, None)
        self._renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
        self._converters = [each for each in mapping if isinstance(each, WeightConverter)]
        self._apart = self._of_experts_apart()
        self._converters += self._apart
        self._of = {pattern: each for each in self._converters for pattern in each.source_patterns}
        self._parts: dict[str, list[_Part]] = defaultdict(list)
        with torch.device("cpu"):  # the model is made on the meta device
            self._find(stored)
        every, reasons = quantizable(model), Reasons(model)
        for name, parts in self._parts.items():
            owner, _, parameter = name.rpartition(".")
            target = every.get(owner)
            if target is None or parameter not in target.parameters or self._must_be_dense(reasons, target):
                continue
            matrices = alike(name, [part.matrix for part in parts])
            parts = [part._replace(matrix=each) for part, each in zip(parts, matrices, strict=True)]
            self._parts[name] = parts
            target.formats[parameter] = matrices[0].format
            target.has_order = parts[0].matrix.order is not None
            if target.has_order and len(parts) > 1:
                _CHECK.fail(name, "made of matrices whose columns are in order", "an order of columns")
            self.targets[owner] = target
        for target in self.targets.values():
            for parameter in {*target.parameters} - {*target.formats}:
                expected = "quantised as the other matrices are"
                _CHECK.fail(target.path(parameter), expected, "dense, or in another layout")
        add_tied(tied_pairs(tied_layers(model)), every, self.targets)

    def _of_experts_apart(self) -> list[WeightConverter]:
        """For experts that are one parameter in dense checkpoints, and modules in others."""
        made: dict[str, WeightConverter] = {}
        for name, module in self.model.named_modules():
            end = ".".join(name.split(".")[-2:])  # which all layers have
            down = getattr(module, "down_proj", None)
            if f"{end}.down_proj" in made or not isinstance(down, torch.Tensor) or down.dim() != 3:
                continue
            dense, prefix = f"{name}.0.down_proj.weight", self.model.base_model_prefix
            if rename_source_key(dense, self._renamings, self._converters, prefix, {})[1] is not None:
                continue
            first = ("gate_proj", "up_proj") if hasattr(module, "gate_up_proj") else ("up_proj",)
            join = [Concatenate(1)] if len(first) > 1 else []
            join += [Interleave(1, inverse=True)] if is_interleaved(module) else []
            turn = [Transpose(1, 2)] if _is_turned(module) else []
            for target, sources, joined in (
                ("gate_up_proj" if len(first) > 1 else "up_proj", first, join),
                ("down_proj", ("down_proj",), []),
            ):
                for part, parameter, turned in (("weight", target, turn), ("bias", f"{target}_bias", [])):
                    patterns = [rf"{re.escape(end)}.*.{source}.{part}$" for source in sources]
                    operations = [MergeModulelist(0), *joined, *turned]
                    target_name = f"{end}.{parameter}"
                    made[target_name] = WeightConverter(patterns, target_name, operations)
        return [*made.values()]

    def _must_be_dense(self, reasons: Reasons, target: Target) -> bool:
        return target.kind != "experts" and reasons.needs(target.name, target.module) is not None

    def _find(self, stored: Mapping[str, Any]) -> None:
        """Fills `_parts`, in the order of the experts."""
        state = self.model.state_dict()
        modules: dict[str, list[str]] = defaultdict(list)
        for name in self.files.shapes:
            modules[name.rpartition(".")[0]].append(name)
        modules = {
            module: names
            for module, names in modules.items()
            if any(f"{module}.{codes}" in names for codes in CODES)
        }
        for module in sorted(modules, key=dot_natural_key):
            key = f"{module}.weight"
            name, pattern = rename_source_key(
                key, self._renamings, self._converters, self.model.base_model_prefix, state
            )
            weight = state.get(name)
            if weight is None or weight.dim() < 2:
                continue
            matrix = matrix_of(self.files, module, self._shape(name, pattern, weight), stored)
            if matrix is not None:
                self._check_known(modules[module], matrix)
                self._parts[name].append(_Part(apply_renamings(key, self._renamings), pattern, matrix))
        for parameter in sorted(
            {
                key.removesuffix(next(end for end in STACKED if key.endswith(end)))
                for key in self.files.shapes
                if key.endswith(STACKED)
            }
        ):
            self._find_stack(parameter, state, stored)

    def _check_known(self, names: list[str], matrix: Matrix) -> None:
        """Raises: ValueError for what a matrix is not made of beside it, such as factors of its inputs."""
        for name in {*names} - {*matrix.names}:
            if name.rpartition(".")[2] not in ("bias", "weight_zero_point") and not re.search(_UNREAD, name):
                _CHECK.fail(name, "of a layout that is known", f"one beside {' and '.join(matrix.names)}")

    def _find_stack(self, key: str, state: Mapping[str, Tensor], stored: Mapping[str, Any]) -> None:
        """Experts that are one parameter in the checkpoint, as in the model."""
        name = apply_renamings(key, self._renamings)
        weight = state.get(name)
        if weight is None or weight.dim() != 3 or name.endswith(".weight"):  # which is a module's own
            return
        turned = self._is_turned(name)
        experts, rows, columns = (weight.mT if turned else weight).shape
        matrix = stack_of(self.files, key, (experts, rows, columns), stored, turned)
        if matrix is not None:
            self._parts[name].append(_Part(name, None, matrix))

    def _is_turned(self, name: str) -> bool:
        """Of a parameter of stacked experts."""
        return _is_turned(self.model.get_submodule(name.rpartition(".")[0]))

    def _shape(self, name: str, pattern: str | None, weight: Tensor) -> tuple[int, int]:
        """Of the matrix of a module: of experts, gate and up are halves of a parameter."""
        turned = weight.dim() == 3 and self._is_turned(name)
        rows, columns = (weight.mT if turned else weight).shape[-2:]
        joined = 1 if pattern is None else len(self._of[pattern].source_patterns)
        return rows // joined, columns

    def rows(self) -> list[WeightConverter]:
        """The converters, once the targets have quantised weights."""
        return [*(self._row(name, parts) for name, parts in self._parts.items()), *self._apart]

    def _row(self, name: str, parts: list[_Part]) -> NamedConverter:
        owner, _, parameter = name.rpartition(".")
        names = [apply_renamings(n, self._renamings) for part in parts for n in part.matrix.names]
        target = self.targets.get(owner)
        if target is None:
            dense = Operation(lambda tensors: [self._dense(name, parts, tensors)])
            return NamedConverter(names, [name], [dense, Cast()], force_cpu=True)
        ours = [n for n in quantized_names(parameter) if n in target.module._parameters]
        order = parts[0].matrix.order
        made = [f"{owner}.{n}" for n in (*ours, *(["order"] if order is not None else []))]

        def read(tensors: list[Tensor]) -> list[Tensor]:
            try:
                weight = self._weight(name, target, parameter, parts, tensors)
            except ValueError as error:  # transformers would only mention it in its report
                self._errors.append(error)
                return [torch.zeros_like(self.model.get_parameter(n), device="cpu") for n in made]
            return [tensor for tensor in (*weight, order) if tensor is not None]

        return NamedConverter(names, made, [Operation(read)], force_cpu=True)

    def _weight(
        self, name: str, target: Target, parameter: str, parts: list[_Part], tensors: list[Tensor]
    ) -> QuantizedWeight:
        errors, rest = ErrorSums(), iter(tensors)
        weights = [part.matrix.read([next(rest) for _ in part.matrix.names], errors) for part in parts]
        made: list[Any] = [
            None if any(t is None for t in each) else self._joined(name, parts, [*each])
            for each in zip(*weights, strict=True)
        ]
        if target.kind == "experts":
            made = [None if t is None else target.rows_first(t).contiguous() for t in made]
        packed, scales, biases = made
        weight = QuantizedWeight(packed, scales, biases, target.formats[parameter])
        add_stored(self.report, target, parameter, weight.format, errors.relative)
        return weight

    def _dense(self, name: str, parts: list[_Part], tensors: list[Tensor]) -> Tensor:
        """Of what a quantised layer has no room for."""
        rest, values = iter(tensors), []
        for _, _, matrix in parts:
            dense = matrix.dense([next(rest) for _ in matrix.names])
            values.append(dense if matrix.order is None else dense[:, matrix.order.argsort()])
        return self._joined(name, parts, values)

    def _joined(self, name: str, parts: list[_Part], tensors: list[Tensor]) -> Tensor:
        """What transformers makes of the matrices, or of something else that has their rows."""
        if parts[0].pattern is None:
            stacked = tensors[0].dim() == 3 and self._is_turned(name)
            return tensors[0].mT if stacked else tensors[0]
        converter = copy.deepcopy(self._of[parts[0].pattern])
        for part, tensor in zip(parts, tensors, strict=True):
            assert part.pattern is not None
            converter.add_tensor(name, part.key, part.pattern, tensor)
        made = converter.convert(name, model=self.model, config=self.model.config)
        if {*made} != {name}:
            _CHECK.fail(name, "a parameter made of whole matrices", f"{sorted(made)} made of {parts[0].key}")
        return made[name][0] if isinstance(made[name], list) else made[name]

    def forget_absent(self) -> None:
        """The model was cut: makes only the parameters that it still has."""
        present = self.model.state_dict()
        self._parts = defaultdict(list, {
            name: parts for name, parts in self._parts.items()
            if name in present or name.rpartition(".")[0] in self.targets
        })  # fmt: skip

    def fill_dropped(self, loaded: Callable[[str], bool]) -> None:
        """Other libraries drop no parameters.

        Raises: ValueError for what could not be read.
        """
        if self._errors:
            raise self._errors[0]


def _check_transforms(stored: Mapping[str, Any]) -> None:
    """Raises: ValueError for rotations of compressed-tensors that are not in the weights already."""
    groups = (stored.get("transform_config") or {}).get("config_groups") or {}
    places = {apply["location"] for group in groups.values() for apply in group.get("apply") or ()}
    if at_run_time := sorted(places - {"weight_input", "weight_output"}):
        expected = "of weights alone in the quantization_config"
        _CHECK.fail("transform_config", expected, " and ".join(at_run_time))


def _is_turned(experts: Any) -> bool:
    """Whether experts are stacked as [experts, columns, rows]; those without the interface have a gate."""
    if (known := getattr(experts, "is_transposed", None)) is not None:
        return bool(known)
    first = getattr(experts, "gate_up_proj", None)
    return first is not None and bool(first.shape[1] == experts.down_proj.shape[2])
