"""Keys that mlx-lm reads in a config.json, and transformers 5 writes under other names or in another form."""

from collections.abc import Mapping

from .architectures import ARCHITECTURES, Architecture, Config

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
# Values that take the place of a key of the same name.
_REPLACED = ("architectures", "layer_types", "q_lora_rank")


def with_older_keys(config: Config) -> Config:
    """A config with these keys added; existing keys are unchanged.

    Raises: ValueError for an architecture whose keys for mlx-lm transformers 5 does not write in full.
    """
    if isinstance(config.get("text_config"), Mapping):
        text = with_older_keys(config["text_config"])
        whole = {key: text[key] for key in ("vocab_size",) if key in text}
        return whole | config | {"text_config": text}
    older = _of_all(config)
    older |= {key: value for key, value in config.items() if value is not None or key not in older}
    architecture = ARCHITECTURES.get(config.get("model_type", ""), Architecture())
    if all(key in older for key in architecture.needed):  # else the config is an original one
        more = architecture.older_keys(older)
        older |= {key: value for key, value in more.items() if key not in config or key in _REPLACED}
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
