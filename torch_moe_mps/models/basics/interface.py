"""Modules of experts: with transformers' experts interface, or recognised by what they compute."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from ..._extension import PACKAGE
from ...quantization import TENSORS, Format
from .experts import GATED, NOT_GATED, SECOND, Experts, ExpertsCode
from .stacks import Stack
from .state import Unsupported

INTERFACE = ("has_gate", "has_bias", "is_concatenated", "is_transposed")  # in transformers' experts
# The attribute of experts on the disk: their `OnDisk`. Their weights are slots, whose content changes.
ON_DISK = "_moe_mps_on_disk"
# The attribute of a module for its `Experts`: packed ones, and those without transformers' interface.
ATTRIBUTE = "_moe_mps_experts"
KIND = "experts"  # the kind of the classes of recognised experts
_CODES = (*TENSORS, "order")


def _with_interface(has_gate: bool, has_bias: bool, is_transposed: bool) -> Experts:
    names = (GATED if has_gate else NOT_GATED, SECOND)
    return Experts(tuple((name, Stack((name,), is_transposed=is_transposed)) for name in names), has_bias)


# (has_gate, has_bias, is_transposed) of a dense module with transformers' interface: its experts.
_INTERFACES = {flags: _with_interface(*flags) for flags in itertools.product((True, False), repeat=3)}

# Modules -> what they compute, None for no experts. They raise Unsupported with a reason.
RECOGNISERS: list[Callable[[nn.Module], Experts | None]] = []


class ExpertsModule(nn.Module):
    """The attributes of a module with the experts interface, for type checkers; it has no instances."""

    has_gate: bool
    has_bias: bool
    is_concatenated: bool
    is_transposed: bool
    config: Any
    act_fn: Callable[[Tensor], Tensor]
    _apply_gate: Callable[[Tensor], Tensor]


def get_experts(module: nn.Module) -> Experts:
    """The experts of a module that has some, not checked: each call of a forward asks."""
    experts: Experts | None = module.__dict__.get(ATTRIBUTE)
    if experts is not None:
        return experts
    flags: Any = module
    return _INTERFACES[flags.has_gate, flags.has_bias, flags.is_transposed]


def recognised_code(module: nn.Module) -> ExpertsCode | None:
    """Code of the class of recognised experts; None for any other module."""
    experts: Experts | None = vars(module).get(ATTRIBUTE)
    return experts.code if experts is not None and experts.code.is_recognised else None


def experts_in(module: nn.Module) -> Experts | None:
    """The experts of a module; None for any other module."""
    if ATTRIBUTE in vars(module):
        return get_experts(module)
    if not all(isinstance(getattr(module, flag, None), bool) for flag in INTERFACE):
        return None
    experts = get_experts(module)
    tensors = [getattr(module, projection, None) for projection in experts.projections]
    return experts if all(isinstance(t, Tensor) and t.dim() == 3 for t in tensors) else None


def is_experts(module: nn.Module) -> TypeGuard[ExpertsModule]:
    """True for modules with the interface of transformers' `use_experts_implementation`, or recognised."""
    return experts_in(module) is not None


def is_quantized(module: nn.Module) -> bool:
    """True if quantising, or the loading of a checkpoint, gave experts packed weights."""
    experts: Experts | None = vars(module).get(ATTRIBUTE)
    return experts is not None and experts.is_packed


def is_transposed(experts: nn.Module) -> bool:
    """True if the dense stacks of an experts module are [E, input, output]."""
    return get_experts(experts).is_transposed


def projections(module: nn.Module) -> tuple[str, str]:
    """Names of the two matrices of experts."""
    return get_experts(module).projections


def formats_of(experts: nn.Module) -> dict[str, Format]:
    """{projection: format} of a quantised module."""
    return get_experts(experts).formats


def count_of(experts: nn.Module) -> int:
    """Number of experts of a module."""
    if (count := get_experts(experts).number) is not None:
        return count
    return next(weight.shape[0] for weight in weights_in(experts) if weight.dim() == 3)


def stack_of(experts: nn.Module, projection: str, values: bool = True) -> Tensor:
    """The matrices [E, ., .] of a dense projection that a forward reads.

    Args:
        values: without, a stack that has to be joined is on the meta device.
    """
    parts = get_experts(experts).matrices(experts, projection)
    if len(parts) == 1:
        return parts[0]
    return torch.cat([part.detach() if values else part.detach().to("meta") for part in parts], -2)


def move_into_interface(module: nn.Module) -> bool:
    """Gives recognised experts on the meta device parameters with the names of transformers' interface.

    They have the matrices that a forward reads: published checkpoints lack further ones, for which
    transformers makes a quarter of LongCat's weights.

    Returns: True if eager code does not read these parameters.
    """
    experts = get_experts(module)
    if not experts.code.is_recognised or experts.is_packed or not experts.tensors(module)[-1].is_meta:
        return False
    for name in experts.projections:
        stack = stack_of(module, name).detach().clone()
        module._parameters[name] = nn.Parameter(stack, requires_grad=False)
    moved = experts.in_interface()
    set_experts(module, moved)
    return not moved.can_run_eager


def set_experts(module: nn.Module, experts: Experts, **attributes: Any) -> None:
    """Sets the experts of a module, and removes dense parameters that these do not read any more.

    Args:
        attributes: further attributes, set by the same assignment: no interruption parts experts from the
            tensors that they read.
    """
    vars(module).update({ATTRIBUTE: experts, **attributes})
    remove_unread(module)


def remove_unread(module: nn.Module) -> None:
    """Removes the dense parameters of eager code from a module whose experts have other stacks by now."""
    paths = (path for _, stack in get_experts(module).source_stacks for path in stack.names)
    for owner, _, name in (path.rpartition(".") for path in paths):
        part = module.get_submodule(owner)
        part._parameters.pop(name, None)
        vars(part)["_is_hf_initialized"] = True  # transformers' own initialisation would read it


def weights_of_experts(module: nn.Module) -> list[Tensor]:
    """The weights of experts, dense or packed, without a router that their module has."""
    experts = experts_in(module)
    if experts is None or not experts.code.is_of_family:
        return [*weights_in(module)]
    if experts.has_other_names:
        return experts.tensors(module)
    tensors = {**module._parameters, **codes_of(module)}
    names = (GATED, NOT_GATED, SECOND)
    return [tensor for name, tensor in tensors.items() if tensor is not None and name.startswith(names)]


def codes_of(module: nn.Module) -> dict[str, Tensor]:
    """{name: tensor} of the codes of quantised weights that a module itself has.

    They are buffers: transformers takes a parameter's dtype for the model's.
    """
    return {
        name: buffer
        for name, buffer in module._buffers.items()
        if buffer is not None and not buffer.is_floating_point() and name.rpartition("_")[2] in _CODES
    }


def weights_in(module: nn.Module, recurse: bool = True) -> Iterator[Tensor]:
    """The parameters of a module and the codes of its quantised weights, shared ones once."""
    seen: set[int] = set()
    for part in module.modules() if recurse else (module,):
        for tensor in (*part._parameters.values(), *codes_of(part).values()):
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor


def experts_of(model: nn.Module, refused: dict[str, str] | None = None) -> dict[str, ExpertsModule]:
    """{name: module} of all experts of a model, in its order. Modules keep what a recogniser finds.

    Args:
        refused: gets {name: reason} of modules with stacks that no operator computes.
    """
    for name, module in model.named_modules():
        try:
            experts = None if is_experts(module) else recognise(module)
        except Unsupported as unsupported:
            experts = None
            if refused is not None:
                refused[name] = str(unsupported)
        if experts is not None:
            given: dict[str, Any] = {}
            if "config" not in vars(module) and (config := _config_above(model, name)) is not None:
                given["config"] = config
            code = experts.code._replace(given=(ATTRIBUTE, *given), numbers=numbers_in(module))
            vars(module).update(given, **{ATTRIBUTE: experts._replace(code=code)})
    return {name: module for name, module in model.named_modules() if is_experts(module)}


def numbers_in(module: nn.Module) -> tuple[tuple[str, str, int], ...]:
    """(path, name, value) of the whole numbers in the attributes of a module and its model's inside."""
    return tuple(
        (path, name, value)
        for path, part in module.named_modules()
        if type(part).__module__.partition(".")[0] not in ("torch", PACKAGE.name)
        for name, value in vars(part).items()
        if type(value) is int
    )


def _config_above(model: nn.Module, name: str) -> Any:
    """The config of the nearest module around another one; None without one."""
    while name:
        name = name.rpartition(".")[0]
        if (config := vars(model.get_submodule(name)).get("config")) is not None:
            return config
    return None


def recognise(module: nn.Module) -> Experts | None:
    """The experts of a module without transformers' interface; None for any other module.

    Raises: Unsupported with the reason if no operator computes the same.
    """
    return next(filter(None, (recogniser(module) for recogniser in RECOGNISERS)), None)


def forget(module: nn.Module) -> None:
    """Removes the attributes that recognition has set on experts whose eager code reads their weights."""
    if (known := recognised_code(module)) is not None and get_experts(module).can_run_eager:
        for name in known.given:
            del vars(module)[name]


def on_disk_of(module: nn.Module) -> Any:
    """The `OnDisk` of a module whose weights are on the disk; None for any other module."""
    return vars(module).get(ON_DISK)


def experts_on_disk(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, its `OnDisk`) of each module of a model whose experts are on the disk."""
    named = ((name, on_disk_of(module)) for name, module in model.named_modules())
    return ((name, on_disk) for name, on_disk in named if on_disk is not None)
