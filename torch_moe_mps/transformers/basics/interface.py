"""The experts interface of transformers: what a module of experts has, and what its parameters are called.

Modules without it get its attributes, if a recogniser knows what they compute.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeGuard

from torch import Tensor, nn

from ...ops._activations import Activation
from ...quantization import TENSORS, Format
from .state import Unsupported

INTERFACE = ("has_gate", "has_bias", "is_transposed", "is_concatenated")  # in transformers' experts
# The attribute of experts on the disk: their `OnDisk`. Their weights are slots, whose content changes.
ON_DISK = "_moe_mps_on_disk"
_CODES = (*TENSORS, "order")
# The attribute of experts without transformers' interface: their `ExpertsForm`.
FORM = "_moe_mps_form"
_GIVEN = "_moe_mps_given"  # and with the names of all attributes that they were given


class ExpertsForm(NamedTuple):
    """Computation of experts without transformers' interface, whose stacks have the names of its parameters.

    Attributes:
        activation: between the two matrices.
        is_transposed: whether the stacks are [E, input, output].
        takes_rows: whether the forward takes rows [E * n, H], n for each expert, and no ids.
        has_identity: whether ids beyond the experts give their input.
        shapes: (name, shape) of the dense parameters.
    """

    activation: Activation
    is_transposed: bool
    takes_rows: bool
    has_identity: bool
    shapes: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def experts(self) -> int:
        """How many there are. The first stack may have more matrices, which no forward reads."""
        return dict(self.shapes)["down_proj"][0]

    @property
    def interface(self) -> dict[str, bool]:
        """The attributes of transformers' interface, and their values."""
        has_bias = any(name.endswith("_bias") for name, _ in self.shapes)
        flags = self.activation.gated, has_bias, self.is_transposed, not self.activation.interleaved
        return dict(zip(INTERFACE, flags, strict=True))


# Modules -> what they compute, None for no experts. They raise Unsupported with a reason.
RECOGNISERS: list[Callable[[nn.Module], ExpertsForm | None]] = []


def experts_on_disk(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, its `OnDisk`) of each module of a model whose experts are on the disk."""
    named = ((name, vars(module).get(ON_DISK)) for name, module in model.named_modules())
    return ((name, on_disk) for name, on_disk in named if on_disk is not None)


class Experts(nn.Module):
    """The attributes of a module with the experts interface, for type checkers; it has no instances.

    `quantization` and `down_quantization`, the formats of the two matrices, exist once they are quantised. If
    gate and up projections have two formats, `up_quantization` is the format of the up projections, which are
    parameters of their own then.
    """

    has_gate: bool
    has_bias: bool
    is_transposed: bool
    is_concatenated: bool
    config: Any
    gate_up_proj: Tensor
    gate_up_proj_bias: Tensor
    up_proj: Tensor
    up_proj_bias: Tensor
    down_proj: Tensor
    down_proj_bias: Tensor
    quantization: Format
    down_quantization: Format
    up_quantization: Format | None
    act_fn: Callable[[Tensor], Tensor]
    _apply_gate: Callable[[Tensor], Tensor]
    post_expert_norm: Callable[[Tensor], Tensor]


def is_experts(module: nn.Module) -> TypeGuard[Experts]:
    """True if a module has the experts interface of transformers' `use_experts_implementation`."""
    if not all(isinstance(getattr(module, flag, None), bool) for flag in INTERFACE):
        return False
    tensors = [getattr(module, projection, None) for projection in projections(module)]
    dense = all(isinstance(tensor, Tensor) and tensor.dim() == 3 for tensor in tensors)
    return dense or is_quantized(module)


def is_quantized(experts: nn.Module) -> bool:
    """True if quantising, or the loading of a checkpoint, gave the module a format."""
    return getattr(experts, "quantization", None) is not None


def formats_of(experts: Experts) -> dict[str, Format]:
    """{projection: format} of a quantised module."""
    first, second = projections(experts)
    up = vars(experts).get("up_quantization")
    between = {} if up is None else {"up_proj": up}
    return {first: experts.quantization, **between, second: experts.down_quantization}


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


def experts_of(model: nn.Module, refused: dict[str, str] | None = None) -> dict[str, Experts]:
    """{name: module} of all experts of a model, in its order.

    Those that a recogniser knows get the attributes of transformers' interface.

    Args:
        refused: gets {name: reason} of modules with stacks of which no operator computes what they do.
    """
    for name, module in model.named_modules():
        try:
            form = None if is_experts(module) else form_of(module)
        except Unsupported as unsupported:
            form = None
            if refused is not None:
                refused[name] = str(unsupported)
        if form is not None:
            given = {FORM: form, **form.interface}
            if "config" not in vars(module) and (config := _config_above(model, name)) is not None:
                given["config"] = config
            vars(module).update(given, **{_GIVEN: (*given, _GIVEN)})
    return {name: module for name, module in model.named_modules() if is_experts(module)}


def _config_above(model: nn.Module, name: str) -> Any:
    """The config of the nearest module around another one; None without one."""
    while name:
        name = name.rpartition(".")[0]
        if (config := vars(model.get_submodule(name)).get("config")) is not None:
            return config
    return None


def form_of(module: nn.Module) -> ExpertsForm | None:
    """Form of experts without transformers' interface; None for any other module.

    Raises: Unsupported with the reason for stacks of which no operator computes what they do.
    """
    return next(filter(None, (recognise(module) for recognise in RECOGNISERS)), None)


def forget_form(module: nn.Module) -> None:
    """Takes the attributes of transformers' interface from recognised experts that are dense."""
    if FORM in vars(module) and not is_quantized(module):
        for name in vars(module)[_GIVEN]:
            del vars(module)[name]


def projections(module: nn.Module) -> tuple[str, str]:
    return ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
