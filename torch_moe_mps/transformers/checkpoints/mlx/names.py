"""Maps mlx-lm's tensor names to the names in the architecture's original checkpoints."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

# mlx-lm's names for the matrices of an MLP that the original checkpoints number.
NUMBERED = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
# Suffixes that mlx-lm renames: {its suffix: the original}. Used only if the model has the original.
_ENDS = {
    ".gate.gate_proj.weight": ".gate.weight",  # a linear layer within the router
    ".gate.proj.weight": ".gate.weight",
    ".e_score_correction_bias": ".gate.e_score_correction_bias",
    "_conv.conv.weight": "_conv1d.weight",
}


def by_module(names: Mapping[str, Any]) -> dict[str, list[str]]:
    """{module: last parts of the names of its tensors}"""
    found = defaultdict(list)
    for name in sorted(names):
        module, _, part = name.rpartition(".")
        found[module].append(part)
    return found


def variants(key: str) -> Iterator[str]:
    """All original names that a name may stand for."""
    for name in _prefixed(key):
        yield name
        module, _, part = name.rpartition(".")
        parent, _, child = module.rpartition(".")
        if child in NUMBERED:
            yield f"{parent}.{NUMBERED[child]}.{part}"
        for end, other in _ENDS.items():
            if name.endswith(end):
                yield name.removesuffix(end) + other


def _prefixed(key: str) -> Iterator[str]:
    yield key
    if key.startswith("language_model."):
        rest = key.removeprefix("language_model.")
        yield rest
        if rest.startswith("model."):
            yield f"model.language_model.{rest.removeprefix('model.')}"
    elif key.startswith("model.language_model."):
        yield f"model.{key.removeprefix('model.language_model.')}"
    elif key.startswith("model."):
        yield f"model.language_model.{key.removeprefix('model.')}"


def with_base(name: str, prefix: str) -> Iterator[str]:
    """The name in a model with a head, and in one without."""
    yield name
    yield f"{prefix}.{name}"
    yield name.removeprefix(f"{prefix}.")
