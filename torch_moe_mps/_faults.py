"""Device errors: synchronization that checks for GPU faults, and out-of-memory errors."""

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ._extension import host_library

_FAILED_WORK = "command buffer execution failed"  # text of torch's error
_NO_MEMORY = re.compile(
    "out of memory|allocate memory|not enough memory|insufficient memory|invalid buffer size", re.I
)


def raise_fault() -> None:
    """Waits for the GPU to finish the current stream's work.

    Raises: torch.AcceleratorError if the GPU has failed, once for each time.
    """
    if host_library() is not None:
        torch.ops.moe_mps._raise_fault()


def gpu_busy() -> float:
    """Seconds of GPU time of this process so far, by the GPU's clock; 0 without mps.

    Counts finished command buffers that contain operators of this package; all are finished after
    `synchronize`.
    """
    return 0.0 if host_library() is None else float(torch.ops.moe_mps._gpu_busy())


def lost_gpu() -> torch.AcceleratorError | None:
    """Error of a process whose GPU work macOS ignores, as it does after several errors; None otherwise.

    Only a new process can use the GPU then. Once a fault says so, this runs a tiny kernel to make sure.
    """
    if host_library() is None or not torch.ops.moe_mps._was_ignored():
        return None
    try:
        torch.zeros(1, device="mps").add_(1)
        synchronize()
    except torch.AcceleratorError as error:
        return error if torch.ops.moe_mps._was_ignored() else None
    return None


class Mark:
    """A mark at the current MPS command buffer: `wait` waits for it, but not for later ones.

    Other devices are synchronised; on a CPU nothing is waited for.

    Args:
        commits: commits the command buffer.

    Attributes:
        place: the stream and the number of the buffer; None on other devices.
    """

    def __init__(self, device: torch.device, commits: bool = False):
        self._device = device
        self.place = torch.ops.moe_mps._watch(commits) if _is_watched(device) else None

    def wait(self) -> None:
        """Waits until the buffer is complete; it is committed if it is still open. Any thread may wait.

        Raises: torch.AcceleratorError if the GPU has failed at it.
        """
        if self.place is not None:
            torch.ops.moe_mps._wait_for_buffer(*self.place)
        elif self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)


def follow_stream(before: int, device: torch.device) -> int:
    """The current stream, once another one that used the same memory has finished; 0 on other devices.

    Args:
        before: the stream, by this function; 0 for none.
    """
    return torch.ops.moe_mps._follow_stream(before) if _is_watched(device) else 0


def host_copy(tensor: Tensor) -> Tensor:
    """A copy on the CPU, complete once the host has waited for a `Mark` of its buffer or of a later one.

    The copy has the strides of the source: for any others, also along a dimension of size 1, torch copies to
    a temporary on the CPU and reads it before the GPU has written it.
    """
    if tensor.device.type == "cpu":
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype)
    if copy.stride() != tensor.stride():
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return copy.copy_(tensor, non_blocking=True)


def fault_of(error: BaseException) -> torch.AcceleratorError | None:
    """GPU fault that an error of torch reports; None for any other error.

    Every error handler calls this. A fault is reported by the first synchronization, of this package or, from
    2.15 on, of torch, there as torch.OutOfMemoryError if the GPU ran out of memory. It must not end the next
    request, too.
    """
    if not isinstance(error, torch.AcceleratorError) and _FAILED_WORK not in str(error):
        return None
    try:
        raise_fault()
    except torch.AcceleratorError as fault:  # it names the operators, and what helps
        return fault
    return error if isinstance(error, torch.AcceleratorError) else torch.AcceleratorError(str(error))


def fault_behind(error: BaseException) -> torch.AcceleratorError | None:
    """GPU fault that an error reports or follows from, or None. Waits for the GPU."""
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
    """Waits for a device like torch.mps.synchronize, and raises if the GPU has failed.

    Loops around a model's forward call it before they use results. `generate` of an accelerated model and the
    commands end with it; operators raise the same error if it is known earlier.

    Args:
        device: of the model; does nothing on other devices than mps.

    Raises: torch.AcceleratorError, a RuntimeError, if the GPU has failed: what was computed before is lost.
    """
    if torch.device(device).type == "mps":
        if host_library() is not None:
            torch.ops.moe_mps._finish()  # torch's operators, too, outside of the queue in which torch waits
        try:
            torch.mps.synchronize()
        except RuntimeError as error:  # torch stores faults from 2.15 on
            raise fault_of(error) or error from None
        raise_fault()


def release_cache(device: torch.device | str = "mps") -> None:
    """Returns cached memory of PyTorch's MPS allocator to the system; waits for the GPU.

    `torch.mps.empty_cache` keeps Python's lock while it waits, and other threads of Python's would not run.

    Args:
        device: that used the memory; does nothing on other devices than mps.
    """
    if torch.device(device).type == "mps" and torch.backends.mps.is_available():
        (torch.mps.empty_cache if host_library() is None else torch.ops.moe_mps._release_cache)()


def free(device: torch.device | str) -> None:
    """Frees the memory of a model that is no longer referenced."""
    gc.collect()
    release_cache(device)


@contextmanager
def synchronized(device: torch.device | str) -> Iterator[None]:
    """Context that synchronizes the device at its end.

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
    """True for an out-of-memory error of torch on any device.

    A GPU fault does not count, because earlier results are lost with it.
    """
    if isinstance(error, torch.AcceleratorError) or _FAILED_WORK in str(error):
        return False
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(str(error)))
