"""PEFT's tuners over models with packed weights: a config gets what PEFT does not ask a model for.

The one function of PEFT around which this stands is a row of `upstream/reach.py`.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from peft import LoraConfig
from peft.tuners import tuners_utils
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import nn

from ..basics.interface import (
    codes_of,
    experts_on_disk,
    formats_of,
    get_experts,
    is_experts,
    is_quantized,
    projections,
)
from ..modules.linears import QuantizedLinear, has_quantized_weights
from .lora import ParamWrapper, StackParameter, check_trained_whole, refuse, wrapped_linear

_ALL_LINEAR = "all-linear"


def injecting(plain: Callable) -> Callable:
    """`BaseTuner.inject_adapter`, which adds an adapter to a model, for models with packed weights, too.

    PEFT calls it for each adapter before it changes a model, so unsupported configs are rejected here.
    """

    @functools.wraps(plain)
    def inject_adapter(self: Any, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        config = self.peft_config[adapter_name]
        check_trained_whole(config, model)
        _check_on_disk(config, model)
        if not any(map(has_quantized_weights, model.modules())):
            return plain(self, model, adapter_name, *args, **kwargs)
        _name_all_linears(config, model)
        with ExitStack() as stack:
            for experts in [each for each in model.modules() if is_experts(each) and is_quantized(each)]:
                stack.enter_context(_naming_stacks(experts))
            if isinstance(config, LoraConfig):
                stack.enter_context(_with_layers(config, model))
            return plain(self, model, adapter_name, *args, **kwargs)

    return inject_adapter


def _name_all_linears(config: Any, model: nn.Module) -> None:
    """Names the layers of "all-linear", which PEFT chooses by class, and quantised ones with them."""
    asked = getattr(config, "target_modules", None)
    if not isinstance(asked, str) or asked.lower() != _ALL_LINEAR:
        return
    names = set(_quantized_linears(model))
    convert_peft_config_for_transformers(config, model, None)
    if isinstance(config.target_modules, str):
        tuners_utils._maybe_include_all_linear_layers(config, model)
    else:  # names without paths, for models whose experts once were linear layers
        names = {name.rpartition(".")[2] for name in names}
    config.target_modules |= names


@contextmanager
def _with_layers(config: Any, model: nn.Module) -> Iterator[None]:
    """Registers our layers with a LoraConfig, as a user registers custom ones."""
    before = config._custom_modules
    experts: dict[Any, Any] = {type(each): _over_experts for each in model.modules() if is_experts(each)}
    config._custom_modules = dict(before or {})
    config._register_custom_module({QuantizedLinear: _over_linear, **experts})
    try:
        yield
    finally:
        config._custom_modules = before


def _over_linear(target: Any, adapter: str, config: Any, **kwargs: Any) -> nn.Module:
    base: Any = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
    return wrapped_linear(target, base, adapter, config, **kwargs)


def _over_experts(target: Any, adapter: str, config: Any, **kwargs: Any) -> nn.Module | None:
    """The LoRA layer over a stack of packed experts; None for PEFT's own."""
    base: Any = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
    if not is_quantized(base) or kwargs.get("parameter_name") not in formats_of(base):
        return None
    entry_points = get_experts(base).code.entry_points
    if "forward" not in entry_points:
        got = f"{type(base).__name__}'s, of {' and '.join(entry_points)}"
        refuse("target_parameters", "stacks of experts that are called", got)
    return ParamWrapper(target, adapter, config=config, **kwargs)


@contextmanager
def _naming_stacks(experts: Any) -> Iterator[None]:
    """Lists packed stacks among an experts module's own parameters, so that `target_parameters` finds them.

    PEFT takes the device from a `weight` or a parameter, which experts of a GGUF file lack.
    """
    original = experts.named_parameters
    first, *_, last = formats_of(experts)

    def named_parameters(prefix: str = "", recurse: bool = True, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        yield from original(prefix, recurse, **kwargs)
        if not recurse:
            for name in (first, last):
                yield f"{prefix}.{name}" if prefix else name, StackParameter(experts, name)

    codes = next(iter(codes_of(experts).values()))
    experts.__dict__ |= {"named_parameters": named_parameters, "weight": codes}
    try:
        yield
    finally:
        del experts.__dict__["named_parameters"], experts.__dict__["weight"]


def _check_on_disk(peft_config: Any, model: nn.Module) -> None:
    """Raises: ValueError for LoRA on experts that are read from the disk."""
    for name, on_disk in experts_on_disk(model):
        if on_disk.pools.staging is not None and adapts_experts(peft_config, name, model.get_submodule(name)):
            on_disk.refuse("LoRA needs all experts in memory")


def adapts_experts(peft_config: Any, name: str, experts: Any) -> bool:
    """True if a LoraConfig has layers for the matrices of an experts module."""
    asked = tuple(getattr(peft_config, "target_parameters", None) or ())
    return any(f"{name}.{projection}".endswith(asked) for projection in projections(experts))


def _quantized_linears(model: Any) -> Iterator[str]:
    """Names of quantised linear layers without an adapter, except the head."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    adapted = [f"{name}." for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear) and module is not head and not name.startswith(tuple(adapted)):
            yield name
