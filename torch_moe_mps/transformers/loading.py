"""Loading a checkpoint of transformers as an accelerated model."""

import contextlib
import copy
import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError

from .._text import shown
from ..checkpoints.calibration import importance_for
from ..checkpoints.cutting import is_cutting, loading_class
from ..checkpoints.mtp import note_folder
from ..checkpoints.on_disk import planned, reading_beside_the_disk
from ..checkpoints.own.config import QuantizationConfig
from ..checkpoints.quantize.importance import Importance, is_file_of_importance
from ..checkpoints.quantize.recipe import ARGUMENTS, requested_recipe
from ..checkpoints.quantizer import Quantizer
from ..checkpoints.source import NO_MODEL, Source
from ..checkpoints.threads import one_by_one, threads_crash
from ..macs import machine_memory
from ..models.attention.implementations import require_kv_bits
from ..models.basics.state import KVBits
from ..models.basics.unmodified import why_unmodified
from ..models.caches.cache import grow_caches_in_place
from ..models.modules.experts import NAME
from .accelerate import accelerate
from .compiling import compile_kernels
from .self_check import allowed, working_kv_bits

# Arguments of the class's `from_pretrained` that find, name and cast weights, which `Source` knows, too; and
# those that change nothing about experts. The fields of the config go with it.
_KNOWN_TO_THE_DISK = {
    "cache_dir", "code_revision", "device_map", "disable_mmap", "dtype", "force_download", "key_mapping",
    "local_files_only", "proxies", "revision", "subfolder", "token", "trust_remote_code", "variant",
    "attn_implementation", "experts_implementation", "generation_config", "low_cpu_mem_usage",
    "offload_state_dict", "output_loading_info", "tqdm_class", "weights_only",
}  # fmt: skip


class PartLoading(Protocol):
    """Loading of one part of a model, while other processes load the rest."""

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """Inside the block, transformers builds the model and reads its weights."""

    def finish(self, model: Any) -> None:
        """The part is loaded and accelerated."""


def from_pretrained(
    name: str,
    model_class: type | None = None,
    *,
    importance: Importance | str | os.PathLike | None = None,
    kv_bits: KVBits | None = None,
    check: bool = True,
    experts_memory: int | str | None = None,
    part: Callable[[Source, dict[str, Any]], PartLoading] | None = None,
    **kwargs: Any,
) -> Any:
    """Load a model and accelerate it; with bits, each weight is quantised as soon as it is read.

    Loading needs the memory of the quantised model and one layer: the dense model never exists as a whole.
    MXFP4 experts (gpt-oss) stay in MXFP4 and are never dequantised. What compressed-tensors, AutoAWQ,
    GPTQModel or ModelOpt have quantised stays packed, and needs none of these libraries
    (docs/third_party.md); 8-bit floats stay in 8 bits, or are quantised as asked.

    Args:
        name: folder, name on the Hub, or a GGUF file: FILE.gguf, or NAME:FILE.gguf on the Hub. Weights packed
            in such a file stay so, unless bits are given: then each matrix is dequantised and quantised
            while it is read. dtype="auto" is bfloat16. `gguf_file` names the file, too, as in transformers.
        model_class: a class of transformers; the default is the one that the config names, or else
            AutoModelForCausalLM or AutoModelForImageTextToText.
        importance: with bits, an importance matrix that weighs quantisation errors: an Importance, a file of
            it, as in `accelerate`, or a text, which runs through the model first; "auto" is a built-in one. A
            model that would fill 0.4 of the memory runs quantised for that, and is quantised again.
        kv_bits: 8, 4 or "k4v2" for keys and values of the cache in fewer bits, as in `accelerate`.
        check: False leaves out the comparison with the CPU, as in `accelerate`.
        experts_memory: bytes, or a text such as "20GB": so much memory holds the experts that were needed
            last; the others are read from a file of them, which is written beside the checkpoint first.
            "auto" does so where the model is larger than memory and that file is there or can be written.
            Arguments of the class's from_pretrained that this takes no account of are refused.
        part: makes what loads a part of the model in this process, of the checkpoint and the arguments that
            all processes must have alike; `torch_moe_mps.pipeline.from_pretrained` gives it.
        kwargs: bits, group_size, mode, linear_bits, embedding_bits, keep and overrides, as in `accelerate`;
            packed weights, but those of GGUF and 8-bit floats, stay as they are. A QuantizationConfig of this
            package stands for them. All others go to the from_pretrained of the class.

    Returns: what the class's from_pretrained returns: the model, in evaluation mode and accelerated; with
        output_loading_info, a tuple of that and the information. `model.hf_quantizer.report` says what was
        quantised.

    Raises: ValueError for importance of another model, without bits, or of too little text, for a format that
        does not exist, does not fit the weights, or would change packed ones, for parameters that the file
        lacks (but for a head that `model_class` adds to the saved class, which transformers initialises), for
        a file that is truncated, for a checkpoint of MLX of a type of model that transformers does not know,
        and for a `distributed_config` that spreads layers over processes.
    """
    asked, importance = _asked_quantization(kwargs, importance)
    recipe = requested_recipe(**asked)  # its errors are raised before anything is loaded
    wanted = None if recipe is None else asked
    require_kv_bits("from_pretrained", kv_bits)
    _require_one_process(kwargs)
    if experts_memory is not None:
        _refuse_with_experts_memory(importance=importance, distributed_config=part)
    name = _with_gguf_file(name, kwargs.pop("gguf_file", None))
    source = Source(name, kwargs, model_class)
    if experts_memory is not None:
        _refuse_with_experts_memory(**_not_known_to_the_disk(source.others))
    if source.gguf is not None:
        kwargs = _of_gguf(source, kwargs)
    if part is not None:
        _require_no_text(importance)
    if importance is not None:
        importance = _importance(
            importance, source, name, model_class, asked, recipe is not None, check, kwargs
        )
    alike = asked | {key: value for key, value in source.others.items() if key != "device_map"}
    loading = None if part is None else part(source, alike)
    plan = None if experts_memory is None else planned(source, wanted, experts_memory)
    kwargs = _with_quantization(kwargs, source, wanted, importance)
    with_info = kwargs.pop("output_loading_info", False)
    reading = _reading(source, wanted, plan, loading)
    with allowed(check):
        # Weights of several tensors, or of another format, are made before the next ones are read.
        alone = recipe is not None or source.by_others or threads_crash()
        with one_by_one(alone), reading:
            model, info = _read(source, kwargs)
        _check_complete(model, source, info["missing_keys"])
        note_folder(model, source.folder)
        _accelerate(model, importance, wanted, kv_bits)
    if loading is not None:
        loading.finish(model)
    return (model, info) if with_info else model


def _reading(source: Source, wanted: Any, plan: Any, loading: Any) -> Any:
    """Context of reading a checkpoint: what stays on the disk, or in other processes, is left out."""
    if plan is not None:
        return reading_beside_the_disk(source, wanted, plan)
    return contextlib.nullcontext() if loading is None else loading.reading()


def _asked_quantization(kwargs: dict[str, Any], importance: Any) -> tuple[dict[str, Any], Any]:
    """Arguments of a recipe, taken out of kwargs, and the importance; a config of ours stands for both."""
    asked = {name: kwargs.pop(name) for name in ARGUMENTS if name in kwargs}
    config = kwargs.get("quantization_config")
    if not isinstance(config, QuantizationConfig) or asked:
        return asked, importance
    del kwargs["quantization_config"]
    return config.arguments(), importance or config.importance


def _with_gguf_file(name: str, file: str | None) -> str:
    """The name of a checkpoint with the GGUF file in it, if one is named beside."""
    if file is None:
        return name
    return str(Path(name, file)) if Path(name).is_dir() else f"{name}:{file}"


def _of_gguf(source: Source, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the class's from_pretrained for a GGUF file."""
    dtype = source.others.get("dtype")
    usual = torch.bfloat16 if dtype == "auto" else torch.get_default_dtype()
    options = {"dtype": usual if dtype in (None, "auto") else dtype}
    if getattr(kwargs.get("quantization_config"), "dequantize", False):  # transformers reads it
        if len(source.files) > 1:
            expected = "in one part where transformers dequantises it"
            raise ValueError(
                f"moe_mps::gguf: {source.file} must be {expected}, got {len(source.files)} parts"
            )
        return {**kwargs, **options, "config": source.config, "gguf_file": source.gguf}
    return {**source.others, **options, "config": source.config}


def _accelerate(model: Any, importance: Any, asked: dict[str, Any] | None, kv_bits: KVBits | None) -> None:
    """Accelerates a model that was read, unless its quantizer has, and sets the bits of its caches."""
    if not isinstance(getattr(model, "hf_quantizer", None), Quantizer):
        done = accelerate(model.eval(), importance=importance, **(asked or {}))
        if asked is not None:
            model.hf_quantizer.report = done.quantization
    if kv_bits is not None and why_unmodified(model) is None:
        grow_caches_in_place(model, working_kv_bits(model, kv_bits))
        compile_kernels(model)


def _not_known_to_the_disk(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the class's `from_pretrained` that reading experts from the disk takes no account of."""
    return {
        name: value
        for name, value in arguments.items()
        if name not in _KNOWN_TO_THE_DISK or (isinstance(value, dict) and name == "dtype")
        if value is not (name == "use_safetensors")
    }


def _refuse_with_experts_memory(**others: Any) -> None:
    """Raises: ValueError for an argument that needs all experts in memory."""
    for name, value in others.items():
        if value is not None:
            expected = "None where experts are on the disk"
            got = shown(value) if isinstance(value, str | bool | int | float) else type(value).__name__
            way = f"leave out {name} or experts_memory"
            raise ValueError(f"moe_mps::from_pretrained: {name} must be {expected}, got {got}: {way}")


def _require_no_text(importance: Importance | str | os.PathLike | None) -> None:
    """Raises: ValueError for importance that a process with some of the layers cannot measure."""
    if isinstance(importance, str) and not is_file_of_importance(Path(importance)):
        expected = "an Importance or a file of it, where layers are spread"
        raise ValueError(f"moe_mps::from_pretrained: importance must be {expected}, got a text")


def _require_one_process(kwargs: dict[str, Any]) -> None:
    spread = getattr(kwargs.get("distributed_config"), "pp_size", None) or 1
    if spread > 1:  # transformers would make a pipeline of its own
        expected = "of pp_size 1: torch_moe_mps.pipeline.from_pretrained spreads layers over processes"
        raise ValueError(f"moe_mps::from_pretrained: distributed_config must be {expected}, got {spread}")


def _read(source: Source, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    try:
        return _load(source, kwargs)
    except NO_MODEL:
        source.skeleton()  # says so, if the config is the reason
        raise
    except RuntimeError as error:
        if (mapped := re.search(r"unable to mmap (\d+) bytes", str(error))) is None:
            raise
        raise ValueError(_too_large(source, int(mapped[1]))) from error
    except SafetensorError:  # does not name its file
        source.check_files()
        raise


def _load(source: Source, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Model and loading information of the class's `from_pretrained`."""
    cls, reads_gguf = source.cls, source.gguf is not None and "gguf_file" not in kwargs
    if reads_gguf or is_cutting():
        cls = loading_class(source.model_class())
    if not reads_gguf:
        return cls.from_pretrained(source.path, output_loading_info=True, **kwargs)
    # The quantizer reads the file: transformers looks for none, and asks for no generation config.
    model, info = cls.from_pretrained(None, state_dict={}, output_loading_info=True, **kwargs)
    model.config.name_or_path = model.name_or_path = source.path
    return model, info


def _too_large(source: Source, size: int) -> str:
    """Why a file of weights cannot be mapped, and which command prints what fits."""
    sizes = (
        f"a file of {size / 1e9:.1f} GB cannot be mapped on a machine with {machine_memory() / 1e9:.1f} GB"
    )
    return f"{source.path}: {sizes}; `torch-moe-mps fit {source.path}` prints what fits"


def _importance(
    importance: Importance | str | os.PathLike,
    source: Source,
    name: str,
    model_class: type | None,
    asked: dict[str, Any],
    quantises: bool,
    check: bool,
    kwargs: dict[str, Any],
) -> Importance:
    """The importance matrix: given, of a file, or measured on a model that is loaded for it."""
    if not quantises:
        raise ValueError("moe_mps::from_pretrained: importance needs bits or a mode, got neither")
    excluded = {"config", "gguf_file", "quantization_config", "output_loading_info", "distributed_config"}
    others = {key: value for key, value in kwargs.items() if key not in excluded}

    def load(dense: bool) -> Any:
        return from_pretrained(name, model_class, check=check, **others, **({} if dense else asked))

    return importance_for("from_pretrained", importance, source, load)


def _with_quantization(
    kwargs: dict[str, Any], source: Source, asked: Any, importance: Importance | None
) -> dict[str, Any]:
    """Arguments of from_pretrained, with a quantization config if Quantizer reads the checkpoint."""
    quantization = source.quantization(asked, importance=importance)
    passed_config = kwargs.get("quantization_config")
    if quantization is None or (passed_config is not None and (source.gguf is None or "gguf_file" in kwargs)):
        return kwargs
    if not source.stored:
        return kwargs | {"quantization_config": QuantizationConfig(**quantization)}
    config = copy.deepcopy(source.config)
    config.quantization_config = {"quant_method": NAME, **quantization}
    vars(config).pop("quantization", None)
    return {**source.others, "config": config}


def _check_complete(model: Any, source: Source, names: Collection[str]) -> None:
    """Raises: ValueError for missing weights, but of a head that the class has and the saved one had not."""
    is_other = type(model).__name__ not in (source.config.architectures or (type(model).__name__,))
    base = model.base_model_prefix
    prefix = f"{base}." if is_other and base and hasattr(model, base) else ""
    missing = sorted(name for name in names if name.startswith(prefix))
    if missing:
        names = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise ValueError(f"moe_mps::from_pretrained: {names} must be in the checkpoint, got no such tensor")
