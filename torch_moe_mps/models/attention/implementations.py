"""Implementation of attention that a layer of transformers runs, and layers that need another one.

Models that run torch's attention keep the implementation "sdpa": its function asks each module whether it is
accelerated. torch's attention knows neither sinks nor soft caps: models with them change from "eager" to an
implementation of this package.
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from ..._limits import KV_BITS
from ..basics.configs import ATTENTION, ImplementationNames
from ..basics.state import KVBits, original_class, state_of
from ..upstream.reach import hold_reach
from .attention import NAME

MASKS_CHOICES: list[Callable[[nn.Module], bool]] = []  # whether a layer masks what its indexer left


def require_kv_bits(function: str, bits: KVBits | None) -> None:
    """Raises: ValueError for what no cache can have."""
    if bits is not None and bits not in KV_BITS:
        *others, last = map(repr, KV_BITS)
        raise ValueError(f"moe_mps::{function}: kv_bits must be {', '.join(others)} or {last}, got {bits!r}")


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """{name: module} of the attention layers that `use_attention` can let run on the operator.

    Layers of encoders count only if they need a feature that torch's attention lacks, or have a window.
    """
    result = {}
    for name, module in model.named_modules():
        causal = getattr(module, "is_causal", None)
        if not isinstance(causal, bool):
            continue
        forward: Any = inspect.unwrap(original_class(module).forward)
        if "ALL_ATTENTION_FUNCTIONS" not in forward.__globals__:
            continue
        implementation = _implementation_for(module)
        if implementation == NAME or (implementation is not None and (causal or _has_window(module))):
            result[name] = module
    return result


def _has_window(module: nn.Module) -> bool:
    return getattr(getattr(module, "config", None), "sliding_window", None) is not None


def choose_implementations(layers: Iterable[nn.Module], names: ImplementationNames) -> None:
    """Notes the layers that need another implementation than their config names."""
    for module in layers:
        config: Any = module.config
        wanted = _implementation_for(module)
        if wanted is not None and wanted != config._attn_implementation:
            names.add(config, ATTENTION, wanted)


def use_attention(layers: Iterable[nn.Module]) -> None:
    """Lets these layers run on the operator; called after their forwards are rewritten."""
    for module in layers:
        if module.config._attn_implementation == "sdpa":  # type: ignore[union-attr]  # a layer's config
            state = state_of(module)
            state.is_attention, state.reach = True, hold_reach("transformers")


def _implementation_for(module: nn.Module) -> str | None:
    """The implementation that can run a module on the operator; None if its code knows others.

    NAME is for what torch's attention lacks. transformers hands the keys that an indexer has chosen to all
    implementations but its own two, for which a module makes masks of them.
    """
    config = getattr(module, "config", None)
    current = getattr(config, "_attn_implementation", None)
    if current not in ("eager", "sdpa", NAME) or getattr(config, "output_attentions", False):
        return None
    # The indexer is None in a layer that takes the choice of another one.
    if hasattr(module, "indexer") and not any(masks(module) for masks in MASKS_CHOICES):
        return NAME
    if current == "sdpa":
        return current
    capped = getattr(module, "attn_logit_softcapping", None) is not None
    return NAME if capped or isinstance(getattr(module, "sinks", None), Tensor) else None
