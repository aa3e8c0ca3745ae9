"""`convert SRC DST`: quantise a checkpoint while it is read. DST is written completely or not at all."""

import argparse
import errno
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from ..transformers.checkpoints.mlx.names import check_writable
from ..transformers.checkpoints.mlx.writing import save_mlx
from ..transformers.checkpoints.parts import Parts
from ..transformers.checkpoints.recipe import requested_recipe
from ..transformers.checkpoints.saving import save_parts
from ..transformers.checkpoints.sizes import bytes_a_token, quantized_sizes, total_bytes
from ..transformers.checkpoints.source import Source
from ..transformers.checkpoints.targets import weights_of
from .recipes import arguments_of
from .sources import folder_of, loading_options, small_files

# What is written anew, not copied.
_WRITTEN = ("config.json", "generation_config.json", "model.safetensors.index.json")


def run(options: argparse.Namespace) -> None:
    """Raises: ValueError, OSError, RuntimeError, SafetensorError with one line that says what is wrong."""
    destination = Path(options.destination)
    if os.path.lexists(destination):
        raise ValueError(f"{destination} exists; convert writes a new folder")
    if options.save_recipe is not None and options.budget is None:
        raise ValueError("--save-recipe needs --budget, whose recipe it writes")
    local = Path(options.source).is_dir()
    source = folder_of(options.source, options.revision, weights=local)
    model = Source(source, loading_options(options)).skeleton()
    if options.to == "mlx":
        check_writable(model.config)
    copied = [file for file in small_files(source) if file.name not in _WRITTEN]
    if not local and (not options.dry_run or options.budget is not None):
        # Gigabytes: after what can be checked without them.
        source = folder_of(options.source, options.revision)
    arguments = arguments_of(options, source, model)
    print(_sizes(model, arguments))
    if not options.dry_run:
        _convert(source, copied, options, arguments)
        print(f"wrote {destination}")


def _sizes(model: torch.nn.Module, arguments: dict[str, Any]) -> str:
    """The sizes of what will be written, which follow from shapes and formats."""
    recipe = requested_recipe(**arguments)
    assert recipe is not None  # the arguments have bits or a mode
    weights = weights_of(model, recipe)
    sizes = quantized_sizes(weights.targets.values())
    before, after = total_bytes(model), total_bytes(model, sizes)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    fit = "fits" if after < 0.75 * memory else "does not fit"
    return (
        f"{before / 1e9:.2f} GB -> {after / 1e9:.2f} GB ({len(weights.targets)} modules quantised, "
        f"{len(weights.dense)} left dense)\n"
        f"a token reads {bytes_a_token(model) / 1e9:.3f} GB of the dense model, "
        f"{bytes_a_token(model, sizes) / 1e9:.3f} GB of the quantised one\n"
        f"the quantised model {fit} in three quarters of this machine's {memory / 1e9:.0f} GB"
    )


def _convert(source: str, copied: list[Path], options: argparse.Namespace, arguments: dict[str, Any]) -> None:
    """Write into a temporary folder beside the destination, and rename it in the end."""
    destination = Path(options.destination)
    destination.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
    try:
        with Parts(source, recipe=arguments, **loading_options(options)) as parts:
            _save(parts, folder, source, options.to)
            if parts.report is not None:
                print(parts.report)
        for file in copied:
            (folder / file).parent.mkdir(exist_ok=True)
            shutil.copyfile(Path(source) / file, folder / file)
        folder.chmod(0o755)
        _rename(folder, destination)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _rename(folder: Path, destination: Path) -> None:
    try:
        folder.rename(destination)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise ValueError(
            f"{destination} was written by something else while this ran; it is left as it is"
        ) from None


def _save(parts: Parts, folder: Path, source: str, layout: str) -> None:
    if layout == "mlx":
        save_mlx(parts.model, folder, json.loads((Path(source) / "config.json").read_text()), parts)
    else:
        save_parts(parts.model, folder, parts)
    if parts.model.can_generate():
        own = (Path(source) / GENERATION_CONFIG_NAME).exists()
        config = GenerationConfig.from_pretrained(source) if own else parts.model.generation_config
        config.save_pretrained(folder)
