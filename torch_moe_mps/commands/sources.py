"""Where a model comes from: a folder, or a name on the Hub, whose files are downloaded into its cache."""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ..macs import refusal
from ..ops._checks import first_line
from ..pipeline import torchrun
from ..transformers.checkpoints.files import check_files
from ..transformers.checkpoints.gguf_file import check_file
from ..transformers.checkpoints.source import Source, read_tokenizer, split_gguf

# Files other than weights: config, tokenizer, processor, chat templates, Python code of the model.
SMALL_FILES = (
    "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.spm", "*.bpe", "*.py", "LICENSE*", "NOTICE*",
    "additional_chat_templates/*",
)  # fmt: skip
# Weights in layouts that transformers does not read, which some repositories have, too.
_DUPLICATES = ("*/*", "consolidated*")
LONGEST = 1 << 24  # tokens; longer than any window or context that models have


def folder_of(source: str, revision: str | None = None, weights: bool = True) -> str:
    """The folder itself, or the one in the Hub's cache; without weights, only small files are downloaded.

    For FILE.gguf and NAME:FILE.gguf the path of the file.

    Raises: ValueError, OSError for what is neither a folder nor a name on the Hub, for a folder whose weights
        are not complete, and for a damaged GGUF file.
    """
    if source.endswith(".gguf"):
        return _gguf_of(source, revision, weights)
    if Path(source).is_dir():
        if revision is not None:
            raise ValueError(f"--revision needs a name on the Hub, got the folder {source}")
        folder = source
    else:
        folder = _downloaded(source, revision, weights)
    if weights:
        check_files(folder)
    return folder


def _gguf_of(source: str, revision: str | None, weights: bool) -> str:
    if find_spec("gguf") is None:
        raise ValueError(f"{source} needs the package gguf, which knows the types: pip install gguf")
    folder, file = split_gguf(source)
    path = Path(folder) / str(file)
    if Path(folder).is_dir():
        if revision is not None:
            raise ValueError(f"--revision needs a name on the Hub, got the file {source}")
        if not path.is_file():
            raise ValueError(f"{path} must be a file, got {'a folder' if path.is_dir() else 'none'}")
    else:
        path = Path(_gguf_from_the_hub(folder, str(file), revision, weights))
    check_file(str(path))
    return str(path)


def _gguf_from_the_hub(name: str, file: str, revision: str | None, weights: bool) -> str:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:  # without weights, gigabytes are not worth a header
        with _named_on_the_hub(name):
            return hf_hub_download(name, file, revision=revision, local_files_only=not weights)
    except LocalEntryNotFoundError:
        reached = ", and the Hub cannot be reached" if weights else f"; `hf download {name} {file}` gets it"
        raise ValueError(f"{name}:{file} is not in the Hub's cache{reached}") from None
    except EntryNotFoundError:
        raise ValueError(f"{name} on the Hub has no file {file}") from None


@contextmanager
def _named_on_the_hub(name: str) -> Iterator[None]:
    """Raises: ValueError for what is no name there."""
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        yield
    except (HFValidationError, RepositoryNotFoundError):
        raise ValueError(f"{name} is neither a folder nor the name of a model on the Hub") from None


def _downloaded(source: str, revision: str | None, weights: bool) -> str:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        with _named_on_the_hub(source):
            folder = snapshot_download(source, revision=revision, allow_patterns=[*SMALL_FILES])
            if weights:
                snapshot_download(
                    source,
                    revision=revision,
                    allow_patterns=["*.safetensors"],
                    ignore_patterns=[*_DUPLICATES],
                )
    except LocalEntryNotFoundError:
        raise ValueError(
            f"{source} is no folder here; as a name, it is not in the Hub's cache, and the Hub cannot be "
            "reached"
        ) from None
    return folder


def small_files(folder: str) -> list[Path]:
    """The files other than weights, as paths relative to the folder; a GGUF file has none.

    Raises: ValueError for one that cannot be read.
    """
    if Path(folder).is_file():
        return []
    found = sorted({path for pattern in SMALL_FILES for path in Path(folder).glob(pattern)})
    for path in found:
        if not path.is_file():
            raise ValueError(f"{path} must be a file, got {'a folder' if path.is_dir() else 'a broken link'}")
        if not os.access(path, os.R_OK):
            raise ValueError(f"{path} must be readable, got no permission")
    return [path.relative_to(folder) for path in found]


def skeleton_of(options: argparse.Namespace, folder: str) -> tuple[Source, Any]:
    """What config.json says, and the dense model on the meta device."""
    source = Source(folder, loading_options(options))
    return source, source.skeleton()


def context_of(config: Any) -> int:
    """How many tokens a model reads."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or LONGEST


def tokenizer_of(folder: str, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a checkpoint; see `read_tokenizer`."""
    return read_tokenizer(*split_gguf(folder), trust_remote_code)


def usable_device(name: str | None) -> str:
    """The device if tensors can be on it; unless given, mps where there is one, and else a line says so.

    Raises: ValueError.
    """
    device = name or ("mps" if torch.backends.mps.is_available() else "cpu")
    if device == "mps" and (reason := refusal()):
        raise ValueError(reason)
    if name is None and device == "cpu" and torchrun.is_first_process():
        print("torch finds no Apple GPU here: operators run their references on the CPU", file=sys.stderr)
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = first_line(error)
        raise ValueError(f"--device must be one that holds tensors here, got {device}: {reason}") from None
    return device


def name_of(options: argparse.Namespace) -> str:
    """What a server calls the model."""
    name, gguf = split_gguf(options.model)
    named = name if options.revision is None else f"{name}@{options.revision}"
    return named if gguf is None else f"{named}:{gguf}"


def loading_options(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `from_pretrained` that several commands have options for."""
    # False, not None: nobody is asked on the terminal whether code may run.
    return {"dtype": options.dtype, "trust_remote_code": options.trust_remote_code}


def load(options: argparse.Namespace, folder: str, device: str) -> Any:
    """The model in a folder, quantised as --bits, --group-size and --kv-bits say."""
    bits = {} if options.bits is None else {"bits": options.bits, "group_size": options.group_size}
    return load_stored(options, folder, device, kv_bits=options.kv_bits, **bits)


def load_stored(options: argparse.Namespace, folder: str, device: str, **asked: Any) -> Any:
    """The model in a folder; `asked` are more arguments of from_pretrained.

    Under torchrun, the layers are spread over all processes.
    """
    asked |= {"device_map": device, **loading_options(options)}
    return torchrun.load(folder, options.shares, **asked)
