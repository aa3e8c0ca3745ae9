"""Decides which weights are quantised, and to which format, for in place, loading and planning."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from ...models.basics.interface import is_quantized
from ...models.basics.report import QuantizationReport
from ...models.basics.state import original_class
from ...ops._checks import Check
from ...quantization import Format
from .reasons import Reasons
from .recipe import Recipe
from .target import Target, other_matrices, paths_of, quantizable, size_of
from .tied import sharing, tied_layers


class Weights(NamedTuple):
    """Weights of a model that a recipe quantises, and all other matrices.

    Attributes:
        targets: {name: target} of quantised weights.
        dense: {name: reason} of weights that stay dense.
        sizes: {name: bytes} of the dense weights.
        notes: of the recipe, see there.
    """

    targets: dict[str, Target]
    dense: dict[str, str]
    sizes: dict[str, int]
    notes: tuple[str, ...]


def weights_of(model: nn.Module, recipe: Recipe) -> Weights:
    """Formats that a recipe chooses for a model's weights, without applying them.

    Modules that share a weight, or will once transformers has tied it, are one: a pattern that fits the name
    of one of them is for all, and the weight counts once.

    Raises: ValueError for a pattern of the recipe that fits nothing.
    """
    every = quantizable(model)
    recipe.check_patterns(paths_of(every))
    together = sharing(model, every, tied_layers(model))
    recipe = recipe.of_sizes(_sizes(every, together))
    result = Weights({}, {}, {}, recipe.notes)
    reasons = Reasons(model)
    for name, target in every.items():
        target.formats = _formats(
            target, [every[other] for other in together.get(name, [name]) if other in every], recipe
        )
        reason = _reason(target, reasons)
        if reason is None:
            result.targets[name] = target
        else:
            result.dense[name] = reason
    _drop_half_shared(together, result)
    result.sizes.update((name, size_of(every[name])) for name in result.dense)
    for name, module, matrix in other_matrices(model, every):
        result.dense[name] = f"{original_class(module).__name__} is no linear layer"
        result.sizes[name] = matrix.nbytes
    return result


def drop_packed(
    wanted: dict[str, Target], stored: Mapping[str, Target], report: QuantizationReport, may_leave: bool
) -> None:
    """Drops packed weights of the checkpoint from the weights to be quantised.

    Raises: ValueError, unless it `may_leave` them, for a recipe with fewer bits, or that finds nothing dense.
    """
    kinds = {target.kind for target in stored.values()}
    main_kind = "experts" if "experts" in kinds else "linears"  # a recipe may give the others more
    asked: set[Format] = set()
    requested: set[Format] = set()
    smaller = False
    for name in stored.keys() & wanted.keys():
        target, formats = wanted.pop(name), stored[name].formats
        requested.update(target.formats.values())
        report.skipped[name] = f"already {_named(formats.values())}"
        if target.kind == main_kind:
            asked.update({*target.formats.values()} - {*formats.values()})
        smaller |= any(format.bits < formats[name].bits for name, format in target.formats.items())
    if not may_leave and (smaller or (asked and not wanted)):
        has = _named(format for target in stored.values() for format in target.formats.values())
        expected = f"left out, or those of the checkpoint, which has {has}: quantise the dense one instead"
        Check("quantize").fail("bits", expected, _named(requested))


def _named(formats: Iterable[Format]) -> str:
    return " and ".join(sorted({*map(str, formats)}))


def _formats(target: Target, alike: Sequence[Target], recipe: Recipe) -> dict[str, Format]:
    """{parameter: the recipe's format}; `alike` are the targets that share the weight, and this one."""
    kind = "embeddings" if any(other.kind == "embeddings" for other in alike) else target.kind
    wanted = {p: recipe.format_of([other.path(p) for other in alike], kind) for p in target.parameters}
    return {part: _fitting(target, part, format) for part, format in wanted.items() if format is not None}


def _reason(target: Target, reasons: Reasons) -> str | None:
    """Why a target stays dense."""
    reason = None if target.kind == "experts" else reasons.of(target.name, target.module)
    if reason is None and len(target.formats) < len(target.parameters):
        return "kept by the recipe"
    if reason is None and target.kind != "experts":
        weight: Any = target.module.weight
        return _does_not_fit(target.rows_first(weight), target.formats["weight"])
    return reason


def _sizes(every: Mapping[str, Target], together: Mapping[str, list[str]]) -> Counter[str]:
    """Number of quantisable weights of each kind; shared ones count once."""
    sizes: Counter[str] = Counter()
    counted: set[str] = set()
    for name, target in every.items():
        if name not in counted:
            counted.update(together.get(name, ()))
            module, is_experts = target.module, target.kind == "experts"
            weights = target.experts.parameters(module) if is_experts else module.parameters(recurse=False)
            sizes[target.kind] += sum(weight.numel() for weight in weights)
    return sizes


def _fitting(target: Target, parameter: str, format: Format) -> Format:
    """The format, or its group-wise substitute where rows are no multiple of its blocks, as in llama.cpp."""
    bits = format.row.groupwise_bits
    if bits is None or (target.kind == "experts" and is_quantized(target.module)):
        return format
    columns = target.rows_first(target.dense(parameter)).shape[-1]
    if columns % format.multiple == 0 or columns % 32 != 0:
        return format
    return Format(bits, 64 if columns % 64 == 0 else 32)


def _does_not_fit(weight: Tensor, format: Format) -> str | None:
    """Why a weight cannot have a format; None if it can."""
    if weight.shape[-1] % format.multiple != 0:
        return f"its input dimension {weight.shape[-1]} is no multiple of {format.multiple}"
    if not weight.is_floating_point() or weight.element_size() not in (2, 4):
        return f"its weight is {weight.dtype}"
    return None


def _drop_half_shared(together: Mapping[str, list[str]], found: Weights) -> None:
    """A weight that several modules share is quantised only if all of them are targets in the same format."""
    for names in together.values():
        formats = [found.targets[n].formats if n in found.targets else None for n in names]
        if any(f != formats[0] for f in formats):
            for name in names:
                if found.targets.pop(name, None) is not None:
                    other = next(n for n in names if n != name)
                    found.dense[name] = f"it shares its weight with {other}, which is not quantised alike"
