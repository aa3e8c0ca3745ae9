"""The experts interface of transformers: what a module of experts has, and what its parameters are called.

Modules without it get its attributes, if a recogniser knows what they compute.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from ..._extension import PACKAGE
from ...ops._activations import Activation
from ...quantization import TENSORS, Format
from .report import Done
from .state import Unsupported

INTERFACE = ("has_gate", "has_bias", "is_concatenated")  # in transformers' experts, as is `is_transposed`
# The attribute of experts on the disk: their `OnDisk`. Their weights are slots, whose content changes.
ON_DISK = "_moe_mps_on_disk"
_CODES = (*TENSORS, "order")
# The attribute of experts without transformers' interface: their `ExpertsForm`.
FORM = "_moe_mps_form"


class Stack(NamedTuple):
    """Parameters below a module that are one stack of matrices together, joined by outputs.

    Attributes:
        paths: of the parameters, [E, rows, columns].
        is_flat: whether they are [E * rows, columns].
        is_transposed: whether their rows are the inputs.
    """

    paths: tuple[str, ...]
    is_flat: bool = False
    is_transposed: bool = False

    def views(self, parts: Sequence[Tensor], experts: int) -> list[Tensor]:
        """The stacks [E, output, input] that are joined."""
        views = [part.unflatten(0, (experts, -1)) if self.is_flat else part for part in parts]
        return [view.mT if self.is_transposed else view for view in views]

    def joined(self, parts: Sequence[Tensor], experts: int) -> Tensor:
        """The stack [E, output, input]."""
        views = self.views(parts, experts)
        return views[0] if len(views) == 1 else torch.cat(views, 1)

    def split(self, stack: Tensor) -> list[Tensor]:
        """The parameters of a stack [E, output, input]."""
        views = stack.chunk(len(self.paths), 1)
        parts = [(view.mT if self.is_transposed else view).contiguous() for view in views]
        return [part.flatten(0, 1) if self.is_flat else part for part in parts]


class ExpertsForm(NamedTuple):
    """Computation of experts without transformers' interface.

    Attributes:
        activation: between the two matrices; None if other code runs there.
        is_transposed: whether the stacks are [E, input, output].
        takes_rows: whether the forward takes rows [E * n, H], n for each expert, and no ids.
        has_identity: whether ids beyond the experts give their input.
        experts: how many there are. The first stack may have more matrices, which no forward reads.
        shapes: (path, shape) of the dense parameters.
        stacks: (projection, Stack) of the stacks that are not parameters of the module with the names of
            transformers' interface. They are once a model is quantised, or loaded for it.
        methods: (name, function) of a module with such stacks, in place of its own ones.
        runs: what these run beside the experts.
        act_fn: path of the activation.
        heard: paths of other modules whose hooks and forwards take part once the experts are packed.
        given: names of the attributes that the module has got, the form among them.
        numbers: of the module and those inside; some are sizes, which differ in a trial.
    """

    activation: Activation | None
    is_transposed: bool
    takes_rows: bool
    has_identity: bool
    experts: int
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    stacks: tuple[tuple[str, Stack], ...] = ()
    methods: tuple[tuple[str, Callable], ...] = ()
    runs: tuple[Done, ...] = ()
    act_fn: str = "act_fn"
    heard: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    numbers: tuple[tuple[str, str, int], ...] = ()

    @property
    def interface(self) -> dict[str, bool]:
        """The attributes of transformers' interface that a module gets, and their values.

        `is_transposed` is not among them: PEFT lays out the factors of adapters by it.
        """
        has_bias = any(name.endswith("_bias") for name, _ in self.shapes)
        activation = self.activation or Activation(gated=False)
        flags = activation.gated, has_bias, not activation.interleaved
        return dict(zip(INTERFACE, flags, strict=True))


KIND = "experts"  # the kind of the classes of recognised experts

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
    is_concatenated: bool
    config: Any
    num_experts: int
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
    flags = INTERFACE if FORM in vars(module) else (*INTERFACE, "is_transposed")
    if not all(isinstance(getattr(module, flag, None), bool) for flag in flags):
        return False
    if are_apart(module):
        return True
    tensors = [getattr(module, projection, None) for projection in projections(module)]
    dense = all(isinstance(tensor, Tensor) and tensor.dim() == 3 for tensor in tensors)
    return dense or is_quantized(module)


def is_transposed(experts: nn.Module) -> bool:
    """True if the dense stacks of an experts module are [E, input, output]."""
    form: ExpertsForm | None = vars(experts).get(FORM)
    return bool(experts.is_transposed) if form is None else form.is_transposed


def are_apart(module: nn.Module) -> bool:
    """True for dense experts whose stacks are other parameters than in transformers' interface."""
    form: ExpertsForm | None = vars(module).get(FORM)
    paths = () if form is None else [path for _, stack in form.stacks for path in stack.paths]
    return bool(paths) and all(_owner_of(module, path)[0] is not None for path in paths)


def is_settled(module: nn.Module) -> bool:
    """True for experts whose own code reads parameters that they no longer have."""
    form: ExpertsForm | None = vars(module).get(FORM)
    return form is not None and bool(form.stacks) and not are_apart(module)


def _owner_of(module: nn.Module, path: str) -> tuple[nn.Module | None, str]:
    """(the module that has a parameter, its name there); None for the module if none has it."""
    owner, _, name = path.rpartition(".")
    for child in owner.split(".") if owner else ():
        module = module._modules.get(child) or nn.Module()
    return (module if module._parameters.get(name) is not None else None), name


def parts_of(experts: nn.Module, projection: str) -> list[Tensor]:
    """The stacks [E, ., .] of a dense projection that a forward reads; several are joined by rows."""
    form: ExpertsForm | None = vars(experts).get(FORM)
    if form is None:
        return [getattr(experts, projection)]
    if not are_apart(experts):
        return [getattr(experts, projection)[: form.experts]]
    stack = dict(form.stacks)[projection]
    return stack.views([experts.get_parameter(path) for path in stack.paths], form.experts)


def stack_of(experts: nn.Module, projection: str, values: bool = True) -> Tensor:
    """The matrices [E, ., .] of a dense projection that a forward reads.

    Args:
        values: without, a stack that has to be joined is on the meta device.
    """
    parts = parts_of(experts, projection)
    if len(parts) == 1:
        return parts[0]
    return torch.cat([part.detach() if values else part.detach().to("meta") for part in parts], -2)


def drop_apart(experts: nn.Module) -> None:
    """Takes the parameters of other names from experts, whose stacks have the interface's names now."""
    form: ExpertsForm | None = vars(experts).get(FORM)
    for _, stack in form.stacks if form is not None else ():
        for path in stack.paths:
            owner, name = _owner_of(experts, path)
            if owner is not None:
                del owner._parameters[name]
                vars(owner)["_is_hf_initialized"] = True  # transformers' own initialisation would read it


def weights_of_experts(module: nn.Module) -> list[Tensor]:
    """The weights of experts, dense or packed, without a router that their module has."""
    form: ExpertsForm | None = vars(module).get(FORM)
    if form is None or not form.stacks:
        return [*weights_in(module)]
    if are_apart(module):
        return [module.get_parameter(path) for _, stack in form.stacks for path in stack.paths]
    tensors = {**module._parameters, **codes_of(module)}
    names = ("gate_up_proj", "up_proj", "down_proj")
    return [tensor for name, tensor in tensors.items() if tensor is not None and name.startswith(names)]


def count_of(experts: nn.Module) -> int:
    """How many experts there are."""
    form: ExpertsForm | None = vars(experts).get(FORM)
    if form is not None:
        return form.experts
    return next(weight.shape[0] for weight in weights_in(experts) if weight.dim() == 3)


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
        refused: gets {name: reason} of modules with stacks that no operator computes.
    """
    for name, module in model.named_modules():
        try:
            form = None if is_experts(module) else form_of(module)
        except Unsupported as unsupported:
            form = None
            if refused is not None:
                refused[name] = str(unsupported)
        if form is not None:
            given: dict[str, Any] = {FORM: form, **form.interface}
            if "config" not in vars(module) and (config := _config_above(model, name)) is not None:
                given["config"] = config
            vars(module).update(given, **{FORM: form._replace(given=(*given,), numbers=numbers_in(module))})
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


def form_of(module: nn.Module) -> ExpertsForm | None:
    """Form of experts without transformers' interface; None for any other module.

    Raises: Unsupported with the reason for stacks of which no operator computes what they do.
    """
    return next(filter(None, (recognise(module) for recognise in RECOGNISERS)), None)


def forget_form(module: nn.Module) -> None:
    """Takes the attributes of transformers' interface from recognised experts that are dense."""
    if FORM in vars(module) and not is_quantized(module):
        for name in vars(module)[FORM].given:
            del vars(module)[name]


def projections(module: nn.Module) -> tuple[str, str]:
    return ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
