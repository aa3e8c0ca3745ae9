"""A model's files and the model in them, for commands; places.py finds the files."""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from .._environment import is_first_process, processes
from .._text import first_line, split_gguf
from ..checkpoints.activations import load_in_best
from ..checkpoints.gguf.file import check_file
from ..checkpoints.layouts.files import check_files
from ..checkpoints.on_disk import DiskPlan, planned
from ..checkpoints.quantize.recipe import ARGUMENTS
from ..checkpoints.source import Source, read_tokenizer
from ..macs import refusal
from ..models.programs import Adapter
from ..serving.prefix_cache.memory import LONGEST
from .places import SMALL_FILES, place_of, place_of_adapter
from .processes import load_spread


def folder_of(source: str, revision: str | None = None, weights: bool = True) -> str:
    """The folder itself, or the one in the Hub's cache; without weights, only small files are downloaded.

    For FILE.gguf and NAME:FILE.gguf the path of the file.

    Raises: ValueError, OSError for a string that is neither a folder nor a name on the Hub, for a folder with
        incomplete weights, and for a damaged GGUF file.
    """
    folder = place_of(source, revision, weights)
    if Path(folder).is_file():
        check_file(folder)
    elif weights:
        check_files(folder)
    return folder


def small_files(folder: str) -> list[Path]:
    """Paths of files other than weights, relative to the folder; none for a GGUF file.

    Raises: ValueError for an unreadable file.
    """
    if Path(folder).is_file():
        return []
    result = sorted({path for pattern in SMALL_FILES for path in Path(folder).glob(pattern)})
    for path in result:
        if not path.is_file():
            raise ValueError(f"{path} is {'a folder' if path.is_dir() else 'a broken link'}, not a file")
        if not os.access(path, os.R_OK):
            raise ValueError(f"{path} must be readable, got no permission")
    return [path.relative_to(folder) for path in result]


def skeleton_of(options: argparse.Namespace, folder: str) -> tuple[Source, Any]:
    """Config of a model, and the dense model on the meta device."""
    source = Source(folder, loading_options(options))
    return source, source.skeleton()


def check_generates(options: argparse.Namespace, folder: str) -> None:
    """Raises: ValueError for a model that makes vectors or scores. Its weights are not read."""
    can_generate = getattr(Source(folder, loading_options(options)).cls, "can_generate", None)
    if can_generate is not None and not can_generate():  # an Auto class has none, and is for text
        raise ValueError("This model generates no text: sentence-transformers runs encoders and rerankers.")


def context_of(config: Any) -> int:
    """Context length of a model; LONGEST for any number."""
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
    if name is None and device == "cpu" and is_first_process():
        why = refusal() or "torch finds no Apple GPU here"
        print(f"{why}: operators run their references on the CPU", file=sys.stderr)
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError) as error:
        finds = "torch finds no Apple GPU here" if device == "mps" else first_line(error).partition(". ")[0]
        raise ValueError(f"--device must be one that holds tensors here, got {device}: {finds}") from None
    return device


def name_of(options: argparse.Namespace) -> str:
    """Name under which a server has the model: that on the Hub, or the own one of a folder or a GGUF file."""
    name, gguf = split_gguf(options.model)
    if gguf is not None and os.path.isdir(name):
        return gguf
    if os.path.isdir(name):
        name = os.path.basename(os.path.abspath(name))
    named = name if options.revision is None else f"{name}@{options.revision}"
    return named if gguf is None else f"{named}:{gguf}"


def loading_options(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `from_pretrained` that several commands have options for."""
    # False, not None: nobody is asked on the terminal whether code may run.
    return {"dtype": options.dtype, "trust_remote_code": options.trust_remote_code}


def load(options: argparse.Namespace, folder: str, device: str) -> Any:
    """The model in a folder, quantised as --bits, --group-size and --kv-bits say.

    stderr has when it begins and ends, unless --log-level asks for errors alone.
    """
    bits = {} if options.bits is None else {"bits": options.bits, "group_size": options.group_size}
    doing = "Reading" if options.bits is None else f"Reading in {options.bits} bits"
    if not (quiet := _is_quiet(options)):
        print(f"{doing}: {options.model}, for {device}", file=sys.stderr, flush=True)
    started = time.perf_counter()
    asked = {"kv_bits": options.kv_bits, "experts_memory": options.experts_memory, **bits}
    model = load_stored(options, folder, device, **asked)
    if not quiet:
        print(f"The model is ready after {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
    return model


def _is_quiet(options: argparse.Namespace) -> bool:
    return getattr(options, "log_level", None) == "error"


def check_adapter(options: argparse.Namespace, folder: str) -> None:
    """Checks that an --adapter fits the model in a folder, before weights are loaded.

    Raises: ValueError that names a tensor.
    """
    if options.adapter is None:
        return
    adapter, (_, dense) = place_of_adapter(options.adapter, weights=True), skeleton_of(options, folder)
    Adapter(adapter).check(dense)


def with_adapter(options: argparse.Namespace, model: Any) -> Any:
    """The model with the layers of --adapter in it; itself without one."""
    if options.adapter is None:
        return model
    return Adapter(place_of_adapter(options.adapter, weights=True)).added_to(model)


def _check_adapter_beside(plan: DiskPlan, adapter: str) -> None:
    """Raises: ValueError for an --adapter of experts that will be on the disk, before these are written."""
    if name := Adapter(place_of_adapter(adapter, weights=True)).adapted_experts(plan.model, plan.on_disk):
        expected = "without LoRA on experts beside --experts-memory"
        raise ValueError(f"--adapter must be {expected}, got one of {name}")


def load_stored(options: argparse.Namespace, folder: str, device: str, **asked: Any) -> Any:
    """The model in a folder; `asked` are more arguments of from_pretrained.

    Unless --dtype says it, stderr and the report have which activations go with quantised weights, and why.
    Where there are several processes, the layers are spread over them.
    """
    asked |= {"device_map": device, **loading_options(options)}

    def loaded(dtype: torch.dtype | None) -> Any:
        dtype_argument = {} if dtype is None else {"dtype": dtype}
        return load_spread(options, folder, **asked | dtype_argument)

    if asked.get("experts_memory") is not None and processes() == 1:
        recipe = {name: asked[name] for name in ARGUMENTS if name in asked} or None
        source = Source(folder, loading_options(options) | {"device_map": device})
        asked["experts_memory"] = plan = planned(source, recipe, asked["experts_memory"])
        if plan is not None and getattr(options, "adapter", None) is not None:
            _check_adapter_beside(plan, options.adapter)
    on_disk = asked.get("experts_memory") is not None  # it would be written for each dtype that is tried
    if options.dtype != "auto" or processes() > 1 or on_disk:
        return loaded(None)
    quantises = asked.get("bits") is not None
    source = Source(folder, loading_options(options))
    model, activations = load_in_best(source, quantises, device, loaded)
    if activations.dtype is not None:
        report = getattr(getattr(model, "hf_quantizer", None), "report", None)
        if report is not None:
            report.activations = str(activations)
        if not _is_quiet(options):
            print(activations, file=sys.stderr, flush=True)
    return model
