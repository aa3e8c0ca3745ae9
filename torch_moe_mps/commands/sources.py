"""Where a model comes from: a folder, or a name on the Hub, whose files are downloaded into its cache."""

import argparse
import os
from pathlib import Path
from typing import Any

import torch

from ..ops._checks import first_line
from ..transformers.checkpoints.files import check_files
from ..transformers.checkpoints.source import Source

# Files other than weights: config, tokenizer, processor, chat templates, Python code of the model.
SMALL_FILES = (
    "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.spm", "*.bpe", "*.py", "LICENSE*", "NOTICE*",
    "additional_chat_templates/*",
)  # fmt: skip
# Weights in layouts that transformers does not read, which some repositories have, too.
_DUPLICATES = ("*/*", "consolidated*")
LONGEST = 1 << 24  # tokens; longer than any window or context that models have
# Files of a tokenizer, of all kinds that transformers reads.
_TOKENIZERS = (
    "tokenizer*", "tokenization*", "vocab*", "merges*", "tekken*", "*.model", "*.tiktoken", "*.spm", "*.bpe"
)  # fmt: skip


def folder_of(source: str, revision: str | None = None, weights: bool = True) -> str:
    """The folder itself, or the one in the Hub's cache; without weights, only small files are downloaded.

    Raises: ValueError, OSError for what is neither a folder nor a name on the Hub, and for a folder whose
        weights are not complete.
    """
    if Path(source).is_dir():
        if revision is not None:
            raise ValueError(f"--revision is of a name on the Hub, got the folder {source}")
        folder = source
    else:
        folder = _downloaded(source, revision, weights)
    if weights:
        check_files(folder)
    return folder


def _downloaded(source: str, revision: str | None, weights: bool) -> str:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        folder = snapshot_download(source, revision=revision, allow_patterns=[*SMALL_FILES])
        if weights:
            snapshot_download(
                source, revision=revision, allow_patterns=["*.safetensors"], ignore_patterns=[*_DUPLICATES]
            )
    except (HFValidationError, RepositoryNotFoundError):
        raise ValueError(f"{source} is neither a folder nor the name of a model on the Hub") from None
    except LocalEntryNotFoundError:
        raise ValueError(
            f"{source} is no folder here; as a name, it is not in the Hub's cache, and the Hub cannot be "
            "reached"
        ) from None
    return folder


def small_files(folder: str) -> list[Path]:
    """The files other than weights, as paths relative to the folder.

    Raises: ValueError for one that cannot be read.
    """
    found = sorted({path for pattern in SMALL_FILES for path in Path(folder).glob(pattern)})
    for path in found:
        if not path.is_file():
            raise ValueError(f"{path} must be a file, got {'a folder' if path.is_dir() else 'a broken link'}")
        if not os.access(path, os.R_OK):
            raise ValueError(f"{path} must be readable, got no permission")
    return [path.relative_to(folder) for path in found]


def skeleton_of(options: argparse.Namespace, folder: str) -> tuple[Source, Any]:
    """What config.json says, and the dense model on the meta device.

    Without the advice to install kernels for other machines, which transformers gives for some models.
    """
    from transformers.utils import logging

    source, before = Source(folder, loading_options(options)), logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        return source, source.skeleton()
    finally:
        logging.set_verbosity(before)


def context_of(config: Any) -> int:
    """How many tokens a model reads."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or LONGEST


def tokenizer_of(folder: str, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a checkpoint.

    Raises: ValueError for a folder without one: transformers would make an empty one for some models.
    """
    from transformers import AutoTokenizer

    if not any(any(Path(folder).glob(pattern)) for pattern in _TOKENIZERS):
        raise ValueError(f"{folder} has no tokenizer")
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)


def usable_device(name: str | None) -> str:
    """The device if tensors can be on it; unless given, mps where there is one.

    Raises: ValueError.
    """
    device = name or ("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = first_line(error)
        raise ValueError(f"--device must be one that holds tensors here, got {device}: {reason}") from None
    return device


def name_of(options: argparse.Namespace) -> str:
    """What a server calls the model."""
    return options.model if options.revision is None else f"{options.model}@{options.revision}"


def loading_options(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `from_pretrained` that several commands have options for."""
    # False, not None: nobody is asked on the terminal whether code may run.
    return {"dtype": options.dtype, "trust_remote_code": options.trust_remote_code}


def processes() -> int:
    """How many processes torchrun started for the command; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_process() -> bool:
    """Whether this is the process that talks: the only one, or torchrun's rank 0."""
    return processes() == 1 or os.environ.get("RANK") == "0"


def pipeline_of(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `from_pretrained` under torchrun: the layers are spread over all processes."""
    if processes() == 1:
        if options.shares is not None:
            raise ValueError("--shares is for the processes that torchrun starts, got one process")
        return {}
    from transformers.distributed import DistributedConfig

    return {"distributed_config": DistributedConfig(pp_size=processes()), "shares": options.shares}


def load(options: argparse.Namespace, folder: str, device: str) -> Any:
    """The model in a folder, quantised as --bits, --group-size and --kv-bits say."""
    from ..transformers.checkpoints.loading import from_pretrained

    bits = {} if options.bits is None else {"bits": options.bits, "group_size": options.group_size}
    given = {**bits, **pipeline_of(options), **loading_options(options)}
    return from_pretrained(folder, device_map=device, kv_bits=options.kv_bits, **given)
