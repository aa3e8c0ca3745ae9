"""The architectures whose layout in MLX's checkpoints is known: names of parameters, keys of the config."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

Config = dict[str, Any]


def _nothing(config: Config) -> Config:
    return {}


class Architecture(NamedTuple):
    """Differences of mlx-lm's names, values and keys from a model type's original checkpoints.

    Args:
        experts: where mlx-lm has the experts of a layer; None for a model without.
        apart: names of gate, up and down projection, where each expert is a module in a list.
        renamed: {part of an original name: what mlx-lm writes instead}.
        renamed_linear: the same, only in layers of linear attention.
        halves: whether kv_b_proj is split into embed_q and unembed_out.
        one_more: whether transformers adds 1 to the weights of norms; mlx-lm stores the sum.
        drops_bias: whether mlx-lm drops the correction of the router's scores.
        part_of: the multimodal type as whose language part mlx-lm loads this text-only type.
        without: the multimodal type of which mlx-lm loads the language part alone, as this type.
        needed: keys that identify a config of transformers 5.
        older_keys: computes the keys that mlx-lm reads from a config with the needed keys.
    """

    experts: str | None = "mlp.switch_mlp"
    apart: tuple[str, str, str] | None = None
    renamed: Mapping[str, str] = MappingProxyType({})
    renamed_linear: Mapping[str, str] = MappingProxyType({})
    halves: bool = False
    one_more: bool = False
    drops_bias: bool = False
    part_of: str | None = None
    without: str | None = None
    needed: tuple[str, ...] = ()
    older_keys: Callable[[Config], Config] = _nothing


def _bailing_hybrid(config: Config) -> Config:
    return {
        "architectures": ["BailingMoeV3ForCausalLM"],
        "layer_group_size": config["full_attention_interval"],
        "moe_shared_expert_intermediate_size": config["moe_intermediate_size"] * config["num_shared_experts"],
        "n_group": config["num_expert_group"],
        "num_experts_per_tok": config["num_experts_per_token"],
        "q_lora_rank": config.get("q_lora_rank"),  # mlx-lm has another default
    }


def _dbrx(config: Config) -> Config:
    return {"attn_config": {**config["attn_config"], "rope_theta": config["rope_parameters"]["rope_theta"]}}


def _exaone_moe(config: Config) -> Config:
    return {"is_moe_layer": [kind == "sparse" for kind in config["mlp_layer_types"]]}


def _gemma4(config: Config) -> Config:
    """Sizes of the layers of full attention."""
    sizes = {name: size for layer in config["per_layer_config"].values() for name, size in layer.items()}
    return {
        "global_head_dim": sizes.get("head_dim", config["head_dim"]),
        "num_global_key_value_heads": sizes.get("num_key_value_heads"),
    }


def _glm_moe_dsa(config: Config) -> Config:
    return {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}


def _granitemoehybrid(config: Config) -> Config:
    kinds = {"linear_attention": "mamba", "full_attention": "attention"}
    return {"layer_types": [kinds.get(kind, kind) for kind in config["layer_types"]]}


def _kimi_linear(config: Config) -> Config:
    """Fields of mlx-lm's config for Kimi-Linear; its layers are numbered from 1 there."""
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


def _longcat_flash(config: Config) -> Config:
    """Keys of what transformers computes whatever a config says."""
    scales = dict.fromkeys(("mla_scale_q_lora", "mla_scale_kv_lora"), True)
    return {"attention_method": "MLA", "zero_expert_type": "identity", "norm_topk_prob": False, **scales}


def _mimo_v2_flash(config: Config) -> Config:
    """No further values for the config of MiMo-V2-Flash.

    Raises: ValueError for a config of transformers 5, which does not write all that mlx-lm reads.
    """
    if "swa_head_dim" not in config:
        expected = "that of the original checkpoint, with swa_head_dim and others that mlx-lm reads"
        raise ValueError(f"moe_mps::save_mlx: the config must be {expected}, got one of transformers 5")
    return {}


def _minimax_m2(config: Config) -> Config:
    rotary = int(config["head_dim"] * config.get("partial_rotary_factor", 1.0))
    return {"rotary_dim": rotary, "shared_intermediate_size": 0}


def _solar_open(config: Config) -> Config:
    return {"intermediate_size": config["moe_intermediate_size"], "first_k_dense_replace": 0}


def _step3p5(config: Config) -> Config:
    """Fields of mlx-lm's config for Step-3.5, with values by layer where transformers has them by kind."""
    kinds, rope = config["layer_types"], config["rope_parameters"]
    of_layers = [rope[kind] for kind in kinds]
    scaling = {key: value for key, value in rope.get("full_attention", {}).items() if key not in _OF_LAYERS}
    sparse = [str(number) for number, kind in enumerate(config["mlp_layer_types"]) if kind == "sparse"]
    groups = config["num_key_value_heads"]
    return {
        "num_attention_groups": groups,
        "attention_other_setting": {
            "num_attention_heads": config["num_sliding_attention_heads"],
            "num_attention_groups": groups,
        },
        "moe_num_experts": config["n_routed_experts"],
        "moe_top_k": config["num_experts_per_tok"],
        "moe_layers_enum": ",".join(sparse),
        "rope_theta": [of_layer["rope_theta"] for of_layer in of_layers],
        "partial_rotary_factors": [of_layer.get("partial_rotary_factor", 1.0) for of_layer in of_layers],
        "rope_scaling": scaling if scaling.get("rope_type", "default") != "default" else None,
        "yarn_only_types": ["full_attention"],
    }


_OF_LAYERS = ("rope_theta", "partial_rotary_factor")  # parameters that mlx-lm reads layer by layer
_PLAIN = Architecture()
_HALVES = Architecture(halves=True)
_BLOCK_SPARSE = Architecture("block_sparse_moe.switch_mlp")
_EXPERTS = Architecture("mlp.experts")
_CORRECTION = "e_score_correction_bias"

# The architectures with experts that mlx-lm has, and others that differ from their original checkpoints.
ARCHITECTURES = {
    "afmoe": _EXPERTS,
    "bailing_hybrid": Architecture(
        renamed_linear={".attention.dense.": ".attention.o_proj."},
        halves=True,
        needed=("num_experts_per_token", "num_expert_group", "full_attention_interval"),
        older_keys=_bailing_hybrid,
    ),
    "dbrx": Architecture(
        "ffn.experts", ("w1", "v1", "w2"), needed=("attn_config", "rope_parameters"), older_keys=_dbrx
    ),
    "deepseek_v2": _PLAIN,
    "deepseek_v3": _HALVES,
    "deepseek_v32": _HALVES,
    "dots1": _EXPERTS,
    "ernie4_5_moe": Architecture(drops_bias=True),
    "exaone_moe": Architecture(
        renamed={f".mlp.{_CORRECTION}": f".mlp.gate.{_CORRECTION}"},
        needed=("mlp_layer_types",),
        older_keys=_exaone_moe,
    ),
    "gemma4_text": Architecture(
        "experts.switch_glu", needed=("head_dim", "per_layer_config"), older_keys=_gemma4
    ),
    "glm4_moe": _PLAIN,
    "glm4_moe_lite": _HALVES,
    "glm_moe_dsa": Architecture(halves=True, older_keys=_glm_moe_dsa),
    "gpt_oss": _EXPERTS,
    "granitemoe": _BLOCK_SPARSE,
    "granitemoehybrid": _BLOCK_SPARSE._replace(needed=("layer_types",), older_keys=_granitemoehybrid),
    "jamba": Architecture("feed_forward.switch_mlp"),
    "kimi_linear": Architecture(
        renamed={
            ".block_sparse_moe.": ".mlp.",
            f".mlp.gate.{_CORRECTION}": f".mlp.{_CORRECTION}",
            "_conv1d.": "_conv.conv.",
        },
        halves=True,
        needed=("layer_types", "mlp_layer_types", "linear_head_dim"),
        older_keys=_kimi_linear,
    ),
    "laguna": Architecture(
        renamed={
            f".mlp.experts.{_CORRECTION}": f".mlp.gate.{_CORRECTION}",
            ".mlp.gate.weight": ".mlp.gate.proj.weight",
        }
    ),
    "lfm2_moe": Architecture(
        "feed_forward.switch_mlp",
        renamed={  # the matrices of an MLP, which the original checkpoints number
            ".feed_forward.w1.weight": ".feed_forward.gate_proj.weight",
            ".feed_forward.w2.weight": ".feed_forward.down_proj.weight",
            ".feed_forward.w3.weight": ".feed_forward.up_proj.weight",
        },
    ),
    "longcat_flash": _HALVES._replace(needed=("zero_expert_num",), older_keys=_longcat_flash),
    "llama4_text": Architecture("feed_forward.experts", part_of="llama4"),
    "mellum": _PLAIN,
    "mimo_v2_flash": Architecture(older_keys=_mimo_v2_flash),
    "minimax_m2": _BLOCK_SPARSE._replace(needed=("head_dim", "rope_parameters"), older_keys=_minimax_m2),
    "minimax_m3_vl_text": _BLOCK_SPARSE,
    "mistral4": _HALVES,
    "mixtral": _BLOCK_SPARSE,
    "nemotron_h": Architecture("mixer.switch_mlp"),
    "olmoe": _PLAIN,
    "phimoe": _BLOCK_SPARSE,
    "qwen2_moe": _PLAIN,
    "qwen3_5_moe_text": Architecture(one_more=True, part_of="qwen3_5_moe"),
    "qwen3_5_text": Architecture(None, one_more=True, part_of="qwen3_5"),
    "qwen3_moe": _PLAIN,
    "qwen3_next": Architecture(one_more=True),
    "qwen3_vl_moe_text": _PLAIN,
    "step3p5": Architecture(
        renamed={
            ".moe.gate.": ".mlp.gate.gate.",
            ".moe.router_bias": ".mlp.gate.router_bias",
            ".share_expert.": ".mlp.share_expert.",
        },
        one_more=True,
        without="step3p7",
        needed=("layer_types", "mlp_layer_types", "rope_parameters", "num_sliding_attention_heads"),
        older_keys=_step3p5,
    ),
    "solar_open": Architecture(needed=("moe_intermediate_size",), older_keys=_solar_open),
}
