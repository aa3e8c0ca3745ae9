"""Loading a checkpoint of transformers as an accelerated model."""

import copy
from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from ..quantization import Format, requested_format
from .accelerate import accelerate
from .experts import NAME

# Arguments of from_pretrained that a config would keep to itself, and those that say where both files are.
_FOR_THE_MODEL = ("dtype", "torch_dtype")
_FOR_BOTH = (
    "cache_dir", "code_revision", "force_download", "local_files_only", "proxies", "revision", "subfolder",
    "token", "trust_remote_code",
)  # fmt: skip


def from_pretrained(
    name: str,
    model_class: type | None = None,
    *,
    bits: int | None = None,
    group_size: int | None = None,
    mode: str | None = None,
    **kwargs: Any,
) -> Any:
    """Load a model and accelerate it; MXFP4 experts (gpt-oss) stay in MXFP4 and are never dequantised.

    Args:
        name: folder or name on the Hub.
        model_class: of transformers; AutoModelForCausalLM unless given.
        bits, group_size, mode: as in `accelerate`, for dense experts; quantised ones stay as they are.
        kwargs: for its from_pretrained.

    Returns: what its from_pretrained returns: the model, in evaluation mode and accelerated; with
        output_loading_info, a tuple of that and the information.

    Raises: ValueError for a format that does not exist, or does not fit the weights, and for parameters that
        the checkpoint lacks.
    """
    requested_format(bits, group_size, mode)  # before anything is loaded
    cls = model_class or AutoModelForCausalLM
    if kwargs.get("quantization_config") is None:
        kwargs = _without_dequantising(name, cls, kwargs)
    with_info = kwargs.pop("output_loading_info", False)
    model, info = cls.from_pretrained(name, output_loading_info=True, **kwargs)
    if info["missing_keys"]:
        names = ", ".join(sorted(info["missing_keys"]))
        raise ValueError(f"moe_mps::from_pretrained: {names} must be in the checkpoint, got no such tensor")
    accelerate(model.eval(), bits, group_size, mode)
    return (model, info) if with_info else model


def _without_dequantising(name: str, cls: type, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of cls.from_pretrained; a config for MXFP4 experts is changed to keep them."""
    config, others = _load_config(name, cls, kwargs)
    stored = getattr(config, "quantization_config", None) or {}
    stored = stored if isinstance(stored, Mapping) else stored.to_dict()
    if stored.get("quant_method") != "mxfp4":
        return kwargs
    config = copy.deepcopy(config)
    config.quantization_config = {"quant_method": NAME, **Format(mode="mxfp4").to_dict()}
    return {**others, "config": config}


def _load_config(name: str, cls: type, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The config with its overrides among the arguments of cls.from_pretrained, and the other arguments."""
    others = {key: value for key, value in kwargs.items() if key != "config"}
    config = kwargs.get("config")
    if isinstance(config, PreTrainedConfig):
        return config, others
    given = {key: value for key, value in others.items() if key not in _FOR_THE_MODEL}
    config_class = getattr(cls, "config_class", None) or AutoConfig
    config, unused = config_class.from_pretrained(config or name, return_unused_kwargs=True, **given)
    return config, {
        key: value for key, value in others.items() if key in {*unused, *_FOR_THE_MODEL, *_FOR_BOTH}
    }
