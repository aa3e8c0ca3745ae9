"""Turns the options of `convert` into arguments of `from_pretrained`."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._weight_formats import LARGE_BLOCK
from ..checkpoints.quantize.decision import weights_of
from ..checkpoints.quantize.recipe import ARGUMENTS, AUTO, SAME, fits, recipe_of
from ..checkpoints.quantize.target import quantizable
from ..quantization import Format
from .arguments import MIXED

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ALL_ALIKE = {"linear_bits": SAME, "embedding_bits": SAME}
# {name: arguments, and the format of the down projections of experts}: docs/quality_moe.md measures them. The
# first are for models of whose experts all columns are multiples of 256; the second for others, and for MLX.
SUPERBLOCKS: dict[str, tuple[dict[str, Any], Any]] = {
    "small": ({"mode": "q3_k"}, {"mode": "iq4_xs"}),
    "fast": ({"mode": "iq4_xs", **_ALL_ALIKE}, None),
    "best": ({"mode": "iq4_xs"}, {"mode": "q5_k"}),
}
NAMED: dict[str, tuple[dict[str, Any], Any]] = {
    "small": ({"bits": 3}, 4),
    "fast": ({"bits": 4, **_ALL_ALIKE}, None),
    "best": ({"bits": 4}, 5),
}


def arguments_of(options: argparse.Namespace, model: "PreTrainedModel") -> dict[str, Any]:
    """The arguments for a checkpoint, whose model on the meta device is `model`.

    Raises: ValueError, OSError for options that exclude each other, and for a file that holds no recipe.
    """
    asked = {name: getattr(options, name) for name in ARGUMENTS if name != "overrides"}
    if options.recipe is not None:
        return arguments_of_recipe(options.recipe, model, for_mlx=options.to == "mlx", **asked)
    if options.bits is None and options.mode == "affine":
        asked["bits"] = 4
    return asked


def arguments_of_recipe(
    recipe: str, model: "PreTrainedModel", *, for_mlx: bool = False, **asked: Any
) -> dict[str, Any]:
    """Quantisation arguments of a named recipe or a recipe file, with other options applied."""
    if recipe in NAMED:
        return _named(recipe, model, asked, for_mlx)
    if recipe not in MIXED:
        return read_recipe(recipe)
    for name in ("linear_bits", "embedding_bits"):  # the names that mlx-lm has
        if asked.get(name, AUTO) == AUTO:
            asked[name] = SAME
    return asked | {"bits": int(recipe.split("_")[1]), "overrides": mixed_overrides(recipe, model)}


def _named(recipe: str, model: "PreTrainedModel", asked: dict[str, Any], for_mlx: bool) -> dict[str, Any]:
    """Options beside the name win; a model without experts has no bits of their own."""
    experts = [target for target in quantizable(model).values() if target.kind == "experts"]
    columns = [t.rows_first(t.dense(p)).shape[-1] for t in experts for p in t.parameters]
    fits_in = experts and all(count % LARGE_BLOCK == 0 for count in columns) and not for_mlx
    recipe_arguments, down = (SUPERBLOCKS if fits_in and asked.get("group_size") is None else NAMED)[recipe]
    unsaid = {"bits": None, "mode": "affine", "group_size": None, "linear_bits": AUTO, "embedding_bits": AUTO}
    arguments = recipe_arguments | {
        name: value for name, value in asked.items() if value != unsaid.get(name, ())
    }
    paths = [target.path(parameter) for target in experts for parameter in target.parameters]
    ends = dict.fromkeys(".".join(path.split(".")[-2:]) for path in paths if path.endswith("down_proj"))
    return arguments if down is None else arguments | {"overrides": dict.fromkeys(ends, down)}


def read_recipe(file: str) -> dict[str, Any]:
    """The arguments in a JSON file."""
    try:
        recipe = json.loads(Path(file).read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is no JSON: {error}") from None
    if not isinstance(recipe, dict) or not set(recipe) <= {*ARGUMENTS}:
        wrong = sorted(set(recipe) - {*ARGUMENTS}) if isinstance(recipe, dict) else type(recipe).__name__
        raise ValueError(f"{file} must have {', '.join(sorted(ARGUMENTS))}, got {wrong}")
    return recipe


def mixed_overrides(recipe: str, model: "PreTrainedModel") -> dict[str, int]:
    """More bits where mlx-lm's recipe of that name, modelled on llama.cpp's Q4_K_M, has them: lm_head, and
    v_proj and down_proj in the first and last eighth of the layers and in every third layer between.
    """
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
