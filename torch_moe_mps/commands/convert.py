"""`convert SRC DST`: a checkpoint quantised while it is read, written completely or not at all."""

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from ..quantization import Format
from ..transformers.recipe import fits, recipe_of, requested_recipe
from ..transformers.sizes import bytes_a_token
from ..transformers.targets import weights_of

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
    arguments = _arguments(options)
    model = _meta_model(options.source)
    arguments["overrides"] = mixed_overrides(options.recipe, model)
    print(_sizes(model, arguments))
    if not options.dry_run:
        _convert(options.source, destination, arguments)
        print(f"wrote {destination}")


def _arguments(options: argparse.Namespace) -> dict[str, Any]:
    bits = options.bits
    if options.recipe is not None:
        if bits is not None or options.mode != "affine":
            raise ValueError("--recipe says the bits itself; leave --bits and --mode out")
        bits = int(options.recipe.split("_")[1])
    elif bits is None and options.mode == "affine":
        bits = 4
    return {
        "bits": bits,
        "group_size": options.group_size,
        "mode": options.mode,
        "linear_bits": options.linear_bits,
        "embedding_bits": options.embedding_bits,
        "keep": options.keep,
    }


def mixed_overrides(recipe: str | None, model: "PreTrainedModel") -> dict[str, int]:
    """More bits where mlx-lm's recipe of that name has them, after llama.cpp's Q4_K_M.

    Those are lm_head, and v_proj and down_proj in the first and the last eighth of the layers and in every
    third between.
    """
    if recipe is None:
        return {}
    high = int(recipe.split("_")[2])
    weights = weights_of(model, recipe_of(Format(4, 32)))
    names = [f"{t.name}.{p}" for t in weights.targets.values() for p in t.formats]
    names += list(weights.targets)
    layers = model.config.get_text_config().num_hidden_layers
    edge = layers // 8
    chosen = [i for i in range(layers) if i < edge or i >= 7 * layers // 8 or (i - edge) % 3 == 2]
    patterns = [
        f"layers.{i}.*{end}" for i in chosen for end in ("v_proj", "v_a_proj", "v_b_proj", "down_proj")
    ]
    return {pattern: high for pattern in [*patterns, "lm_head"] if any(fits(pattern, name) for name in names)}


def check_files(source: str) -> None:
    """That the shards of a local folder are there and whole, with the name of the file that is not."""
    folder = Path(source)
    if not folder.is_dir():
        return
    index = folder / "model.safetensors.index.json"
    files = sorted(folder.glob("*.safetensors"))
    if index.exists():
        files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    if not files:
        raise ValueError(f"{folder} has no safetensors files")
    for file in files:
        if not file.exists():
            raise ValueError(f"{index} names {file.name}, which is missing")
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError as error:
            raise ValueError(f"{file} is truncated or no safetensors file: {error}") from None


def _meta_model(source: str) -> "PreTrainedModel":
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(source)
    dtype = getattr(config, "dtype", None) or torch.bfloat16
    vars(config).pop("quantization_config", None)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


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
                after += _quantized_bytes(weight, format) - weight.nbytes
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    fit = "fits" if after < 0.75 * memory else "does not fit"
    return (
        f"{before / 1e9:.2f} GB -> {after / 1e9:.2f} GB ({len(weights.targets)} modules quantised, "
        f"{len(weights.dense)} left dense)\n"
        f"a token reads {token / 1e9:.3f} GB of the dense model\n"
        f"the quantised model {fit} in three quarters of this machine's {memory / 1e9:.0f} GB"
    )


def _quantized_bytes(weight: torch.Tensor, format: Format) -> int:
    scale = 2 * weight.element_size() if format.has_biases else 1
    return weight.numel() * format.bits // 8 + weight.numel() // format.group_size * scale


def _convert(source: str, destination: Path, arguments: dict[str, Any]) -> None:
    from ..transformers.loading import from_pretrained

    destination.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
    try:
        model = from_pretrained(source, **arguments, dtype="auto")
        report = model.hf_quantizer.report if getattr(model, "hf_quantizer", None) is not None else None
        if report is not None:
            print(report)
        model.save_pretrained(folder, max_shard_size="2GB")
        for file in (f for pattern in _COPIED for f in Path(source).glob(pattern)):
            if file.name not in _WRITTEN:
                shutil.copy(file, folder)
        folder.chmod(0o755)
        os.replace(folder, destination)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
