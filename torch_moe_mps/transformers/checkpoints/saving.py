"""Models that save_pretrained writes as quantised."""

import copy
import functools
import gc
from collections import Counter
from typing import Any

from torch import nn

from ...quantization import Format
from ..attention import PREVIOUS_ATTENTION
from ..experts import NAME, PREVIOUS_EXPERTS
from ..global_scales import global_scales_of
from ..interface import experts_of, formats_of, is_quantized
from ..linears import QuantizedLayer
from .absent import absent_in
from .config import QuantizationConfig


def mark_quantized(model: nn.Module) -> None:
    """Makes save_pretrained write checkpoints that from_pretrained reads as quantised.

    Every model of transformers in `model` with quantised weights is marked: whichever is saved, whatever is
    wrapped around it. The outermost comes last, since models share their config with the base model.
    """
    # Still incomplete when transformers' quantizers, and with them ours, are imported.
    from transformers import PreTrainedModel
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    model = _outermost(model, PreTrainedModel)
    parts = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    marked = {part: config for part in parts if (config := config_of(part)) is not None}
    quantizer = AUTO_QUANTIZER_MAPPING[NAME]
    if any(not isinstance(getattr(part, "hf_quantizer", None), quantizer) for part in marked):
        _own_configs(model)
    for part, config in reversed(marked.items()):
        part.config.quantization_config = config
        report = getattr(getattr(part, "hf_quantizer", None), "report", None)
        part.hf_quantizer = quantizer(config, pre_quantized=True)
        part.hf_quantizer.report = report


def decide_when_saving(cls: Any) -> None:
    """Makes `save_pretrained` of transformers' models write a config that says of the weights what they are.

    A model that was made from the config of a quantised one is dense, and so is a module that took the place
    of a quantised one; quantising may have been interrupted before the model was marked.
    """
    save = cls.save_pretrained

    @functools.wraps(save)
    def save_pretrained(model: Any, *args: Any, **kwargs: Any) -> Any:
        stored: Any = getattr(model.config, "quantization_config", None)
        ours, right = isinstance(stored, QuantizationConfig), config_of(model)
        if right is None and ours:
            _unmark(model)
        elif right is not None and not (ours and right.to_dict() == stored.to_dict()):
            mark_quantized(model)
        return save(model, *args, **kwargs)

    cls.save_pretrained = save_pretrained


def _unmark(model: nn.Module) -> None:
    _own_configs(model)
    for module in model.modules():
        config: Any = module.__dict__.get("config")
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        module.__dict__.pop("hf_quantizer", None)


def _outermost(model: nn.Module, cls: type[nn.Module]) -> nn.Module:
    """The largest model of transformers that contains a model: saving it saves the quantised part as well."""
    if not hasattr(model, "config"):
        return model
    around, found = [model], model
    for module in around:  # which grows
        around += [parent for parent in _parents(module) if all(parent is not each for each in around)]
        if issubclass(type(module), cls) and any(part is found for part in module.modules()):
            found = module
    return found


def _parents(module: nn.Module) -> list[nn.Module]:
    """The modules that a module is a child of.

    Found by its referrers. `gc.get_objects` would hold tuples that other threads are still building, which
    CPython fails to finish then.
    """
    found = []
    for children in gc.get_referrers(module):
        if type(children) is not dict:
            continue
        for holder in gc.get_referrers(children):  # the module, or the dict of its attributes
            owners = gc.get_referrers(holder) if type(holder) is dict else [holder]
            found += [o for o in owners if issubclass(type(o), nn.Module) and o._modules is children]
    return found


def _own_configs(model: nn.Module) -> None:
    """Copies the configs in a model: another model with the same config object is not quantised."""
    from transformers import PreTrainedConfig

    copies: dict[int, Any] = {}
    for module in model.modules():
        config: Any = module.__dict__.get("config")
        if isinstance(config, PreTrainedConfig):
            module.config = copy.deepcopy(config, copies)
    for module in model.modules():
        for name in (PREVIOUS_EXPERTS, PREVIOUS_ATTENTION):
            if name in module.__dict__:
                config, implementation = module.__dict__[name]
                module.__dict__[name] = copies.get(id(config), config), implementation


def config_of(model: nn.Module) -> QuantizationConfig | None:
    """The config with the formats of a model's quantised modules; None if it has none."""
    modules: dict[str, Format] = {}
    experts = experts_of(model)
    for name, module in experts.items():
        if is_quantized(module):
            formats = formats_of(module)
            if len(set(formats.values())) == 1:
                modules[name] = module.quantization
            else:
                modules |= {f"{name}.{parameter}": format for parameter, format in formats.items()}
    layers = {name: m.format for name, m in model.named_modules() if isinstance(m, QuantizedLayer)}
    absent = absent_in(model)
    scales = [f"{name}.{p}" for name, module in experts.items() for p in global_scales_of(module)]
    if not modules and not layers and not absent:
        return None
    usual = Counter((modules | layers or {"": Format()}).values()).most_common(1)[0][0]
    everything = not layers and set(modules) == set(experts) and len(set(modules.values())) == 1
    stored = None if everything else {n: format.to_dict() for n, format in (modules | layers).items()}
    return QuantizationConfig(**usual.to_dict(), modules=stored, absent=absent, global_scales=scales)
