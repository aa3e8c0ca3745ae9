"""The files of a checkpoint: finds existing ones, and writes new ones piece by piece."""

import json
import tempfile
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_utils import _get_resolved_checkpoint_files

from ...ops._checks import first_line

INDEX = "model.safetensors.index.json"
LARGEST = 2_000_000_000  # bytes of a new file
_COPIED = 1 << 20  # bytes that are made contiguous at a time


def check_files(folder: str) -> None:
    """Checks that the files of a local folder are complete; see `checkpoint_files`."""
    if not (Path(folder) / "config.json").exists():
        raise ValueError(f"{folder} has no config.json")
    checkpoint_files(folder)


def checkpoint_files(source: str) -> list[Path]:
    """The safetensors files that transformers reads, of a folder or a name on the Hub.

    Raises: ValueError, with its name, for a file that is missing or truncated, and for no file.
    """
    config, _ = PreTrainedConfig.get_config_dict(source)
    try:
        names, _ = _get_resolved_checkpoint_files(
            source,
            variant=None,
            gguf_file=None,
            use_safetensors=True,
            user_agent={},
            is_remote_code=False,
            transformers_explicit_filename=config.get("transformers_weights"),
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{Path(source) / INDEX} is truncated or has no weight_map in JSON") from None
    except OSError as error:
        if not Path(source).is_dir():
            raise
        raise ValueError(f"{source} has no safetensors files: {first_line(error)}") from None
    files = [Path(name) for name in names or ()]
    for file in files:
        if not file.exists():
            raise ValueError(f"{file.parent / INDEX} names {file.name}, which is missing")
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError as error:
            raise ValueError(f"{file} is truncated or no safetensors file: {error}") from None
    return files


class Shards:
    """New safetensors files of a folder, and their index.

    Tensors wait for their file in temporary files of the folder: what is written takes no memory.
    """

    def __init__(self, folder: Path, form: str):
        self.folder, self.form = folder, form
        self._waiting: dict[str, Tensor] = {}
        self._files: list[Path] = []
        self._names: list[list[str]] = []
        self._total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Raises: OSError for a full disk."""
        waiting = sum(other.nbytes for other in self._waiting.values())
        if self._waiting and waiting + tensor.nbytes > LARGEST:
            self._write()
        self._waiting[name] = _in_a_file(tensor.detach(), self.folder)
        self._total += tensor.nbytes

    def _write(self) -> None:
        self._files.append(self.folder / f"model-{len(self._files) + 1:05}.safetensors")
        self._names.append([*self._waiting])
        save_file(self._waiting, self._files[-1], metadata={"format": self.form})
        self._waiting = {}

    def finish(self) -> None:
        """Writes what waits, and the index; files are named by their number when that is known."""
        self._write()
        count = len(self._files)
        weight_map: dict[str, str] = {}
        for number, (file, names) in enumerate(zip(self._files, self._names, strict=True), 1):
            final = "model.safetensors" if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
            file.rename(self.folder / final)
            weight_map |= dict.fromkeys(names, final)
        index = {"metadata": {"total_size": self._total}, "weight_map": dict(sorted(weight_map.items()))}
        (self.folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")


def _in_a_file(tensor: Tensor, folder: Path) -> Tensor:
    """A copy in a temporary file, whose pages the system writes and reads as needed."""
    with tempfile.NamedTemporaryFile(dir=folder, buffering=0) as file:  # a buffer would fail again in close()
        rows = max(1, _COPIED * len(tensor) // max(1, tensor.nbytes)) if tensor.dim() else 1
        for some in tensor.split(rows) if tensor.dim() else [tensor]:
            octets = some.contiguous().view(-1).view(torch.uint8).numpy().data
            while octets:
                octets = octets[file.write(octets) :]
        size = tensor.numel()
        return torch.from_file(file.name, shared=True, size=size, dtype=tensor.dtype).view(tensor.shape)
