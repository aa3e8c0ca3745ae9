"""Layers behind a model that guess further tokens (multi-token prediction): `guesses="mtp"`, and `use_mtp`.

transformers reads them for each `generate`, dense and with layers of the model's classes. Of an accelerated
model they are read once, and quantised and accelerated as its own layers.
"""

import copy
import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel

from ..quantization import Format
from .accelerate import accelerate
from .basics.interface import experts_of
from .basics.state import STATE, kv_bits_of, state_of
from .caches.cache import grow_cache
from .capture.calls import capture_calls, captures_of, wanted_capture
from .checkpoints.layouts.files import checkpoint_files
from .checkpoints.layouts.own.config import is_ours
from .checkpoints.quantize.decision import weights_of
from .checkpoints.quantize.in_place import quantize_model
from .checkpoints.quantize.recipe import Recipe
from .checkpoints.quantize.target import Target, quantizable
from .checkpoints.quantize.weights import empty_weight, replace
from .modules.linears import formats_in
from .upstream.loading import seen_with

# Models whose configs do not say how many of these layers there are: they are counted in a checkpoint. Their
# attention is full.
_UNCOUNTED = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_OF_QWEN, _NUMBERED = re.compile(r"^mtp\."), re.compile(r"^mtp\.layers\.(\d+)\.")
MTP = "mtp"  # the entry of a checkpoint's quantisation with the formats of these layers
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
    if packed := _packed_in(path):
        result = _with_formats(model, packed)
        result.layers.load_state_dict(_of_layers(path, model), assign=True)
        # Tensors that no checkpoint has are without elements: they stand for a dtype.
        result.layers._apply(
            lambda t: torch.empty_like(t, device=model.device) if t.is_meta else t.to(model.device)
        )
    else:
        # Without the conversions of the model's own format: the layers are as they came.
        result = own(seen_with(model, _weight_conversions=None), device_map, **others).eval()
        quantize_model(result.layers, recipe_of_last_layer(model), progress=False)
    accelerate(result.layers)
    return result


def recipe_of_last_layer(model: Any) -> Recipe:
    """The formats of a model's last layer."""
    formats = _formats(model.get_decoder().layers[-1])
    return Recipe(formats.get("experts"), formats.get("linears"))


def _packed_in(source: str) -> dict[str, dict[str, str]]:
    """{name of a module in these layers: {parameter: format}} of those that a checkpoint has quantised."""
    stored = _quantization(source)
    found: dict[str, dict[str, str]] = stored.get(MTP, {}) if is_ours(stored) else {}
    return found


def _with_formats(model: Any, packed: Mapping[str, Mapping[str, str]]) -> Any:
    """transformers' module of these layers with quantised weights, all without memory."""
    result = _without_memory(model)
    every = quantizable(result.layers)
    for name, formats in packed.items():
        every[name].formats = {parameter: Format.named(format) for parameter, format in formats.items()}
    _quantize_empty(result.layers, (every[name] for name in packed))
    return result


def _without_memory(model: Any) -> Any:
    """transformers' module of these layers on the meta device, in the model's dtype."""
    from .upstream.guesses import MtpModel

    with torch.device("meta"):
        result = MtpModel(model, model.config.get_text_config().num_mtp_layers).eval()
    result.layers.to(model.dtype)
    return result


def _quantize_empty(layers: Any, targets: Iterable[Target]) -> None:
    """Lets layers without memory have the formats of targets."""
    for target in targets:
        replace(layers, target, {part: empty_weight(target, part) for part in target.formats})


def _of_layers(source: str, model: Any) -> dict[str, Tensor]:
    """The tensors of quantised layers in a checkpoint, by their names in the module of all layers."""
    count = model.config.get_text_config().num_mtp_layers
    prefixes = [(_prefix(model, layer), layer) for layer in range(count)]
    return {
        f"{layer}.{name.removeprefix(prefix)}": tensor
        for name, tensor in mtp_tensors(source, model)
        for prefix, layer in prefixes
        if name.startswith(prefix)
    }


def _prefix(model: Any, layer: int) -> str:
    """Prefix of names of a quantised layer's tensors: transformers takes them for such a layer's."""
    from .upstream.guesses import MtpModel

    names = MtpModel.get_mtp_weights_regex(model)
    number = model.config.get_text_config().num_hidden_layers + layer
    known = (f"model.layers.{number}.", f"mtp.layers.{layer}.", f"model.mtp.layers.{layer}.")
    return next(prefix for prefix in known if names.search(f"{prefix}mtp_block.x"))


def _stored(source: str) -> Any:
    """The quantisation of a checkpoint that is not of this package."""
    stored = _quantization(source)
    return None if is_ours(stored) else stored


def _quantization(source: str) -> Any:
    return PreTrainedConfig.get_config_dict(source)[0].get("quantization_config")


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


def converted_mtp(source: str, model: Any, packed: dict[str, dict[str, str]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of these layers for a checkpoint of a model whose last layer is quantised.

    Args:
        packed: takes what `_packed_in` gives of that checkpoint. Layers that a source has quantised stay so.
    """
    from .upstream.guesses import MtpModel

    if next(_files(source, model), None) is None:
        return
    model = _counted(model, source)
    before, recipe = _packed_in(source), recipe_of_last_layer(model)
    if before or recipe == Recipe(None):
        packed.update(before)
        yield from mtp_tensors(source, model)
        return
    config = copy.copy(model.config)
    config.name_or_path = source
    layers = MtpModel.from_pretrained(seen_with(model, config=config, _weight_conversions=None)).layers
    quantize_model(layers, recipe, progress=False)
    for name, module in layers.named_modules():
        if formats := formats_in(module):
            packed[name] = {parameter: str(format) for parameter, format in formats.items()}
    for name, tensor in layers.state_dict().items():
        layer, _, rest = name.partition(".")
        yield f"{_prefix(model, int(layer))}{rest}", tensor


def planned_mtp(source: str, model: Any, formats: Mapping[str, str]) -> tuple[int, int]:
    """Bytes of these layers in a checkpoint, and in the one that `converted_mtp` makes of it.

    Args:
        model: without weights.
        formats: {name of a weight of the model: the format that it gets, or its dtype}.
    """
    before = sum(tensor.nbytes for _, tensor in mtp_tensors(source, model))
    last = f".layers.{model.config.get_text_config().num_hidden_layers - 1}."
    kinds: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    for name, format in formats.items():
        if last in name and not hasattr(torch, format):
            kinds[".experts" in name].update([format])
    if before == 0 or not any(kinds.values()) or _packed_in(source):
        return before, before
    most = {kind: Format.named(own.most_common(1)[0][0]) for kind, own in kinds.items() if own}
    layers = _without_memory(_counted(model, source)).layers
    _quantize_empty(layers, weights_of(layers, Recipe(most.get(True), most.get(False))).targets.values())
    return before, sum(tensor.nbytes for tensor in layers.state_dict().values())


def has_mtp(model: Any) -> bool:
    """Whether the checkpoint of a model has such layers, and transformers knows their names."""
    return next(_names(model.config.name_or_path, model), None) is not None


def require_mtp(model: Any) -> None:
    """Raises: ValueError for a model whose checkpoint has no such layers."""
    if not has_mtp(model):
        expected = "a model whose checkpoint has layers that guess"
        got = f"a {model.config.model_type} without them"
        raise ValueError(f"moe_mps::guesses: mtp must be for {expected}, got {got}")


def _files(source: str, model: Any) -> Iterator[tuple[Path, re.Pattern[str]]]:
    """The files of a checkpoint, and what the names of these layers' tensors look like."""
    from .upstream.guesses import MtpModel

    config = model.config.get_text_config()
    known = getattr(config, "num_mtp_layers", 0) or config.model_type in _UNCOUNTED
    known = known and model._keys_to_ignore_on_load_unexpected
    if not known or not source or Path(source).is_file() or _stored(source):
        return
    try:
        names = MtpModel.get_mtp_weights_regex(model)
    except ValueError:  # the known ones are of larger models
        return
    if config.model_type in _UNCOUNTED:  # their models of text ignore images, too
        names = _OF_QWEN
    for file in checkpoint_files(source):
        yield file, names


def _counted(model: Any, source: str) -> Any:
    """The model as transformers' code of these layers takes it: its config says how many there are."""
    if model.config.get_text_config().model_type not in _UNCOUNTED:
        return model
    numbers = {int(found[1]) for name in _names(source, model) if (found := _NUMBERED.match(name))}
    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    text.num_mtp_layers, text.mtp_layer_types = len(numbers), ["full_attention"] * len(numbers)
    return seen_with(model, config=config)


def _names(source: str, model: Any) -> Iterator[str]:
    """Names of these layers' tensors in a checkpoint."""
    for file, names in _files(source, model):
        with safe_open(file, framework="pt") as tensors:
            yield from filter(names.search, tensors.keys())


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
    seen = _counted(model, model.config.name_or_path)
    layers = MtpModel.from_pretrained(seen, device_map={"": model.device})
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
    return DynamicCache(config=_counted(model, model.config.name_or_path).config.get_mtp_config())
