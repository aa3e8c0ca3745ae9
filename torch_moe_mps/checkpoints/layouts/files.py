"""Files of a checkpoint: finds existing ones, writes new ones tensor by tensor."""

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig

INDEX = "model.safetensors.index.json"
LARGEST = 2_000_000_000  # bytes of a new file
_COPIED = 1 << 20  # bytes that are made contiguous at a time
_SAMPLE = 64  # bytes


def check_files(folder: str) -> None:
    """Checks that the files of a local folder are complete; see `checkpoint_files`."""
    if not (Path(folder) / "config.json").exists():
        raise ValueError(f"{folder} has no config.json")
    checkpoint_files(folder)


def checkpoint_files(source: str, variant: str | None = None, **where: Any) -> list[Path]:
    """The safetensors files that transformers reads, of a folder or a name on the Hub.

    Args:
        where: arguments of `from_pretrained` that say where on the Hub, such as revision.

    Raises: ValueError, with its name, for a file that is missing or truncated, and for no file.
    """
    # Not above: transformers imports its models after its quantizers, and so this file.
    from ...models.upstream.weights import _get_resolved_checkpoint_files

    config, _ = PreTrainedConfig.get_config_dict(source, **where)
    folder = Path(source, where.get("subfolder") or "")
    check_index(folder)
    try:
        names, _ = _get_resolved_checkpoint_files(
            source,
            variant=variant,
            gguf_file=None,
            use_safetensors=True,
            user_agent={},
            is_remote_code=False,
            transformers_explicit_filename=config.get("transformers_weights"),
            download_kwargs=where,
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{folder / INDEX} is truncated or has no weight_map in JSON") from None
    except OSError:
        if not Path(source).is_dir():
            raise
        of_variant = f" of the variant {variant}" if variant else ""
        raise ValueError(f"{folder} has no safetensors files{of_variant}") from None
    files = [Path(name) for name in names or ()]
    for file in files:
        if not file.exists():
            raise ValueError(f"{file.parent / INDEX} names {file.name}, which is missing")
        check_whole(file)
    return files


def check_index(folder: Path) -> None:
    """Raises: ValueError for an index, or a config, that names a file of weights outside of the folder."""
    for listing in (*sorted(folder.glob("*.index.json")), folder / "config.json"):
        try:
            stored = json.loads(listing.read_text())
            names = {stored.get("transformers_weights") or "", *stored.get("weight_map", {}).values()}
            outside = [name for name in names if Path(name).is_absolute() or ".." in Path(name).parts]
        except (OSError, ValueError, TypeError, AttributeError):  # its reader raises the error
            continue
        if outside:
            raise ValueError(f"{listing} names {min(outside)}, which is outside of the folder")


def check_whole(file: Path) -> None:
    """Raises: ValueError for a file that is truncated, or is none of safetensors."""
    try:
        with safe_open(file, framework="pt"):
            pass
    except SafetensorError as error:
        raise ValueError(f"{file} is truncated or not a safetensors file: {error}") from None


class TensorPlace(NamedTuple):
    """Place of a tensor in a safetensors file, and its dtype by the file's name."""

    dtype: str
    offset: int
    size: int


def places_in(path: str) -> dict[str, TensorPlace]:
    """{name of a tensor: its place} of a safetensors file."""
    with open(path, "rb", buffering=0) as file:
        return _places(_header(file))


def _header(file: FileIO) -> bytes:
    return file.read(int.from_bytes(file.read(8), "little"))


def _places(header: bytes) -> dict[str, TensorPlace]:
    """{name: place} of the tensors that a safetensors header lists."""
    about = json.loads(header)
    about.pop("__metadata__", None)
    spans = {name: (entry["dtype"], *entry["data_offsets"]) for name, entry in about.items()}
    data = 8 + len(header)
    return {
        name: TensorPlace(dtype, data + begin, end - begin) for name, (dtype, begin, end) in spans.items()
    }


def sample_of(path: str) -> bytes:
    """Header of a safetensors file, and samples from the start, middle and end of each tensor."""
    with open(path, "rb", buffering=0) as file:
        parts = [_header(file)]
        for _, offset, size in _places(parts[0]).values():
            for place in (offset, offset + (size - _SAMPLE) // 2, offset + size - _SAMPLE):
                file.seek(max(offset, place))
                parts.append(file.read(min(_SAMPLE, size)))
    return b"".join(parts)


def tensors_in(files: Iterable[str]) -> Iterator[tuple[str, str, str, tuple[int, ...]]]:
    """(file, name, dtype as safetensors calls it, shape) of all tensors in some files."""
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                part = tensors.get_slice(name)
                yield file, name, part.get_dtype(), tuple(part.get_shape())


class Shards:
    """New safetensors files of a folder, and their index.

    Tensors wait for their file in temporary files of the folder, so that output is not held in memory.

    Args:
        format: "pt" or "mlx".
        key: identifies the output. With a key, a JSON file beside the folder lists the complete files, so
            that another process resumes if this one is killed at any moment, after `finish`, too. Files that
            are not in that list, or of another key, are removed; nobody else may write there. Without one
            the folder must be empty.

    Attributes:
        done: {part: what `end` was told of it} of the parts whose tensors are in complete files.

    Raises: ValueError for a folder without a key that is not empty.
    """

    def __init__(self, folder: Path, format: str, key: str = ""):
        if not key and (others := sorted(file.name for file in folder.iterdir())):
            raise ValueError(f"{folder} must be an empty folder, got one with {', '.join(others[:3])}")
        self.folder, self.format, self.key = folder, format, key
        self._waiting: dict[str, Tensor] = {}
        self._ended: dict[str, Any] = {}  # parts of which something may be waiting
        self._names: list[list[str]] = []  # names of tensors in each complete file
        self.done: dict[str, Any] = {}
        self._total = 0
        progress = progress_file(folder)
        if key and progress.exists() and (stored := json.loads(progress.read_text()))[0] == key:
            _, self._names, self._total, self.done = stored
        complete = {self._file(number) for number in range(1, len(self._names) + 1)}
        existing = {*folder.glob("*")}
        if not complete <= existing:  # someone removed some
            self._names, self._total, self.done, complete = [], 0, {}, set()
        for file in existing - complete:
            shutil.rmtree(file) if file.is_dir() else file.unlink()
        self._known = {name for names in self._names for name in names}

    def add(self, name: str, tensor: Tensor) -> None:
        """Raises: OSError for a full disk."""
        if name in self._known:  # complete already, of a part that was not
            return
        waiting = sum(other.nbytes for other in self._waiting.values())
        if self._waiting and waiting + tensor.nbytes > LARGEST:
            self._write()
        self._waiting[name] = _in_a_file(tensor.detach(), self.folder)
        self._total += tensor.nbytes

    def end(self, part: str, note: Any = None) -> None:
        """Ends a part, all of whose tensors were added."""
        self._ended[part] = note

    def _file(self, number: int) -> Path:
        """A complete file, which `finish` names by their number."""
        final = self._final(number)
        return final if final.exists() else self._new(number)

    def _final(self, number: int) -> Path:
        count = len(self._names)
        name = "model.safetensors" if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
        return self.folder / name

    def _new(self, number: int) -> Path:
        return self.folder / f"model-{number:05}.safetensors"

    def _write(self) -> None:
        save_file(self._waiting, self._new(len(self._names) + 1), metadata={"format": self.format})
        self._names.append([*self._waiting])
        self._waiting = {}
        self.done |= self._ended
        self._ended = {}
        if self.key:
            progress = progress_file(self.folder)
            new = progress.with_suffix(".new")
            new.write_text(json.dumps([self.key, self._names, self._total, self.done]))
            new.replace(progress)

    def finish(self) -> None:
        """Writes the last file, the final names, and the index."""
        if self._waiting:
            self._write()
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._names, 1):
            final = self._final(number)
            self._file(number).rename(final).chmod(0o644)  # safetensors keeps others out
            weight_map |= dict.fromkeys(names, final.name)
        index = {"metadata": {"total_size": self._total}, "weight_map": dict(sorted(weight_map.items()))}
        (self.folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")


def progress_file(folder: Path) -> Path:
    """The file beside a folder that lists which of its files are complete."""
    return folder.with_name(f"{folder.name}.json")


def _in_a_file(tensor: Tensor, folder: Path) -> Tensor:
    """A copy in a temporary file, whose pages the system writes and reads as needed."""
    with tempfile.NamedTemporaryFile(dir=folder, buffering=0) as file:  # a buffer would fail again in close()
        rows = max(1, _COPIED * len(tensor) // max(1, tensor.nbytes)) if tensor.dim() else 1
        for some in tensor.split(rows) if tensor.dim() else [tensor]:
            rest = some.contiguous().view(-1).view(torch.uint8).numpy().data
            while rest:
                rest = rest[file.write(rest) :]
        size = tensor.numel()
        return torch.from_file(file.name, shared=True, size=size, dtype=tensor.dtype).view(tensor.shape)
