"""What mlx-lm calls the parameters of a model.

Its names are those of an architecture's original checkpoints, as transformers writes them. Only the experts
have names of mlx-lm, with one tensor for each of gate, up and down.
"""

import re
from typing import TYPE_CHECKING, Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion

from ...interface import Experts, projections

if TYPE_CHECKING:  # transformers is not complete yet when its quantizers import ours
    from transformers import PreTrainedModel

# mlx-lm's names for the matrices of an MLP that the original checkpoints number.
_NUMBERED = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
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
PARTS_OF = {"qwen3_5_moe_text": "qwen3_5_moe"}
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
        f".feed_forward.{old}.weight": f".feed_forward.{new}.weight" for new, old in _NUMBERED.items()
    },
}
# The same, only in layers of linear attention.
_RENAMED_LINEAR = {"bailing_hybrid": {".attention.dense.": ".attention.o_proj."}}
# Model types whose norms add 1 to the weight in transformers; mlx-lm stores the sum.
_ONE_MORE = {"qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text"}
_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "model.norm",
    "q_norm",
    "k_norm",
    "language_model.norm",
)
# Model types for which mlx-lm drops the correction of the router's scores.
_DROP_BIAS = {"ernie4_5_moe"}
_LAYER = re.compile(r"^(.*\.\d+)\.")


def check_writable(config: Any) -> None:
    """Raises: ValueError for an architecture whose layout in MLX is not known."""
    whole, text = type(config).model_type, type_of(config)
    known = {*EXPERTS, *DENSE}
    if text not in known or whole not in (text, *_COMPOSITES):
        names = ", ".join(sorted({*known, *_COMPOSITES}))
        raise ValueError(f"moe_mps::save_mlx: model_type must be one of {names}, got {whole}")


def type_of(config: Any) -> str:
    """The model type of the language model, from the class: an instance may have that of its checkpoint."""
    return type(config.get_text_config()).model_type


def canonical(name: str) -> str:
    """A name without "model" and "language_model" in front, which not all checkpoints have."""
    return re.sub(r"^((model|language_model)\.)+", "", name)


class Names:
    """The names for one model, and which of its parameters have other values or shapes in MLX."""

    def __init__(self, model: "PreTrainedModel"):
        self.model, self.type, self.whole = model, type_of(model.config), type(model.config).model_type
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
        own = vars(self.model)
        before = own.get("_weight_conversions")
        own["_weight_conversions"] = self._conversions
        try:
            reverted = revert_weight_conversion(self.model, {name: torch.empty(shape, device="meta")})
        finally:
            own["_weight_conversions"] = before
        return [self._renamed(theirs, name) for theirs in reverted]

    def _renamed(self, theirs: str, name: str) -> str:
        attention = name.rpartition(".")[0].rpartition(".")[0]
        linear = hasattr(self.model.get_submodule(attention), "conv1d")
        renamed = _RENAMED.get(self.type, {}) | (_RENAMED_LINEAR.get(self.type, {}) if linear else {})
        for old, new in renamed.items():
            theirs = theirs.replace(old, new)
        composite = self.whole in _COMPOSITES
        if composite:
            theirs = theirs.removeprefix("language_model.").replace("model.blocks.", "model.layers.")
        if composite or self.type in PARTS_OF:  # the latter is read from the whole or from the part
            return f"language_model.{theirs.replace('model.language_model.', 'model.')}"
        return theirs

    def of_experts(self, name: str, module: Experts) -> dict[str, list[str]]:
        """{projection: mlx-lm's modules that it is made of}

        Raises: ValueError for experts outside of a numbered layer.
        """
        found = _LAYER.match(name)
        if found is None:
            expected = "in a numbered layer, as MLX has them"
            raise ValueError(f"moe_mps::save_mlx: experts must be {expected}, got {name}")
        layer = self.of(f"{found[1]}.x")[0].removesuffix(".x")
        gated = (["gate_proj", "up_proj"], ["down_proj"]) if module.has_gate else (["fc1"], ["fc2"])
        container = f"{layer}.{EXPERTS.get(self.type, 'mlp.switch_mlp')}"
        return {
            projection: [f"{container}.{part}" for part in parts]
            for projection, parts in zip(projections(module), gated, strict=True)
        }

    def has_one_more(self, name: str) -> bool:
        norm = name.removesuffix(".weight").endswith(_NORMS) and "linear_attn" not in name
        return norm and self.type in _ONE_MORE

    def is_dropped(self, name: str) -> bool:
        return self.type in _DROP_BIAS and name.endswith("e_score_correction_bias")

    def is_halved(self, name: str) -> bool:
        return self.type in _HALVES and name.endswith("kv_b_proj.weight")
