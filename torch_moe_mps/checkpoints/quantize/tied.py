"""Layers that share a weight, or will once transformers has tied it."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import permutations

from torch import nn

from ...quantization import TENSORS
from .target import Target


def sharing(
    model: nn.Module, targets: Mapping[str, Target], tied: Mapping[str, str] | None = None
) -> dict[str, list[str]]:
    """{name: all names, in the model's order} of modules with the weight of a target in common.

    Args:
        tied: names of two modules that count as one, from `tied_layers`.
    """
    parts = [target.module._parameters.get(p) for target in targets.values() for p in target.parameters]
    weights = {id(weight) for weight in parts if weight is not None}
    names = {id(module): name for name, module in model.named_modules()}
    owners: dict[int, list[str]] = defaultdict(list)
    for name, module in model.named_modules():
        for weight in {*map(id, module._parameters.values())} & weights:
            owners[weight].append(name)
    aliases = {alias: names[id(m)] for alias, m in model.named_modules(remove_duplicate=False)}
    pairs = [[aliases.get(n, n) for n in pair] for pair in (tied or {}).items()]
    order = {name: place for place, name in enumerate(names.values())}
    groups = _united([*owners.values(), *pairs])
    return {
        name: group
        for names in groups
        if len(group := sorted(names, key=lambda n: order.get(n, -1))) > 1
        for name in group
    }


def _united(groups: Iterable[Iterable[str]]) -> Iterable[list[str]]:
    """Groups with a name in common, as one."""
    above: dict[str, str] = {}

    def root(name: str) -> str:
        while above.setdefault(name, name) != name:
            name = above[name]
        return name

    for first, *others in groups:
        for other in others or [first]:
            above[root(other)] = root(first)
    result: dict[str, list[str]] = defaultdict(list)
    for name in above:
        result[root(name)].append(name)
    return result.values()


def tied_layers(model: nn.Module) -> dict[str, str]:
    """{name: name} of the modules whose weight transformers ties: the first takes it from the second.

    Once the model is quantised, it ties the codes of it (`tie_quantized`).
    """
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return {
        target.removesuffix(end): source.removesuffix(end)
        for target, source in tied.items()
        for end in (".weight", f".{TENSORS[0]}")
        if target.endswith(end) and source.endswith(end)
    }


def tied_pairs(tied: Mapping[str, str]) -> list[tuple[str, str]]:
    """Pairs of modules that share a weight, each in both orders, from `tied_layers` of the dense model."""
    return [pair for names in _united(tied.items()) for pair in permutations(names, 2)]


def add_tied(tied: Mapping[str, str], every: Mapping[str, Target], targets: dict[str, Target]) -> None:
    """Adds to `targets` the targets of `every` whose weight is stored under the other name of a tied pair."""
    for name, other in tied_pairs(tied):
        if other in targets and name in every and name not in targets:
            every[name].formats = dict(targets[other].formats)
            targets[name] = every[name]


def tie_quantized(model: nn.Module) -> None:
    """Makes transformers tie the tensors of quantised layers if it tied their weights."""
    for part in model.modules():
        for attribute in ("_tied_weights_keys", "all_tied_weights_keys"):
            tied = getattr(part, attribute, None)
            if isinstance(tied, Mapping):
                changed = dict(_tied_tensors(part, tied))
                if changed != tied:
                    setattr(part, attribute, changed)


def _tied_tensors(model: nn.Module, tied: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields (target, source) of tied tensors: those of a quantised pair in place of their weights."""
    everything = model.named_modules(remove_duplicate=False)
    # While a checkpoint is loaded, layers of torch have the tensors.
    layers = {f"{name}.weight": m for name, m in everything if getattr(m, "packed", None) is not None}
    for target, source in tied.items():
        if target in layers and source in layers:
            for part in TENSORS:
                if getattr(layers[source], part, None) is not None:
                    yield target.removesuffix("weight") + part, source.removesuffix("weight") + part
        else:
            yield target, source
