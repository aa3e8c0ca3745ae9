"""Models that describe their quantised weights in the config.json that `save_pretrained` writes."""

import copy
import functools
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ...models.basics.interface import experts_of, projections
from ...models.basics.state import made_as, restore_class, subclass
from ...models.modules.experts import NAME
from ...models.modules.linears import OrderedLinear, formats_in
from ...models.upstream.weights import AUTO_QUANTIZER_MAPPING, seen_with
from ...quantization import Format
from ..absent import absent_in
from .config import QuantizationConfig, is_ours, together

_DESCRIBED = "describing weights"  # the kind of the classes that `_described_class` makes


def mark_quantized(model: nn.Module) -> None:
    """Sets the quantization_config and quantizer of each transformers model within `model`."""
    describe_when_saving(model)
    quantizer = AUTO_QUANTIZER_MAPPING[NAME]
    for part in _outermost(model, PreTrainedModel):
        config = config_of(part)
        if config is None:
            continue
        before: Any = getattr(part, "hf_quantizer", None)
        if not isinstance(before, quantizer):
            _own_configs(part)
        part.config.quantization_config = config
        part.hf_quantizer = quantizer(config, pre_quantized=True)
        part.hf_quantizer.report = getattr(before, "report", None)


def _outermost(module: nn.Module, cls: type[nn.Module]) -> Iterator[Any]:
    """The modules of a class that are inside no other."""
    if isinstance(module, cls):
        yield module
        return
    for child in module.children():
        yield from _outermost(child, cls)


def describe_when_saving(model: nn.Module) -> None:
    """Lets `save_pretrained` of the models in `model` write a config.json that describes their weights."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and made_as(type(part), _DESCRIBED) is None:
            cls: Any = type(part)
            part.__class__ = _described_class(cls)


def restore_saving(model: nn.Module) -> None:
    """Undoes `describe_when_saving`, but for models whose own config does not describe their weights."""
    for part in _outermost(model, PreTrainedModel):
        if made_as(type(part), _DESCRIBED) is not None and _is_described(part):
            for module in part.modules():
                restore_class(module, _DESCRIBED)


def _is_described(model: Any) -> bool:
    """True if transformers' own `save_pretrained` writes what `_described` does."""
    stored, right = getattr(model.config, "quantization_config", None), config_of(model)
    if right is None:
        return not is_ours(stored)
    return isinstance(stored, QuantizationConfig) and stored.to_dict() == right.to_dict()


@functools.cache
def _described_class(original: type[PreTrainedModel]) -> type[nn.Module]:
    save = original.save_pretrained

    @functools.wraps(save)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        return save(_described(self), *args, **kwargs)

    return subclass(original, _DESCRIBED, _described_class, save_pretrained=save_pretrained)


def _described(model: Any) -> Any:
    """The model with a config that describes its weights; its own one may be another model's, too."""
    stored, right = getattr(model.config, "quantization_config", None), config_of(model)
    if right is None and not is_ours(stored):
        return model
    config = copy.copy(model.config)
    if right is not None:
        config.quantization_config = right
    else:
        del config.quantization_config
    return seen_with(model, config=config)


def _own_configs(model: nn.Module) -> None:
    """Copies the configs in a model: another model with the same config object is not quantised."""
    copies: dict[int, Any] = {}
    for module in model.modules():
        config: Any = module.__dict__.get("config")
        if isinstance(config, PreTrainedConfig):
            module.config = copy.deepcopy(config, copies)


def config_of(model: nn.Module) -> QuantizationConfig | None:
    """The config with the formats of a model's quantised modules; None if it has none."""
    experts = experts_of(model)
    formats: dict[str, Format] = {}
    for name, module in model.named_modules():
        result = formats_in(module)
        same = len({*result.values()}) == 1
        formats |= {name if same else f"{name}.{p}": format for p, format in result.items()}
    absent = absent_in(model)
    if not formats and not absent:
        return None
    matrices = [f"{name}.{p}" for name, module in experts.items() for p in projections(module)]
    # Experts that nobody recognised, too: their layers are not among those with a format.
    parameters = (name for name, _ in model.named_parameters())
    everything = {name for name, _ in model.named_modules()} | {*parameters, *matrices, *formats}
    modules: dict[str, Format] = {}
    for format in dict.fromkeys(formats.values()):
        names = [name for name, other in formats.items() if other == format]
        modules |= dict.fromkeys(together(names, everything), format)
    ordered = [name for name, module in model.named_modules() if isinstance(module, OrderedLinear)]
    return QuantizationConfig(modules=modules, ordered=together(ordered, everything), absent=absent)
