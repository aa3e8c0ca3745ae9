"""Tiny checkpoints written by mlx-lm; its logits are the oracle."""

import json
import re
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

import torch_moe_mps
from support import tiny_models
from support.checkpoints import changed, drop_zero_experts
from support.models import output, prompt
from torch_moe_mps.checkpoints.mlx.writing import save_mlx

NULL = "null"  # what a config must say, where None among the keys below stands for no such key
# Architectures that mlx-lm's model code and transformers' compute alike, and what their configs need for it.
UNSCALED = {
    "type": "yarn", "factor": 1.0, "original_max_position_embeddings": 256,
    "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
PLAIN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
ARCHITECTURES: dict[str, dict] = {
    "afmoe": {"layer_types": ["sliding_attention", "full_attention"]},
    "bailing_hybrid": {"layer_group_size": 2},
    "dbrx": {"ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 8, "moe_top_k": 2}},
    "deepseek_v2": {"rope_parameters": UNSCALED | {"rope_type": "yarn", "rope_theta": 10000.0}},
    "deepseek_v3": {},
    "deepseek_v32": {},
    "dots1": {},
    "ernie4_5_moe": {},
    "exaone_moe": {},
    "gemma4": {"final_logit_softcapping": 30.0},
    "gemma4 with vision": {"final_logit_softcapping": 30.0},
    "glm4_moe": {},
    "glm4_moe_lite": {"rms_norm_eps": 1e-6},
    "glm_moe_dsa": {},
    "gpt_oss": PLAIN_ROPE,
    "granitemoe": {},
    "granitemoehybrid": {"position_embedding_type": "rope"},
    "jamba": {},
    "kimi_k25": {},
    "kimi_linear": {"q_lora_rank": None},
    "laguna": {},
    "lfm2_moe": {},
    "llama4": {"num_hidden_layers": 4, "interleave_moe_layer_step": 2, "rms_norm_eps": 1e-6},
    "longcat_flash": {},
    "mellum": {"mlp_layer_types": ["sparse", "sparse"]},
    "mimo_v2_flash": {
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.5}
            for kind, theta in (("full_attention", 5e6), ("sliding_attention", 1e4))
        },
    },
    "minimax_m2": {},
    "minimax_m3_vl": {"rotary_dim": 8},
    "mistral3": {"head_dim": 40},
    "mistral4": {"head_dim": 40},
    "mixtral": {"head_dim": 16},
    "nemotron_h": {},
    "olmoe": {},
    "phimoe": {"attention_bias": True, "lm_head_bias": True},
    "qwen2_moe": {},
    "qwen3_5_moe": {},
    "qwen3_5_moe with vision": {},
    "qwen3_moe": {},
    "qwen3_next": {},
    "qwen3_vl_moe": {"tie_word_embeddings": False},
    "solar_open": {},
    "step3p5": {
        "num_sliding_attention_heads": 8,
        "mlp_layer_types": ["dense", "sparse"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
        },
    },
}
# Keys that mlx-lm reads, and None where a key of others would be misread; by the type of the model.
OLDER_KEYS: dict[str, dict] = {
    "bailing_hybrid": {
        "architectures": ["BailingMoeV3ForCausalLM"],
        "layer_group_size": 2,
        "moe_shared_expert_intermediate_size": 64,
        "num_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
    },
    "exaone_moe": {"is_moe_layer": [False, True]},
    "gemma3_text": {"sliding_window_pattern": 2, "rope_theta": 1e6},
    "gemma4": {"vocab_size": 96},
    "gemma4_text": {"global_head_dim": 8, "rope_scaling": None},
    "glm4_moe_lite": {"head_dim": None},
    "glm_moe_dsa": {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "kimi_linear": {
        "linear_attn_config": {
            "full_attn_layers": [2],
            "kda_layers": [1],
            "head_dim": 8,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
        "model_max_length": 256,
        "mla_use_nope": True,
        "first_k_dense_replace": 1,
        "num_expert_group": 2,
    },
    "laguna": {"rope_scaling": None},
    "mellum": {"rope_scaling": None},
    "longcat_flash": {
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "norm_topk_prob": False,
    },
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1],
        "moe_layer_freq": [0, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": 128,
        "n_shared_experts": NULL,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "layernorm_epsilon": 1e-5,
        "rope_scaling": None,
        "rope_theta": 5e6,
        "swa_rope_theta": 1e4,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 8,
        "swa_v_head_dim": 32,
        "partial_rotary_factor": 0.5,
    },
    "minimax_m3_vl_text": {"rotary_dim": 8},
    "qwen3_5_moe_text": {"model_type": "qwen3_5_moe", "rope_scaling": None},
    "solar_open": {"intermediate_size": 64, "first_k_dense_replace": 0},
    "step3p5": {
        "num_attention_groups": 2,
        "attention_other_setting": {"num_attention_heads": 8, "num_attention_groups": 2},
        "moe_num_experts": 8,
        "moe_top_k": 2,
        "moe_layers_enum": "1",
        "rope_theta": [1e4, 5e6],
        "partial_rotary_factors": [1.0, 0.5],
        "rope_scaling": None,
        "swiglu_limits": [0.0, 0.5],
    },
}
# Models of which mlx-lm has the language model: their classes, and those of its config.
COMPOSITES = {
    "gemma4 with vision": ("Gemma4ForConditionalGeneration", "Gemma4TextConfig"),
    "kimi_k25": ("Kimi_K25ForConditionalGeneration", "DeepseekV3Config"),
    "llama4": ("Llama4ForConditionalGeneration", "Llama4TextConfig"),
    "minimax_m3_vl": ("MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3VLTextConfig"),
    "mistral3": ("Mistral3ForConditionalGeneration", "Mistral4Config"),
    "qwen3_5 with vision": ("Qwen3_5ForConditionalGeneration", "Qwen3_5TextConfig"),
    "qwen3_5_moe with vision": ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeTextConfig"),
    "step3p5": ("Step3p7ForConditionalGeneration", "Step3p7TextConfig"),
    "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration", "Qwen3VLMoeTextConfig"),
}
# Names that transformers writes differently from the architecture's checkpoints.
CHECKPOINT_NAMES = {
    "bailing_hybrid": {r"(layers\.0\.attention)\.dense\.": r"\1.o_proj."},
    "kimi_k25": {
        r"^(language_model\.model)\.blocks\.": r"\1.layers.",
        r"^model\.mm_projector": "mm_projector",
    },
    "kimi_linear": {r"(layers\.0)\.block_sparse_moe\.(\w+)_proj\.": r"\1.mlp.\2_proj."},
}
# Models without experts whose relatives have some.
WITHOUT_EXPERTS: dict[str, dict] = {
    "gemma4 without experts": {"enable_moe_block": False, "final_logit_softcapping": 30.0},
    "gemma4 with tables of layers without experts": tiny_models.SMALL_GEMMA4,
    "qwen3_5": {},
    "qwen3_5 with vision": {},
}
TOWER = {"projection_dim": 32, "vision_output_dim": 64}
SIZES = {
    "vocab_size": 96,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "shared_expert_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 64,
}


def tiny(architecture: str):
    overrides = (ARCHITECTURES | WITHOUT_EXPERTS)[architecture]
    architecture = architecture.partition(" with")[0] if "without" in architecture else architecture
    with tiny_models.groups_of_32(), tiny_models.sizes(**SIZES):
        if architecture not in COMPOSITES:
            return tiny_models.tiny_model(architecture, **overrides)
        name, text = COMPOSITES[architecture]
        with tiny_models.sizes(**TOWER):
            return composite(getattr(transformers, name), text, **overrides)


def composite(cls, text: str, **overrides):
    """A multimodal model; `overrides` are for the config of its language model, `text`."""
    part = tiny_models.build_config(getattr(transformers, text), **overrides)
    tied = part.tie_word_embeddings
    torch.manual_seed(0)
    model = cls(tiny_models.build_config(cls.config_class, text_config=part, tie_word_embeddings=tied))
    tiny_models.randomise(model, 0)
    return model.eval()


def write(
    model,
    folder: Path,
    bits: int | None,
    group_size: int = 32,
    mode: str = "affine",
    predicate=None,
    global_scale: bool = False,
    **keys,
):
    """mlx-lm's model as it reads back what it wrote, dense with bits of None; `keys` are for its config."""
    from mlx_lm import utils

    dense = folder / "dense"
    merged = model.config.get_text_config().model_type == "qwen3_5_moe_text"  # as in its checkpoints
    model.save_pretrained(dense, save_original_format=not merged)
    config = model.config.to_dict()
    if model.config.model_type == "step3p7":  # mlx-lm has its language model alone
        config = config["text_config"]
        with changed(dense / "model.safetensors") as tensors:
            for name in [name for name in tensors if name.startswith("vi")]:
                del tensors[name]
    (dense / "config.json").write_text(json.dumps(with_older_keys(config) | keys))
    if model.config.model_type == "gpt_oss":
        _split_gate_and_up(dense / "model.safetensors")
    if model.config.model_type == "qwen3_vl_moe":
        _transpose_experts(dense / "model.safetensors")
    if model.config.model_type == "longcat_flash":
        drop_zero_experts(dense / "model.safetensors", model.config.n_routed_experts)
    _rename(dense / "model.safetensors", CHECKPOINT_NAMES.get(model.config.model_type, {}))
    converted, config = utils.load_model(dense)
    if bits is not None:
        converted, config = utils.quantize_model(
            converted,
            config,
            group_size,
            bits,
            mode=mode,
            quant_predicate=predicate,
            global_scale=global_scale,
        )
        config["quantization_config"] = config["quantization"]
    utils.save_model(folder / "mlx", converted)
    utils.save_config(config, folder / "mlx" / "config.json")
    return read(folder / "mlx")


def read(folder: Path):
    """mlx-lm's model of a folder."""
    from mlx_lm import utils

    _let_jamba_route_as_transformers()
    return utils.load_model(folder)[0]


def logits(converted) -> torch.Tensor:
    """mlx-lm's, of the prompt."""
    import mlx.core as mx

    return torch.from_numpy(np.array(converted(mx.array(prompt().numpy())).astype(mx.float32)))


def load(folder: Path, cls: type | None = None, **options):
    """The model of transformers that what `write` wrote is read into."""
    options = {"dtype": torch.float32, "attn_implementation": "eager"} | options
    return torch_moe_mps.from_pretrained(f"{folder}/mlx", cls, **options)


def write_back(loaded, folder: Path):
    """mlx-lm's model of what is written for it, into another folder."""
    (folder / "back").mkdir()
    save_mlx(loaded, folder / "back", json.loads((folder / "mlx" / "config.json").read_text()))
    return read(folder / "back")


def both_ways(model, folder: Path, *format) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of mlx-lm's model, of the one that is read here, and of mlx-lm's that is written back."""
    theirs = logits(write(model, folder, *format))
    loaded = load(folder, type(model))
    return theirs, output(loaded, prompt()), logits(write_back(loaded, folder))


def with_older_keys(config: dict) -> dict:
    """A config of transformers 5 with the keys that mlx-lm reads."""
    if "text_config" in config:
        text = with_older_keys(config["text_config"])
        return config | {"text_config": text} | OLDER_KEYS.get(config["model_type"], {})
    rope = config.get("rope_parameters") or {}
    older = {
        "rope_theta": rope.get("rope_theta", 10000.0),
        "rope_scaling": UNSCALED if config["model_type"] == "deepseek_v2" else None,
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0),
        "head_dim": config.get("hidden_size", 0) // config.get("num_attention_heads", 1),
        "norm_topk_prob": True,
        "shared_intermediate_size": config.get("intermediate_size"),
        "rotary_dim": config.get("head_dim"),
        "full_attention_interval": 2,
    }
    experts = (
        config.get("num_local_experts") or config.get("n_routed_experts") or config.get("num_experts") or 8
    )
    older |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), experts)
    older |= {key: value for key, value in config.items() if value is not None}
    older |= OLDER_KEYS.get(config["model_type"], {})
    dropped = [key for key, value in OLDER_KEYS.get(config["model_type"], {}).items() if value is None]
    kept = {key: value for key, value in older.items() if key not in dropped}
    return {key: None if value == NULL else value for key, value in kept.items()}


def _rename(path: Path, patterns: dict[str, str]) -> None:
    if not patterns:
        return
    tensors = load_file(path)
    for pattern, name in patterns.items():
        tensors = {re.sub(pattern, name, old): tensor for old, tensor in tensors.items()}
    save_file(tensors, path, metadata={"format": "pt"})


def _split_gate_and_up(path: Path) -> None:
    """The dense experts of gpt-oss, with the names that mlx-lm has for them."""
    tensors = load_file(path)
    for name in [n for n in tensors if ".experts." in n]:
        value = tensors.pop(name)
        name, part = name.removesuffix("_bias"), "bias" if name.endswith("_bias") else "weight"
        value = value.mT if part == "weight" else value
        if name.endswith("gate_up_proj"):
            for row, half in enumerate(("gate_proj", "up_proj")):
                tensors[f"{name.removesuffix('gate_up_proj')}{half}.{part}"] = value[:, row::2].contiguous()
        else:
            tensors[f"{name}.{part}"] = value.contiguous()
    save_file(tensors, path, metadata={"format": "pt"})


def _transpose_experts(path: Path) -> None:
    """Checkpoints of Qwen3-VL have experts [input, output]."""
    tensors = load_file(path)
    swapped = {name: tensor.mT.contiguous() for name, tensor in tensors.items() if ".experts." in name}
    save_file(tensors | swapped, path, metadata={"format": "pt"})


def _let_jamba_route_as_transformers() -> None:
    """mlx-lm normalises the weights of Jamba's experts to a sum of 1, which the model does not."""
    import mlx.core as mx
    from mlx_lm.models import jamba

    def forward(self, x):
        scores = mx.softmax(self.router(x), axis=-1, precise=True)
        chosen = mx.argpartition(-scores, kth=self.num_experts_per_tok - 1, axis=-1)
        chosen = chosen[..., : self.num_experts_per_tok]
        weights = mx.take_along_axis(scores, chosen, axis=-1)
        return (self.switch_mlp(x, chosen) * weights[..., None]).sum(axis=-2)

    jamba.JambaSparseMoeBlock.__call__ = forward
