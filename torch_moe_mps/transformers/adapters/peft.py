"""Three functions of PEFT, wrapped where it lacks an interface. docs/upstream.md proposes the interface.

They are wrapped for the version in `_versions.PEFT` only; other versions of PEFT reject quantised layers.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import peft
from peft.tuners import tuners_utils
from peft.tuners.lora import model as lora_model
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from torch import Tensor, nn

from ..._versions import PEFT
from ..basics.interface import codes_of, experts_on_disk, formats_of, is_experts, is_quantized, projections
from ..modules.linears import QuantizedLinear
from .lora import ParamWrapper, check_trained_whole, wrapped_linear

_ALL_LINEAR = "all-linear"


def register() -> None:
    """Makes plain `get_peft_model` take quantised models, if this is the version of PEFT that is known."""
    if not peft.__version__.startswith(f"{PEFT}."):
        return
    _wrap(lora_model.LoraModel, "_create_new_module", lambda plain: staticmethod(_creating(plain)))
    _wrap(BaseTuner, "_inject_parameters", _naming)
    _wrap(tuners_utils, "_maybe_include_all_linear_layers", _including)


def _wrap(owner: Any, name: str, around: Callable) -> None:
    setattr(owner, name, around(getattr(owner, name)))


def _creating(plain: Callable) -> Callable:
    @functools.wraps(plain)
    def create(config: Any, adapter: str, target: nn.Module, **kwargs: Any) -> nn.Module:
        base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
        if isinstance(base, QuantizedLinear):
            return wrapped_linear(target, base, adapter, config, **kwargs)
        if is_experts(base) and is_quantized(base) and kwargs.get("parameter_name") in formats_of(base):
            return ParamWrapper(target, adapter, config=config, **kwargs)
        return plain(config, adapter, target, **kwargs)

    return create


def _naming(plain: Callable) -> Callable:
    """Context where quantised stacks are named parameters, so that `target_parameters` finds them.

    PEFT takes the device from a `weight` or a parameter, which experts of a GGUF file lack.
    """

    @functools.wraps(plain)
    def inject(self: Any, peft_config: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        shown = [module for module in model.modules() if is_experts(module) and is_quantized(module)]
        for module in shown:
            codes = next(iter(codes_of(module).values()))
            module.__dict__ |= {"named_parameters": _with_stacks(module), "weight": codes}
        try:
            return plain(self, peft_config, model, *args, **kwargs)
        finally:
            for module in shown:
                del module.__dict__["named_parameters"], module.__dict__["weight"]

    return inject


def _with_stacks(experts: Any) -> Callable:
    own = experts.named_parameters

    def named_parameters(
        prefix: str = "", recurse: bool = True, **kwargs: Any
    ) -> Iterator[tuple[str, Tensor | None]]:
        yield from own(prefix, recurse, **kwargs)
        if not recurse:
            first, *_, last = formats_of(experts)
            yield from ((f"{prefix}.{name}" if prefix else name, None) for name in (first, last))

    return named_parameters


def _including(plain: Callable) -> Callable:
    """Adds quantised linear layers to "all-linear", which selects layers by class.

    PEFT calls this for each adapter before it changes a model, so unsupported configs are rejected here.
    """

    @functools.wraps(plain)
    def include(peft_config: Any, model: nn.Module) -> Any:
        check_trained_whole(peft_config, model)
        _check_on_disk(peft_config, model)
        before = getattr(peft_config, "target_modules", None)
        peft_config = plain(peft_config, model)
        if isinstance(before, str) and before.lower() == _ALL_LINEAR:
            peft_config.target_modules |= set(_quantized_linears(model))
        return peft_config

    return include


def _check_on_disk(peft_config: Any, model: nn.Module) -> None:
    """Raises: ValueError for LoRA on experts that are read from the disk."""
    for name, own in experts_on_disk(model):
        if own.pools.staging is not None and adapts_experts(peft_config, name, model.get_submodule(name)):
            own.refuse("LoRA needs all experts in memory")


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
