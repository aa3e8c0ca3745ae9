"""Experts where a checkpoint's own files have them: each of their tensors is rows behind each other."""

import hashlib
import os
import weakref
from collections.abc import Mapping, Sequence
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
        path, layers, fingerprint: as of an `ExpertsFile`; the path is the checkpoint's.
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
        self._files = {name: opened(name) for name in sorted(names)}
        for file in self._files.values():
            weakref.finalize(self, os.close, file)
        stamps = b"".join(map(stamp_of, self._files))
        self.fingerprint = hashlib.sha256(key.encode() + stamps).hexdigest()

    def read(self, layer: int, expert: int, views: Sequence[memoryview], begin: int = 0) -> None:
        """Reads a part of an expert as `ExpertsFile.read` does: its tensors count as one block."""
        rest = [view for view in views if len(view)]
        for rows, size in zip(self._tensors[layer], self.layers[layer].sizes, strict=True):
            if begin >= size or not rest:
                begin -= size
                continue
            wanted, room = [], size - begin
            while rest and room:
                wanted.append(rest[0][:room])
                room -= len(wanted[-1])
                rest[0] = rest[0][len(wanted[-1]) :]
                if not len(rest[0]):
                    del rest[0]
            part, row = rows.place(expert)
            if not fill(self._files[part.path], wanted, part.offset + row * size + begin):
                raise ValueError(f"{part.path} is truncated")
            begin = 0

    def check(self, layer: int, expert: int, views: Sequence[memoryview]) -> None:
        """Gives an expert that was read as a whole its layer's dtypes."""
        types = [dtype_of(dtype) for dtype, _ in self.layers[layer].tensors.values()]
        for rows, view, dtype in zip(self._tensors[layer], views, types, strict=True):
            if rows.dtype != dtype and dtype.is_floating_point:
                torch.frombuffer(view, dtype=dtype).copy_(torch.frombuffer(view, dtype=rows.dtype).clone())
