"""Layers behind a model that guess further tokens (multi-token prediction): transformers' `use_mtp`.

transformers reads them for each `generate`, dense and with layers of the model's classes. Of an accelerated
model they are read once, and quantised and accelerated as its own layers.
"""

import functools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedConfig

from .accelerate import accelerate
from .basics.interface import experts_of
from .basics.state import STATE
from .checkpoints.layouts.files import checkpoint_files
from .checkpoints.layouts.own.config import is_ours
from .checkpoints.quantize.in_place import quantize_model
from .checkpoints.quantize.recipe import Recipe
from .modules.linears import formats_in
from .upstream.loading import seen_with

_READ: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # {model: what transformers made of its layers}


def read_once(cls: Any) -> None:
    """Patches `MtpModel.from_pretrained` for models that are accelerated."""
    own = cls.from_pretrained.__func__
    # They are the model's, whatever parameters they have.
    cls._keys_to_ignore_on_load_missing = [r"^shared_head\.", r"^embed_tokens\."]

    def from_pretrained(cls: Any, /, main_model: Any, device_map: Any = None, **kwargs: Any) -> Any:
        if not any(STATE in vars(module) for module in main_model.modules()):
            return own(cls, main_model, device_map, **kwargs)
        if main_model not in _READ:
            _READ[main_model] = _read(functools.partial(own, cls), main_model, device_map, kwargs)
        result = _READ[main_model]
        result.tie_with_main_model(main_model)
        return result.to(main_model.device)

    cls.from_pretrained = classmethod(from_pretrained)


def _read(own: Any, model: Any, device_map: Any, others: dict[str, Any]) -> Any:
    path = model.config.name_or_path
    if stored := _stored(path):
        method = stored.get("quant_method")
        expected = f"dense layers for it in {path}"
        raise ValueError(f"moe_mps::generate: use_mtp must have {expected}, got those of {method}")
    # Without the conversions of the model's own format: the layers are as they came.
    result = own(seen_with(model, _weight_conversions=None), device_map, **others).eval()
    formats = _formats(model.get_decoder().layers[-1])
    if formats:
        quantize_model(result.layers, Recipe(formats.get("experts"), formats.get("linears")), progress=False)
    accelerate(result.layers)
    return result


def _stored(source: str) -> Any:
    """The quantisation of a checkpoint that is not of this package."""
    stored = PreTrainedConfig.get_config_dict(source)[0].get("quantization_config")
    return None if is_ours(stored) else stored


def _formats(layer: Any) -> dict[str, Any]:
    """{kind of weights: the format that most of them have}"""
    experts = [*experts_of(layer).values()]
    kinds: dict[str, Counter[Any]] = {"experts": Counter(), "linears": Counter()}
    for module in layer.modules():
        kinds["experts" if module in experts else "linears"].update(formats_in(module).values())
    return {kind: result.most_common(1)[0][0] for kind, result in kinds.items() if result}


def mtp_tensors(source: str, model: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of these layers by their names in a checkpoint.

    There are none in a GGUF file, in a checkpoint that is quantised, and of a model for which transformers
    knows no names of them.
    """
    from .upstream.guesses import MtpModel

    known = getattr(model.config.get_text_config(), "num_mtp_layers", 0)
    known = known and model._keys_to_ignore_on_load_unexpected
    if not known or Path(source).is_file() or _stored(source):
        return
    names = MtpModel.get_mtp_weights_regex(model)
    for file in checkpoint_files(source):
        with safe_open(file, framework="pt") as tensors:
            for name in filter(names.search, tensors.keys()):
                yield name, tensors.get_tensor(name)
