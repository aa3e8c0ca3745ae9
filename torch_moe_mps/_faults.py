"""Faults of a device: waits that see whether the GPU has finished, which those of torch do not ask, and
memory that has run out."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ._extension import host_library

_FAILED_WORK = "command buffer execution failed"  # torch's words
_NO_MEMORY = re.compile(
    "out of memory|allocate memory|not enough memory|insufficient memory|invalid buffer size", re.I
)


def raise_fault() -> None:
    """Waits until the GPU has ended what the current stream gave it.

    Raises: torch.AcceleratorError if the GPU has failed, once for each time.
    """
    if host_library() is not None:
        torch.ops.moe_mps._raise_fault()


def gpu_busy() -> float:
    """Seconds that the GPU has worked for this process so far, by its own clock; 0 without mps.

    Counts the command buffers that have operators of this package, once Metal has told of their end: it has
    of all behind `synchronize`.
    """
    return 0.0 if host_library() is None else float(torch.ops.moe_mps._gpu_busy())


class Mark:
    """The command buffer that mps encodes into now: `wait` waits for it and for no later one.

    Other devices are synchronised; the CPU has nothing to wait for.

    Args:
        commits: gives the buffer to the GPU.
    """

    def __init__(self, device: torch.device, commits: bool = False):
        self._device = device
        self._number = torch.ops.moe_mps._watch(commits) if _is_watched(device) else None

    def wait(self) -> None:
        """Waits until the buffer is complete; it is committed if it is still open.

        Raises: torch.AcceleratorError if the GPU has failed at it.
        """
        if self._number is not None:
            torch.ops.moe_mps._wait_for_buffer(self._number)
        elif self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)


def host_copy(tensor: Tensor) -> Tensor:
    """A copy on the CPU, complete once the host has waited for a `Mark` of its buffer or of a later one.

    mps is asked for strides that equal those of the copy: for others, also along a dimension of size 1, torch
    copies to a temporary on the CPU and reads that before the GPU has written it.
    """
    if tensor.device.type == "cpu":
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype)
    if copy.stride() != tensor.stride():
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return copy.copy_(tensor, non_blocking=True)


def fault_of(error: BaseException) -> torch.AcceleratorError | None:
    """The fault of the GPU that an error of torch's tells; None for any other error.

    Whoever handles an error calls this. What waits first tells of a fault: this package, or from 2.15 on
    torch, as torch.OutOfMemoryError where the GPU's memory did not hold the work. The other one's error would
    end the next request.
    """
    if not isinstance(error, torch.AcceleratorError) and _FAILED_WORK not in str(error):
        return None
    try:
        raise_fault()
    except torch.AcceleratorError as fault:  # it names the operators, and what helps
        return fault
    return error if isinstance(error, torch.AcceleratorError) else torch.AcceleratorError(str(error))


def fault_behind(error: BaseException) -> torch.AcceleratorError | None:
    """The fault whose wrong results an error follows from, or that it tells. Waits for the GPU."""
    fault = fault_of(error)
    if fault is None and host_library() is not None:
        try:
            synchronize()
        except torch.AcceleratorError as found:
            return found
    return fault


def _is_watched(device: torch.device) -> bool:
    return device.type == "mps" and host_library() is not None


def synchronize(device: torch.device | str = "mps") -> None:
    """Wait for all that a device computes, as torch.mps.synchronize does, and see whether it did.

    A loop around a model's own forward calls it before its results are used. `generate` of an accelerated
    model and the commands end with it, and operators raise the same error where it is known earlier.

    Args:
        device: of the model; on others than mps nothing is waited for.

    Raises: torch.AcceleratorError, a RuntimeError, if the GPU has failed: what was computed before is lost.
    """
    if torch.device(device).type == "mps":
        if host_library() is not None:
            torch.ops.moe_mps._watch()  # torch's operators, too
        try:
            torch.mps.synchronize()
        except RuntimeError as error:  # torch stores faults from 2.15 on
            raise fault_of(error) or error from None
        raise_fault()


@contextmanager
def synchronized(device: torch.device | str) -> Iterator[None]:
    """The block's work on a device, waited for when it ends.

    Raises: torch.AcceleratorError as `synchronize`, in the place of errors that follow from wrong results.
    """
    try:
        yield
    except Exception as error:
        try:
            synchronize(device)
        except torch.AcceleratorError as fault:
            raise fault from error
        raise
    synchronize(device)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that an allocation has failed, as torch's on any device do.

    A fault of the GPU is none, whatever it says: what was computed before is lost with it.
    """
    if isinstance(error, torch.AcceleratorError) or _FAILED_WORK in str(error):
        return False
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(str(error)))
