"""The header of a GGUF file, read once, also for transformers' first reader.

That takes every value apart through numpy, and reads a file for each of its questions. Lists of texts, such
as a vocabulary, are counted.
"""

import copy
import functools
import os
import re
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from ..._text import parts_of
from .parsing import parsed

_TOKENS = "tokenizer.ggml.tokens"
# Sizes of experts that files state and transformers' first loader leaves at its defaults.
_WIDTHS = {
    "qwen2moe": {
        "qwen2moe.expert_feed_forward_length": "moe_intermediate_size",
        "qwen2moe.expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    },
    "qwen3moe": {"qwen3moe.expert_feed_forward_length": "moe_intermediate_size"},
}
_BLOCK = re.compile(r"(?:^|\.)blk\.(\d+)\.")
_SIZE = re.compile(r"_(count|count_kv|length|size|kernel|cache|rank)$")


class Header:
    """Contents of a file in front of its tensors.

    Args:
        is_first: whether the file is the first part, which alone has metadata of the model.

    Attributes:
        metadata: {key: value}; of an array of texts the count.
        tensors: (name, shape, number of the type, offset) of each.
        end: the byte behind it.
        config: entries that transformers' first loader makes of it, once that has.
    """

    def __init__(self, path: str, is_first: bool = True):
        self.metadata, self.tensors, self.end = parsed(path, is_first)
        self.config: dict[str, Any] | None = None


def header_of(path: str, is_first: bool = True) -> Header:
    """Header of a file, or of a part after the first, cached until the file changes.

    Raises: ValueError for a damaged file, OSError for one that cannot be read.
    """
    about = os.stat(path)
    return _header(os.path.realpath(path), about.st_size, about.st_mtime_ns, is_first)


@functools.lru_cache(maxsize=64)  # a file may have some dozens of parts
def _header(path: str, size: int, time: int, is_first: bool) -> Header:
    return Header(path, is_first)


def present_parts(path: str) -> list[str]:
    """Paths of all parts of a file, by its first one. Raises: ValueError for one that is missing."""
    parts = parts_of(os.fspath(path))
    for number, part in enumerate(parts):
        if not os.path.isfile(part):
            raise ValueError(f"moe_mps::gguf: {part} is missing, part {number + 1} of {len(parts)}")
    return parts


def tensor_names_in(path: str) -> list[str]:
    """Names of the tensors in all parts of a file."""
    parts = enumerate(parts_of(os.fspath(path)))
    return [name for number, part in parts for name, *_ in header_of(part, number == 0).tensors]


def check_part(metadata: dict[str, Any], number: int, count: int) -> None:
    """Checks what a file says of its parts.

    Raises: ValueError for another number, or another count, than its name has.
    """
    if count == 1 and metadata.get("split.count", 1) == 1:
        return
    for key, expected in (("split.count", count), ("split.no", number)):
        if metadata.get(key) != expected:
            got = metadata.get(key, "no such key")
            raise ValueError(f"{key} must be {expected}, by the name of the file, got {got}")


def check_sizes(metadata: dict[str, Any], names: Iterable[str]) -> None:
    """Validates sizes and counts in a file's metadata.

    Raises: ValueError for a value that is not a nonnegative number, for more blocks than the tensors have,
        and for attention without a head count, which transformers would guess.
    """
    names = [*names]
    heads = f"{metadata['general.architecture']}.attention.head_count"
    if any(".attn_q" in name for name in names):
        if heads not in metadata:
            raise ValueError(f"{heads} must be in the metadata, got no such key")
        if metadata[heads] == 0:
            raise ValueError(f"{heads} must be at least 1, got 0")
    for key, value in metadata.items():
        if key.startswith(f"{metadata['general.architecture']}.") and _SIZE.search(key):
            for number in value if isinstance(value, list) else [value]:
                if type(number) is not int or number < 0:
                    raise ValueError(f"{key} must be a number from 0, got {number!r}")
    _check_blocks(metadata, names)


def _check_blocks(metadata: dict[str, Any], names: Iterable[str]) -> None:
    """Raises: ValueError for more blocks than the tensors have, for each of which a module would be made.

    Those that predict further tokens may be in another file.
    """
    key = f"{metadata['general.architecture']}.block_count"
    count = metadata.get(key)
    further = metadata.get(f"{metadata['general.architecture']}.nextn_predict_layers", 0)
    present = max((int(block) for name in names for block in _BLOCK.findall(name)), default=-1) + 1
    if present and isinstance(count, int) and isinstance(further, int) and count - further > present:
        raise ValueError(f"{key} must be at most {present}, as many as the tensors have, got {count}")


def check_offsets(tensors: list[tuple[str, int, int]], alignment: int, size: int) -> None:
    """Checks that tensors lie one behind the other, and fill a file.

    Args:
        tensors: name, first byte and number of bytes of each.
        alignment: of the first bytes.
        size: of all, in bytes.

    Raises: ValueError for a wrong offset, such as after a wrong type or shape in the header.
    """
    last = end = 0
    for name, first, count in tensors:
        if first != end:
            raise ValueError(f"{name} must begin at byte {end} of the tensors, got {first}")
        last, end = first + count, -(-(first + count) // alignment) * alignment
    if tensors and size > end:
        raise ValueError(f"{tensors[-1][0]} must end at byte {size} of the tensors, got {last}")


def config_of_first_loader(path: str) -> dict[str, Any]:
    """Entries of the config that transformers' first loader finds, and the sizes that it leaves out.

    It parses a small file with the header's fields in place of the file.
    """
    from ...models.upstream import modeling_gguf_pytorch_utils

    load = modeling_gguf_pytorch_utils.load_gguf_checkpoint
    if find_spec("gguf") is None:  # it says what to install
        load(path)
    header = header_of(path)
    if header.config is None:
        with TemporaryDirectory() as folder:
            small = Path(folder) / "header.gguf"
            _write_small(small, header, tensor_names_in(path))
            header.config = load(str(small))["config"]
        tokens = header.metadata.get(_TOKENS)
        if header.config.get("vocab_size") == 0 and tokens:  # it was counted
            header.config["vocab_size"] = tokens
        header.config |= widths_in(header)
    return copy.deepcopy(header.config)


def widths_in(header: Header) -> dict[str, Any]:
    """{name in the config: size} of the sizes that transformers' first loader leaves at its defaults."""
    widths = _WIDTHS.get(header.metadata["general.architecture"], {})
    return {name: header.metadata[key] for key, name in widths.items() if key in header.metadata}


def _write_small(path: Path, header: Header, names: Iterable[str]) -> None:
    """Writes a file for that loader's config: no values of tensors, empty texts for a tokenizer's lists."""
    from gguf import GGUFValueType, GGUFWriter

    kinds = {bool: "BOOL", int: "INT64", float: "FLOAT64", str: "STRING"}
    writer = GGUFWriter(path, header.metadata["general.architecture"])
    for key, value in header.metadata.items():
        many = isinstance(value, list)
        if key == _TOKENS or (many and key.startswith("tokenizer.")):
            value, many = "", False
        if key in ("general.architecture", "general.alignment") or key.startswith("split.") or value == []:
            continue
        kind = GGUFValueType[kinds[type(value[0] if many else value)]]
        writer.add_key_value(key, value, *((GGUFValueType.ARRAY, kind) if many else (kind,)))
    for name in names:
        writer.add_tensor_info(name, [0], np.dtype(np.float32), 0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
