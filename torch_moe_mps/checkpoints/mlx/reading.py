"""Reads checkpoints that MLX wrote; packed codes and scales have the same layout as ours.

The names in the files tell which weights are quantised, and the config tells how.
"""

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..._text import first_line
from ...models.basics.interface import is_transposed
from ...ops._checks import Check
from ...quantization import Format
from ..absent import beside_text
from ..layouts.checking import DENSE, check_tensor, may_lack
from ..layouts.converters import NamedConverter
from ..layouts.files import checkpoint_files, tensors_in
from ..layouts.streaming import StreamingLayout
from ..quantize.reasons import Reasons
from ..quantize.target import Target, quantizable
from ..quantize.tied import add_tied, tied_layers
from .names import MlxNames, canonical
from .rows import PARTS, RowConverters

_CHECK = Check("load")
# The tensors of a quantised matrix have these dtypes; the scales of formats without biases are uint8.
_PACKED, _FLOATS, _EXPONENTS = ("U32",), ("F16", "BF16", "F32"), ("U8",)
_CODES = {"U32": torch.uint32, "U8": torch.uint8}


class TensorsOfFiles:
    """Names, shapes and formats of the tensors in a checkpoint's files.

    Args:
        quantization: the quantisation in the config: a format, and {module: format, or whether it has one};
            {} for a dense checkpoint.

    Attributes:
        tensors, dtypes: on the meta device, and what safetensors calls their dtypes.
        quantized: names of the tensors for which `format` found a format.
    """

    def __init__(self, files: Sequence[str], quantization: Mapping[str, Any]):
        self.tensors: dict[str, Tensor] = {}
        self.dtypes: dict[str, str] = {}
        self.quantized: set[str] = set()
        self._quantization = quantization
        for _, name, dtype, shape in tensors_in(files):
            codes = _CODES.get(dtype, torch.float32)
            self.tensors[name] = torch.empty(shape, dtype=codes, device="meta")
            self.dtypes[name] = dtype
        self._keys = {canonical(name): name for name in self.tensors}

    def key(self, name: str) -> str | None:
        """Name of a tensor in the files, with or without the prefixes that `canonical` drops."""
        return name if name in self.tensors else self._keys.get(canonical(name))

    def format(self, module: str, columns: int) -> Format | None:
        """Format of a module, or None if it is dense.

        Raises: ValueError for tensors that do not match the format.
        """
        key = self.key(f"{module}.scales")
        weight = self.key(f"{module}.weight")
        if key is None and self.dtypes.get(weight or "", "F32") in _FLOATS:
            return None
        module = (key or weight or "").rpartition(".")[0]
        if self.key(f"{module}.global_scale") is not None:
            _CHECK.fail(module, "in a format of MLX without a global scale", "one with it")
        format = self._declared(module)
        if format is None:
            _CHECK.fail(module, "dense, as in the config", "one with scales")
        self.quantized.update(self._checked(module, format, columns))
        return format

    def _checked(self, module: str, format: Format, columns: int) -> list[str]:
        """Names of a module's tensors: codes, scales and, if the format has them, biases.

        Raises: ValueError for tensors that are not as the format has them.
        """
        parts = [f"{module}.{part}" for part in (PARTS if format.has_zeros else PARTS[:2])]
        for name in parts:
            if name not in self.tensors:
                _CHECK.fail(name, "in the checkpoint", "no such tensor")
        rows = [tuple(self.tensors[name].shape[:-1]) for name in parts]
        if len({*rows}) > 1:
            _CHECK.fail(" and ".join(parts), "of as many rows", " and ".join(map(str, rows)))
        scales = _FLOATS if format.has_zeros else _EXPONENTS
        self._check(parts[0], _PACKED, (*rows[0], columns * format.bits // 32))
        for name in parts[1:]:
            self._check(name, scales, (*rows[0], columns // format.group_size))
        if format.has_zeros and self.dtypes[parts[1]] != self.dtypes[parts[2]]:
            _CHECK.fail(parts[2], f"of {self.dtypes[parts[1]]}, as {parts[1]}", self.dtypes[parts[2]])
        if not format.has_zeros and f"{module}.biases" in self.tensors:
            _CHECK.fail(f"{module}.biases", f"absent in {format}", "a tensor")
        return parts

    def _check(self, name: str, dtypes: Sequence[str], shape: tuple[int, ...]) -> None:
        check_tensor(name, (self.dtypes[name], tuple(self.tensors[name].shape)), dtypes, [shape])

    def _declared(self, module: str) -> Format | None:
        """The format that the config gives a module; None if it is dense."""
        entry = self._quantization.get(module, bool(self._quantization))
        if not entry:
            return None
        how = self._quantization if entry is True else entry
        try:
            return Format(how.get("bits"), how.get("group_size"), how.get("mode") or "affine")
        except (AttributeError, TypeError, ValueError) as error:
            return _CHECK.fail(f"the quantization of {module}", "a format of MLX", first_line(error))


class MlxLayout(StreamingLayout):
    """Layout of a checkpoint of MLX.

    Args:
        quantization: as for TensorsOfFiles.

    Attributes:
        dropped: parameters that mlx-lm drops; they are zero.

    Raises: ValueError for tensors that do not fit the model.
    """

    has_other_names = True

    def __init__(self, model: PreTrainedModel, files: Sequence[str], quantization: Mapping[str, Any]):
        super().__init__(model)
        self.names = MlxNames(model)
        self.stored = TensorsOfFiles(files, quantization)
        self.every = quantizable(model)
        self._dense: dict[str, list[Format | None]] = {}  # quantised in MLX and dense here
        self._halved: set[str] = set()
        state = model.state_dict()
        self.dropped = [name for name in state if self.names.is_dropped(name)]
        if self.dropped:
            ignored = [*(model._keys_to_ignore_on_load_missing or ()), *map(re.escape, self.dropped)]
            model._keys_to_ignore_on_load_missing = ignored
        self.beside = beside_text(model)
        self.absent = [part for part in self.beside if not self._has_some(part, state)]
        experts = [target for target in self.every.values() if target.kind == "experts"]
        for target in experts:
            self._experts(target)
        inside = tuple(f"{target.name}." for target in experts)
        why_dense = Reasons(model).needs
        for name, tensor in state.items():
            if name.endswith(".weight") and tensor.dim() > 1 and not name.startswith(inside):
                self._layer(name, tensor.shape, why_dense)
        add_tied(tied_layers(model), self.every, self.targets)

    def _has_some(self, part: str, state: dict[str, Tensor]) -> bool:
        """True if the checkpoint has a tensor of this part of the model."""
        inside = (name for name in state if name.startswith(f"{part}."))
        return any(self.stored.key(theirs) for name in inside for theirs in self.names.of(name))

    def _experts(self, target: Target) -> None:
        """Makes an experts module a target; one projection of it alone is dequantised.

        Raises: ValueError for mixed formats.
        """
        name, module = target.name, target.module
        for projection, modules in self.names.of_experts(name, module).items():
            columns = getattr(module, projection).shape[-2 if is_transposed(module) else -1]
            formats = [self.stored.format(other, columns) for other in modules]
            if len(each := dict(zip(formats, modules, strict=True))) > 1:
                got = " and ".join("none" if item is None else str(item) for item in each)
                _CHECK.fail(" and ".join(each.values()), "in one format", got)
            if formats[0] is not None:
                target.formats[projection] = formats[0]
                self._dense[f"{name}.{projection}"] = formats
        if {*target.formats} == {*target.parameters}:
            self.targets[name] = target
            for projection in target.formats:
                del self._dense[f"{name}.{projection}"]
        else:
            target.formats = {}

    def _layer(self, name: str, shape: torch.Size, why_dense: Callable[[str, nn.Module], str | None]) -> None:
        """Makes a quantised layer a target, or notes its formats if it must be dense here."""
        modules = [theirs.removesuffix(".weight") for theirs in self.names.of(name)]
        attention = modules[0].removesuffix("kv_b_proj")
        if name.endswith("kv_b_proj.weight") and self.stored.key(f"{attention}embed_q.weight"):
            nope = self.model.config.get_text_config().qk_nope_head_dim
            halves = {f"{attention}embed_q": nope, f"{attention}unembed_out": shape[-1]}
            self._dense[name] = [self.stored.format(half, columns) for half, columns in halves.items()]
            self._halved.add(name)
            return
        formats = [self.stored.format(module, shape[-1]) for module in modules]
        if formats[0] is None:
            return
        owner = name.removesuffix(".weight")
        target = self.every.get(owner)
        if target is not None and len({*formats}) == 1 and why_dense(owner, target.module) is None:
            target.formats["weight"] = formats[0]
            self.targets[owner] = target
        else:
            self._dense[name] = formats

    def drop_float8(self, wanted: Mapping[str, Target]) -> None:
        before = dict(self.targets)
        super().drop_float8(wanted)
        for name in before.keys() - self.targets.keys():
            for parameter, format in before[name].formats.items():
                self._dense[f"{name}.{parameter}"] = [format] * len(self._modules(before[name], parameter))

    def _modules(self, target: Target, parameter: str) -> Sequence[str]:
        """MLX's names of the modules that a parameter is made of."""
        if target.kind == "experts":
            return self.names.of_experts(target.name, target.module)[parameter]
        return self.names.of(f"{target.name}.{parameter}")

    def conversions(self, others: list) -> list[NamedConverter]:
        """Converters of all tensors, once targets have quantised weights.

        Raises: ValueError for a parameter without a tensor, or with tensors of another shape.
        """
        result: list[NamedConverter] = []
        for row in RowConverters(self.names, self._halved.__contains__, self._dense).of(
            self.model.state_dict()
        ):
            keys = [self.stored.key(name) for name in row.source_patterns]
            if not any(keys):
                continue
            for name, key in zip(row.source_patterns, keys, strict=True):
                if key is None:
                    _CHECK.fail(name, "in the checkpoint of MLX", "no such tensor")
            result.append(NamedConverter([*filter(None, keys)], row.target_patterns, row.operations))
            self._check_shapes(result[-1])
            if self.wanted.keys() & {*row.target_patterns}:
                result[-1].operations.append(self.operation)
        self._check_complete(result)
        return result

    def forget_absent(self, model: nn.Module) -> None:
        super().forget_absent(model)
        self.dropped = [name for name in self.dropped if name in model.state_dict()]

    def finish(self, loaded: Callable[[str], bool]) -> None:
        """Installs quantised weights, and fills the parameters that mlx-lm drops."""
        super().finish(loaded)
        for name in self.dropped:
            owner, _, last = name.rpartition(".")
            if loaded(owner):
                zeros = torch.zeros_like(self.model.get_parameter(name), device="cpu")
                self.model.get_submodule(owner)._parameters[last] = nn.Parameter(zeros, requires_grad=False)

    def _check_shapes(self, row: NamedConverter) -> None:
        """Checks shapes by running the converter on the meta device."""
        sources = row.source_patterns
        for source in {*sources} - self.stored.quantized:
            if self.stored.dtypes[source] not in DENSE:
                _CHECK.fail(source, f"of {' or '.join(DENSE)}", self.stored.dtypes[source])
        try:
            results = copy.deepcopy(row).of(self.stored.tensors, self.model)
        except RuntimeError:
            shapes = [tuple(self.stored.tensors[source].shape) for source in sources]
            _CHECK.fail(row.target_patterns[0], "made of tensors that fit", f"{shapes} of {sources}")
        for name, tensor in results.items():
            shape, of = tuple(self.model.get_parameter_or_buffer(name).shape), " and ".join(sources)
            if tensor.shape != shape:
                _CHECK.fail(name, f"of shape {shape}", f"{tuple(tensor.shape)} made of {of}")

    def _check_complete(self, rows: Sequence[NamedConverter]) -> None:
        """Raises: ValueError with the name of a missing parameter, of the language model if possible."""
        ignored = [re.compile(name) for name in self.model._keys_to_ignore_on_load_unexpected or ()]
        unknown = self.stored.tensors.keys() - {source for row in rows for source in row.source_patterns}
        unknown = {name for name in unknown if not any(pattern.search(name) for pattern in ignored)}
        known = {name for row in rows for name in row.target_patterns}
        known.update(self.dropped, self.model.all_tied_weights_keys or (), dict(self.model.named_buffers()))
        optional = may_lack(self.model)
        beside = tuple(f"{part}." for part in self.beside)
        names = sorted(self.model.state_dict(), key=lambda name: name.startswith(beside))
        missing = [name for name in names if name not in known and not optional(name)]
        missing += self.absent if unknown else []
        if missing:
            got = f"no tensor like it, but {sorted(unknown)[:3]}"
            _CHECK.fail(missing[0], "in the checkpoint of MLX", got)


def written_by_mlx(name: str) -> bool:
    """True if the metadata of a folder's files names MLX."""
    try:
        first = checkpoint_files(name)[0] if Path(name).is_dir() else None
    except ValueError:  # loading says what is wrong with them
        return False
    if first is None:
        return False
    with safe_open(first, framework="pt") as tensors:
        return (tensors.metadata() or {}).get("format") == "mlx"
