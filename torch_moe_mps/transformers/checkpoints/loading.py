"""Loading a checkpoint of transformers as an accelerated model."""

import contextlib
import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
)

from ..._extension import ONE_THREAD
from ...quantization import Format
from ..accelerate import accelerate
from ..attention import require_kv_bits
from ..cache import grow_caches_in_place
from ..checked import allowed, working_kv_bits
from ..compiling import compile_kernels
from ..experts import NAME
from ..pipeline.loading import PipelineLoading, size_of
from ..pipeline.peers import Timeouts
from .config import QuantizationConfig, is_mlx, is_ours
from .mlx.reading import written_by_mlx
from .quantizer import Quantizer
from .recipe import ARGUMENTS, requested_recipe

# Model types that mlx-lm loads as another type, which transformers knows.
_SAME_MODEL = {"joyai_llm_flash": "deepseek_v3", "kimi_k2": "deepseek_v3"}
# Arguments of from_pretrained: a config would swallow the first; the others say where the files are.
_FOR_THE_MODEL = ("dtype", "torch_dtype")
_FOR_BOTH = (
    "cache_dir", "code_revision", "force_download", "local_files_only", "proxies", "revision", "subfolder",
    "token", "trust_remote_code",
)  # fmt: skip


def from_pretrained(
    name: str,
    model_class: type | None = None,
    *,
    kv_bits: int | None = None,
    check: bool = True,
    shares: Sequence[int] | None = None,
    loading_timeout: float = 1800.0,
    decoding_timeout: float = 60.0,
    **kwargs: Any,
) -> Any:
    """Load a model and accelerate it; with bits, each weight is quantised as soon as it is read.

    Loading needs the memory of the quantised model and one layer: the dense model never exists as a whole.
    MXFP4 experts (gpt-oss) stay in MXFP4 and are never dequantised; FP8 checkpoints are dequantised, then
    quantised.

    Args:
        name: folder or name on the Hub.
        model_class: a class of transformers; the default is AutoModelForCausalLM, or for a model type that it
            does not know AutoModelForImageTextToText.
        kv_bits: 8 for keys and values of the cache in 8 bits, as in `accelerate`.
        check: False leaves out the comparison with the CPU, as in `accelerate`.
        shares: of a pipeline (distributed_config=DistributedConfig(pp_size=2), docs/distributed.md): how many
            layers each process has; by default as many as its memory and bandwidth suggest.
        loading_timeout, decoding_timeout: how many seconds a process of a pipeline waits until the others
            have loaded, and until the layers of another have run on 512 tokens.
        kwargs: bits, group_size, mode, linear_bits, embedding_bits, keep and overrides, as in `accelerate`;
            weights that are quantised stay as they are. All others go to the from_pretrained of the class.

    Returns: what the class's from_pretrained returns: the model, in evaluation mode and accelerated; with
        output_loading_info, a tuple of that and the information. `model.hf_quantizer.report` says what was
        quantised.

    Raises: ValueError for a format that does not exist, or does not fit the weights, for parameters that the
        checkpoint lacks, for a checkpoint of MLX of a type of model that transformers does not know, and for
        a pipeline of a model that cannot be cut. PeerError if another process of a pipeline fails or differs.
    """
    asked = {name: kwargs.pop(name) for name in ARGUMENTS if name in kwargs}
    recipe = requested_recipe(**asked)  # its errors are raised before anything is loaded
    require_kv_bits("from_pretrained", kv_bits)
    cls: Any = model_class or AutoModelForCausalLM
    pipeline = None
    distributed = kwargs.get("distributed_config")
    if size_of(distributed, "pp_size") > 1:
        pipeline = _pipeline(name, model_class, asked, shares, (loading_timeout, decoding_timeout), kwargs)
    elif size_of(distributed, "ep_size") > 1:
        _check_expert_parallel(recipe is not None)
    elif shares is not None:
        expected = "given with distributed_config=DistributedConfig(pp_size=...)"
        raise ValueError(f"moe_mps::from_pretrained: shares must be {expected}, got none")
    if kwargs.get("quantization_config") is None:
        config, others = load_config(name, cls, kwargs)
        cls = model_class or class_for(config)
        stored = stored_in(name, config)
        quantization = quantization_of(stored, None if recipe is None else asked)
        if quantization is not None and not stored:
            kwargs["quantization_config"] = QuantizationConfig(**quantization)
        elif quantization is not None:
            config = copy.deepcopy(config)
            config.quantization_config = {"quant_method": NAME, **quantization}
            vars(config).pop("quantization", None)
            kwargs = {**others, "config": config}
    with_info = kwargs.pop("output_loading_info", False)
    reading = contextlib.nullcontext() if pipeline is None else pipeline.reading()
    with one_by_one(recipe is not None), allowed(check), reading:
        model, info = cls.from_pretrained(name, output_loading_info=True, **kwargs)
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        names = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise ValueError(f"moe_mps::from_pretrained: {names} must be in the checkpoint, got no such tensor")
    quantizer = getattr(model, "hf_quantizer", None)
    accelerated = isinstance(quantizer, Quantizer) and (recipe is None or quantizer.report is not None)
    if not accelerated:
        with allowed(check):
            accelerate(model.eval(), **({} if recipe is None else asked))
    if kv_bits is not None:
        with allowed(check):
            grow_caches_in_place(model, working_kv_bits(model, kv_bits))
        compile_kernels(model)
    if pipeline is not None:
        pipeline.finish(model)
    return (model, info) if with_info else model


def _check_expert_parallel(quantises: bool) -> None:
    """Raises: ValueError for what expert parallelism cannot do."""
    if torch.backends.mps.is_available():
        expected = "1 on a Mac until torch.distributed has a backend for mps; pp_size spreads layers"
        raise ValueError(f"moe_mps::from_pretrained: ep_size must be {expected}")
    if quantises:
        raise ValueError(
            "moe_mps::from_pretrained: bits must be None with ep_size, got a format; `torch-moe-mps convert` "
            "writes a quantised checkpoint, which can be loaded so"
        )


def _pipeline(
    name: str,
    model_class: Any,
    asked: Mapping[str, Any],
    shares: Sequence[int] | None,
    timeouts: tuple[float, float],
    kwargs: dict[str, Any],
) -> PipelineLoading:
    """The pipeline that was asked for; its argument leaves `kwargs`, as transformers has one of its own."""
    distributed = kwargs.pop("distributed_config")
    config, others = load_config(name, model_class or AutoModelForCausalLM, kwargs)
    cls = model_class or class_for(config)
    asked = {**asked, **{key: value for key, value in others.items() if key not in ("config", "device_map")}}
    return PipelineLoading(name, cls, config, distributed, shares, Timeouts(*timeouts), asked)


def class_for(config: PreTrainedConfig) -> Any:
    """The Auto class for a model with this config that generates text."""
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    if hasattr(config, "auto_map"):  # a class in the repository, for a type that transformers does not know
        return AutoModelForCausalLM
    expected = "of a model that generates text; give model_class for another"
    raise ValueError(f"moe_mps::from_pretrained: model_type must be {expected}, got {config.model_type!r}")


def stored_in(name: str, config: Any) -> dict[str, Any]:
    """The quantisation of a checkpoint, from its config, or its files if MLX wrote them; {} is dense."""
    stored = getattr(config, "quantization_config", None) or getattr(config, "quantization", None) or {}
    stored = dict(stored) if isinstance(stored, Mapping) else stored.to_dict()
    if is_mlx(stored) or (not stored and written_by_mlx(name)):
        return {"quant_method": NAME, "mlx": True}
    if is_ours(stored):
        return {**stored, "quant_method": NAME}
    method = stored.get("quant_method")
    return {**stored, "quant_method": getattr(method, "value", method)} if stored else {}


def quantization_of(stored: Mapping[str, Any], asked: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The arguments of QuantizationConfig for a checkpoint; None if no Quantizer of ours reads it."""
    if not stored:
        return None if asked is None else dict(asked)
    match stored["quant_method"]:
        case "moe_mps":
            return dict(stored)
        case "mxfp4":
            return Format(mode="mxfp4").to_dict()
        case "fp8" if asked is not None:
            return {**asked, "source": dict(stored)}
    return None


@contextlib.contextmanager
def one_by_one(enabled: bool) -> Iterator[None]:
    """Makes transformers read one tensor at a time: its four threads would read faster than we quantise."""
    before = os.environ.get(ONE_THREAD)
    if enabled:
        os.environ[ONE_THREAD] = "1"
    try:
        yield
    finally:
        if enabled:
            os.environ.pop(ONE_THREAD)
        if before is not None:
            os.environ[ONE_THREAD] = before


def _config_class(name: str, given: Mapping[str, Any]) -> Any:
    """AutoConfig, or the config class for a model type that only mlx-lm knows."""
    where = {key: value for key, value in given.items() if key in _FOR_BOTH}
    stored, _ = PreTrainedConfig.get_config_dict(name, **where)
    kind = stored.get("model_type")
    mlx = is_mlx(stored.get("quantization") or {}) or written_by_mlx(name)
    if not mlx or kind in CONFIG_MAPPING or where.get("trust_remote_code"):
        return AutoConfig
    if kind not in _SAME_MODEL:
        raise ValueError(f"moe_mps::from_pretrained: model_type must be one of transformers', got {kind!r}")
    return CONFIG_MAPPING[_SAME_MODEL[kind]]


def load_config(
    name: str, cls: type = AutoModelForCausalLM, kwargs: Mapping[str, Any] = MappingProxyType({})
) -> tuple[Any, dict[str, Any]]:
    """The config with its overrides from the arguments of cls.from_pretrained, and the other arguments."""
    others = {key: value for key, value in kwargs.items() if key != "config"}
    config = kwargs.get("config")
    if isinstance(config, PreTrainedConfig):
        return config, others
    given = {key: value for key, value in others.items() if key not in _FOR_THE_MODEL}
    config_class = getattr(cls, "config_class", None) or _config_class(str(config or name), given)
    config, unused = config_class.from_pretrained(config or name, return_unused_kwargs=True, **given)
    return config, {
        key: value for key, value in others.items() if key in {*unused, *_FOR_THE_MODEL, *_FOR_BOTH}
    }
