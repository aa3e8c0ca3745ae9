"""Rows of architectures: what a GGUF file's metadata and tensors mean in transformers' classes.

Names of tensors come from the package `gguf`, and most keys mean the same in all architectures. A row
declares only what is different in one.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...models.upstream.weights import CONFIG_MAPPING

_SOFTMAX, _SIGMOID = 1, 2  # gguf's ExpertGatingFuncType
_NO_DEFAULT = object()
# Tensors with factors of rotary frequencies: for texts longer than those of the training, and for others.
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"


class Stated:
    """Metadata and names of the tensors of a file, and which keys were read.

    Attributes:
        architecture: name of the architecture in the file.
        names: of all tensors.
        layers: number of layers without those that predict further tokens.
    """

    def __init__(self, metadata: Mapping[str, Any], names: Iterable[str]):
        self.architecture, self.names = str(metadata["general.architecture"]), frozenset(names)
        self.metadata, prefix = metadata, f"{metadata['general.architecture']}."
        self._values = {
            key[len(prefix) :]: value for key, value in metadata.items() if key.startswith(prefix)
        }
        self._unread = {*self._values}
        self.layers = self.get("block_count", _NO_DEFAULT) - self.get("nextn_predict_layers", 0)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key; an array that has one value for all layers is this value.

        Raises: ValueError for a missing key without a default.
        """
        self._unread.discard(key)
        if key not in self._values:
            if default is _NO_DEFAULT:
                raise ValueError(
                    f"moe_mps::gguf: {self.architecture}.{key} must be in the metadata, got no such key"
                )
            return default
        value = self._values[key]
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]
        return _shortest(value)

    def need(self, key: str) -> Any:
        """The value of a key, which must be there."""
        return self.get(key, _NO_DEFAULT)

    def by_layer(self, key: str, default: Any = _NO_DEFAULT) -> list[Any]:
        """The values of all layers, also where the file has one for all.

        Raises: ValueError for an array with fewer values.
        """
        value = self.get(key, default)
        if not isinstance(value, list):
            return [value] * self.layers
        if len(value) < self.layers:
            expected = f"one value, or one for each of the {self.layers} layers"
            raise ValueError(f"moe_mps::gguf: {self.architecture}.{key} must be {expected}, got {len(value)}")
        return value[: self.layers]

    def has(self, stem: str) -> bool:
        """True if a layer has a tensor of such a name, as "attn_q.bias"."""
        return any(
            name.startswith("blk.") and name.partition(".")[2].partition(".")[2] == stem
            for name in self.names
        )

    def layers_with(self, stem: str) -> list[int]:
        """Numbers of the layers that have a tensor of such a name."""
        return [layer for layer in range(self.layers) if f"blk.{layer}.{stem}" in self.names]

    def check_all_read(self) -> None:
        """Raises: ValueError for a key that nothing reads."""
        if self._unread:
            key = min(self._unread)
            raise ValueError(
                f"moe_mps::gguf: {self.architecture}.{key} must be a key whose meaning is known, "
                f"got {self._values[key]!r}"
            )


def _shortest(value: Any) -> Any:
    """A number as it was before it became a float32 of the file."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


# A value of the file's tensors, in the order of the row -> that of the parameter. The functions also run on
# numbers of rows, so that they must not depend on the number of columns.
Value = Callable[[Any, list[Tensor]], Tensor]


class Architecture(NamedTuple):
    """How the files of an architecture differ from what all have in common.

    Attributes:
        model_type: type of the config, or a function that chooses it.
        names: {pattern in the name of a parameter: what gguf's table calls it}.
        joined: {name of a parameter in a layer: the tensors that it is made of; of several choices a file
            has one}.
        values: {name of a tensor in a layer, or of one outside: its conversion}.
        config: metadata -> further entries of the config; common ones may be among them.
        gating: number of the router's function, for a class that has only one.
        needs_experts: True where transformers reads the files of this name that declare no experts.
    """

    model_type: str | Callable[[Stated], str]
    names: Mapping[str, str] = MappingProxyType({})
    joined: Mapping[str, tuple[tuple[str, ...], ...]] = MappingProxyType({})
    values: Mapping[str, Value] = MappingProxyType({})
    config: Callable[[Stated], dict[str, Any]] = lambda stated: {}
    gating: int | None = None
    needs_experts: bool = False


def minus_one(config: Any, tensors: list[Tensor]) -> Tensor:
    """Weights of norms that the model adds to one."""
    return tensors[0] - 1


def log_of_negative(config: Any, tensors: list[Tensor]) -> Tensor:
    """A_log of a state space: files have -exp(A_log)."""
    return torch.log(-tensors[0])


def flat(config: Any, tensors: list[Tensor]) -> Tensor:
    """A norm of groups, which are rows in the file."""
    return tensors[0].flatten()


def of_channels(config: Any, tensors: list[Tensor]) -> Tensor:
    """Convolutions of queries, keys and values, which the class has as one."""
    return torch.cat([tensor.reshape(-1, tensor.shape[-1]) for tensor in tensors])


def joined(config: Any, tensors: list[Tensor]) -> Tensor:
    """Rows of the first tensor, then those of the others."""
    return torch.cat(tensors)


def transposed(config: Any, tensors: list[Tensor]) -> Tensor:
    """Experts [E, out, in] whose parameter is [E, in, out]."""
    return torch.cat(tensors, 1).mT


def alternating(config: Any, tensors: list[Tensor]) -> Tensor:
    """Gate and up projections of experts, or their biases, whose outputs alternate in the parameter."""
    both = torch.stack(tensors, 2).flatten(1, 2)
    return both if both.dim() == 2 else both.mT


def _split_halves(heads: str) -> Value:
    """Rows of queries or keys whose rotary pairs are neighbours in the file, and halves of a head here."""

    def convert(config: Any, tensors: list[Tensor]) -> Tensor:
        rows = tensors[0]
        pairs = rows.unflatten(0, (getattr(config, heads), -1, 2))
        return pairs.transpose(1, 2).reshape(rows.shape)

    return convert


_LLAMA_ROPE: Mapping[str, Value] = {
    **{f"attn_q.{part}": _split_halves("num_attention_heads") for part in ("weight", "bias")},
    **{f"attn_k.{part}": _split_halves("num_key_value_heads") for part in ("weight", "bias")},
}


def _latent_keys(config: Any, tensors: list[Tensor]) -> Tensor:
    """kv_b_proj: as it is, or of the keys' part, transposed in each head, and the values' part."""
    if len(tensors) == 1:
        return tensors[0]
    keys, values = tensors
    return torch.cat((keys.mT, values), 1).flatten(0, 1)


def _grouped_qkvz(config: Any, tensors: list[Tensor]) -> Tensor:
    """in_proj_qkvz of Qwen3-Next: a key head has its queries, keys, values and gates in succession."""
    if len(tensors) == 1:
        return tensors[0]
    heads, width = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    parts = (*tensors[0].split((heads * width, heads * width, values)), tensors[1])
    return torch.cat([part.unflatten(0, (heads, -1)) for part in parts], 1).flatten(0, 1)


# (key, attributes of which a config has one, value of a file without the key), as llama.cpp has them.
# `None` means that the attribute keeps the default of the class.
_KEYS: tuple[tuple[str, tuple[str, ...], Any], ...] = (
    ("context_length", ("max_position_embeddings",), _NO_DEFAULT),
    ("embedding_length", ("hidden_size",), _NO_DEFAULT),
    ("feed_forward_length", ("intermediate_size",), None),
    ("attention.head_count", ("num_attention_heads",), _NO_DEFAULT),
    ("attention.layer_norm_rms_epsilon", ("rms_norm_eps", "norm_eps", "layer_norm_epsilon"), None),
    ("attention.layer_norm_epsilon", ("layer_norm_eps", "layer_norm_epsilon"), None),
    (
        "expert_count",
        ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts"),
        _NO_DEFAULT,
    ),
    ("expert_used_count", ("num_experts_per_tok", "moe_topk", "moe_k"), _NO_DEFAULT),
    ("expert_feed_forward_length", ("moe_intermediate_size",), None),
    ("expert_shared_count", ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), None),
    (
        "expert_shared_feed_forward_length",
        (
            "shared_expert_intermediate_size",
            "shared_intermediate_size",
            "moe_shared_expert_intermediate_size",
        ),
        None,
    ),
    ("expert_weights_scale", ("routed_scaling_factor", "route_scale"), 1.0),
    ("expert_weights_norm", ("norm_topk_prob",), False),
    ("expert_group_count", ("n_group",), 1),
    ("expert_group_used_count", ("topk_group",), 1),
    ("leading_dense_block_count", ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), 0),
    ("attention.q_lora_rank", ("q_lora_rank",), "absent"),
    ("attention.kv_lora_rank", ("kv_lora_rank",), None),
    ("attention.sliding_window", ("sliding_window",), "absent"),
    ("attention.scale", ("attention_multiplier",), None),
    ("embedding_scale", ("embedding_multiplier",), 1.0),
    ("residual_scale", ("residual_multiplier",), 1.0),
    ("logit_scale", ("logits_scaling", "logit_scale"), 1.0),
)
# {attribute: the tensor in a layer whose presence it states}
_FLAGS = {
    "attention_bias": "attn_q.bias",
    "mlp_bias": "ffn_up.bias",
    "use_qk_norm": "attn_q_norm.weight",
    "use_expert_bias": "exp_probs_b.bias",
}
# Keys that say nothing of a computation, or what other keys and the tensors say.
_IGNORED = ("vocab_size", "attention.causal", "attention.key_length", "attention.value_length")
_IDS = {"bos": "bos", "eos": "eos", "pad": "padding"}


def row_of(metadata: Mapping[str, Any]) -> Architecture | None:
    """The row that reads a file; None for one that transformers reads, or nobody."""
    architecture = metadata["general.architecture"]
    row = ARCHITECTURES.get(architecture)
    if row is not None and row.needs_experts and not metadata.get(f"{architecture}.expert_count"):
        return None
    return row


def config_of(row: Architecture, metadata: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Entries of the config that a file of a row states.

    Raises: ValueError for a missing key, for one whose meaning is not known, and for values that
        contradict each other.
    """
    stated = Stated(metadata, names)
    model_type = row.model_type if isinstance(row.model_type, str) else row.model_type(stated)
    fields = _fields(CONFIG_MAPPING[model_type])
    result: dict[str, Any] = {
        "model_type": model_type,
        "num_hidden_layers": stated.layers,
        "vocab_size": stated.get("vocab_size") or metadata.get("tokenizer.ggml.tokens"),
        # llama.cpp writes the head only where it is not the embedding
        "tie_word_embeddings": "output.weight" not in stated.names,
        **{f"{name}_token_id": metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _IDS.items()},
        **{name: value for name, value in _heads(stated).items() if name == "head_dim" or name in fields},
    }
    further = row.config(stated)
    for key, attributes, default in _KEYS:
        attribute = next((name for name in attributes if name in fields), None)
        if attribute is None or attribute in further:
            continue
        value = stated.get(key, default)
        if isinstance(value, list):
            raise ValueError(
                f"moe_mps::gguf: {stated.architecture}.{key} must be the same in all layers, got {value}"
            )
        if value is not None:
            result[attribute] = None if value == "absent" else value
    if "mlp_layer_types" in fields and "leading_dense_block_count" in stated:
        dense = stated.need("leading_dense_block_count")
        result["mlp_layer_types"] = ["dense"] * dense + ["sparse"] * (stated.layers - dense)
    result |= {name: stated.has(stem) for name, stem in _FLAGS.items() if name in fields}
    if "rope_parameters" in fields:
        result["rope_parameters"] = _rope(stated, further.get("qk_rope_head_dim") or result["head_dim"])
    if (
        "head_dim" not in fields
        and result["head_dim"] * result["num_attention_heads"] == result["hidden_size"]
    ):
        del result["head_dim"]
    if row.gating is not None and (gating := stated.get("expert_gating_func", row.gating)) != row.gating:
        key = f"{stated.architecture}.expert_gating_func"
        raise ValueError(f"moe_mps::gguf: {key} must be {row.gating}, got {gating}")
    for key in _IGNORED:
        stated.get(key)
    result |= further
    stated.check_all_read()
    return {_declared(CONFIG_MAPPING[model_type], name): value for name, value in result.items()}


def _fields(config_class: Any) -> frozenset[str]:
    """Names of the entries of a config, and those by which they can be set, too."""
    return frozenset(
        {*(field.name for field in dataclasses.fields(config_class)), *config_class.attribute_map}
    )


def _declared(config_class: Any, name: str) -> str:
    """Name of a field, by one of its names."""
    target = config_class.attribute_map.get(name, name)
    return target if any(field.name == target for field in dataclasses.fields(config_class)) else name


def _heads(stated: Stated) -> dict[str, Any]:
    """Number of key heads, and the width of heads."""
    heads, hidden = stated.need("attention.head_count"), stated.need("embedding_length")
    key_heads = max(stated.by_layer("attention.head_count_kv", heads))
    most = max(stated.by_layer("attention.head_count"))
    width = stated.get("attention.key_length") or hidden // most
    if width == 0:
        key = f"{stated.architecture}.attention.head_count"
        raise ValueError(f"moe_mps::gguf: {key} must be at most the embedding_length {hidden}, got {most}")
    return {"num_key_value_heads": key_heads, "head_dim": width}


def _rope(stated: Stated, width: int) -> dict[str, Any]:
    """The config's rope_parameters.

    Raises: ValueError for a scaling that is not known.
    """
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": stated.get("rope.freq_base", 10000.0)}
    rotated = stated.get("rope.dimension_count", width)
    if rotated != width:
        rope["partial_rotary_factor"] = rotated / width
    kind = stated.get("rope.scaling.type", "none")
    stated.get("rope.scaling.finetuned")
    if kind in ("none", "longrope") and not stated.names.isdisjoint((LONG_FACTORS, SHORT_FACTORS)):
        # rope.py has them, for they are tensors
        for key in ("factor", "attn_factor", "original_context_length"):
            stated.get(f"rope.scaling.{key}")
    elif kind == "none":
        stated.get("rope.scaling.factor")
        stated.get("rope.scaling.original_context_length")
    elif kind == "yarn":
        rope |= {"rope_type": "yarn", "factor": stated.need("rope.scaling.factor")}
        rope["original_max_position_embeddings"] = stated.need("rope.scaling.original_context_length")
        for name, key in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            rope[name] = stated.get(f"rope.scaling.{key}", {"beta_fast": 32.0, "beta_slow": 1.0}[name])
        if (logarithm := stated.get("rope.scaling.yarn_log_multiplier")) is not None:
            # deepseek2 has 0.1 times mscale_all_dim; DeepSeek's models have the same mscale
            rope |= dict.fromkeys(("mscale", "mscale_all_dim"), _shortest(logarithm * 10))
    elif kind == "linear":
        rope |= {"rope_type": "linear", "factor": stated.need("rope.scaling.factor")}
    else:
        expected = "none, linear or yarn"
        raise ValueError(
            f"moe_mps::gguf: {stated.architecture}.rope.scaling.type must be {expected}, got {kind}"
        )
    return rope


def _deepseek_type(stated: Stated) -> str:
    """DeepSeek-V3, Kimi-K2 and GLM-4.7-Flash score experts by sigmoids, DeepSeek-V2 by a softmax."""
    if stated.metadata.get("tokenizer.ggml.pre") == "glm4":
        return "glm4_moe_lite"
    by_sigmoid = (
        stated.get("expert_gating_func", _SIGMOID if stated.has("exp_probs_b.bias") else _SOFTMAX) == _SIGMOID
    )
    return "deepseek_v3" if by_sigmoid else "deepseek_v2"


def _latent_sizes(stated: Stated) -> dict[str, Any]:
    """Widths of heads whose keys and values are made of latents."""
    rotary, heads = stated.need("rope.dimension_count"), stated.need("attention.head_count")
    # Files of 2024 have the widths of heads; newer ones those of the latents, and these beside them.
    width = stated.get("attention.key_length_mla") or stated.need("attention.key_length")
    return {
        "num_key_value_heads": heads,
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": width - rotary,
        "v_head_dim": stated.get("attention.value_length_mla") or stated.need("attention.value_length"),
        "head_dim": rotary,
    }


def _deepseek(stated: Stated) -> dict[str, Any]:
    result = _latent_sizes(stated)
    if _deepseek_type(stated) == "deepseek_v2":
        if stated.get("expert_weights_norm", False):
            raise ValueError(
                "moe_mps::gguf: deepseek2.expert_weights_norm must be false with a softmax, got true"
            )
        groups = stated.get("expert_group_count", 1)
        result["topk_method"] = "group_limited_greedy" if groups > 1 else "greedy"
    return result


def _kimi_linear(stated: Stated) -> dict[str, Any]:
    """Layers without key heads have a recurrent state; no layer has a rotary embedding."""
    stated.get("rope.freq_base")
    attends = stated.by_layer("attention.head_count_kv")
    return _latent_sizes(stated) | {
        "layer_types": ["full_attention" if heads else "linear_attention" for heads in attends],
        "linear_head_dim": stated.need("kda.head_dim"),
        "linear_num_heads": stated.need("attention.head_count"),
        "linear_conv_kernel_dim": stated.need("ssm.conv_kernel"),
    }


def _glm_dsa(stated: Stated) -> dict[str, Any]:
    """Attention to latents, and the indexer, which all layers have unless the file says which."""
    full = stated.by_layer("attention.indexer.types", True)
    return _latent_sizes(stated) | {
        "index_n_heads": stated.need("attention.indexer.head_count"),
        "index_head_dim": stated.need("attention.indexer.key_length"),
        "index_topk": stated.need("attention.indexer.top_k"),
        "indexer_types": ["full" if each else "shared" for each in full],
    }


def _qwen3_next(stated: Stated) -> dict[str, Any]:
    """Config values of Qwen3-Next: its layer types, linear attention and rotary factor."""
    interval, heads = stated.get("full_attention_interval", 4), stated.need("ssm.time_step_rank")
    return {
        "layer_types": [
            "linear_attention" if (layer + 1) % interval else "full_attention"
            for layer in range(stated.layers)
        ],
        "linear_conv_kernel_dim": stated.need("ssm.conv_kernel"),
        "linear_key_head_dim": stated.need("ssm.state_size"),
        "linear_num_key_heads": stated.need("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": stated.need("ssm.inner_size") // heads,
        "norm_topk_prob": stated.get("expert_weights_norm", True),
        "decoder_sparse_step": 1,
    }


def _dbrx(stated: Stated) -> dict[str, Any]:
    """Config values of DBRX: its attention and its experts."""
    theta = stated.need("rope.freq_base")
    for key in ("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"):
        stated.get(key)  # the class has its own
    return {
        "attn_config": {
            "kv_n_heads": stated.need("attention.head_count_kv"),
            "clip_qkv": stated.need("attention.clamp_kqv"),
            "rope_theta": theta,
        },
        "ffn_config": {
            "ffn_hidden_size": stated.need("feed_forward_length"),
            "moe_num_experts": stated.need("expert_count"),
            "moe_top_k": stated.need("expert_used_count"),
        },
    }


def _gpt_oss(stated: Stated) -> dict[str, Any]:
    """Values that files do not state are those of all models of the family."""
    scaling = {
        "factor": stated.get("rope.scaling.factor", 32.0),
        "original_max_position_embeddings": stated.get("rope.scaling.original_context_length", 4096),
        "beta_fast": stated.get("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": stated.get("rope.scaling.yarn_beta_slow", 1.0),
    }
    theta = stated.need("rope.freq_base")
    stated.get("feed_forward_length")
    return {
        "intermediate_size": stated.need("expert_feed_forward_length"),
        "rope_parameters": {"rope_type": "yarn", "rope_theta": theta, "truncate": False, **scaling},
    }


def _state_space(stated: Stated, prefix: str = "mamba_") -> dict[str, Any]:
    """Sizes of Mamba-2's layers, as Granite names them."""
    heads, inner = stated.need("ssm.time_step_rank"), stated.need("ssm.inner_size")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": stated.need("ssm.group_count"),
        "mamba_d_state": stated.need("ssm.state_size"),
        "mamba_d_conv": stated.need("ssm.conv_kernel"),
        "mamba_expand": inner // stated.need("embedding_length"),
        "mamba_conv_bias": stated.has("ssm_conv1d.bias"),
    }


def _granite_hybrid(stated: Stated) -> dict[str, Any]:
    attends = stated.by_layer("attention.head_count_kv")
    result = _state_space(stated) | {
        "layer_types": ["full_attention" if heads else "linear_attention" for heads in attends],
        "position_embedding_type": "rope" if stated.get("rope.scaling.finetuned", False) else None,
        "num_local_experts": stated.get("expert_count", 0),
        "num_experts_per_tok": stated.get("expert_used_count", 0),
    }
    if not result["num_local_experts"]:  # its only MLP is the one that others share
        result["shared_intermediate_size"] = stated.need("feed_forward_length")
    return result


def _nemotron_h(stated: Stated) -> dict[str, Any]:
    """Config values of Nemotron-H: a mixer for each layer, and its state space model."""
    inner, attends = stated.by_layer("feed_forward_length"), stated.by_layer("attention.head_count_kv")
    mixer = "moe" if stated.architecture == "nemotron_h_moe" else "mlp"
    types = [
        "full_attention" if heads else mixer if rows else "linear_attention"
        for heads, rows in zip(attends, inner, strict=True)
    ]
    sizes = _state_space(stated)
    result = {
        "layers_block_type": types,
        "intermediate_size": max(inner),
        "mamba_num_heads": sizes["mamba_n_heads"],
        "mamba_head_dim": sizes["mamba_d_head"],
        "n_groups": sizes["mamba_n_groups"],
        "ssm_state_size": sizes["mamba_d_state"],
        "conv_kernel": sizes["mamba_d_conv"],
        "use_conv_bias": sizes["mamba_conv_bias"],
        "moe_latent_size": stated.get("moe_latent_size"),
    }
    for key in ("rope.dimension_count", "rope.freq_base", "rope.scaling.finetuned"):
        stated.get(key)  # its attention does not turn
    return result if mixer == "moe" else result | {"n_routed_experts": 0, "num_experts_per_tok": 0}


def _llama4(stated: Stated) -> dict[str, Any]:
    """Entries of Llama 4; what files do not state is the same in both models, and in llama.cpp's code."""
    stated.get("leading_dense_block_count")
    return {
        "intermediate_size": stated.need("expert_feed_forward_length"),
        "intermediate_size_mlp": stated.need("feed_forward_length"),
        "moe_layers": stated.layers_with("ffn_gate_inp.weight"),
        "interleave_moe_layer_step": stated.need("interleave_moe_layer_step"),
        "use_qk_norm": stated.need("expert_count") != 128,
    }


def _ernie(stated: Stated) -> dict[str, Any]:
    stated.get("expert_shared_feed_forward_length")
    return {
        "moe_layer_interval": stated.get("interleave_moe_layer_step", 1),
        "moe_layer_end_index": stated.layers - 1,
        "use_bias": stated.has("attn_q.bias"),
    }


def _hunyuan(stated: Stated) -> dict[str, Any]:
    stated.get("expert_shared_feed_forward_length")
    stated.get("expert_shared_count")
    stated.get("feed_forward_length")
    return {"intermediate_size": stated.need("expert_feed_forward_length")}


def _olmo(stated: Stated) -> dict[str, Any]:
    """The epsilon of its norms is that of the class."""
    epsilon = stated.need("attention.layer_norm_epsilon")
    if epsilon != 1e-5:
        raise ValueError(f"moe_mps::gguf: olmo.attention.layer_norm_epsilon must be 1e-05, got {epsilon}")
    return {"clip_qkv": stated.get("attention.clamp_kqv")}


def _olmoe(stated: Stated) -> dict[str, Any]:
    return {"clip_qkv": stated.get("attention.clamp_kqv")}


def _jamba(stated: Stated) -> dict[str, Any]:
    """Layers with attention and with experts, which the config gives by a first one and a distance."""
    result: dict[str, Any] = {}
    attends = [layer for layer, heads in enumerate(stated.by_layer("attention.head_count_kv")) if heads]
    for name, layers in (("attn", attends), ("expert", stated.layers_with("ffn_gate_inp.weight"))):
        first, period = layers[0], layers[1] - layers[0] if len(layers) > 1 else stated.layers
        if layers != [*range(first, stated.layers, period)]:
            raise ValueError(f"moe_mps::gguf: layers of {name} must have one distance, got {layers}")
        result |= {f"{name}_layer_offset": first, f"{name}_layer_period": period}
    return result | {
        "mamba_d_conv": stated.need("ssm.conv_kernel"),
        "mamba_d_state": stated.need("ssm.state_size"),
        "mamba_dt_rank": stated.need("ssm.time_step_rank"),
        "mamba_expand": stated.need("ssm.inner_size") // stated.need("embedding_length"),
        "mamba_conv_bias": stated.has("ssm_conv1d.bias"),
    }


def _windows(stated: Stated) -> dict[str, Any]:
    """Layers with a sliding window, by the file's pattern."""
    window = stated.get("attention.sliding_window")
    if window is None:
        return {"sliding_window": None, "layer_types": ["full_attention"] * stated.layers}
    slides = stated.by_layer("attention.sliding_window_pattern")
    return {"layer_types": ["sliding_attention" if each else "full_attention" for each in slides]}


def _exaone_moe(stated: Stated) -> dict[str, Any]:
    stated.get("expert_shared_feed_forward_length")
    return _windows(stated)


def _afmoe(stated: Stated) -> dict[str, Any]:
    """llama.cpp's code has what files do not state: a layer in four attends to all, embeddings are scaled."""
    if not stated.get("expert_weights_norm", True):
        raise ValueError("moe_mps::gguf: afmoe.expert_weights_norm must be true, got false")
    return {"global_attn_every_n_layers": 4, "mup_enabled": True}


def _lfm2_moe(stated: Stated) -> dict[str, Any]:
    attends = stated.by_layer("attention.head_count_kv")
    return {
        "layer_types": ["full_attention" if heads else "conv" for heads in attends],
        "conv_L_cache": stated.need("shortconv.l_cache"),
        "conv_bias": stated.has("shortconv.in_proj.bias"),
        "norm_topk_prob": stated.get("expert_weights_norm", True),
    }


def _mixtral(stated: Stated) -> dict[str, Any]:
    """Nothing further.

    Raises: ValueError for a tensor of each expert, as files have them from before April 2024.
    """
    if layers := stated.layers_with("ffn_gate.0.weight"):
        expected = "the experts of a layer must be one tensor, ffn_gate_exps.weight"
        got = f"blk.{layers[0]}.ffn_gate.0.weight of one expert, as in files from before April 2024"
        raise ValueError(f"moe_mps::gguf: {expected}, got {got}")
    return {}


def _mistral3(stated: Stated) -> dict[str, Any]:
    """Its metadata have mscale_all_dim as it is, and a factor of queries that grows with the position."""
    rope = _rope(stated, stated.get("rope.dimension_count"))
    if (over_all := stated.get("rope.scaling.yarn_log_multiplier")) is not None:
        rope |= {"mscale": 1.0, "mscale_all_dim": over_all}
    rope["llama_4_scaling_beta"] = stated.get("attention.temperature_scale", 0.0)
    rope.setdefault("original_max_position_embeddings", stated.need("context_length"))
    return {"rope_parameters": rope}


def _phi3(stated: Stated) -> dict[str, Any]:
    """A file without a sliding window has 0."""
    return {
        "sliding_window": stated.get("attention.sliding_window") or None,
        "original_max_position_embeddings": stated.get(
            "rope.scaling.original_context_length", stated.need("context_length")
        ),
    }


def _phimoe(stated: Stated) -> dict[str, Any]:
    return {
        "sliding_window": stated.get("attention.sliding_window") or None,
        "attention_bias": stated.has("attn_q.bias"),
        "lm_head_bias": "output.bias" in stated.names,
    }


def _rope_by_type(stated: Stated, full: float, sliding: float) -> dict[str, Any]:
    """rope_parameters of a class that has them for each type of layer, by the shares of a head that turn."""
    shares = {
        "full_attention": ("rope.freq_base", full),
        "sliding_attention": ("rope.freq_base_swa", sliding),
    }
    if (kind := stated.get("rope.scaling.type", "none")) != "none":
        key = f"{stated.architecture}.rope.scaling.type"
        raise ValueError(f"moe_mps::gguf: {key} must be none, got {kind}")
    return {
        layer_type: {"rope_type": "default", "rope_theta": stated.need(key), "partial_rotary_factor": share}
        for layer_type, (key, share) in shares.items()
    }


def _of_types(stated: Stated, key: str, types: list[str], factor: int | None = None) -> tuple[int, int]:
    """Values of the layers that attend to all, and of those with a window.

    Args:
        factor: of the latter, if the class has one.

    Raises: ValueError for layers of one type that differ, and for another factor.
    """
    values = stated.by_layer(key)
    found = [
        {value for value, each in zip(values, types, strict=True) if each == layer_type}
        for layer_type in ("full_attention", "sliding_attention")
    ]
    full = max(found[0], default=0) or max(found[1]) // (factor or 1)
    sliding = max(found[1], default=full * (factor or 1))
    if max(map(len, found)) > 1 or (factor is not None and sliding != full * factor):
        times = "" if factor is None else f", {factor} times as large in those with a window"
        expected = f"the same in all layers of a type{times}"
        raise ValueError(f"moe_mps::gguf: {stated.architecture}.{key} must be {expected}, got {values}")
    return full, sliding


def _mimo2(stated: Stated) -> dict[str, Any]:
    """Its layers with a window have twice the key heads, and rotary frequencies of their own."""
    types = _windows(stated)["layer_types"]
    key_heads, _ = _of_types(stated, "attention.head_count_kv", types, 2)
    width, sparse = stated.need("attention.key_length"), stated.layers_with("ffn_gate_inp.weight")
    share = stated.get("rope.dimension_count", width) / width
    stated.get("leading_dense_block_count")
    result = {
        "layer_types": types,
        "num_key_value_heads": key_heads,
        "v_head_dim": stated.need("attention.value_length"),
        # The class counts the token itself, besides those of the window.
        "sliding_window": stated.need("attention.sliding_window") + 1,
        "rope_parameters": _rope_by_type(stated, share, share),
        "mlp_layer_types": ["sparse" if layer in sparse else "dense" for layer in range(stated.layers)],
        "norm_topk_prob": stated.get("expert_weights_norm", True),
    }
    # Files of MiMo-V2-Flash without the key are of a time when llama.cpp did not scale; the class does.
    scale = stated.get("attention.value_scale")
    return result if scale is None else result | {"attention_value_scale": scale}


def _step35(stated: Stated) -> dict[str, Any]:
    """Its layers with a window have more heads, which turn wholly; heads of the others turn by half."""
    types, sparse = _windows(stated)["layer_types"], stated.layers_with("ffn_gate_inp.weight")
    heads, sliding = _of_types(stated, "attention.head_count", types)
    key_heads, _ = _of_types(stated, "attention.head_count_kv", types, 1)
    width = stated.need("attention.key_length")
    share = stated.get("rope.dimension_count", width) / width
    if not stated.need("expert_weights_norm"):
        raise ValueError("moe_mps::gguf: step35.expert_weights_norm must be true, got false")
    for key in ("leading_dense_block_count", "moe_every_n_layers", "rope.dimension_count_swa"):
        stated.get(key)  # the tensors say which layers have experts
    return {
        "layer_types": types,
        "num_attention_heads": heads,
        "num_sliding_attention_heads": sliding,
        "num_key_value_heads": key_heads,
        "pad_token_id": stated.metadata.get("tokenizer.ggml.padding_token_id", 1),
        "rope_parameters": _rope_by_type(stated, share / 2, share),
        "mlp_layer_types": ["sparse" if layer in sparse else "dense" for layer in range(stated.layers)],
        "share_expert_dim": stated.need("expert_shared_feed_forward_length"),
        "moe_router_scaling_factor": stated.get("expert_weights_scale", 1.0),
        **{
            name: stated.by_layer(key) if key in stated else None
            for name, key in (
                ("swiglu_limits", "swiglu_clamp_exp"),
                ("swiglu_limits_shared", "swiglu_clamp_shexp"),
            )
        },
    }


def _mistral4(stated: Stated) -> dict[str, Any]:
    """Latents, and a factor of queries that grows with the position; files may lack the family's."""
    result = _latent_sizes(stated)
    rope = _rope(stated, result["qk_rope_head_dim"])
    rope["llama_4_scaling_beta"] = stated.get("attention.temperature_scale", 0.1)
    trained = rope.setdefault("original_max_position_embeddings", stated.need("context_length"))
    if (length := stated.get("attention.temperature_length", trained)) != trained:
        expected = f"{trained}, as rope.scaling.original_context_length"
        raise ValueError(
            f"moe_mps::gguf: mistral4.attention.temperature_length must be {expected}, got {length}"
        )
    width = result["qk_nope_head_dim"] + result["qk_rope_head_dim"]
    return result | {"head_dim": width, "rope_parameters": rope}


def _qwen3_vl(stated: Stated) -> dict[str, Any]:
    """Its rotary embedding has sections for the time, the height and the width."""
    if not stated.get("expert_weights_norm", True):
        key = f"{stated.architecture}.expert_weights_norm"
        raise ValueError(f"moe_mps::gguf: {key} must be true, got false")
    stated.get("n_deepstack_layers")  # features of the vision tower
    sections = stated.need("rope.dimension_sections")
    return {
        "rope_parameters": {
            **_rope(stated, stated.need("attention.key_length")),
            **{"mrope_section": sections[:3], "mrope_interleaved": True},
        }
    }


def _every_fourth_without_rope(stated: Stated) -> dict[str, Any]:
    return {"no_rope_layer_interval": 4, "no_rope_layers": None, "layer_types": None}


def _cohere2(stated: Stated) -> dict[str, Any]:
    """llama.cpp's code has the pattern that files do not state: each fourth layer attends to all."""
    slides = [(layer + 1) % 4 != 0 for layer in range(stated.layers)]
    return {"layer_types": ["sliding_attention" if each else "full_attention" for each in slides]}


_LATENTS = {"self_attn.kv_b_proj.weight": (("attn_kv_b.weight",), ("attn_k_b.weight", "attn_v_b.weight"))}
_OF_LATENTS: Mapping[str, Value] = {"attn_kv_b.weight": _latent_keys, "attn_k_b.weight": _latent_keys}
_ZERO_CENTERED = ("attn_norm", "post_attention_norm", "attn_q_norm", "attn_k_norm")
_MAMBA2: Mapping[str, Value] = {"ssm_a": log_of_negative, "ssm_norm.weight": flat}
_SHARED_HALVES = (("ffn_gate_shexp.weight", "ffn_up_shexp.weight"), ("ffn_gate.weight", "ffn_up.weight"))
_GRANITE_SHARED = {
    "shared_mlp.input_linear.weight": _SHARED_HALVES,
    "shared_mlp.output_linear.weight": (("ffn_down_shexp.weight",), ("ffn_down.weight",)),
}
_GRANITE_ROUTER = {r"\.block_sparse_moe\.router\.": ".mlp.gate."}
# Classes with a vision tower: its parameters are not in the file of the language model.
_IN_LANGUAGE_MODEL = {r"^model\.language_model\.": "model."}
_SINKS = {r"\.sinks$": ".sinks.weight"}
_NEMOTRON_H = Architecture(
    "nemotron_h",
    names={r"^model\.": "backbone.", r"\.dt_proj\.bias$": ".dt.bias"},
    values=_MAMBA2,
    config=_nemotron_h,
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "afmoe": Architecture("afmoe", config=_afmoe, gating=_SIGMOID),
    "arcee": Architecture("arcee", values=_LLAMA_ROPE),
    "cohere2": Architecture("cohere2", config=_cohere2),
    "command-r": Architecture("cohere"),
    "dbrx": Architecture("dbrx", config=_dbrx, gating=_SOFTMAX),
    "deepseek2": Architecture(_deepseek_type, joined=_LATENTS, values=_OF_LATENTS, config=_deepseek),
    "dots1": Architecture("dots1", gating=_SIGMOID),
    "ernie4_5": Architecture("ernie4_5", config=lambda stated: {"use_bias": stated.has("attn_q.bias")}),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe", {r"\.gate\.moe_statics\.": ".moe_statics."}, config=_ernie, gating=_SOFTMAX
    ),
    "exaone-moe": Architecture("exaone_moe", config=_exaone_moe, gating=_SIGMOID),
    "exaone4": Architecture("exaone4", config=_windows),
    "glm-dsa": Architecture(
        "glm_moe_dsa", joined=_LATENTS, values=_OF_LATENTS, config=_glm_dsa, gating=_SIGMOID
    ),
    "glm4": Architecture("glm4"),
    "glm4moe": Architecture("glm4_moe", gating=_SIGMOID),
    "gpt-oss": Architecture(
        "gpt_oss",
        _SINKS,
        values={
            **{f"ffn_gate_exps.{part}": alternating for part in ("weight", "bias")},
            "ffn_down_exps.weight": transposed,
        },
        config=_gpt_oss,
    ),
    "granite": Architecture("granite", values=_LLAMA_ROPE),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        _GRANITE_ROUTER,
        _GRANITE_SHARED,
        {**_LLAMA_ROPE, **_MAMBA2},
        _granite_hybrid,
        _SOFTMAX,
    ),
    "granitemoe": Architecture(
        lambda stated: "granitemoeshared" if stated.has("ffn_up_shexp.weight") else "granitemoe",
        _GRANITE_ROUTER,
        _GRANITE_SHARED,
        _LLAMA_ROPE,
        gating=_SOFTMAX,
    ),
    "hunyuan-dense": Architecture("hunyuan_v1_dense"),
    "hunyuan-moe": Architecture("hunyuan_v1_moe", config=_hunyuan, gating=_SOFTMAX),
    "jamba": Architecture("jamba", values={"ssm_a": log_of_negative}, config=_jamba, gating=_SOFTMAX),
    "kimi-linear": Architecture(
        "kimi_linear",
        {r"\.forget_gate\.": "."},
        {
            **_LATENTS,
            "self_attn.conv1d.weight": (tuple(f"ssm_conv1d_{part}.weight" for part in "qkv"),),
        },
        {**_OF_LATENTS, "ssm_a": log_of_negative, "ssm_conv1d_q.weight": of_channels},
        _kimi_linear,
        _SIGMOID,
    ),
    "lfm2moe": Architecture("lfm2_moe", config=_lfm2_moe, gating=_SIGMOID),
    "llama": Architecture(
        "mixtral", values=_LLAMA_ROPE, config=_mixtral, gating=_SOFTMAX, needs_experts=True
    ),
    "llama4": Architecture(
        "llama4_text",
        values={
            **{f"ffn_{part}_exps.weight": transposed for part in ("gate", "down", "gate_up")},
        },
        config=_llama4,
        gating=_SIGMOID,
    ),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H._replace(gating=_SIGMOID),
    "mimo2": Architecture("mimo_v2_flash", _SINKS, config=_mimo2, gating=_SIGMOID),
    "mistral3": Architecture("ministral3", values=_LLAMA_ROPE, config=_mistral3),
    "mistral4": Architecture(
        "mistral4", joined=_LATENTS, values=_OF_LATENTS, config=_mistral4, gating=_SOFTMAX
    ),
    "olmo": Architecture("olmo", values=_LLAMA_ROPE, config=_olmo),
    "olmo2": Architecture("olmo2"),
    "olmoe": Architecture("olmoe", config=_olmoe, gating=_SOFTMAX),
    "phi3": Architecture("phi3", config=_phi3),
    "phimoe": Architecture("phimoe", config=_phimoe),
    "qwen3next": Architecture(
        "qwen3_next",
        joined={
            "linear_attn.in_proj_qkvz.weight": (
                ("ssm_in.weight",),
                ("attn_qkv.weight", "attn_gate.weight"),
            )
        },
        values={
            **{f"{name}.weight": minus_one for name in (*_ZERO_CENTERED, "output_norm")},
            "ssm_a": log_of_negative,
            **{"ssm_in.weight": _grouped_qkvz, "attn_qkv.weight": _grouped_qkvz},
        },
        config=_qwen3_next,
        gating=_SOFTMAX,
    ),
    "qwen3vl": Architecture("qwen3_vl_text", _IN_LANGUAGE_MODEL, config=_qwen3_vl),
    "qwen3vlmoe": Architecture("qwen3_vl_moe_text", _IN_LANGUAGE_MODEL, config=_qwen3_vl, gating=_SOFTMAX),
    "seed_oss": Architecture("seed_oss"),
    "smollm3": Architecture("smollm3", values=_LLAMA_ROPE, config=_every_fourth_without_rope),
    "step35": Architecture(
        "step3p5",
        _IN_LANGUAGE_MODEL,
        values={f"{name}.weight": minus_one for name in (*_ZERO_CENTERED, "ffn_norm", "output_norm")},
        config=_step35,
        gating=_SIGMOID,
    ),
}
