"""Stacks of experts as a model is loaded: parameters with the names of transformers' interface.

Published checkpoints lack matrices that no forward reads, and some classes have their stacks elsewhere.
What quantises, plans, reads other layouts and writes knows one form.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..models.basics.interface import experts_of, get_experts, move_into_interface
from ..models.basics.stacks import Stack
from ..models.modules.stacked_experts import run_operators
from ..models.upstream.weights import PrefixChange, WeightConverter, get_model_conversion_mapping
from .layouts.operations import Operation
from .quantize.target import layer_of


def settle_stacks(model: nn.Module) -> None:
    """Makes the stacks that forwards read parameters of the experts of a model without weights.

    transformers makes LongCat's first ones for ids that mean the identity, too: a quarter of its weights.
    """
    for module in experts_of(model).values():
        if move_into_interface(module):
            run_operators(module)


def conversions_of(
    model: Any, quantizer: Any = None, key_mapping: Mapping[str, str] | None = None
) -> list[Any]:
    """transformers' conversions of a checkpoint for a model of `settle_stacks`.

    Args:
        key_mapping: {pattern of names in the files: name}, as of transformers' `from_pretrained`.
    """
    conversions: list[Any] = get_model_conversion_mapping(model, key_mapping, quantizer)
    return conversions if quantizer is not None else [*of_stacks(model), *_without_unread(model, conversions)]


def _without_unread(model: nn.Module, conversions: list[Any]) -> list[Any]:
    """The conversions, which leave out matrices of experts that no forward reads: transformers saves them."""
    counts: dict[str, int] = {}
    for name, module in experts_of(model).items():
        experts = get_experts(module)
        if experts.number is not None and not experts.code.is_of_family:
            end = name.removeprefix(f"{layer_of(name)}.")
            counts |= {f"{end}.{projection}": experts.number for projection in experts.projections}
    result = []
    for each in conversions:
        count = counts.get(each.target_patterns[0]) if isinstance(each, WeightConverter) else None
        if count is not None:
            first = Operation(partial(_first, count), list)
            each = each.copy(
                [*each._original_source_patterns],
                [*each._original_target_patterns],
                operations=[*each.operations, first],
            )
        result.append(each)
    return result


def _first(count: int, parts: list[Tensor]) -> list[Tensor]:
    return [part[:count] for part in parts]


def conversions_to_save(model: Any) -> list[Any] | None:
    """The conversions with which a model of `settle_stacks` is saved under the names of its class.

    None, for which transformers takes its own, where all names are those.
    """
    if not (stacks := of_stacks(model)):
        return None
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    return [*stacks, *(each for each in conversions if not isinstance(each, PrefixChange))]


def of_stacks(model: nn.Module) -> list[WeightConverter]:
    """Converters of the parameters that a class has to the stacks that forwards read."""
    result: dict[str, WeightConverter] = {}
    for name, module in experts_of(model).items():
        experts = get_experts(module)
        end = name.removeprefix(f"{layer_of(name)}.")  # all layers have this end
        for projection, stack in experts.source_stacks:
            target = f"{end}.{projection}"
            operation = Operation(partial(_joined, stack, experts.number), partial(_split, stack))
            operation.keeps_bytes = len(stack.names) == 1 and not stack.is_transposed
            sources = [f"{end}.{path}" for path in stack.names]
            result[target] = WeightConverter(sources, target, [operation])
    return [*result.values()]


def _joined(stack: Stack, count: int | None, parts: list[Tensor]) -> list[Tensor]:
    return [stack.joined(parts, count).contiguous()]


def _split(stack: Stack, whole: list[Tensor]) -> list[Tensor]:
    return stack.split(whole[0])
