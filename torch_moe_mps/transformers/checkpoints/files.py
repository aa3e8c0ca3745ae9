"""Tensors in temporary files.

The system reads and writes their pages as needed, so they do not count as memory of the process.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import torch
from torch import Tensor

_COPIED = 1 << 20  # bytes that are made contiguous at a time
_FOLDER: ContextVar[Path | None] = ContextVar("folder", default=None)


@contextmanager
def tensors_in(folder: Path) -> Iterator[None]:
    """Within, tensors that loading creates are put into temporary files of a folder."""
    token = _FOLDER.set(folder)
    try:
        yield
    finally:
        _FOLDER.reset(token)


def in_files() -> bool:
    """Whether this is within `tensors_in`."""
    return _FOLDER.get() is not None


def in_a_file(tensor: Tensor) -> Tensor:
    """The tensor, contiguous; within `tensors_in` it is moved to a file unless it is in one."""
    if _FOLDER.get() is None or (tensor.is_shared() and tensor.is_contiguous()):
        return tensor.contiguous()
    with empty_whole(tensor.shape) as whole:
        whole.append(tensor)
        return whole.tensor()


def empty_whole(shape: torch.Size) -> "Whole":
    """A tensor to be filled part by part; within `tensors_in` it is in a file."""
    folder = _FOLDER.get()
    return Whole(shape) if folder is None else WholeInAFile(shape, folder)


class Whole:
    """A tensor [E, ...] that is filled in parts of its first dimension; use it as a context manager."""

    def __init__(self, shape: torch.Size):
        self.shape, self.whole, self.filled = shape, torch.empty(0), 0

    def __enter__(self) -> "Whole":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def append(self, part: Tensor) -> None:
        if part.shape == self.shape:
            self.whole = part
            return
        if not self.filled:
            self.whole = part.new_empty(self.shape)
        self.whole[self.filled : self.filled + len(part)] = part
        self.filled += len(part)

    def tensor(self) -> Tensor:
        return self.whole


class WholeInAFile(Whole):
    """The same in a file; on a full disk `append` raises."""

    def __init__(self, shape: torch.Size, folder: Path):
        self.shape, self.dtype = shape, torch.uint8
        self.file = tempfile.NamedTemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  (a buffer fails again)

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def append(self, part: Tensor) -> None:
        self.dtype = part.dtype
        rows = max(1, _COPIED * len(part) // max(1, part.nbytes))
        for some in part.split(rows) if part.dim() else [part]:
            octets = some.contiguous().view(-1).view(torch.uint8).numpy().data
            while octets:
                octets = octets[self.file.write(octets) :]

    def tensor(self) -> Tensor:
        size = self.shape.numel()
        return torch.from_file(self.file.name, shared=True, size=size, dtype=self.dtype).view(self.shape)
