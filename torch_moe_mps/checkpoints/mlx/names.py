"""mlx-lm's names of a model's parameters.

It uses the names of an architecture's original checkpoints, as transformers writes them. Only the experts
have names of mlx-lm, with one tensor for each of gate, up and down.
"""

import re
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ...models.basics.interface import count_of, get_experts, projections
from ...models.upstream.weights import (
    PrefixChange,
    get_model_conversion_mapping,
    revert_weight_conversion,
    seen_with,
)
from .architectures import ARCHITECTURES, Architecture

# Models without experts that mlx-lm computes as transformers does; the parameters keep their names.
DENSE = frozenset(
    {
        "cohere", "ernie4_5", "gemma2", "gemma3_text", "glm4", "granite", "hunyuan_v1_dense", "llama",
        "mistral", "nemotron", "olmo2", "phi3", "qwen2", "qwen3", "qwen3_5_text", "seed_oss", "smollm3",
        "stablelm",
    }
)  # fmt: skip
# Multimodal model types of which mlx-lm has only the language model.
_COMPOSITES = (
    "gemma4", "kimi_k25", "llama4", "minimax_m3_vl", "mistral3", "qwen3_5", "qwen3_5_moe", "qwen3_vl_moe"
)  # fmt: skip
_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "model.norm",
    "q_norm",
    "k_norm",
    "language_model.norm",
)
_LAYER = re.compile(r"^(.*\.\d+)\.")


def check_architecture(config: Any) -> None:
    """Raises: ValueError for an architecture whose layout in MLX is not known."""
    whole, text = type(config).model_type, type_of(config)
    known = {*DENSE, *(name for name, a in ARCHITECTURES.items() if a.experts)}
    around = {a.without for a in ARCHITECTURES.values() if a.without}
    if text not in known or whole not in (text, *_COMPOSITES, *around):
        names = ", ".join(sorted({*known, *_COMPOSITES, *around}))
        raise ValueError(f"moe_mps::save_mlx: model_type must be one of {names}, got {whole}")


def type_of(config: Any) -> str:
    """The model type of the language model, from the class: an instance may name its checkpoint's."""
    return type(config.get_text_config()).model_type


def canonical(name: str) -> str:
    """A name without the prefixes "model" and "language_model", which some checkpoints lack."""
    return re.sub(r"^((model|language_model)\.)+", "", name)


class MlxNames:
    """The names for one model, and which of its parameters have other values or shapes in MLX."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.architecture = ARCHITECTURES.get(type_of(model.config), Architecture())
        self._is_composite = type(model.config).model_type in _COMPOSITES
        conversions = get_model_conversion_mapping(model, add_legacy=False)
        self._conversions = [c for c in conversions if not isinstance(c, PrefixChange)]
        self._known: dict[str, list[str]] = {}

    def of(self, name: str) -> list[str]:
        """mlx-lm's names for a parameter; several if its rows are separate tensors there."""
        if name not in self._known:
            self._known[name] = self._original(name)
        return self._known[name]

    def _original(self, name: str) -> list[str]:
        owner, _, last = name.rpartition(".")
        shape = getattr(getattr(self.model.get_submodule(owner), last, None), "shape", (1, 1))
        seen = seen_with(self.model, _weight_conversions=self._conversions)
        reverted = revert_weight_conversion(seen, {name: torch.empty(shape, device="meta")})
        return [self._renamed(theirs, name) for theirs in reverted]

    def _renamed(self, theirs: str, name: str) -> str:
        """mlx-lm's name for a name of the original checkpoint."""
        attention = name.rpartition(".")[0].rpartition(".")[0]
        renamed = {**self.architecture.renamed}
        if hasattr(self.model.get_submodule(attention), "conv1d"):
            renamed |= self.architecture.renamed_linear
        for old, new in renamed.items():
            theirs = theirs.replace(old, new)
        if self._is_composite:
            theirs = theirs.removeprefix("language_model.").replace("model.blocks.", "model.layers.")
        if self._is_composite or self.architecture.part_of:  # the latter is read from the whole or the part
            return f"language_model.{theirs.replace('model.language_model.', 'model.')}"
        return theirs

    def of_experts(self, name: str, module: nn.Module) -> dict[str, list[str]]:
        """{projection: mlx-lm's modules that it is made of}

        Raises: ValueError for experts outside of a numbered layer.
        """
        matched = _LAYER.match(name)
        if matched is None:
            expected = "in a numbered layer, as MLX has them"
            raise ValueError(f"moe_mps::save_mlx: experts must be {expected}, got {name}")
        layer = self.of(f"{matched[1]}.x")[0].removesuffix(".x")
        gated = (
            (["gate_proj", "up_proj"], ["down_proj"]) if get_experts(module).has_gate else (["fc1"], ["fc2"])
        )
        if self.architecture.apart is not None:
            numbers, (gate, up, down) = range(count_of(module)), self.architecture.apart
            gated = [f"{n}.{part}" for part in (gate, up) for n in numbers], [f"{n}.{down}" for n in numbers]
        container = f"{layer}.{self.architecture.experts}"
        return {
            projection: [f"{container}.{part}" for part in parts]
            for projection, parts in zip(projections(module), gated, strict=True)
        }

    def has_one_more(self, name: str) -> bool:
        return self.architecture.one_more and name.removesuffix(".weight").endswith(_NORMS)

    def is_dropped(self, name: str) -> bool:
        return self.architecture.drops_bias and name.endswith("e_score_correction_bias")

    def is_halved(self, name: str) -> bool:
        return self.architecture.halves and name.endswith("kv_b_proj.weight")
