"""Ranges of activations that were measured before, in the user's cache folder."""

import hashlib
import math
from pathlib import Path
from typing import NamedTuple

from ...selfcheck.machine import cache_folder, read_object, write_object

MOST = 200  # models that are remembered; the first ones go
_FILES = (".safetensors", ".bin", ".gguf", ".json")


class Largest(NamedTuple):
    """Largest magnitude of a model's activations over a number of tokens; infinite for NaN."""

    value: float
    tokens: int


def key_of(path: str, gguf: str | None, quantises: bool) -> str | None:
    """Digest of the names, sizes and times of a folder's files; None if there is no such folder."""
    folder = Path(path)
    if not folder.is_dir():
        return None
    files = [folder / gguf] if gguf is not None else sorted(folder.iterdir())
    states = [(file.name, file.stat()) for file in files if file.suffix in _FILES and file.exists()]
    parts = [str(folder.resolve()), str(quantises)]
    parts += [f"{name} {state.st_size} {state.st_mtime_ns}" for name, state in states]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def remembered(key: str | None) -> Largest | None:
    found = read_object(_file).get(key) if key is not None else None
    match found:
        case [None, int(tokens)]:
            return Largest(math.inf, tokens)
        case [int() | float() as value, int(tokens)]:
            return Largest(float(value), tokens)
    return None


def remember(key: str | None, largest: Largest) -> None:
    """Stores a measured range; without a writable file, the next process measures again."""
    if key is None:
        return
    value = largest.value if math.isfinite(largest.value) else None
    known = {name: kept for name, kept in read_object(_file).items() if name != key}
    known[key] = [value, largest.tokens]
    write_object(_file, dict([*known.items()][-MOST:]))


def _file() -> Path:
    return cache_folder() / "ranges.json"
