"""Recipes by measurement: within a number of bytes, more bits for the weights that need them most.

Every part of the model (a layer, an embedding, the output head) runs on what the dense parts before it
compute for a calibration text. Its weights are quantised one at a time, in each format, and the error is

    sum (output - dense output)^2 / sum (dense output)^2

The output of a layer is the residual stream, so all errors have the same unit and can be added.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..._faults import synchronize
from ...ops._checks import Check
from ...quantization import Format, dequantize
from ...quantization.formats import CHUNK, quantize_stack
from .parts import Parts
from .recipe import Recipe
from .sizes import quantized_bytes
from .targets import Target, layer_of, tied_layers, weights_of

BITS = (2, 3, 4, 5, 6, 8)
_CHECK = Check("measured_recipe")

# {name of a weight: {format: error}}
Errors = dict[str, dict[Format, float]]


class FormatCost(NamedTuple):
    """What a weight costs in a format."""

    format: Format
    nbytes: int
    error: float


class Item(NamedTuple):
    """A tensor of `size` weights, which has several names where layers are tied."""

    names: tuple[str, ...]
    size: int
    choices: list[FormatCost]


def measured_recipe(
    model: nn.Module | Parts,
    ids: Tensor,
    budget: float,
    group_size: int = 64,
    bits: Collection[int] = BITS,
    keep: Collection[str] = (),
    progress: bool = True,
) -> dict[str, Any]:
    """Choose the bits of each weight of a language model by the errors that they cause on a calibration text.

    Args:
        model: a dense model in memory, or a checkpoint that is read part by part.
        ids: [B, T] tokens of the text.
        budget: bits for each quantised weight, on average, with scales and biases.
        group_size, bits: of the formats to choose from, in mode affine.
        keep: as in `accelerate`.
        progress: show a bar.

    Returns: arguments of `accelerate` and `from_pretrained`, which can be written as JSON. They are the best
        a greedy search finds within the budget: it spends bytes where they lower the error most.

    Raises: ValueError for a budget that the smallest format exceeds, and for weights that do not fit.
    """
    checkpoint = model if isinstance(model, Parts) else None
    whole: nn.Module = model.model if isinstance(model, Parts) else model
    formats = [Format(count, group_size, "affine") for count in sorted(bits)]
    recipe = Recipe(formats[0], formats[0], formats[0], dict.fromkeys(keep))
    targets = weights_of(whole, recipe).targets
    for target in targets.values():
        target.check_columns(_CHECK)
    items = list(_items(whole, targets, formats, _no_errors(targets, formats)))
    total = sum(item.size for item in items)
    least = 8 * sum(min(choice.nbytes for choice in item.choices) for item in items) / max(total, 1)
    if budget < least:  # raised before the measuring, which takes long
        raise ValueError(f"moe_mps::measured_recipe: budget must be {least:.3f} bits or more, got {budget}")
    errors = _measure(whole, targets, formats, ids, checkpoint, progress)
    items = list(_items(whole, targets, formats, errors))
    chosen = choose([item.choices for item in items], int(budget * total / 8))
    result = {n: c.format.bits for item, c in zip(items, chosen, strict=True) for n in item.names}
    return _arguments(result, group_size, keep)


def _arguments(bits: Mapping[str, int], group_size: int, keep: Collection[str]) -> dict[str, Any]:
    usual = max(set(bits.values()), key=list(bits.values()).count)
    overrides = {name: count for name, count in bits.items() if count != usual}
    recipe = {"bits": usual, "group_size": group_size, "mode": "affine", "overrides": overrides}
    return recipe | ({"keep": list(keep)} if keep else {})


# Errors


@torch.no_grad()
def _measure(
    model: nn.Module,
    targets: Mapping[str, Target],
    formats: Sequence[Format],
    ids: Tensor,
    checkpoint: Parts | None,
    progress: bool,
) -> Errors:
    """Runs the model once; each part is read, measured and freed in turn."""
    found = _no_errors(targets, formats)
    inside = defaultdict(list)
    for name, target in targets.items():
        inside[layer_of(name)].append(target)
    parts = inside if checkpoint is None else checkpoint.modules
    bar = tqdm(total=len(inside), desc="Measuring", unit="part", disable=not progress)
    weights = ExitStack()  # those of the part that runs

    def enter(part: str) -> None:
        if checkpoint is not None:
            weights.enter_context(checkpoint.loaded(part))

    def leave(part: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        for target in inside.get(part, ()):
            for parameter in target.formats:
                errors = found[target.path(parameter)]
                for format in formats:
                    with _rounded(target, parameter, format):
                        errors[format] += _distance(output, module.forward(*args, **kwargs))
        bar.update(int(part in inside))
        weights.close()

    with ExitStack() as hooks, weights, bar:
        for part in list(parts):
            module = model.get_submodule(part)
            before = module.register_forward_pre_hook(lambda *call, part=part: enter(part))
            after = module.register_forward_hook(partial(leave, part), with_kwargs=True)
            hooks.callback(before.remove)
            hooks.callback(after.remove)
        model(input_ids=ids, use_cache=False)
    return found


def _no_errors(targets: Mapping[str, Target], formats: Sequence[Format]) -> Errors:
    return {t.path(p): dict.fromkeys(formats, 0.0) for t in targets.values() for p in t.formats}


@contextmanager
def _rounded(target: Target, parameter: str, format: Format) -> Iterator[None]:
    """Inside the block, a parameter has its quantised values."""
    weight = getattr(target.module, parameter)
    values = _values(target.rows_first(weight.data), format)
    values = values if target.kind == "experts" else values.squeeze(0)
    dense = weight.data
    weight.data = values.mT if target.kind == "experts" and target.module.is_transposed else values
    try:
        yield
    finally:
        weight.data = dense


def _values(stack: Tensor, format: Format) -> Tensor:
    """The dequantised matrices, computed some rows at a time to keep temporaries small."""
    values = torch.empty(stack.shape, dtype=stack.dtype, device=stack.device)
    step = max(1, CHUNK // stack.shape[-1])
    for matrix, out in zip(stack, values, strict=True):
        for rows, result in zip(matrix.split(step), out.split(step), strict=True):
            weight = quantize_stack(rows.unsqueeze(0), format)
            result.copy_(dequantize(*weight, **format.to_dict()).squeeze(0))
    return values


def _distance(expected: Any, output: Any) -> float:
    """The squared error of an output, or of the first of several, relative to its square."""
    expected, output = (t if isinstance(t, Tensor) else t[0] for t in (expected, output))
    synchronize(output.device)
    difference = square = 0.0
    for dense, other in zip(expected.flatten(0, -2).split(64), output.flatten(0, -2).split(64), strict=True):
        difference += float((other.float() - dense.float()).square().sum())
        square += float(dense.float().square().sum())
    return difference / square if square else 0.0


# Bits


def _items(
    model: nn.Module, targets: Mapping[str, Target], formats: Sequence[Format], errors: Errors
) -> Iterator[Item]:
    """One item for each tensor: the errors of tied layers are added."""
    tied = {name: other for name, other in tied_layers(model).items() if {name, other} <= targets.keys()}
    for target in targets.values():
        for parameter in target.formats:
            name = target.path(parameter)
            if name in tied:
                continue
            names = (name, *(n for n, other in tied.items() if other == name))
            weight = getattr(target.module, parameter)
            choices = [
                FormatCost(f, quantized_bytes(weight, f), sum(errors[n][f] for n in names)) for f in formats
            ]
            yield Item(names, weight.numel(), choices)


def choose(items: Sequence[Sequence[FormatCost]], budget: int) -> list[FormatCost]:
    """One choice for each item within `budget` bytes, by the steps that lower the error most for a byte.

    Raises: ValueError for a budget below the smallest choices.
    """
    hulls = [_hull(item) for item in items]
    chosen, spent = [0] * len(hulls), sum(hull[0].nbytes for hull in hulls)
    if spent > budget:
        raise ValueError(f"moe_mps::measured_recipe: budget must be {spent} bytes or more, got {budget}")
    steps = []
    for index, hull in enumerate(hulls):
        for level, (low, high) in enumerate(pairwise(hull), 1):
            gain = (low.error - high.error) / (high.nbytes - low.nbytes)
            steps.append((-gain, index, level, high.nbytes - low.nbytes))
    full = set()
    for _, index, level, nbytes in sorted(steps):
        if index not in full and spent + nbytes <= budget:
            chosen[index], spent = level, spent + nbytes
        else:
            full.add(index)
    return [hull[level] for hull, level in zip(hulls, chosen, strict=True)]


def _hull(choices: Sequence[FormatCost]) -> list[FormatCost]:
    """The lower convex hull: the choices that no mixture of two others beats, the smallest first."""
    hull: list[FormatCost] = []
    for choice in sorted(choices, key=lambda c: (c.nbytes, c.error)):
        if hull and choice.error >= hull[-1].error:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-2], choice):
            hull.pop()
        hull.append(choice)
    return hull


def _slope(low: FormatCost, high: FormatCost) -> float:
    return (low.error - high.error) / (high.nbytes - low.nbytes)
