"""Experts where a checkpoint's own files have them: each of their tensors is rows behind each other."""

import hashlib
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .file import Layer, dtype_of, fill, opened, stamp_of


@dataclass(frozen=True)
class FileRows:
    """Rows of a tensor behind each other in a file.

    Attributes:
        offset: bytes before the first.
    """

    path: str
    offset: int
    rows: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor [experts, ...]: its parts, and its dtype in the files, where 16 bits may be others."""

    parts: Sequence[FileRows]
    dtype: torch.dtype

    def place(self, row: int) -> tuple[FileRows, int]:
        """The part with a row, and the number of the row in it."""
        for part in self.parts:
            if row < part.rows:
                return part, row
            row -= part.rows
        raise IndexError(row)


class StoredExperts:
    """The experts of a checkpoint's files, for reading as those of an `ExpertsFile`.

    Args:
        key: of their formats, as an `ExpertsFile` has it.

    Attributes:
        path, layers, fingerprint, opened: as of an `ExpertsFile`; the path is the checkpoint's.
    """

    def __init__(
        self, path: Path, key: str, layers: Sequence[Layer], tensors: Sequence[Mapping[str, StoredTensor]]
    ):
        self.path, self.layers = path, list(layers)
        self._tensors = [
            [of_layer[name] for name in layer.tensors]
            for layer, of_layer in zip(layers, tensors, strict=True)
        ]
        names = {part.path for of_layer in self._tensors for rows in of_layer for part in rows.parts}
        self.opened = {name: opened(name) for name in sorted(names)}
        for file in self.opened.values():
            weakref.finalize(self, os.close, file)
        stamps = b"".join(map(stamp_of, self.opened))
        self.fingerprint = hashlib.sha256(key.encode() + stamps).hexdigest()

    def places(self) -> Iterator[tuple[list[torch.dtype], list[list[int]], list[int]]]:
        """Yields as `ExpertsFile.places`; checkpoints have no checksums of experts."""
        files = [*self.opened]
        for layer, tensors in zip(self.layers, self._tensors, strict=True):
            rows = [
                [number, files.index(part.path), part.offset, size, part.rows]
                for number, (tensor, size) in enumerate(zip(tensors, layer.sizes, strict=True))
                for part in tensor.parts
            ]
            yield [tensor.dtype for tensor in tensors], rows, []

    def read(self, layer: int, expert: int, views: Sequence[memoryview]) -> None:
        """Reads an expert as `ExpertsFile.read` does, and gives it its layer's dtypes."""
        about = self.layers[layer]
        types = [dtype_of(dtype) for dtype, _ in about.tensors.values()]
        for rows, size, view, dtype in zip(self._tensors[layer], about.sizes, views, types, strict=True):
            part, row = rows.place(expert)
            if not fill(self.opened[part.path], [view], part.offset + row * size):
                raise ValueError(f"{part.path}: expert {expert} of {about.name} is truncated")
            if rows.dtype != dtype and dtype.is_floating_point:
                torch.frombuffer(view, dtype=dtype).copy_(torch.frombuffer(view, dtype=rows.dtype).clone())
