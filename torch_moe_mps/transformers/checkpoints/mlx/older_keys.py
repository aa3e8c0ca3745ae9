"""Keys that mlx-lm reads in a config.json, and transformers 5 writes under other names or in another form."""

from collections.abc import Callable, Mapping
from typing import Any

Config = dict[str, Any]
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_GLM = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}


def with_older_keys(config: Config) -> Config:
    """A config with these keys, too; those that it has stay as they are.

    Raises: ValueError for an architecture of which transformers 5 does not write all that mlx-lm reads.
    """
    if isinstance(config.get("text_config"), Mapping):
        text = with_older_keys(config["text_config"])
        whole = {key: text[key] for key in ("vocab_size",) if key in text}
        return whole | config | {"text_config": text}
    older = _of_all(config)
    older |= {key: value for key, value in config.items() if value is not None or key not in older}
    kind = config.get("model_type")
    needed, own_keys = _OWN.get(kind, ((), lambda config: {}))
    if all(key in older for key in needed):  # else the config is an original one
        own = own_keys(older)
        older |= {key: value for key, value in own.items() if key not in config or key in _REPLACED}
    if kind == "mimo_v2_flash" and "swa_head_dim" not in config:
        expected = "that of the original checkpoint, with swa_head_dim and others that mlx-lm reads"
        raise ValueError(f"moe_mps::save_mlx: the config must be {expected}, got one of transformers 5")
    return older


def _of_all(config: Config) -> Config:
    """Keys of many architectures."""
    rope = config.get("rope_parameters") or {}
    older: Config = {}
    if "rope_theta" in rope:
        scaling = {k: v for k, v in rope.items() if k not in ("rope_theta", "partial_rotary_factor")}
        scaled = scaling.get("rope_type", "default") != "default"
        older = {"rope_theta": rope["rope_theta"], "rope_scaling": scaling if scaled else None}
    if "rope_theta" in rope or "partial_rotary_factor" in rope:
        older["partial_rotary_factor"] = rope.get("partial_rotary_factor", 1.0)
    experts = next((config[name] for name in _EXPERTS if config.get(name) is not None), None)
    if experts is not None:
        older |= dict.fromkeys(_EXPERTS[:3], experts) | {"norm_topk_prob": True}
    heads = config.get("num_attention_heads")
    if heads and "hidden_size" in config and "kv_lora_rank" not in config:
        older["head_dim"] = config["hidden_size"] // heads
    if "full_attention" in (kinds := config.get("layer_types") or ()):
        older["full_attention_interval"] = kinds.index("full_attention") + 1
    return older


def _bailing_hybrid(config: Config) -> Config:
    return {
        "architectures": ["BailingMoeV3ForCausalLM"],
        "layer_group_size": config["full_attention_interval"],
        "moe_shared_expert_intermediate_size": config["moe_intermediate_size"] * config["num_shared_experts"],
        "n_group": config["num_expert_group"],
        "num_experts_per_tok": config["num_experts_per_token"],
        "q_lora_rank": None,
    }


def _gemma4_text(config: Config) -> Config:
    sizes = {name: size for layer in config["per_layer_config"].values() for name, size in layer.items()}
    return {
        "global_head_dim": sizes.get("head_dim", config["head_dim"]),
        "num_global_key_value_heads": sizes.get("num_key_value_heads"),
    }


def _granite(config: Config) -> Config:
    kinds = {"linear_attention": "mamba", "full_attention": "attention"}
    return {"layer_types": [kinds.get(kind, kind) for kind in config["layer_types"]]}


def _kimi_linear(config: Config) -> Config:
    kinds = list(enumerate(config["layer_types"], 1))
    return {
        "linear_attn_config": {
            "full_attn_layers": [number for number, kind in kinds if kind == "full_attention"],
            "kda_layers": [number for number, kind in kinds if kind != "full_attention"],
            "head_dim": config["linear_head_dim"],
            "num_heads": config["linear_num_heads"],
            "short_conv_kernel_size": config["linear_conv_kernel_dim"],
        },
        "first_k_dense_replace": config["mlp_layer_types"].count("dense"),
        "mla_use_nope": True,
        "rope_theta": 10000.0,
    }


def _minimax_m2(config: Config) -> Config:
    rotary = int(config["head_dim"] * config.get("partial_rotary_factor", 1.0))
    return {"rotary_dim": rotary, "shared_intermediate_size": 0}


# By the model type: the keys that transformers 5 writes, and what is made of them.
_OWN: dict[Any, tuple[tuple[str, ...], Callable[[Config], Config]]] = {
    "bailing_hybrid": (
        ("num_experts_per_token", "num_expert_group", "full_attention_interval"),
        _bailing_hybrid,
    ),
    "exaone_moe": (
        ("mlp_layer_types",),
        lambda config: {"is_moe_layer": [kind == "sparse" for kind in config["mlp_layer_types"]]},
    ),
    "gemma4_text": (("head_dim", "per_layer_config"), _gemma4_text),
    "glm_moe_dsa": ((), lambda config: _GLM),
    "granitemoehybrid": (("layer_types",), _granite),
    "kimi_linear": (("layer_types", "mlp_layer_types", "linear_head_dim"), _kimi_linear),
    "minimax_m2": (("head_dim", "rope_parameters"), _minimax_m2),
    "solar_open": (
        ("moe_intermediate_size",),
        lambda config: {"intermediate_size": config["moe_intermediate_size"], "first_k_dense_replace": 0},
    ),
}
_REPLACED = ("architectures", "layer_types", "q_lora_rank")
