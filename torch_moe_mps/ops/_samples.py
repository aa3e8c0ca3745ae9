"""One good call of every operator, and more of some: arguments by name.

The tests of all operators and the self-check use them.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from . import FAMILIES
from ._registry import DECLARED
from ._sample import HEAD, Calls, Changes, Sample
from .families.quantize import judged_by_importance
from .families.tiles import judged_tiles

# The family of each operator: its file here, and in csrc/ and shaders/.
FAMILY_OF = {name: family for family, module in FAMILIES.items() for name in module.CALLS}
CALLS: Calls = {name: call for family in FAMILIES.values() for name, call in family.CALLS.items()}
_CHANGES: Changes = {name: make for family in FAMILIES.values() for name, make in family.CHANGES.items()}
LINEAR_ATTENTION = ("gated_delta_rule_", "_gated_delta_rule_")
# {operator: (argument giving the width of a head's keys, argument giving that of its values)}; `states` in 8
# bits have packed codes of four elements.
OF_HEADS = {
    **dict.fromkeys(("cached_attention", "_cached_attention"), ("q", "v")),
    "rope": ("q", "q"),
    "rope_heads": ("x", "x"),
    "_rope_cache_": ("k", "v"),
    "_rope_attention_": ("q", "v"),
    **dict.fromkeys(LINEAR_ATTENTION, ("q", "v")),
    **dict.fromkeys(("_write_cache_quantized_", "_seal_tiles_"), ("states", "states")),
    "_tiled_attention": ("q", "v_dense"),
}
# Where several results are right: what of them must agree, of the arguments and the results.
JUDGED: dict[str, Callable[[dict[str, Any], list[Tensor]], list[Tensor]]] = {
    "_quantize_by_importance": judged_by_importance,
    "_seal_tiles_": judged_tiles,
}


def packet(name: str) -> Callable:
    return getattr(torch.ops.moe_mps, name)


def sample_arguments(name: str, device: str, dtype: torch.dtype, **sizes: Any) -> dict[str, Any]:
    """Valid arguments of an operator: from CALLS, and the required tensors that it declares. `sizes` are
    the other arguments of Sample."""
    sample, overload = Sample(device, dtype, **sizes), cast(Any, packet(name)).default
    required = [argument.name for argument in overload._schema.arguments if not argument.has_default_value()]
    known = {"...": (sample.T,), **{size: getattr(sample, size) for size in "THEKID"}}

    def make(_: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
        return sample.values(*shape, dtype=dtype)

    made = DECLARED[name].completed(CALLS[name](sample), required, make, known)
    return {
        argument.name: made[argument.name] for argument in overload._schema.arguments if argument.name in made
    }


def changed_samples(
    name: str, changes: Changes, device: str, dtype: torch.dtype, seed: int, **sizes: Any
) -> list[dict[str, Any]]:
    """Changes to the valid arguments, each with the other tensors that have to follow it."""
    sample, declared = Sample(device, dtype, seed=seed, **sizes), DECLARED[name]
    base = sample_arguments(name, device, dtype, **sizes)

    def make(argument: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
        old = base[argument]
        shape = tuple(was if size is None else size for size, was in zip(shape, old.shape, strict=True))
        return sample.values(*shape, dtype=dtype or old.dtype)

    return [
        declared.completed(item, declared.misfits(base, item), make, declared.sizes_of(base))
        for item in (changes[name](sample) if name in changes else ())
    ]


def more_samples(
    name: str, device: str, dtype: torch.dtype, head: tuple[int, int] = HEAD
) -> list[dict[str, Any]]:
    """Changes to the valid arguments that lead to other paths of the operator."""
    return changed_samples(name, _CHANGES, device, dtype, 1, head=head)


def copies(arguments: dict) -> dict:
    """Fresh tensors with the same strides, for operators that write."""
    return {
        name: value.clone(memory_format=torch.preserve_format) if isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }
