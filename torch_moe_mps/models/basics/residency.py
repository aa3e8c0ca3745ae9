"""Keeps the weights of accelerated models resident on mps.

After about a second without work macOS takes memory back from the GPU, and the first token after a pause
waits until all weights are there again: 0.3 to 0.8 s for 17 GB (llama.cpp#10119). A residency set, from macOS
15 on, keeps them. Caches are in none: they come and go with requests, the prompt that is read next makes them
ready anyway, and they are small beside the weights.
"""

import itertools
import time
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from ..._environment import RESIDENCY, is_on
from ..._extension import host_library

REST = 10.0  # seconds between two sets of a model: kernel panics are reported where sets change often


class Resident:
    """The weights of one model, and the set that their memory is in.

    The set ends when a weight leaves its memory, as in `quantize`, `load_state_dict(assign=True)`, `to`. The
    next call of the model makes a new one, `REST` seconds after the last at the earliest.
    """

    def __init__(self, model: nn.Module):
        self.model = weakref.ref(model)
        self.set = 0
        self.made = -REST
        self.watched: list[weakref.finalize] = []
        self.with_model = weakref.finalize(model, self.end)
        self.with_model.atexit = False

    def hold(self) -> None:
        """Puts what the model's weights lie in now into a set."""
        model = self.model()
        if model is None:
            return
        self.end()
        weights = {
            weight.untyped_storage()._cdata: weight.detach()
            for weight in itertools.chain(model.parameters(), model.buffers())
            if type(weight) in (Tensor, nn.Parameter) and weight.device.type != "meta" and weight.numel() > 0
        }
        on_mps = [weight for weight in weights.values() if weight.device.type == "mps"]
        if on_mps:
            self.set, self.made = torch.ops.moe_mps._keep_resident(on_mps), time.monotonic()
        for weight in weights.values():
            left = weakref.finalize(weight.untyped_storage(), _left, weakref.ref(self))
            left.atexit = False
            self.watched.append(left)

    def end(self) -> None:
        """Gives all memory back."""
        MOVED.discard(self)
        for left in self.watched:
            left.detach()
        self.watched.clear()
        number, self.set = self.set, 0
        if number:
            torch.ops.moe_mps._end_residency(number)


_residents: "weakref.WeakKeyDictionary[nn.Module, Resident]" = weakref.WeakKeyDictionary()
# Models with a weight that has left its memory: `follow_moved` is due.
MOVED: set[Resident] = set()


def keep_resident(model: nn.Module) -> None:
    """Keeps a model's weights resident from now on, wherever they move, unless MOE_MPS_RESIDENCY is 0."""
    if host_library() is None or not is_on(RESIDENCY):
        return
    if model not in _residents:
        _residents[model] = Resident(model)
    if _loaded not in model._load_state_dict_post_hooks.values():
        model.register_load_state_dict_post_hook(_loaded)
    _residents[model].hold()


def end_residency(model: nn.Module) -> None:
    """Undoes `keep_resident` for a model and the modules in it."""
    for module in model.modules():
        if (resident := _residents.pop(module, None)) is not None:
            resident.with_model.detach()
            resident.end()
        hooks = module._load_state_dict_post_hooks
        for key in [key for key, hook in hooks.items() if hook is _loaded]:
            del hooks[key]


def follow_moved() -> None:
    """Makes the sets of models whose weights have moved. Each call of a decoder begins with it."""
    if MOVED and not torch._C._len_torch_dispatch_stack():  # not while a token is recorded
        for resident in [*MOVED]:
            if time.monotonic() >= resident.made + REST:
                resident.hold()


def _loaded(model: nn.Module, keys: Any) -> None:
    """Marks a model whose weights `load_state_dict` with assign=True may have replaced."""
    if (resident := _residents.get(model)) is not None:
        MOVED.add(resident)


def _left(resident: "weakref.ref[Resident]") -> None:
    """Ends the set that a deleted weight was in, once for all weights that leave before the next call."""
    if (resident_set := resident()) is not None:
        resident_set.end()
        MOVED.add(resident_set)
