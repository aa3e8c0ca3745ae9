"""Layers behind a model that guess further tokens (multi-token prediction): `guesses="mtp"`, and `use_mtp`.

transformers reads them for each `generate`, dense and with layers of the model's classes. Of an accelerated
model they are read once, and quantised and accelerated as its own layers.
"""

import functools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from safetensors import safe_open
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel

from .accelerate import accelerate
from .basics.interface import experts_of
from .basics.state import STATE, kv_bits_of, state_of
from .caches.cache import grow_cache
from .capture.calls import capture_calls, captures_of, wanted_capture
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
    for file, names in _files(source, model):
        with safe_open(file, framework="pt") as tensors:
            for name in filter(names.search, tensors.keys()):
                yield name, tensors.get_tensor(name)


def has_mtp(model: Any) -> bool:
    """Whether the checkpoint of a model has such layers, and transformers knows their names."""
    for file, names in _files(model.config.name_or_path, model):
        with safe_open(file, framework="pt") as tensors:
            if any(map(names.search, tensors.keys())):
                return True
    return False


def require_mtp(model: Any) -> None:
    """Raises: ValueError for a model whose checkpoint has no such layers."""
    if not has_mtp(model):
        expected = "a model whose checkpoint has layers that guess"
        got = f"a {model.config.model_type} without them"
        raise ValueError(f"moe_mps::guesses: mtp must be for {expected}, got {got}")


def _files(source: str, model: Any) -> Iterator[tuple[Path, re.Pattern[str]]]:
    """The files of a checkpoint, and what the names of these layers' tensors look like."""
    from .upstream.guesses import MtpModel

    known = getattr(model.config.get_text_config(), "num_mtp_layers", 0)
    known = known and model._keys_to_ignore_on_load_unexpected
    if not known or not source or Path(source).is_file() or _stored(source):
        return
    try:
        names = MtpModel.get_mtp_weights_regex(model)
    except ValueError:  # the known ones are of larger models
        return
    for file in checkpoint_files(source):
        yield file, names


class MtpStep(PreTrainedModel):
    """One of these layers, as a model whose calls for a few tokens are captured.

    Args:
        layers: as transformers has them, with the model's embedding and head.
        number: of the layer.
    """

    def __init__(self, layers: Any, number: int):
        super().__init__(PreTrainedConfig())  # transformers would change that of the layers
        self.layers, self.number = layers, number

    def forward(
        self, input_ids: Tensor, states: Tensor, position_ids: Tensor, cache: Cache
    ) -> tuple[Tensor, Tensor]:
        """Logits [1, 1, V] of the token behind the last one, and states [1, T, H] for the next layer.

        Args:
            input_ids: [1, T], each behind the token of its state.
            states: [1, T, H], of the model, or of the layer before.
            position_ids: [1, T], of the tokens.
        """
        result = self.layers.forward_layer(self.number, states, position_ids, cache, input_ids=input_ids)
        return self.layers._project_to_logits(result[:, -1:]), result


def mtp_steps(model: Any) -> list[MtpStep]:
    """The layers of a model that guess. Raises: ValueError for a model that has none."""
    from .upstream.guesses import MtpModel

    require_mtp(model)
    layers = MtpModel.from_pretrained(model, device_map={"": model.device})
    steps = [MtpStep(layers, number).eval() for number in range(len(layers.layers))]
    for step in steps:
        state_of(step).kv_bits = kv_bits_of(model)
        step.register_forward_pre_hook(grow_cache, with_kwargs=True)
        if captures_of(model) is not None:
            capture_calls(step, wanted_capture(None))
    return steps


def new_mtp_cache(model: Any) -> Any:
    """An empty cache of these layers.

    A layer reads its tokens in order, from the first one on: the masks are those of any cache, however far
    its positions are from the model's.
    """
    return DynamicCache(config=model.config.get_mtp_config())
