"""Config, class and quantisation of a checkpoint, read before its weights."""

import contextlib
import copy
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    TOKENIZER_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from .._hub import folder_in_the_cache
from .._text import first_line, parts_of, split_gguf
from ..models.modules.experts import NAME
from ..models.upstream.models import auto_class_of, cached_file, get_class_from_dynamic_module
from ..models.upstream.weights import AutoHfQuantizer
from ..quantization import Format
from .gguf.file import stated_config
from .gguf.header import present_parts
from .gguf.rope import set_rope
from .gguf.splits import check_splits, set_splits
from .layouts.files import INDEX, check_index, checkpoint_files, sample_of, tensors_in
from .mlx.reading import written_by_mlx
from .own.config import is_mlx, is_ours
from .stacks import conversions_of, settle_stacks
from .third_party.schemes import METHODS, modelopt_beside

# Model types that mlx-lm loads as another type, which transformers knows.
_SAME_MODEL = {"joyai_llm_flash": "deepseek_v3", "kimi_k2": "deepseek_v3"}
# Types of text alone that transformers has only within a type of more.
_WITHIN = {"qwen3_vl_text": "qwen3_vl", "qwen3_vl_moe_text": "qwen3_vl_moe", "step3p5": "step3p7"}
# Arguments of from_pretrained: a config would swallow the first; the others say where the files are.
_FOR_THE_MODEL = ("dtype",)
_FOR_BOTH = (
    "cache_dir", "code_revision", "force_download", "local_files_only", "proxies", "revision", "subfolder",
    "token", "trust_remote_code",
)  # fmt: skip
# Files of a tokenizer, of all kinds that transformers reads.
_TOKENIZERS = (
    "tokenizer*", "tokenization*", "vocab*", "merges*", "tekken*", "*.model", "*.tiktoken", "*.spm", "*.bpe"
)  # fmt: skip
# Names that transformers' configs have for the experts of a layer, and for those that a token is routed to.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_IDENTITY = "zero_expert_num"  # LongCat: a router chooses them, too, and they return their input
_CHOSEN = (
    "num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k"
)  # fmt: skip
_WHERE = ("cache_dir", "local_files_only", "revision", "subfolder", "token")
_FOR_CODE = ("code_revision", "trust_remote_code")
# Dtypes that a model can have, by their names in files.
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Errors of models' code for a config in which a value is missing, or is one that it cannot compute with.
NO_MODEL = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError)


def _wrong_config(expected: str, error: Exception) -> ValueError:
    strict = isinstance(error, StrictDataclassError)  # its second line says what is wrong
    reason = " ".join(str(error).split()) if strict else first_line(error)
    got = f"one that raises {type(error).__name__}: {reason}"
    return ValueError(f"moe_mps::from_pretrained: the config must be {expected}, got {got}")


def read_tokenizer(path: str, gguf: str | None, trust_remote_code: bool) -> Any:
    """The tokenizer of a checkpoint, by what `split_gguf` gives.

    Raises: ValueError for a folder without one: transformers would make an empty one for some models. For a
        GGUF file without one, and for one whose way to split text is not known.
    """
    folder = Path(path)
    if gguf is None:
        if folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in _TOKENIZERS):
            raise ValueError(f"{path} has no tokenizer")
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    try:
        file = _cached_gguf(path, gguf)
        check_splits(file)
        config, _ = _config_of_gguf(file)
        # AutoTokenizer takes this class, too, but reads the config by its own, slow loader.
        tokenizer_class = TOKENIZER_MAPPING.get(type(config), None) or PreTrainedTokenizerFast
        tokenizer = tokenizer_class.from_pretrained(path, gguf_file=gguf)
        set_splits(tokenizer, file)
        return tokenizer
    except Exception as error:  # transformers raises anything for what it misses
        name = folder / gguf if folder.is_dir() else f"{path}:{gguf}"
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise ValueError(f"{name} has no tokenizer that transformers reads ({reason})") from None


class Source:
    """Source of a model: a checkpoint, by its config.

    Args:
        name: a folder, a name on the Hub, or a GGUF file.
        arguments: of the from_pretrained of the class.
        model_class: of transformers; by default the config's, see `class_for`.

    Attributes:
        path, gguf: the folder or name, and the GGUF file in it or None.
        folder: the folder of the config and the weights, here or in the Hub's cache; the name of a GGUF file.
        config: with the overrides among the arguments.
        cls: the class of the model.
        others: the arguments without those overrides; `torch_dtype` is called `dtype`.
        stored: the quantisation of the checkpoint; {} is dense.

    Raises: ValueError for a type of model that is not known, a config that transformers does not read or that
        routes tokens to more experts than a layer has, and an index with files outside of the folder.
    """

    config: Any

    def __init__(self, name: str, arguments: Mapping[str, Any], model_class: Any = None):
        self.path, self.gguf = split_gguf(str(name))
        self.others = {key: value for key, value in arguments.items() if key != "config"}
        if (dtype := self.others.pop("torch_dtype", None)) is not None and not self.others.get("dtype"):
            self.others["dtype"] = dtype
        inside = (self.others.get("subfolder") or "") if self.gguf is None else ""
        self.folder = str(Path(name, inside)) if inside else str(name)
        if self.gguf is None and not Path(self.path).is_dir():
            self.folder = _looked_for(self.path, inside, arguments)
        config = arguments.get("config")
        if isinstance(config, PreTrainedConfig):
            self.config = config
        else:
            self._read_config(config or self.path, model_class)
        _check_routing(self.config.get_text_config())
        if self.gguf is None:
            check_index(Path(self.folder))
        self.cls = model_class or class_for(self.config)
        self.stored = {} if self.gguf is not None else _stored(name, self.folder, self.config, arguments)

    def _read_config(self, path: Any, model_class: Any) -> None:
        """Reads the config, and keeps only the arguments of the model."""
        passed = {key: value for key, value in self.others.items() if key not in _FOR_THE_MODEL}
        try:
            if self.gguf is not None:
                self.config, unused = _config_of_gguf(self.file, **passed)
            else:
                kind, is_of_mlx = _type_of(str(path), self.folder, passed)
                within = _WITHIN.get(kind) if is_of_mlx else None
                config_class = None if within else getattr(model_class, "config_class", None)
                config_class = config_class or _config_class(kind, is_of_mlx, passed)
                self.config, unused = config_class.from_pretrained(path, return_unused_kwargs=True, **passed)
                if within is not None:
                    self.config = _around(self.config, CONFIG_MAPPING[within])
        except (*NO_MODEL, StrictDataclassError) as error:  # a field is missing, or wrong
            raise _wrong_config("one that transformers reads", error) from error
        kept = {*unused, *_FOR_THE_MODEL, *_FOR_BOTH}
        self.others = {key: value for key, value in self.others.items() if key in kept}

    def quantization(self, asked: Mapping[str, Any] | None, importance: Any = None) -> dict[str, Any] | None:
        """The arguments of QuantizationConfig; None if no Quantizer of ours reads the checkpoint.

        Args:
            asked: the arguments of a recipe.
            importance: an Importance, for quantisation.
        """
        if self.gguf is not None:
            if asked is None:
                return {"gguf": self.file}
            return {**asked, "dequantized_gguf": self.file, "importance": importance}
        wanted = {"wanted": asked, "importance": importance}
        if not self.stored:
            return None if asked is None else {**asked, "importance": importance}
        match self.stored["quant_method"]:
            case "moe_mps":
                return {**self.stored, **wanted}
            case "mxfp4":
                return {**Format(mode="mxfp4").to_dict(), **wanted}
            case method if method in METHODS:
                return {"other": dict(self.stored), **wanted}
        return None

    @functools.cached_property
    def file(self) -> str:
        """Path of the GGUF file, or of its first part, here or in the Hub's cache."""
        assert self.gguf is not None
        where = {key: self.others[key] for key in _WHERE if key in self.others}
        return _cached_gguf(self.path, self.gguf, **where)

    @property
    def is_packed(self) -> bool:
        """True if weights are quantised in a format that loading keeps."""
        return self.stored.get("quant_method", "fp8") != "fp8"

    @property
    def by_others(self) -> bool:
        """True if another library quantised the checkpoint."""
        return self.stored.get("quant_method") in METHODS

    def model_class(self) -> Any:
        """The class of the model, where `cls` may be an Auto class."""
        if not hasattr(self.cls, "_model_mapping"):
            return self.cls
        trusts = self.others.get("trust_remote_code")
        if trusts and (code := getattr(self.config, "auto_map", {}).get(self.cls.__name__)) is not None:
            where = {key: self.others[key] for key in _FOR_BOTH if key in self.others}
            return get_class_from_dynamic_module(code, self.path, **where)
        return auto_class_of(self.config, self.cls)

    @functools.cached_property
    def files(self) -> list[str]:
        """Paths of the files of weights, here or in the Hub's cache.

        Raises: ValueError, with its name, for a file that is missing or truncated.
        """
        return parts_of(self.file) if self.gguf is not None else [*map(str, self._found_files())]

    def check_files(self) -> None:
        """Raises: ValueError, with its name, for a file of weights that is missing or truncated."""
        if self.gguf is None:
            self._found_files()

    def _found_files(self) -> list[Path]:
        where = {key: self.others[key] for key in (*_WHERE, "variant") if key in self.others}
        return checkpoint_files(self.path, **where)

    def settle_dtype(self) -> None:
        """Takes the dtype of the weights, as transformers does, where neither caller nor config has one."""
        asked = self.others.get("dtype") or "auto"
        if asked != "auto" or getattr(self.config, "dtype", None) is not None:
            return
        if self.gguf is not None:
            self.others["dtype"] = torch.get_default_dtype()  # whatever the types in the file
        else:
            names = (dtype for _, _, dtype, _ in tensors_in(self.files[:1]))
            if (dtype := next((_FLOATS[name] for name in names if name in _FLOATS), None)) is not None:
                self.others["dtype"] = dtype

    def conversions(self, model: PreTrainedModel, quantizer: Any = None) -> list[Any]:
        """transformers' conversions of the weights in the files, for a model of `skeleton`."""
        return conversions_of(model, quantizer, self.others.get("key_mapping"))

    def skeleton(self) -> PreTrainedModel:
        """The dense model on the meta device, with what published checkpoints have.

        Raises: ValueError for a config that the class cannot be made of.
        """
        config = copy.deepcopy(self.config)
        for attribute in ("quantization_config", "quantization"):
            vars(config).pop(attribute, None)
        dtype = self.others.get("dtype") or "auto"
        of_code = {"trust_remote_code": False} | {
            key: self.others[key] for key in _FOR_CODE if self.others.get(key) is not None
        }
        if dtype == "auto":
            dtype = getattr(config, "dtype", None) or torch.bfloat16
        try:
            with torch.device("meta"):
                if hasattr(self.cls, "from_config"):  # an Auto class
                    model = self.cls.from_config(config, dtype=dtype, **of_code)
                else:
                    model = self.cls._from_config(config, dtype=dtype)
        except NO_MODEL as error:
            raise _wrong_config(f"complete for {self.cls.__name__}", error) from error
        settle_stacks(model)
        return model


def _cached_gguf(name: str, file: str, **where: Any) -> str:
    """Path of a GGUF file, or of the first of its parts, which all are here or in the Hub's cache then."""
    parts = parts_of(file)
    if len(parts) > 1 and Path(name).is_dir():
        return present_parts(str(Path(name, where.get("subfolder") or "", file)))[0]
    first, *_ = [cached_file(name, part, **where) for part in parts]
    return first


def _config_of_gguf(file: str, **passed: Any) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """The config that a GGUF file states, and the arguments that are none of its fields."""
    stated = stated_config(file)
    config, unused = CONFIG_MAPPING[stated["model_type"]].from_dict(
        stated, return_unused_kwargs=True, **passed
    )
    set_rope(config, file)
    within = _WITHIN.get(stated["model_type"])
    return (config if within is None else _around(config, CONFIG_MAPPING[within])), unused


def _looked_for(name: str, inside: str, arguments: Mapping[str, Any]) -> str:
    """A folder inside of the one of a name on the Hub, in its cache.

    Raises: ValueError for a string that is neither a folder nor the name of an available model.
    """
    where = {key: arguments[key] for key in _WHERE if key != "subfolder" and arguments.get(key) is not None}
    folder = folder_in_the_cache(name, (str(Path(inside) / "config.json"),), **where)
    return str(Path(folder) / inside)


def _check_routing(config: PreTrainedConfig) -> None:
    """Raises: ValueError for more experts a token than a layer has."""
    experts = [vars(config).get(name) for name in _EXPERTS]
    available = max((number for number in experts if isinstance(number, int)), default=0)
    available += vars(config).get(_IDENTITY) or 0
    for name in _CHOSEN:
        number = vars(config).get(name)
        if available > 1 and isinstance(number, int) and number > available:  # a model with one has no router
            expected = f"at most {available}, the experts of a layer"
            raise ValueError(f"moe_mps::from_pretrained: {name} must be {expected}, got {number}")


def class_for(config: PreTrainedConfig) -> Any:
    """The class that a config names, or else an Auto class for a model that generates text."""
    for name in config.architectures or ():
        named = getattr(transformers, name, None)
        if isinstance(named, type) and getattr(named, "config_class", None) is type(config):
            return named
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    if hasattr(config, "auto_map"):  # a class in the repository, for a type that transformers does not know
        return AutoModelForCausalLM
    expected = "of a model that generates text; give model_class for another"
    raise ValueError(f"moe_mps::from_pretrained: model_type must be {expected}, got {config.model_type!r}")


def _type_of(name: str, folder: str, arguments: Mapping[str, Any]) -> tuple[Any, bool]:
    """The model type of a checkpoint, and whether MLX wrote it."""
    where = {key: value for key, value in arguments.items() if key in _FOR_BOTH}
    stored, _ = PreTrainedConfig.get_config_dict(name, **where)
    if not isinstance(stored, dict):
        got = type(stored).__name__
        raise ValueError(f"moe_mps::from_pretrained: the config of {name} must be an object, got a {got}")
    is_of_mlx = is_mlx(_object(stored.get("quantization") or {})) or written_by_mlx(folder)
    return stored.get("model_type"), is_of_mlx


def _config_class(kind: Any, is_of_mlx: bool, arguments: Mapping[str, Any]) -> Any:
    """AutoConfig, or the config class for a model type that only mlx-lm knows."""
    if not is_of_mlx or kind in CONFIG_MAPPING or arguments.get("trust_remote_code"):
        return AutoConfig
    if kind not in _SAME_MODEL:
        raise ValueError(f"moe_mps::from_pretrained: model_type must be one of transformers', got {kind!r}")
    return CONFIG_MAPPING[_SAME_MODEL[kind]]


def _around(text: PreTrainedConfig, config_class: Any) -> PreTrainedConfig:
    """A config of a multimodal model around one of its language model."""
    shared = {"dtype": text.dtype, "tie_word_embeddings": text.tie_word_embeddings}
    config: PreTrainedConfig = config_class(text_config=text.to_dict(), **shared)
    for attribute in ("quantization_config", "quantization"):
        if hasattr(text, attribute):
            setattr(config, attribute, getattr(text, attribute))
            vars(config.text_config).pop(attribute, None)
    return config


def _stored(name: str, folder: str, config: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The quantisation of a checkpoint, from its config, or its files if MLX or ModelOpt wrote them."""
    stored = getattr(config, "quantization_config", None) or getattr(config, "quantization", None) or {}
    stored = stored.to_dict() if hasattr(stored, "to_dict") else _object(stored)
    if is_mlx(stored) or (not stored and written_by_mlx(folder)):
        return {"quant_method": NAME, "mlx": stored}
    if is_ours(stored):
        return {**stored, "quant_method": NAME}
    if not stored and (file := _file(name, "hf_quant_config.json", arguments)) is not None:
        return modelopt_beside(file)
    if not stored:
        return {}
    method = getattr(stored.get("quant_method"), "value", stored.get("quant_method"))
    if not isinstance(method, str | None):
        raise ValueError(f"moe_mps::from_pretrained: quant_method must be a string, got {method!r}")
    if method not in METHODS and not AutoHfQuantizer.supports_quant_method(dict(stored)):
        expected = "a method that transformers or this package reads"
        raise ValueError(f"moe_mps::from_pretrained: quant_method must be {expected}, got {method!r}")
    return {**stored, "quant_method": method}


def _object(stored: Any) -> dict[str, Any]:
    """The quantisation in a config. Raises: ValueError if it is not an object."""
    if not isinstance(stored, Mapping):
        expected = "the quantization of the config must be an object"
        raise ValueError(f"moe_mps::from_pretrained: {expected}, got {stored!r}")
    return dict(stored)


def _file(name: str, file: str, arguments: Mapping[str, Any]) -> str | None:
    """Path of a file of a checkpoint, here or in the Hub's cache, or None."""
    where = {key: arguments[key] for key in _WHERE if arguments.get(key) is not None}
    quiet = ("missing_entries", "connection_errors", "gated_repo")
    passed = where | {f"_raise_exceptions_for_{kind}": False for kind in quiet}
    return cached_file(name, file, **passed)


def sample_of_checkpoint(name: str, asked: Mapping[str, Any]) -> bytes | None:
    """A sample of each tensor in the safetensors files of a checkpoint; None if it has none, or broken ones.

    Args:
        asked: arguments of `from_pretrained`.
    """
    where = {k: asked[k] for k in ("revision", "subfolder", "token", "cache_dir") if asked.get(k)}
    where |= {"_raise_exceptions_for_missing_entries": False}
    index = cached_file(name, INDEX, **where)
    files = ["model.safetensors"]
    with contextlib.suppress(ValueError, KeyError):  # a broken file raises them; loading names it
        if index is not None:
            files = sorted({*json.loads(Path(index).read_text())["weight_map"].values()})
        paths = [cached_file(name, file, **where) for file in files]
        if None not in paths:
            return b"".join(map(sample_of, paths))
    return None
