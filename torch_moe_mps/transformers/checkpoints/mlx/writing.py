"""Writes models in MLX's layout; packed words, scales and biases are the same as ours.

Names are those of an architecture's original checkpoints, as transformers writes them. Only the experts have
names of mlx-lm, with one tensor for each of gate, up and down. plan.py reads the same layout.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ....quantization import TENSORS, Format, QuantizedWeight, dequantize
from ...experts import activation_of
from ...global_scales import global_scale_of
from ...interface import Experts, experts_of, formats_of, is_quantized, projections
from ...linears import QuantizedLayer
from ..absent import beside_text
from ..files import Shards
from ..weights import stored
from .names import NUMBERED
from .plan import DROP_BIAS, NORMS, ONE_MORE

_LAYER = re.compile(r"^(.*\.\d+)\.")
_PARTS = ("weight", "scales", "biases")
# {model type: where mlx-lm has the experts of a layer}.
EXPERTS = {
    "afmoe": "mlp.experts",
    "bailing_hybrid": "mlp.switch_mlp",
    "deepseek_v2": "mlp.switch_mlp",
    "deepseek_v3": "mlp.switch_mlp",
    "deepseek_v32": "mlp.switch_mlp",
    "dots1": "mlp.experts",
    "ernie4_5_moe": "mlp.switch_mlp",
    "exaone_moe": "mlp.switch_mlp",
    "gemma4_text": "experts.switch_glu",
    "glm4_moe": "mlp.switch_mlp",
    "glm4_moe_lite": "mlp.switch_mlp",
    "glm_moe_dsa": "mlp.switch_mlp",
    "gpt_oss": "mlp.experts",
    "granitemoe": "block_sparse_moe.switch_mlp",
    "granitemoehybrid": "block_sparse_moe.switch_mlp",
    "jamba": "feed_forward.switch_mlp",
    "kimi_linear": "mlp.switch_mlp",
    "laguna": "mlp.switch_mlp",
    "lfm2_moe": "feed_forward.switch_mlp",
    "mellum": "mlp.switch_mlp",
    "mimo_v2_flash": "mlp.switch_mlp",
    "minimax_m2": "block_sparse_moe.switch_mlp",
    "minimax_m3_vl_text": "block_sparse_moe.switch_mlp",
    "mistral4": "mlp.switch_mlp",
    "mixtral": "block_sparse_moe.switch_mlp",
    "nemotron_h": "mixer.switch_mlp",
    "olmoe": "mlp.switch_mlp",
    "phimoe": "block_sparse_moe.switch_mlp",
    "qwen2_moe": "mlp.switch_mlp",
    "qwen3_5_moe_text": "mlp.switch_mlp",
    "qwen3_moe": "mlp.switch_mlp",
    "qwen3_next": "mlp.switch_mlp",
    "qwen3_vl_moe_text": "mlp.switch_mlp",
    "solar_open": "mlp.switch_mlp",
}
# Models without experts that mlx-lm computes as transformers does; the parameters keep their names.
DENSE = frozenset(
    {
        "cohere", "ernie4_5", "gemma2", "gemma3_text", "glm4", "granite", "hunyuan_v1_dense", "llama",
        "mistral", "nemotron", "olmo2", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3", "stablelm",
    }
)  # fmt: skip
# Model types for which mlx-lm splits kv_b_proj.
_HALVES = (
    "bailing_hybrid",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "kimi_linear",
    "mistral4",
)
# Multimodal model types of which mlx-lm has only the language model.
_COMPOSITES = ("gemma4", "kimi_k25", "minimax_m3_vl", "mistral3", "qwen3_5_moe", "qwen3_vl_moe")
# Text-only model types that mlx-lm loads as the language part of a multimodal type.
_PARTS_OF = {"qwen3_5_moe_text": "qwen3_5_moe"}
# {model type: {part of an original name: what mlx-lm writes instead}}.
_RENAMED = {
    "exaone_moe": {".mlp.e_score_correction_bias": ".mlp.gate.e_score_correction_bias"},
    "kimi_linear": {
        ".block_sparse_moe.": ".mlp.",
        ".mlp.gate.e_score_correction_bias": ".mlp.e_score_correction_bias",
        "_conv1d.": "_conv.conv.",
    },
    "laguna": {
        ".mlp.experts.e_score_correction_bias": ".mlp.gate.e_score_correction_bias",
        ".mlp.gate.weight": ".mlp.gate.proj.weight",
    },
    "lfm2_moe": {
        f".feed_forward.{old}.weight": f".feed_forward.{new}.weight" for new, old in NUMBERED.items()
    },
}
# The same, only in layers of linear attention.
_RENAMED_LINEAR = {"bailing_hybrid": {".attention.dense.": ".attention.o_proj."}}
_SHARD = 2 << 30  # bytes of a file

# Names and tensors, each made when its turn comes.
Tensors = Iterator[tuple[str, Tensor]]


def check_writable(config: Any) -> None:
    """Raises: ValueError for an architecture whose layout in MLX is not known."""
    whole, text = type(config).model_type, _type_of(config)
    known = {*EXPERTS, *DENSE}
    if text not in known or whole not in (text, *_COMPOSITES):
        names = ", ".join(sorted({*known, *_COMPOSITES}))
        raise ValueError(f"moe_mps::save_mlx: model_type must be one of {names}, got {whole}")


def _type_of(config: Any) -> str:
    """The model type of the language model, from the class: an instance may have that of its checkpoint."""
    return type(config.get_text_config()).model_type


def save_mlx(
    model: PreTrainedModel,
    folder: Path,
    config: Mapping[str, Any],
    parts: Iterable[Mapping[str, Tensor]] | None = None,
) -> None:
    """Write weights, index and config.json.

    Args:
        model: quantised by this package, or dense.
        folder: which exists.
        config: the original config.json, because mlx-lm reads keys that transformers 5 no longer writes.
        parts: the tensors of the model, some at a time; those that it has unless given.

    Raises: ValueError for an architecture whose layout in MLX is not known.
    """
    check_writable(model.config)
    writer, shards = _Writer(model), Shards(folder, "mlx", _SHARD)
    for tensors in [model.state_dict()] if parts is None else parts:
        for name, tensor in writer.tensors(tensors):
            shards.add(name, tensor)
    shards.finish()
    config = {k: v for k, v in config.items() if k not in ("quantization", "quantization_config")}
    config["model_type"] = _PARTS_OF.get(type(model.config).model_type, config["model_type"])
    if writer.formats:
        quantization = _quantization(writer.formats)
        for name in writer.global_scales:
            quantization[name] = writer.formats[name].to_dict() | {"global_scale": True}
        config |= {"quantization": quantization, "quantization_config": quantization}
    if isinstance(config.get("text_config"), Mapping):
        config["text_config"] = _with_older_keys(config["text_config"])
    (folder / "config.json").write_text(json.dumps(_with_older_keys(config), indent=2, sort_keys=True) + "\n")


def _quantization(formats: Mapping[str, Format]) -> dict[str, Any]:
    """The most common format, and the modules that have another."""
    usual = Counter(formats.values()).most_common(1)[0][0]
    others = {name: format.to_dict() for name, format in formats.items() if format != usual}
    return {**usual.to_dict(), **others}


def _with_older_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Adds rope_theta and rope_scaling, which mlx-lm reads, from the rope_parameters of transformers 5."""
    rope = config.get("rope_parameters")
    if isinstance(rope, Mapping) and "rope_theta" in rope:
        scaling = {k: v for k, v in rope.items() if k not in ("rope_theta", "partial_rotary_factor")}
        scaled = scaling.get("rope_type", "default") != "default"
        older = {"rope_theta": rope["rope_theta"], "rope_scaling": scaling if scaled else None}
        older |= {k: rope[k] for k in ("partial_rotary_factor",) if k in rope}
        return older | config
    return config


class _Writer:
    """The tensors of a model in MLX's layout.

    Attributes:
        formats: {module: format}.
        global_scales: the modules that have them.
    """

    def __init__(self, model: PreTrainedModel):
        self.model, self.type = model, _type_of(model.config)
        self.formats: dict[str, Format] = {}
        self.global_scales: list[str] = []
        self._tied = getattr(model, "all_tied_weights_keys", None) or {}
        self._beside = tuple(f"{name}." for name in beside_text(model))

    def tensors(self, state: Mapping[str, Tensor]) -> Tensors:
        """The tensors made of some of the model's."""
        experts = experts_of(self.model)
        layers = {n: m for n, m in self.model.named_modules() if isinstance(m, QuantizedLayer)}
        for owner, module in experts.items():
            if any(name.startswith(f"{owner}.") for name in state):
                yield from self._experts(owner, module)
        inside = (*(f"{name}." for name in experts), *self._beside)
        for name, tensor in state.items():
            layer, _, part = name.rpartition(".")
            if name in self._tied or (inside and name.startswith(inside)):
                continue
            if layer in layers and part in TENSORS:
                if part == "packed":
                    yield from self._layer(layer, layers[layer])
            else:
                yield from self._dense(name, tensor)

    def _theirs(self, name: str) -> list[str]:
        """mlx-lm's names for a parameter; several if its rows are separate tensors there."""
        reverted = revert_weight_conversion(self.model, {name: torch.empty(12, 12, device="meta")})
        return [self._renamed(theirs, name) for theirs in reverted]

    def _renamed(self, theirs: str, name: str) -> str:
        attention = name.rpartition(".")[0].rpartition(".")[0]
        linear = hasattr(self.model.get_submodule(attention), "conv1d")
        renamed = _RENAMED.get(self.type, {}) | (_RENAMED_LINEAR.get(self.type, {}) if linear else {})
        for old, new in renamed.items():
            theirs = theirs.replace(old, new)
        composite = type(self.model.config).model_type in _COMPOSITES
        if composite:
            theirs = theirs.removeprefix("language_model.").replace("model.blocks.", "model.layers.")
        if composite or self.type in _PARTS_OF:  # the latter is read from the whole or from the part
            return f"language_model.{theirs.replace('model.language_model.', 'model.')}"
        return theirs

    def _quantized(self, module: str, weight: QuantizedWeight) -> Tensors:
        self.formats[module] = weight.format
        for part, tensor in zip(_PARTS, weight, strict=True):
            if tensor is not None:
                yield f"{module}.{part}", _words(tensor)

    # Layers

    def _layer(self, name: str, layer: QuantizedLayer) -> Tensors:
        names = [theirs.removesuffix(".weight") for theirs in self._theirs(f"{name}.weight")]
        if self._is_halved(name):
            yield from self._halves(names[0], (*layer.quantized,), layer.format)
            return
        for row, theirs in enumerate(names):
            yield from self._quantized(
                theirs, layer.quantized.map(partial(_chunk, row=row, count=len(names)))
            )

    def _dense(self, name: str, tensor: Tensor) -> Tensors:
        if self.type in DROP_BIAS and name.endswith("e_score_correction_bias"):
            return
        names = self._theirs(name)
        if self._is_halved(name.removesuffix(".weight")):
            yield from self._halves(names[0].removesuffix(".weight"), (tensor,), None)
            return
        norm = name.removesuffix(".weight").endswith(NORMS) and "linear_attn" not in name
        for theirs, rows in zip(names, tensor.chunk(len(names)) if tensor.dim() else [tensor], strict=True):
            if self.type in ONE_MORE and norm:
                yield theirs, rows + 1
            elif rows.dim() == 3 and rows.shape[1] == 1:  # a convolution
                yield theirs, rows.transpose(1, 2)
            else:
                yield theirs, rows

    def _is_halved(self, name: str) -> bool:
        return self.type in _HALVES and name.endswith("kv_b_proj")

    def _halves(self, name: str, parts: tuple[Tensor | None, ...], format: Format | None) -> Tensors:
        """kv_b_proj [heads * (nope + v), rank] -> embed_q [heads, rank, nope], unembed_out [heads, v, rank].

        embed_q is transposed, and so dequantised. `parts` is the dense weight, or packed, scales and biases.
        """
        config = self.model.config.get_text_config()
        attention = name.removesuffix("kv_b_proj")
        halves = (_split(t, config.num_attention_heads, config.qk_nope_head_dim) for t in parts)
        q, v = zip(*halves, strict=True)
        yield f"{attention}embed_q.weight", _dense(q, format).mT
        if format is None:
            yield f"{attention}unembed_out.weight", v[0]
        else:
            yield from self._quantized(f"{attention}unembed_out", QuantizedWeight(v[0], v[1], v[2], format))

    # Experts

    def _experts(self, name: str, module: Experts) -> Tensors:
        found = _LAYER.match(name)
        if found is None:
            raise ValueError(
                f"moe_mps::save_mlx: experts must be in a numbered layer, as MLX has them, got {name}"
            )
        layer = self._theirs(f"{found[1]}.x")[0].removesuffix(".x")
        container = f"{layer}.{EXPERTS[self.type]}"
        activation = activation_of(module)
        interleaved = activation.interleaved if activation is not None else not module.is_concatenated
        first, second = projections(module)
        gated = ("gate_proj", "up_proj") if module.has_gate else ("fc1",)
        for projection, names in ((first, gated), (second, ("down_proj" if module.has_gate else "fc2",))):
            for row, part in enumerate(names):
                rows = _Rows(row, len(names), interleaved)
                yield from self._matrices(f"{container}.{part}", module, projection, rows)

    def _matrices(self, theirs: str, module: Experts, projection: str, rows: "_Rows") -> Tensors:
        if is_quantized(module):
            yield from self._quantized(
                theirs, stored(module, projection, formats_of(module)[projection]).map(rows)
            )
            global_scale = module._parameters.get(global_scale_of(projection))
            if global_scale is not None:
                self.global_scales.append(theirs)
                yield f"{theirs}.global_scale", global_scale[:, rows.row]
        else:
            dense = getattr(module, projection)
            yield f"{theirs}.weight", rows(dense.mT if module.is_transposed else dense)
        bias = getattr(module, f"{projection}_bias", None)
        if bias is not None:
            yield f"{theirs}.bias", rows(bias)


class _Rows:
    """Selects the rows of gate, or of up, from stacked matrices or biases."""

    def __init__(self, row: int, count: int, interleaved: bool):
        self.row, self.count, self.interleaved = row, count, interleaved

    def __call__(self, tensor: Tensor) -> Tensor:
        if self.interleaved and self.count > 1:
            return tensor[:, self.row :: self.count]
        return tensor.chunk(self.count, 1)[self.row]


def _chunk(tensor: Tensor, row: int, count: int) -> Tensor:
    return tensor.chunk(count)[row]


def _words(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.view(torch.uint32) if tensor.dtype == torch.int32 else tensor


def _split(tensor: Tensor | None, heads: int, nope: int) -> tuple[Tensor | None, Tensor | None]:
    if tensor is None:
        return None, None
    rows = tensor.unflatten(0, (heads, -1))
    return rows[:, :nope], rows[:, nope:]


def _dense(parts: tuple[Any, ...], format: Format | None) -> Tensor:
    if format is None:
        return parts[0]
    packed, scales, biases = parts
    biases = None if biases is None else biases.contiguous()
    return dequantize(packed.contiguous(), scales.contiguous(), biases, **format.to_dict())
