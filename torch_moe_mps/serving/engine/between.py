"""Steps of other answers while a model encodes the images, or the sound, of a prompt."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle


class Between:
    """Calls of something else between the modules that a model has in front of its decoder.

    An encoder computes all images of a prompt together, for seconds, and nobody should wait for its end. A
    hook of torch for all modules changes nothing of the model; it is there for as long as the encoder runs.
    """

    def __init__(self, model: Any):
        self._decoder: nn.Module = model.get_decoder()
        self._encoders = {*model.modules()} - {*self._decoder.modules()}

    @contextlib.contextmanager
    def calling(self, function: Callable[[], None]) -> Iterator[None]:
        """Block with a call of the model. What the function raises ends that call."""
        own, hooks = threading.get_ident(), list[RemovableHandle]()

        def before(module: nn.Module, inputs: Any) -> None:
            if threading.get_ident() != own or torch._C._len_torch_dispatch_stack():  # the call is recorded
                return
            if module is self._decoder:
                hooks.pop().remove()
            elif module in self._encoders:
                hooks.pop().remove()  # experts see whether somebody observes them
                function()
                hooks.append(register_module_forward_pre_hook(before))

        hooks.append(register_module_forward_pre_hook(before))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
