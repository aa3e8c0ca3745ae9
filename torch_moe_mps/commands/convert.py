"""`convert SRC DST`: a checkpoint quantised while it is read, written completely or not at all."""

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..transformers.checkpoints.layerwise import check_files
from ..transformers.checkpoints.mlx.writing import check_writable
from ..transformers.checkpoints.recipe import requested_recipe
from ..transformers.checkpoints.sizes import bytes_a_token, quantized_bytes
from ..transformers.checkpoints.targets import weights_of
from .recipes import arguments_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# What a folder holds beside the weights and the config: the tokenizer and its like.
_COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
_WRITTEN = ("config.json", "generation_config.json", "model.safetensors.index.json")


def run(options: argparse.Namespace) -> None:
    """Raises: ValueError, OSError, RuntimeError, SafetensorError with one line that says what is wrong."""
    destination = Path(options.destination)
    if destination.exists():
        raise ValueError(f"{destination} exists; convert writes a new folder")
    check_files(options.source)
    if options.save_recipe is not None and options.budget is None:
        raise ValueError("--save-recipe needs --budget, whose recipe it writes")
    model = _meta_model(options.source)
    if options.to == "mlx":
        check_writable(model.config)
    arguments = arguments_of(options, model)
    print(_sizes(model, arguments))
    if not options.dry_run:
        _convert(options, destination, arguments)
        print(f"wrote {destination}")


def _meta_model(source: str) -> "PreTrainedModel":
    from ..transformers.checkpoints.loading import class_for, load_config

    config, _ = load_config(source)
    dtype = getattr(config, "dtype", None) or torch.bfloat16
    vars(config).pop("quantization_config", None)
    with torch.device("meta"):
        return class_for(config).from_config(config, dtype=dtype)


def _sizes(model: torch.nn.Module, arguments: dict[str, Any]) -> str:
    """What will be written, from the formats alone."""
    recipe = requested_recipe(**arguments)
    assert recipe is not None  # the arguments have bits or a mode
    weights = weights_of(model, recipe)
    before = sum(p.nbytes for p in model.parameters())
    token = bytes_a_token(model)
    after, seen = before, set()
    for target in weights.targets.values():
        for parameter, format in target.formats.items():
            weight = getattr(target.module, parameter)
            if id(weight) not in seen:
                seen.add(id(weight))
                after += quantized_bytes(weight, format) - weight.nbytes
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    fit = "fits" if after < 0.75 * memory else "does not fit"
    return (
        f"{before / 1e9:.2f} GB -> {after / 1e9:.2f} GB ({len(weights.targets)} modules quantised, "
        f"{len(weights.dense)} left dense)\n"
        f"a token reads {token / 1e9:.3f} GB of the dense model\n"
        f"the quantised model {fit} in three quarters of this machine's {memory / 1e9:.0f} GB"
    )


def _convert(options: argparse.Namespace, destination: Path, arguments: dict[str, Any]) -> None:
    """Everything is written into a folder beside the destination, which gets its name in the end."""
    from ..transformers.checkpoints.files import tensors_in
    from ..transformers.checkpoints.loading import from_pretrained

    destination.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
    try:
        with tensors_in(folder):
            model = from_pretrained(options.source, **arguments, dtype="auto")
        report = getattr(getattr(model, "hf_quantizer", None), "report", None)
        if report is not None:
            print(report)
        _save(model, folder, options)
        for file in (f for pattern in _COPIED for f in Path(options.source).glob(pattern)):
            if file.name not in _WRITTEN:
                shutil.copy(file, folder)
        folder.chmod(0o755)
        os.replace(folder, destination)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _save(model: "PreTrainedModel", folder: Path, options: argparse.Namespace) -> None:
    if options.to == "mlx":
        from ..transformers.checkpoints.mlx.writing import save_mlx

        save_mlx(model, folder, _stored_config(options.source))
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
    else:
        model.save_pretrained(folder, max_shard_size="2GB")


def _stored_config(source: str) -> dict[str, Any]:
    """config.json as it is: mlx-lm reads keys that transformers 5 drops."""
    from transformers.utils.hub import cached_file

    return json.loads(Path(cached_file(source, "config.json")).read_text())
