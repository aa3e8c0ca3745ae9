"""State around a call that decides how it runs: torch's modes, and positions."""

from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from ..caches.cache import FOLLOWS
from ..caches.held import HeldEntries
from ..upstream.calls import cache_among


def forbidden() -> str | None:
    """Reason around a call that keeps it from running as a program; None if there is none."""
    if torch.is_grad_enabled():
        return "gradients are on: torch.no_grad() lets a token be one call"
    if torch._C._is_any_autocast_enabled():
        return "autocast is on"
    if (
        torch._C._len_torch_dispatch_stack()
        or any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch._C._is_tracing()
    ):
        return "a mode of torch looks at each operator"
    if (
        torch_module._global_forward_hooks
        or torch_module._global_forward_pre_hooks
        # A forward may assign to a module, or make one. Hooks of gradients do not run without gradients.
        or torch_module._global_module_registration_hooks
        or torch_module._global_buffer_registration_hooks
        or torch_module._global_parameter_registration_hooks
    ):
        return "hooks look at all modules"
    return None


def positions_by_hand(arguments: dict[str, Any]) -> str | None:
    """Why a call runs module by module whose layers count tokens, if its positions may be others.

    To compare them would wait for the GPU as long as a token takes. `generate` derives them from its cache.
    """
    if FOLLOWS.get() or arguments.get("position_ids") is None:
        return None
    layers = getattr(cache_among(arguments), "layers", ())
    counts = any(isinstance(layer, HeldEntries) for layer in layers)
    return "position_ids are compared with the cache, outside of generate()" if counts else None


def default_device() -> torch.device | None:
    """The device that `torch.set_default_device` or `with torch.device(...)` gives this thread's tensors."""
    return next((mode.device for mode in _get_current_function_mode_stack()), None)
