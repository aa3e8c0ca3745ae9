"""Writes models in MLX's layout, by the reverse of the converters that read it."""

import json
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ...models.modules.linears import formats_in
from ...quantization import Format
from ..absent import beside_text
from ..layouts.files import Shards
from ..quantize.weights import quantized_names
from .names import MlxNames, check_architecture, type_of
from .older_keys import with_older_keys
from .rows import RowConverters


def save_mlx(
    model: PreTrainedModel,
    folder: Path | Shards,
    config: Mapping[str, Any],
    parts: Iterable[Mapping[str, Tensor]] | None = None,
) -> None:
    """Write weights, index and config.json.

    Args:
        model: quantised by this package, or dense.
        folder: an empty one, or its files.
        config: the original config.json, because mlx-lm reads keys that transformers 5 no longer writes.
        parts: yields the model's tensors in groups; by default the ones in memory.

    Raises: ValueError for an architecture whose layout in MLX is not known, and for a folder with files.
    """
    check_architecture(model.config)
    names, shards = MlxNames(model), folder if isinstance(folder, Shards) else Shards(folder, "mlx")
    rows = RowConverters(names, names.is_halved)
    if dropped := [*filter(names.is_dropped, model.state_dict())]:
        what = f"{dropped[0]} and {len(dropped) - 1} others like it"
        warnings.warn(f"torch_moe_mps: mlx-lm drops {what}: they are not written", stacklevel=2)
    for tensors in [model.state_dict()] if parts is None else parts:
        written = _written(model, tensors)
        for row in rows.of(written):
            for name, tensor in row.reverse_transform().of(written, model).items():
                shards.add(name, tensor)
    shards.finish()
    formats = {
        source.removesuffix(".scales"): _format_of(model, row.target_patterns[0])
        for row in rows.of(_written(model, model.state_dict()))
        for source in row.source_patterns
        if source.endswith(".scales")
    }
    text = json.dumps(with_older_keys(_config_of(model, names, config, formats)), indent=2, sort_keys=True)
    (shards.folder / "config.json").write_text(text + "\n")


def _config_of(
    model: PreTrainedModel, names: MlxNames, config: Mapping[str, Any], formats: Mapping[str, Format]
) -> dict[str, Any]:
    """The config that mlx-lm reads, with the formats of quantised weights."""
    config = {k: v for k, v in config.items() if k not in ("quantization", "quantization_config")}
    if formats:
        quantization = _quantization(formats)
        config |= {"quantization": quantization, "quantization_config": quantization}
    if names.architecture.part_of and "text_config" not in config:
        about = ("architectures", "quantization", "quantization_config")
        whole = {key: config[key] for key in about if key in config}
        config = whole | {"model_type": names.architecture.part_of, "text_config": config}
    if names.architecture.without and "text_config" in config:
        left_out = ("architectures", "text_config", "vision_config")
        others = {key: value for key, value in config.items() if key not in left_out}
        config = {**others, **config["text_config"], "model_type": type_of(model.config)}
    return config


def sizes_in_mlx(model: PreTrainedModel) -> dict[Tensor, int]:
    """{tensor of a model: its bytes in MLX's layout}, 0 if it is not written; weights may be on meta.

    What several tensors become together is the first one's.
    """
    names, state = MlxNames(model), model.state_dict(keep_vars=True)
    sizes = {tensor: 0 for name, tensor in state.items() if name not in _tied(model)}
    for row in RowConverters(names, names.is_halved).of(written := _written(model, state)):
        results = row.reverse_transform().of(written, model)
        sizes[state[row.target_patterns[0]]] += sum(tensor.nbytes for tensor in results.values())
    return sizes


def _written(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that are written, by name: neither tied ones nor parts beside the language model."""
    tied, beside = _tied(model), tuple(f"{name}." for name in beside_text(model))
    return {n: tensor for n, tensor in tensors.items() if n not in tied and not n.startswith(beside)}


def _tied(model: PreTrainedModel) -> Mapping[str, str]:
    return model.all_tied_weights_keys or {}


def _format_of(model: PreTrainedModel, name: str) -> Format:
    """The format of the quantised matrix that has a tensor of this name."""
    owner, _, last = name.rpartition(".")
    formats = formats_in(model.get_submodule(owner))
    return next(format for parameter, format in formats.items() if last in quantized_names(parameter))


def _quantization(formats: Mapping[str, Format]) -> dict[str, Any]:
    """The most common format, and the modules that have another."""
    usual = Counter(formats.values()).most_common(1)[0][0]
    others = {name: format.to_dict() for name, format in formats.items() if format != usual}
    return {**usual.to_dict(), **others}
