"""Turns the options of `convert` into arguments of `from_pretrained`."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..quantization import Format
from ..transformers.checkpoints.recipe import ARGUMENTS, AUTO, SAME, fits, recipe_of
from ..transformers.checkpoints.targets import weights_of
from .perplexity import text_ids
from .results import written_whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MIXED = ("mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6")
# --budget measures with this many tokens, in windows. More change the error of a layer by a few percent.
_TOKENS, _WINDOW = 2048, 512


def arguments_of(options: argparse.Namespace, source: str, model: "PreTrainedModel") -> dict[str, Any]:
    """The arguments for the checkpoint in the folder `source`, whose model on the meta device is `model`.

    Raises: ValueError, OSError for options that exclude each other, and for a file that holds no recipe.
    """
    ways = {"--recipe": options.recipe, "--budget": options.budget}
    given = [way for way, value in ways.items() if value is not None]
    if given and (len(given) > 1 or options.bits is not None or options.mode != "affine"):
        raise ValueError(f"{given[0]} already sets the bits; leave out --bits and --mode")
    if options.budget is not None:
        return _measured(options, source)
    if options.recipe is not None and options.recipe not in MIXED:
        return read_recipe(options.recipe)
    bits = options.bits
    if options.recipe is not None:
        bits = int(options.recipe.split("_")[1])
    elif bits is None and options.mode == "affine":
        bits = 4
    asked = {name: getattr(options, name) for name in ARGUMENTS if name != "overrides"}
    if options.recipe is not None and options.embedding_bits == AUTO:  # as mlx-lm has it
        asked["embedding_bits"] = SAME
    return {**asked, "bits": bits, "overrides": mixed_overrides(options.recipe, model)}


def read_recipe(file: str) -> dict[str, Any]:
    """The arguments in a JSON file."""
    try:
        recipe = json.loads(Path(file).read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is no JSON: {error}") from None
    except FileNotFoundError:
        raise ValueError(f"--recipe must be {', '.join(MIXED)} or a file, got {file}") from None
    if not isinstance(recipe, dict) or not set(recipe) <= {*ARGUMENTS}:
        wrong = sorted(set(recipe) - {*ARGUMENTS}) if isinstance(recipe, dict) else type(recipe).__name__
        raise ValueError(f"{file} must have {', '.join(sorted(ARGUMENTS))}, got {wrong}")
    return recipe


def _measured(options: argparse.Namespace, source: str) -> dict[str, Any]:
    from ..transformers.checkpoints.budget import measured_recipe
    from ..transformers.checkpoints.parts import Parts

    group_size = 64 if options.group_size is None else options.group_size
    most = 8 + 32 / max(1, group_size)  # 16 bits of scale and of bias for each group
    if not options.budget <= most:
        expected = f"at most {most:g} bits a weight, with which all weights are in 8 bit"
        raise ValueError(f"--budget must be {expected}, got {options.budget:g}")
    ids = calibration_ids(source, options.text, options.trust_remote_code)
    device = "mps" if torch.backends.mps.is_available() else "cpu"
    with Parts(source, device, trust_remote_code=options.trust_remote_code) as checkpoint:
        recipe = measured_recipe(checkpoint, ids.to(device), options.budget, group_size, keep=options.keep)
    if options.save_recipe is not None:
        with written_whole(options.save_recipe):
            Path(options.save_recipe).write_text(json.dumps(recipe, indent=1) + "\n")
    return recipe


def calibration_ids(source: str, text: str | None, trust_remote_code: bool = False) -> Tensor:
    """[B, T] tokens of the first part of a text file."""
    ids = torch.cat(text_ids(source, text, trust_remote_code)[::-1])[:_TOKENS]
    if len(ids) == 0:
        raise ValueError(f"{text} has no text to measure with")
    rows = max(1, len(ids) // _WINDOW)
    return ids[: rows * _WINDOW].view(rows, -1) if rows > 1 else ids[None]


def mixed_overrides(recipe: str | None, model: "PreTrainedModel") -> dict[str, int]:
    """More bits where mlx-lm's recipe of that name, modelled on llama.cpp's Q4_K_M, has them: lm_head, and
    v_proj and down_proj in the first and last eighth of the layers and in every third layer between.
    """
    if recipe is None:
        return {}
    high = int(recipe.split("_")[2])
    weights = weights_of(model, recipe_of(Format(4, 32)))
    names = [target.path(parameter) for target in weights.targets.values() for parameter in target.formats]
    layers = model.config.get_text_config().num_hidden_layers
    edge = layers // 8
    chosen = [i for i in range(layers) if i < edge or i >= 7 * layers // 8 or (i - edge) % 3 == 2]
    patterns = [
        f"layers.{i}.*{end}" for i in chosen for end in ("v_proj", "v_a_proj", "v_b_proj", "down_proj")
    ]
    return {pattern: high for pattern in [*patterns, "lm_head"] if any(fits(pattern, name) for name in names)}
