"""The importance files of llama.cpp: what llama-imatrix writes, in GGUF or in its older form (.dat).

    GGUF   NAME.in_sum2 [n, C] and NAME.counts [n] in float32, n the experts of a stack, else 1
    .dat   int32 entries; of each: int32 length, name, int32 calls, int32 values, float32 of each value: mean
           times calls; behind them int32 chunks, int32 length, the name of the text

NAME is the weight's name in the model's GGUF file.
"""

import math
import re
import struct
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ...._install import pip_install
from ...._text import first_line
from ....ops._checks import Check
from ..quantize.blending import blended
from ..quantize.target import quantizable
from .file import GgufTensor, placing_of

_CHECK = Check("imatrix")
# GGUF's names of architectures whose model_type differs.
_ARCHITECTURES = {"mistral": "llama", "mixtral": "llama", "cohere": "commandr", "umt5": "t5"}
# The tokens of a call, unless somebody chose another number: the older form does not say it.
_CALL = 512


class Entry(NamedTuple):
    """Sums of squares [n, C], and the tokens [n] that they are of."""

    sums: Tensor
    counts: Tensor


def is_imatrix(path: Path) -> bool:
    """True if a file is no safetensors file: those have JSON after eight bytes."""
    with path.open("rb") as file:
        start = file.read(9)
    return start[:4] == b"GGUF" or (len(start) == 9 and start[8:] != b"{")


def read_imatrix(path: Path, model: nn.Module) -> tuple[dict[str, Tensor], int]:
    """Mean squares, keyed by matrix path, and the number of tokens, or 0.

    Raises: ValueError for a damaged file, for one of another kind, and without the package gguf."""
    if find_spec("gguf") is None:
        raise ValueError(f"moe_mps::imatrix: {path.name} needs the package gguf: {pip_install('gguf')}")
    entries, tokens = _read(path)
    means: dict[str, Tensor] = {}
    for name, entry, order in _placed(entries, model):
        mean = blended(*entry)
        if mean is None:
            continue
        mean = mean if order is None else mean[:, order.argsort()].contiguous()
        means[name] = mean if len(mean) > 1 else mean.squeeze(0)
    if not means:
        some = next(iter(entries), "nothing")
        _CHECK.fail(path.name, "of the model", f"that of another, which has {some}")
    return means, tokens


def _read(path: Path) -> tuple[dict[str, Entry], int]:
    try:
        data = path.read_bytes()
        entries, tokens = _read_gguf(path) if data[:4] == b"GGUF" else _read_dat(data)
        for name, entry in entries.items():
            if not all(bool((part.isfinite() & (part >= 0)).all()) for part in entry):
                raise ValueError(f"{name} must have finite numbers of at least 0")
        return entries, tokens
    except Exception as error:  # raised by struct, numpy or gguf_file
        raise ValueError(
            f"moe_mps::imatrix: {path.name} is damaged, or no imatrix ({first_line(error)})"
        ) from (error)


def _read_gguf(path: Path) -> tuple[dict[str, Entry], int]:
    from gguf import GGUFReader

    reader: Any = GGUFReader(path)
    kind = reader.fields.get("general.type")
    if kind is None or kind.contents() != "imatrix":
        raise ValueError("its general.type is not imatrix")
    tensors = {tensor.name: torch.from_numpy(np.array(tensor.data)) for tensor in reader.tensors}
    entries = {}
    for name in [name.removesuffix(".in_sum2") for name in tensors if name.endswith(".in_sum2")]:
        sums, counts = tensors[f"{name}.in_sum2"].float(), tensors[f"{name}.counts"].float().flatten()
        entries[name] = Entry(sums.view(len(counts), -1), counts)
    sizes = [reader.fields.get(f"imatrix.{key}") for key in ("chunk_count", "chunk_size")]
    counted = [0 if size is None else int(size.contents()) for size in sizes]
    return entries, counted[0] * counted[1]


def _read_dat(data: bytes) -> tuple[dict[str, Entry], int]:
    """Entries of the older form, which does not say how many matrices an entry has."""
    (count,) = struct.unpack_from("<i", data)
    place, entries = 4, {}
    for _ in range(count):
        (length,) = struct.unpack_from("<i", data, place)
        if length < 0:  # it would lead back, and the file would never end
            raise ValueError(f"a length of {length} at {place}")
        name = data[place + 4 : place + 4 + length].decode()
        calls, values = struct.unpack_from("<ii", data, place + 4 + length)
        place += 12 + length
        if calls < 1 or values < 0:
            raise ValueError(f"{name} has {values} values and was called {calls} times")
        sums = torch.from_numpy(np.frombuffer(data, "<f4", values, place).copy())
        place += 4 * values
        entries[name] = Entry(_CALL * sums[None], torch.tensor([float(_CALL * calls)]))
    return entries, 0


def _placed(entries: dict[str, Entry], model: Any) -> Iterator[tuple[str, Entry, Tensor | None]]:
    """Paths of the model's matrices, with an entry and the order that it has inputs in.

    Weights that are parts of one parameter have one input, as gate and up projections have: the first counts.
    """
    shapes = {f"{t.name}.{p}": (t, p) for t in quantizable(model).values() for p in t.parameters}
    stacks = [len(t.rows_first(t.dense(p))) for t, p in shapes.values() if t.kind == "experts"]
    placing = placing_of(_architecture(model), model)
    done = set()
    for name, entry in entries.items():
        for full in placing.names(_stand_in(name, entry, stacks, model)):
            if full not in shapes or full in done:
                continue
            done.add(full)
            target, parameter = shapes[full]
            matrices, _, columns = target.rows_first(target.dense(parameter)).shape
            if entry.sums.numel() != matrices * columns:
                expected = f"{matrices} * {columns} values, as the model has them"
                _CHECK.fail(name, expected, f"{entry.sums.numel()}")
            yield target.path(parameter), _of_each(entry, matrices), placing.inputs(full)


def _stand_in(name: str, entry: Entry, stacks: list[int], model: Any) -> GgufTensor:
    """A weight of this name; how many rows it has is not known, and matters only where code divides them."""
    config = model.config.get_text_config()
    rows = 2 * config.num_attention_heads * (getattr(config, "num_key_value_heads", None) or 1)
    stack = stacks[:1] if "_exps" in name else []
    shape = (*stack, rows, entry.sums.numel() // math.prod(stack))
    return GgufTensor(name, "F32", shape, np.empty(0, np.uint8))


def _of_each(entry: Entry, matrices: int) -> Entry:
    """The older form does not say which matrices an entry is of; it has ones for those without tokens."""
    sums, counts = entry.sums.view(matrices, -1), entry.counts
    if len(counts) == matrices:
        return entry._replace(sums=sums)
    counts = torch.where((sums == counts).all(1), 0.0, counts)
    return Entry(sums.masked_fill(counts[:, None] == 0, 0), counts)


def _architecture(model: Any) -> str:
    """GGUF's name for the type of a model."""
    from gguf import MODEL_ARCH_NAMES

    kind = _letters(model.config.get_text_config().model_type.removesuffix("_text"))
    known = {_letters(name): name for name in MODEL_ARCH_NAMES.values()}
    result = known.get(_letters(_ARCHITECTURES.get(kind, kind)))
    if result is None:
        _CHECK.fail("the model", "of a type that GGUF has", model.config.model_type)
    return result


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
