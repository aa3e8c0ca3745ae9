"""Steps of other sequences while a model encodes the images or audio of a prompt."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle


class EncoderHook:
    """Calls a function between the modules of a model's image or audio encoder.

    An encoder computes all images of a prompt at once, which takes seconds; other sequences must not wait. It
    uses torch's global forward hook while the encoder runs, and leaves the model unchanged.
    """

    def __init__(self, model: Any):
        self._decoder: nn.Module = model.get_decoder()
        self._encoders = {*model.modules()} - {*self._decoder.modules()}

    @contextlib.contextmanager
    def calling(self, function: Callable[[], None]) -> Iterator[None]:
        """Context of a model call; an exception of `function` aborts the call."""
        thread, hooks = threading.get_ident(), list[RemovableHandle]()

        def before(module: nn.Module, inputs: Any) -> None:
            # behind `or`: the call is recorded
            if threading.get_ident() != thread or torch._C._len_torch_dispatch_stack():
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
