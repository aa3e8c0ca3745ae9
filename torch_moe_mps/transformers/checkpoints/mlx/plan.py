"""Reads checkpoints that MLX wrote; packed words and scales have the same layout as ours.

A plan lists, for each parameter of the model, the tensors of the checkpoint that it is made of. It is derived
from the names and shapes in the files and in the model; the config only says that MLX wrote the checkpoint.
mlx-lm uses the names of an architecture's original checkpoints, which transformers knows how to rename. Only
its experts have names of their own, with one tensor for each of gate, up and down.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.core_model_loading import Concatenate, WeightConverter, WeightRenaming, apply_renamings

from ....ops._checks import Check
from ....quantization import Format
from ...experts import activation_of
from ...global_scales import global_scale_of
from ...interface import Experts, projections
from ..absent import beside_text
from ..targets import Target, kinds_of, reasons_to_stay_dense, tied_layers
from ..weights import quantized_names
from .names import by_module, variants, with_base
from .tensors import dense_rows, joined, kv_b, rows

_CHECK = Check("load")
_EXPERTS = re.compile(r"^(.*)\.(gate_proj|up_proj|down_proj|fc1|fc2)$")
_FIRST = {"gate_proj": 0, "up_proj": 1, "fc1": 1}
_PARTS = ("weight", "scales", "biases")
# Model types whose norms add 1 to the weight in transformers; mlx-lm stores the sum.
ONE_MORE = {"qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text"}
# Model types for which mlx-lm drops the correction of the router's scores.
DROP_BIAS = {"ernie4_5_moe"}
NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "model.norm",
    "q_norm",
    "k_norm",
    "language_model.norm",
)


class Entry(NamedTuple):
    """The tensors that a parameter is made of, and the function that makes it."""

    sources: tuple[str, ...]
    make: Callable[..., Tensor]


class Plan:
    """How the parameters of a model are made of the tensors of a checkpoint.

    Attributes:
        targets: {name: target} of what is quantised.
        entries: {name of a parameter: entry}.
        dequantized: the modules that are quantised in the checkpoint but must be dense in the model.
        dropped: parameters that mlx-lm drops; they are filled with zeros.
        global_scales: the matrices of experts that also have a scale for each expert.
        absent: parts of a multimodal model that the checkpoint lacks.
        unknown: tensors that fit no parameter.

    Raises: ValueError for tensors that do not fit the model.
    """

    def __init__(self, model: nn.Module, files: Sequence[str], conversions: Sequence[object]):
        self.shapes, self.dtypes = _headers(files)
        self.renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
        self.model = model
        self.kinds = kinds_of(model)
        state = model.state_dict()
        self.parameters = {name: tensor.shape for name, tensor in state.items()}
        self.types_of = {name: tensor.dtype for name, tensor in state.items()}
        self.types = {getattr(getattr(m, "config", None), "model_type", None) for m in model.modules()}
        self.why_dense = reasons_to_stay_dense(model)
        self.targets: dict[str, Target] = {}
        self.entries: dict[str, Entry] = {}
        self.dequantized: list[str] = []
        self.unknown: list[str] = []
        self.dropped: list[str] = []
        self.global_scales: list[str] = []
        self.absent: list[str] = []
        for module, parts in by_module(self.shapes).items():
            if not self._layer(module, parts):
                self.unknown += [f"{module}.{part}".lstrip(".") for part in parts]
        self._experts()
        self._concatenated([c for c in conversions if isinstance(c, WeightConverter)])
        self._latent_attention()
        self._tied()
        beside = beside_text(model)
        if not self.unknown:
            self.absent = [p for p in beside if not any(n.startswith(f"{p}.") for n in self.entries)]
        self._check_complete(tuple(f"{part}." for part in beside))

    def forget_absent(self, model: nn.Module) -> None:
        """The model was cut: makes only the parameters that it still has."""
        names = model.state_dict().keys()
        self.entries = {name: entry for name, entry in self.entries.items() if name in names}
        self.dropped = [name for name in self.dropped if name in names]

    def _check_complete(self, beside: tuple[str, ...]) -> None:
        """Raises: ValueError with the name of a missing parameter, of the language model if possible."""
        packed = {f"{t.name}.{parameter}" for t in self.targets.values() for parameter in t.formats}
        tied = set(getattr(self.model, "all_tied_weights_keys", None) or {})
        ignored = re.compile("|".join(getattr(self.model, "_keys_to_ignore_on_load_missing", None) or ["$^"]))
        buffers = {name for name, _ in self.model.named_buffers()}
        for name in sorted(self.parameters, key=lambda name: name.startswith(beside)):
            there = name in self.entries or name in packed or name in tied or name in buffers
            there |= name.startswith(tuple(f"{part}." for part in self.absent))
            if there:
                continue
            if self.types & DROP_BIAS and name.endswith("e_score_correction_bias"):
                self.dropped.append(name)
            elif not ignored.search(name):
                _CHECK.fail(name, "in the checkpoint of MLX", f"no tensor like it, but {self.unknown[:3]}")

    def _tied(self) -> None:
        """Adds the tied layers: the checkpoint has only one of each pair."""
        for pair in tied_layers(self.model).items():
            for name, other in (pair, pair[::-1]):
                if other in self.targets and name not in self.targets and name in self.kinds:
                    kind, module = self.kinds[name]
                    self.targets[name] = Target(name, module, kind, self.targets[other].formats)

    # Layers

    def _layer(self, module: str, parts: list[str]) -> bool:
        """Plans the tensors of one module; False if the model has no such module."""
        quantized = "scales" in parts and "weight" in parts
        wanted = [part for part in parts if not quantized or part not in _PARTS[1:]]
        resolved = {part: self._resolve(f"{module}.{part}".lstrip(".")) for part in wanted}
        names = {part: name for part, name in resolved.items() if name is not None}
        if not names or len(names) < len(wanted):
            return False
        for part, name in names.items():
            source = f"{module}.{part}".lstrip(".")
            if part == "weight" and quantized:
                self._quantized([module], name)
            else:
                self.entries[name] = Entry((source,), self._in_dtype(name, self._cast(name, source)))
        return True

    def _quantized(self, modules: Sequence[str], name: str) -> None:
        """Plans a parameter that has the quantised rows of one or several modules."""
        owner, _, parameter = name.rpartition(".")
        formats = [self._format(module, self.parameters[name][-1]) for module in modules]
        kind, target = self.kinds.get(owner, ("", None))
        usable = target is not None and kind != "experts" and self.why_dense(owner, target) is None
        if target is not None and usable and len(set(formats)) == 1:
            self.targets[owner] = Target(owner, target, kind, {parameter: formats[0]})
            for part, ours in zip(_PARTS, quantized_names(parameter), strict=True):
                sources = tuple(f"{module}.{part}" for module in modules)
                if sources[0] in self.shapes:
                    self.entries[f"{owner}.{ours}"] = Entry(sources, rows)
        else:
            self.dequantized.append(owner)
            shape, dtype = self.parameters[name], self.types_of[name]
            sources = tuple(f"{m}.{p}" for m in modules for p in _PARTS if f"{m}.{p}" in self.shapes)
            self.entries[name] = Entry(sources, lambda *t: dense_rows(formats, t).view(shape).to(dtype))

    def _format(self, module: str, columns: int, experts: bool = False) -> Format:
        """The format, from the shapes: 32 * words = bits * columns, and one scale for each group."""
        row, groups = (self.shapes[f"{module}.{part}"][-1] for part in _PARTS[:2])
        group_size = columns // max(1, groups)
        mode = (
            "affine" if f"{module}.biases" in self.shapes else _MODES.get((group_size, row * 32 // columns))
        )
        if mode is None or (f"{module}.global_scale" in self.shapes and not (experts and mode == "nvfp4")):
            _CHECK.fail(module, "in a format of MLX without a global scale", f"{row} words, {groups} scales")
        try:
            return Format(row * 32 // columns, group_size, mode)
        except ValueError:
            got = f"{row} words and {groups} scales"
            return _CHECK.fail(module, f"in a format of MLX, {columns} columns wide", got)

    def _cast(self, name: str, source: str) -> Callable[[Tensor], Tensor]:
        """The function that makes a parameter of a dense tensor."""
        one_more = bool(self.types & ONE_MORE) and name.removesuffix(".weight").endswith(NORMS)
        if one_more and "linear_attn" not in name:
            return lambda t: t - 1
        return self._reshaped(source, self.parameters[name])

    def _reshaped(self, source: str, shape: torch.Size) -> Callable[[Tensor], Tensor]:
        """The function that gives a tensor its shape in the model: convolutions are transposed."""
        stored = torch.Size(self.shapes[source])
        if shape == stored:
            return lambda t: t
        if len(shape) >= 3 and torch.Size([*stored[:-2], stored[-1], stored[-2]]) == shape:
            return lambda t: t.mT.contiguous()
        if len(shape) >= 3 and torch.Size([stored[0], stored[-1], *stored[1:-1]]) == shape:
            return lambda t: t.movedim(-1, 1).contiguous()
        if shape.numel() == stored.numel() and [d for d in shape if d > 1] == [d for d in stored if d > 1]:
            return lambda t: t.view(shape)
        return _CHECK.fail(source, f"of shape {tuple(shape)}", tuple(stored))

    def _in_dtype(self, name: str, make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Casts dense parameters to the dtype of the model; scales keep the dtype of the checkpoint."""
        dtype = self.types_of[name]
        return lambda *tensors: make(*tensors).to(dtype)

    def _resolve(self, key: str) -> str | None:
        """The parameter for MLX's name of a tensor."""
        for variant in variants(key):
            for name in (variant, apply_renamings(variant, self.renamings)):
                for candidate in with_base(name, getattr(self.model, "base_model_prefix", "")):
                    if candidate in self.parameters:
                        return candidate
        return None

    # Experts

    def _experts(self) -> None:
        layers: dict[str, dict[str, list[str]]] = defaultdict(dict)
        for name in list(self.unknown):
            module, _, part = name.rpartition(".")
            matched = _EXPERTS.match(module)
            if matched and (len(self.shapes[name]) == 3 or part in ("bias", "global_scale")):
                layers[matched[1]].setdefault(matched[2], []).append(part)
        for container, found in layers.items():
            owner = self._experts_module(container)
            if owner is not None:
                self._merge(owner, container, found)

    def _experts_module(self, container: str) -> str | None:
        """The experts of the same layer: the numbers in both names are equal."""
        numbers = re.findall(r"\.(\d+)\.", f"{container}.")
        same = [
            name for name, (kind, _) in self.kinds.items()
            if kind == "experts" and re.findall(r"\.(\d+)\.", f"{name}.") == numbers
        ]  # fmt: skip
        return same[0] if len(same) == 1 else None

    def _merge(self, owner: str, container: str, found: Mapping[str, list[str]]) -> None:
        module = cast(Experts, self.kinds[owner][1])
        first = sorted((name for name in found if name in _FIRST), key=_FIRST.__getitem__)
        second = [name for name in found if name not in _FIRST]
        activation = activation_of(module)
        interleaved = activation.interleaved if activation is not None else not module.is_concatenated
        for projection, names in zip(projections(module), (first, second), strict=True):
            tensors = [f"{container}.{name}" for name in names]
            for part in found[names[0]]:
                sources = tuple(f"{tensor}.{part}" for tensor in tensors)
                for source in sources:
                    if source not in self.unknown:
                        _CHECK.fail(source, "in the checkpoint of MLX", "no such tensor")
                    self.unknown.remove(source)
                self._matrices(owner, module, projection, part, sources, interleaved)

    def _matrices(
        self,
        owner: str,
        module: Experts,
        projection: str,
        part: str,
        sources: tuple[str, ...],
        interleaved: bool,
    ) -> None:
        base = sources[0].rpartition(".")[0]
        quantized = f"{base}.scales" in self.shapes
        if part == "global_scale":
            self.global_scales.append(f"{owner}.{projection}")
            self.entries[f"{owner}.{global_scale_of(projection)}"] = Entry(
                sources, lambda *t: torch.stack(t, 1)
            )
            return
        if part == "bias":
            name, transposed = f"{owner}.{projection}_bias", False
        elif quantized:
            shape = self.parameters[f"{owner}.{projection}"]
            format = self._format(base, shape[-2] if module.is_transposed else shape[-1], experts=True)
            target = self.targets.setdefault(owner, Target(owner, module, "experts", {}))
            target.formats[projection] = format
            name = f"{owner}.{quantized_names(projection)[_PARTS.index(part)]}"
            transposed = False
        else:
            name, transposed = f"{owner}.{projection}", module.is_transposed
        if part == "weight" and len({tuple(self.shapes[s]) for s in sources}) > 1:
            _CHECK.fail(name, "of gate and up rows in one format", [self.shapes[s] for s in sources])
        make: Callable[..., Tensor] = lambda *t: joined(t, interleaved, transposed)  # noqa: E731
        make = self._in_dtype(name, make) if name in self.parameters else make
        self.entries[name] = Entry(sources, make)

    # Parameters that transformers concatenates

    def _concatenated(self, converters: Sequence[WeightConverter]) -> None:
        """Plans parameters that transformers concatenates, such as the convolutions of q, k and v."""
        for converter in converters:
            if [type(op) for op in converter.operations] != [Concatenate]:
                continue
            found: dict[str, dict[str, str]] = defaultdict(dict)
            for source in self.unknown:
                target, pattern = self._part_of(source, converter)
                if target in self.parameters and pattern is not None:
                    found[target][pattern] = source
            for target, parts in found.items():
                if len(parts) == len(converter.source_patterns):
                    sources = [parts[pattern] for pattern in converter.source_patterns]
                    self._cat(target, sources, converter.operations[0].dim)

    def _part_of(self, source: str, converter: WeightConverter) -> tuple[str, str | None]:
        for variant in variants(source):
            target, pattern = converter.rename_source_key(apply_renamings(variant, self.renamings))
            if pattern is not None:
                return target, pattern
        return source, None

    def _cat(self, name: str, sources: list[str], dim: int) -> None:
        modules = [source.rpartition(".")[0] for source in sources]
        quantized = [f"{module}.scales" in self.shapes for module in modules]
        if any(quantized) and not (all(quantized) and dim == 0):
            return
        for module in modules:
            self.unknown = [source for source in self.unknown if source.rpartition(".")[0] != module]
        if any(quantized):
            self._quantized(modules, name)
            return
        shape = list(self.parameters[name])
        shape[dim] //= len(sources)
        parts = [self._reshaped(source, torch.Size(shape)) for source in sources]
        make = lambda *t: torch.cat([part(x) for part, x in zip(parts, t, strict=True)], dim)  # noqa: E731
        self.entries[name] = Entry(tuple(sources), self._in_dtype(name, make))

    # Latent attention

    def _latent_attention(self) -> None:
        """Plans kv_b_proj, which is made of two halves. One is transposed, so both are dequantised."""
        for first in [n for n in self.unknown if n.endswith(".embed_q.weight")]:
            attention = first.removesuffix(".embed_q.weight")
            name = self._resolve(f"{attention}.kv_b_proj.weight")
            if name is None:
                continue
            halves = [f"{attention}.{half}" for half in ("embed_q", "unembed_out")]
            sources = tuple(f"{h}.{p}" for h in halves for p in _PARTS if f"{h}.{p}" in self.shapes)
            for source in sources:
                self.unknown.remove(source)
            heads, rank = self.shapes[first][0], self.parameters[name][-1]
            nope = self.parameters[name][0] // heads - self.shapes[f"{halves[1]}.weight"][1]
            formats = [
                self._format(half, columns) if f"{half}.scales" in self.shapes else None
                for half, columns in zip(halves, (nope, rank), strict=True)
            ]
            if any(formats):
                self.dequantized.append(name.removesuffix(".weight"))
            dtype = self.types_of[name]
            self.entries[name] = Entry(sources, lambda *t, f=formats, d=dtype: kv_b(f, t).to(d))


_MODES = {(32, 4): "mxfp4", (32, 8): "mxfp8", (16, 4): "nvfp4"}


def written_by_mlx(name: str) -> bool:
    """Whether the metadata of the files in a folder says that MLX wrote them."""
    for file in sorted(Path(name).glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            return (tensors.metadata() or {}).get("format") == "mlx"
    return False


def _headers(files: Sequence[str]) -> tuple[dict[str, list[int]], dict[str, str]]:
    shapes, dtypes = {}, {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                part = tensors.get_slice(name)
                shapes[name], dtypes[name] = part.get_shape(), part.get_dtype()
    return shapes, dtypes


__all__ = ["Plan", "written_by_mlx"]
