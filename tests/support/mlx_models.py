"""Tiny models as MLX writes them, by mlx-lm, whose logits are the oracle."""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from support import tiny_models

# Architectures that mlx-lm's model code and transformers' compute alike, and what their configs need for it.
PLAIN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
ARCHITECTURES: dict[str, dict] = {
    "afmoe": {"layer_types": ["sliding_attention", "full_attention"]},
    "deepseek_v2": {},
    "deepseek_v3": {},
    "deepseek_v32": {},
    "dots1": {},
    "ernie4_5_moe": {},
    "exaone_moe": {},
    "gemma4": {"final_logit_softcapping": 30.0},
    "glm4_moe": {},
    "glm4_moe_lite": {"rms_norm_eps": 1e-6},
    "glm_moe_dsa": {},
    "gpt_oss": PLAIN_ROPE,
    "granitemoe": {},
    "jamba": {},
    "laguna": {},
    "lfm2_moe": {},
    "mellum": {"mlp_layer_types": ["sparse", "sparse"]},
    "minimax_m2": {},
    "mixtral": {"head_dim": 16},
    "nemotron_h": {},
    "olmoe": {},
    "phimoe": {"attention_bias": True, "lm_head_bias": True},
    "qwen2_moe": {},
    "qwen3_5_moe": {},
    "qwen3_moe": {},
    "qwen3_next": {},
    "solar_open": {},
}
# Keys that mlx-lm reads, and None where a key of others would be misread; by the type of the model.
OLDER_KEYS: dict[str, dict] = {
    "exaone_moe": {"is_moe_layer": [False, True]},
    "gemma4_text": {"global_head_dim": 8, "rope_scaling": None},
    "glm4_moe_lite": {"head_dim": None},
    "glm_moe_dsa": {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1},
    "laguna": {"rope_scaling": None},
    "mellum": {"rope_scaling": None},
    "qwen3_5_moe_text": {"model_type": "qwen3_5_moe", "rope_scaling": None},
    "solar_open": {"intermediate_size": 64, "first_k_dense_replace": 0},
}
SIZES = {
    "vocab_size": 96,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "shared_expert_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 64,
}
UNSCALED = {
    "type": "yarn", "factor": 1.0, "original_max_position_embeddings": 256,
    "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip


def tiny(architecture: str):
    with tiny_models.groups_of_32(), tiny_models.sizes(**SIZES):
        return tiny_models.tiny_model(architecture, **ARCHITECTURES[architecture])


def write(
    model, folder: Path, bits: int | None, group_size: int = 32, mode: str = "affine", predicate=None, **keys
):
    """mlx-lm's model as it reads back what it wrote, dense with bits of None; `keys` are for its config."""
    from mlx_lm import utils

    dense = folder / "dense"
    merged = model.config.model_type == "qwen3_5_moe_text"  # as in its checkpoints
    model.save_pretrained(dense, save_original_format=not merged)
    (dense / "config.json").write_text(json.dumps(with_older_keys(model.config.to_dict()) | keys))
    if model.config.model_type == "gpt_oss":
        _split_gate_and_up(dense / "model.safetensors")
    converted, config = utils.load_model(dense)
    if bits is not None:
        converted, config = utils.quantize_model(
            converted, config, group_size, bits, mode=mode, quant_predicate=predicate
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


def logits(converted, ids: torch.Tensor) -> torch.Tensor:
    import mlx.core as mx

    return torch.from_numpy(np.array(converted(mx.array(ids.numpy())).astype(mx.float32)))


def with_older_keys(config: dict) -> dict:
    """A config of transformers 5 with the keys that mlx-lm reads."""
    rope = config.get("rope_parameters") or {}
    older = {
        "rope_theta": rope.get("rope_theta", 10000.0),
        "rope_scaling": UNSCALED if config["model_type"] == "deepseek_v2" else None,
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0),
        "head_dim": config["hidden_size"] // config["num_attention_heads"],
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
    return {key: value for key, value in older.items() if key not in dropped}


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
