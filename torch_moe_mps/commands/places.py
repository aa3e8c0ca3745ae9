"""Finds a model's files: in a folder, or by name in the Hub's cache.

Nothing here waits for torch, so that a wrong name is said at once.
"""

import argparse
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .._hub import folder_in_the_cache, named_on_the_hub
from .._install import pip_install
from .._text import first_line, parts_of, shown, split_gguf

# Files beside the weights: config, tokenizer, processor, chat templates, Python code, and the modules that
# sentence-transformers puts behind the model, in folders that begin with a number (1_Pooling, 2_Dense).
SMALL_FILES = (
    "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.spm", "*.bpe", "*.py", "LICENSE*", "NOTICE*",
    "additional_chat_templates/*", "[0-9]*_*/*.json", "[0-9]*_*/*.safetensors",
)  # fmt: skip
# Weights in layouts that transformers does not read, which some repositories have, too.
_DUPLICATES = ("*/*", "consolidated*")
ADAPTER_CONFIG = "adapter_config.json"
_NAMES = {
    "model": True,
    "source": True,
    "against": False,
    "bisect": False,
}  # options: whether --revision is theirs
_FILES = {"text": "--text", "prompts": "--prompts"}  # options, and how they are written


def look_for_files(options: argparse.Namespace) -> None:
    """Raises: ValueError for the name of a file that is none."""
    for option, name in _FILES.items():
        file = getattr(options, option, None)
        if file is not None and (not Path(file).exists() or Path(file).is_dir()):  # it may be a pipe
            wrong = f"{file} is a folder" if Path(file).is_dir() else f"{file} does not exist"
            raise ValueError(f"{name} must be a file: {wrong}")


def look_for_models(options: argparse.Namespace) -> None:
    """Look for the models that a command names; of those on the Hub, small files alone are downloaded.

    Raises: ValueError, OSError for a name that is of no folder and not on the Hub.
    """
    revision = getattr(options, "revision", None)  # `report` has no such option
    for option, has_revision in _NAMES.items():
        names = getattr(options, option, None) or []
        for name in [names] if isinstance(names, str) else names:
            place_of(name, revision if has_revision else None, weights=False, only_look=True)


def utf8_text(option: str, file: str | Path) -> str:
    """Text of the file of an option. Raises: ValueError if it is not UTF-8."""
    try:
        return Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{option} must be a file in UTF-8, got {file}: {error}") from None


def prompts_of(options: argparse.Namespace) -> list[str]:
    """The prompts of `generate`: the argument, the lines of a file, or stdin.

    Raises: ValueError for a file or an input without one, and where they are not in UTF-8.
    """
    if options.prompt is not None:
        return [options.prompt]
    if options.prompts is not None:
        texts = utf8_text("--prompts", options.prompts).split("\n")
    else:
        try:
            texts = [sys.stdin.buffer.read().decode("utf-8")]
        except UnicodeDecodeError as error:
            raise ValueError(f"stdin must be in UTF-8: {error}") from None
    if not any(text.strip() for text in texts):
        raise ValueError(f"{options.prompts or 'stdin'} has no prompt")
    return [text for text in texts if text.strip()]


def place_of(source: str, revision: str | None, weights: bool, only_look: bool = False) -> str:
    """The folder, or the GGUF file, of a model; see `sources.folder_of`.

    Args:
        weights: download them, too, from the Hub.
        only_look: at a GGUF file on the Hub: nothing of it is downloaded.
    """
    folder, file = split_gguf(source)
    if file is not None and find_spec("gguf") is None:
        raise ValueError(f"{source} needs the package gguf, which knows the types: {pip_install('gguf')}")
    if not Path(folder).is_dir():
        if Path(source).is_file():
            raise ValueError(
                f"MODEL must be a folder, a name on the Hub or a GGUF file, got the file {source}: "
                f"its folder is {Path(source).parent}"
            )
        if file is None:
            return _downloaded(source, revision, weights)
        return _gguf_from_the_hub(folder, file, revision, weights, only_look)
    if revision is not None:
        raise ValueError(
            f"--revision needs a name on the Hub, got the {'file' if file else 'folder'} {source}"
        )
    if file is None:
        if not (Path(source) / "config.json").is_file():
            raise ValueError(f"{source} has no config.json")
        return source
    path = Path(folder) / file
    if not path.is_file():
        raise ValueError(f"{path} is a folder, not a file" if path.is_dir() else f"{path} does not exist")
    return str(path)


def _gguf_from_the_hub(name: str, file: str, revision: str | None, weights: bool, only_look: bool) -> str:
    """Path of a GGUF file in the Hub's cache, or of its first part, downloaded if weights are needed.

    Args:
        only_look: asks whether the Hub has the file, and downloads nothing.

    Raises: ValueError for a file that neither the Hub nor its cache has.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    asked: dict[str, Any] = {"dry_run": True} if only_look else {"local_files_only": not weights}
    paths = []
    try:  # without weights, gigabytes are not worth a header
        with named_on_the_hub(name):
            for part in parts_of(file):
                paths.append(str(hf_hub_download(name, part, revision=revision, **asked)))
    except LocalEntryNotFoundError:
        tried = weights or only_look
        reached = ", and the Hub cannot be reached" if tried else f"; `hf download {name} {part}` gets it"
        raise ValueError(f"{name}:{part} is not in the Hub's cache{reached}") from None
    except EntryNotFoundError:
        raise ValueError(f"{name} on the Hub has no file {part}") from None
    return paths[0]


def _downloaded(source: str, revision: str | None, weights: bool) -> str:
    folder = folder_in_the_cache(source, SMALL_FILES, revision=revision)
    if weights:
        folder_in_the_cache(source, ("*.safetensors",), _DUPLICATES, revision=revision)
    return folder


def place_of_adapter(name: str, weights: bool) -> str:
    """The folder of an adapter of PEFT: the name itself, or that in the Hub's cache.

    Args:
        weights: download them, too, from the Hub.

    Raises: ValueError for a string that is neither a folder nor a name on the Hub, or without an adapter.
    """
    files = (ADAPTER_CONFIG, "adapter_model.*") if weights else (ADAPTER_CONFIG,)
    folder = name if Path(name).is_dir() else folder_in_the_cache(name, files, what="an adapter")
    adapter_config(folder)
    return folder


def adapter_config(folder: str) -> dict[str, Any]:
    """The adapter_config.json of a LoRA adapter of PEFT in a folder. Raises: ValueError."""
    file = Path(folder) / ADAPTER_CONFIG
    if not file.is_file():
        raise ValueError(f"--adapter must be a folder with an {ADAPTER_CONFIG}, got {folder}")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"--adapter: {file} must be JSON, got {first_line(error)}") from None
    if not isinstance(config, dict):
        raise ValueError(f"--adapter: {file} must have a JSON object, got a {type(config).__name__}")
    if (kind := config.get("peft_type")) != "LORA":
        raise ValueError(f"--adapter must be a LoRA adapter of PEFT, got one of {kind}")
    for key, lowest in (("r", 1), ("lora_alpha", 0)):
        number = config.get(key, 8)  # in the layout of PEFT
        if isinstance(number, bool) or not isinstance(number, int | float) or number < lowest:
            raise ValueError(f'--adapter: {file} must have "{key}" of at least {lowest}, got {shown(number)}')
    return config
