"""Experts where a checkpoint's own files have them, and are read without a file of their own.

Each of their tensors is rows one after the other, or is made of the blocks of a GGUF file: those of a matrix
of one expert are contiguous there, and become rows of the tensors of its format as they are read.
"""

import hashlib
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..quantization.gguf import block_size, from_blocks
from .file import Layer, Places, allow_open_files, dtype_of, fill, opened, stamp_of

# Values that are not quantised, by ggml's names.
VALUES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


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


def bytes_of_block(kind: str) -> int:
    """Bytes of a block of ggml's type, in lower case; of one value that is not quantised."""
    return VALUES[kind].itemsize if kind in VALUES else block_size(kind)


@dataclass(frozen=True)
class FileBlocks:
    """Rows of a matrix of each expert of a layer in a GGUF file.

    Attributes:
        kind: ggml's type, in lower case. A block of values that are not quantised is one value.
        offset: bytes before the rows of the first expert.
        stride: bytes from one expert to the next.
        rows, in_row: rows of an expert, and blocks of a row.
        tensors: names of the tensors of the layer that hold the codes, scales and zeros, as far as there are.
        first, step: row n of an expert becomes row `first + n * step` of each of these tensors.
    """

    kind: str
    path: str
    offset: int
    stride: int
    rows: int
    in_row: int
    tensors: tuple[str, ...]
    first: int = 0
    step: int = 1

    @property
    def size(self) -> int:
        """Bytes of the rows of one expert."""
        return self.rows * self.in_row * bytes_of_block(self.kind)

    def converted(self, data: bytearray, dtype: torch.dtype) -> list[Tensor]:
        """The rows of one expert, of codes, scales and zeros. Values become those of a dtype."""
        if (stored := VALUES.get(self.kind)) is not None:
            values = torch.frombuffer(data, dtype=stored).float().to(dtype)
            return [values.view(self.rows, -1)]
        blocks = torch.frombuffer(data, dtype=torch.uint8).view(self.rows, -1)
        return [tensor for tensor in from_blocks(blocks, self.kind) if tensor is not None]


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
        self._tensors = [
            [of_layer[name] for name in layer.tensors]
            for layer, of_layer in zip(layers, tensors, strict=True)
        ]
        names = {part.path for of_layer in self._tensors for rows in of_layer for part in rows.parts}
        self._open(path, key, layers, names)

    def _open(self, path: Path, key: str, layers: Sequence[Layer], names: set[str]) -> None:
        self.path, self.layers = path, list(layers)
        allow_open_files(2 * len(names))  # the reading threads have descriptors of their own
        self.opened: dict[str, int] = {}
        for name in sorted(names):
            self.opened[name] = opened(name)
            weakref.finalize(self, os.close, self.opened[name])
        stamps = b"".join(map(stamp_of, self.opened))
        self.fingerprint = hashlib.sha256(key.encode() + stamps).hexdigest()

    def places(self) -> Iterator[Places]:
        """Yields as `ExpertsFile.places`; checkpoints have no checksums of experts."""
        files = [*self.opened]
        for layer, tensors in zip(self.layers, self._tensors, strict=True):
            rows = [
                [number, files.index(part.path), part.offset, size, part.rows]
                for number, (tensor, size) in enumerate(zip(tensors, layer.sizes, strict=True))
                for part in tensor.parts
            ]
            yield Places([tensor.dtype for tensor in tensors], rows)

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


class BlockExperts(StoredExperts):
    """The experts of a GGUF file, whose blocks are converted as they are read.

    Args:
        blocks: of each layer.
    """

    def __init__(self, path: Path, key: str, layers: Sequence[Layer], blocks: Sequence[Sequence[FileBlocks]]):
        self._blocks = blocks
        self._open(path, key, layers, {part.path for of_layer in blocks for part in of_layer})

    def places(self) -> Iterator[Places]:
        """Yields as `ExpertsFile.places`, with blocks in place of tensors."""
        files = [*self.opened]
        for layer, of_layer in zip(self.layers, self._blocks, strict=True):
            names, blocks = [*layer.tensors], []
            for part in of_layer:
                tensors = [names.index(name) for name in part.tensors]
                tensors += [-1] * (3 - len(tensors))
                place = [files.index(part.path), part.offset, part.stride, part.rows, part.in_row]
                blocks.append((part.kind, [*place, *tensors, part.first, part.step]))
            yield Places([dtype_of(dtype) for dtype, _ in layer.tensors.values()], [], blocks=blocks)

    def read(self, layer: int, expert: int, views: Sequence[memoryview]) -> None:
        """Reads an expert as `ExpertsFile.read` does, and converts its blocks."""
        about = self.layers[layer]
        into = dict(zip(about.tensors, views, strict=True))
        for part in self._blocks[layer]:
            data = bytearray(part.size)
            if not fill(self.opened[part.path], [memoryview(data)], part.offset + expert * part.stride):
                raise ValueError(f"{part.path}: expert {expert} of {about.name} is truncated")
            converted = part.converted(data, dtype_of(about.tensors[part.tensors[0]][0]))
            rows = part.first + part.step * torch.arange(part.rows)
            for name, tensor in zip(part.tensors, converted, strict=True):
                of_rows = tensor.contiguous().view(torch.uint8).view(part.rows, -1)
                whole = torch.frombuffer(into[name], dtype=torch.uint8)
                whole.view(-1, of_rows.shape[1])[rows] = of_rows
