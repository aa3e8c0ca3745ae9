"""Memory budget of a served model, and the system's memory pressure.

The budget is the GPU's recommended maximum for one process, minus the weights and the largest step. Sequences
and cached prefixes share the rest: prefixes are evicted for sequences, and a sequence waits until it fits.
"""

import ctypes
import sys
import time
from collections.abc import Callable, Sequence
from enum import IntEnum

import torch
from torch import nn
from transformers import PreTrainedModel

from ..._limits import LARGEST_CHUNK
from ...checkpoints.quantize.sizes import prompt_bytes
from ...macs import memory_for_models

# Answers at once: before the M5, matmuls of 16 rows take nearly twice as long as those of 8, and on all GPUs
# experts do, of which each has a few of the rows.
MOST_ROWS = 8
_EVERY = 1.0  # seconds between two questions to the system
RETRY_AFTER = 10  # seconds after which a client may ask a system again that was short of memory


class Level(IntEnum):
    """Memory pressure levels of macOS."""

    NORMAL = 0
    WARN = 1
    CRITICAL = 2


def _pressure_of_macos() -> Level:
    """Current memory pressure level, as a dispatch source would report it."""
    value, size = ctypes.c_int(0), ctypes.c_size_t(4)
    name = b"kern.memorystatus_vm_pressure_level"
    ctypes.CDLL(None).sysctlbyname(name, ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0))
    return {2: Level.WARN, 4: Level.CRITICAL}.get(value.value, Level.NORMAL)


class Memory:
    """Memory budget of one model.

    Args:
        model: loaded; all memory in use on its device counts as weights.
        pressure: returns the system's memory pressure; None where it is unknown.
        beside: further modules on the same device.

    Attributes:
        total, weights, step: bytes of the process's limit, of the weights, and of the largest step.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        pressure: Callable[[], Level] | None = _pressure_of_macos if sys.platform == "darwin" else None,
        beside: Sequence[nn.Module] = (),
    ):
        self.total = memory_for_models(model.device.type == "mps")
        self.weights = memory_in_use(model, *beside)
        try:
            self.step = prompt_bytes(model, LARGEST_CHUNK)
        except (AttributeError, ValueError):  # an encoder, or a model without layers
            self.step = 0
        self._pressure, self._asked, self._level = pressure, -_EVERY, Level.NORMAL

    @property
    def free(self) -> int:
        """Bytes that sequences and cached prefixes may take."""
        return max(0, self.total - self.weights - self.step)

    @property
    def is_watched(self) -> bool:
        """True if the system reports memory pressure."""
        return self._pressure is not None

    @property
    def level(self) -> Level:
        """Memory pressure, refreshed at most once a second."""
        now = time.monotonic()
        if self._pressure is not None and now >= self._asked + _EVERY:
            self._asked, self._level = now, self._pressure()
        return self._level


def memory_in_use(*modules: nn.Module) -> int:
    """Bytes in use on the modules' device; on a CPU, of their parameters and buffers."""
    tensors = {id(each): each for module in modules for each in (*module.parameters(), *module.buffers())}
    if any(tensor.device.type == "mps" for tensor in tensors.values()):
        return int(torch.mps.current_allocated_memory())  # without the heaps that torch's allocator keeps
    return sum(tensor.nbytes for tensor in tensors.values())


def is_short(memory: Memory | None) -> bool:
    return memory is not None and memory.level > Level.NORMAL


def is_watched(memory: Memory | None) -> bool:
    return memory is not None and memory.is_watched
