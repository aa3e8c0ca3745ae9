"""The experts implementation "moe_mps", for every class with the experts interface of transformers."""

import copy
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.autograd import forward_ad

from ...ops._activations import Activation
from ...ops._checks import ACTIVATION_DTYPES, MAX_TOP_K
from ...ops._decoded import with_decoded_weights
from ...ops.families.slots import slots_lock
from ..basics.configs import EXPERTS, plain_config
from ..basics.experts import Experts, ExpertsCode
from ..basics.guards import Kept, are_unchanged, collection, is_observed, recording
from ..basics.interface import (
    KIND,
    ON_DISK,
    get_experts,
    is_experts,
    numbers_in,
    on_disk_of,
    recognise,
    stack_of,
)
from ..basics.report import Done
from ..basics.state import (
    EMPTY_STATE,
    STATE,
    Unsupported,
    made_as,
    state_in,
    state_of,
)
from ..graphs.fakes import geometry
from ..graphs.nodes import memory_of, tensor_of
from ..graphs.patterns import match, uncast
from ..upstream.models import ALL_EXPERTS_FUNCTIONS
from .traced import SIZES, Input, Sizes, Traced, attribute_of, everywhere, remembered, trace

ops = torch.ops.moe_mps

NAME = "moe_mps"
_DISPATCH = vars(sys.modules[type(ALL_EXPERTS_FUNCTIONS).__module__])  # names of the file that dispatches
_IN_MEMORY = "training, gradients, autocast and float64 need all experts in memory"
# Attributes of experts with transformers' interface that say what their weights are.
_OF_WEIGHTS = ("has_gate", "has_bias", "is_transposed")
REFUSED = "moe_mps::accelerate: packed {} must compute what they did when they were packed"

_TANH = "tanh(({G} + pow({G}, 3) * 0.044715) * 0.7978845608028654)"
_POINTWISE = {
    "silu": ("silu({G})", "{G} * sigmoid({G})"),
    "gelu": ("gelu({G})",),
    "gelu_tanh": ("gelu({G}, 'tanh')", f"{{G}} * 0.5 * ({_TANH} + 1)"),
    "relu": ("relu({G})",),
    "relu2": ("pow(relu({G}), 2)", "relu({G}) * relu({G})"),
}
_LOW = "clamp({G}, None, LIMIT)"
# Activations and their formulas, of the gate {G} and the other half, {U}; of G alone without a gate.
ACTIVATION_FORMS: list[tuple[str, str]] = [
    ("silu_clamped", f"silu({_LOW}) * clamp({{U}}, LOW, LIMIT)"),
    ("silu_capped", "clamp(silu({G}), None, LIMIT) * clamp({U}, LOW, LIMIT)"),
    ("swiglu_oai", f"(clamp({{U}}, LOW, LIMIT) + 1) * ({_LOW} * sigmoid({_LOW} * ALPHA))"),
    *((name, f"{form} * {{U}}") for name, forms in _POINTWISE.items() for form in forms),
    *((name, form) for name, forms in _POINTWISE.items() for form in forms),
]


def activation_of(module: nn.Module) -> Activation | None:
    """The activation if the operators know it; None if the module's own code must compute it.

    Raises: Unsupported if the code of recognised experts computes something else by now, which then runs;
        ValueError if that code does not read the weights that they have, or if packed experts say something
        else of their weights than what they are.
    """
    experts = get_experts(module)
    if experts.code.is_recognised:
        return _activation_now(module, experts, experts.code)
    if experts.is_packed:
        _require_said(module, experts)
    try:
        return _activation_traced(module)
    except Unsupported:
        return None


def _require_said(module: nn.Module, experts: Experts) -> None:
    """Raises: ValueError if a module says something else of its packed weights than what they are."""
    guards = collection()
    for name in _OF_WEIGHTS:
        if guards is not None:
            guards.add_attribute(module, name)
        if (now := getattr(module, name)) is not getattr(experts, name):
            raise ValueError(f"{REFUSED.format(type(module).__name__)}, got {name}={now}")


def _activation_now(module: nn.Module, experts: Experts, code: ExpertsCode) -> Activation | None:
    """`activation_of` recognised experts, with their current numbers."""
    changed = "other code or attributes"
    try:
        now = recognise(module)
    except Unsupported as unsupported:
        now, changed = None, str(unsupported)
    if now is not None:
        same_code = now.code._replace(given=code.given, numbers=numbers_in(module))
        if now._replace(code=same_code, activation=experts.activation) == experts.eager:
            return now.activation
    if not experts.can_run_eager:
        state_of(module).guards = None  # the change may be undone
        raise ValueError(f"{REFUSED.format(type(module).__name__)}, got {changed}")
    raise Unsupported(changed)


def is_interleaved(module: Any) -> bool:
    """True if rows of the gate and of the up projection take turns in the first matrix."""
    try:
        activation = activation_of(module) if is_experts(module) else None
    except Unsupported:
        activation = None
    return not getattr(module, "is_concatenated", True) if activation is None else activation.interleaved


@remembered
def _activation_traced(module: Any) -> Activation | None:
    """The activation of experts with transformers' interface, by a trace of their code; None if unknown."""
    if attribute_of(module, "has_post_expert_norm"):
        return None
    width = _width_between(module)

    def between(module: Any, x: Tensor) -> Tensor:
        return module._apply_gate(x) if module.has_gate else module.act_fn(x)

    def ask(sizes: Sizes, dtype: torch.dtype) -> Activation | None:
        traced = trace(module, Input((*sizes, width), dtype), function=between)
        result = None if traced is None else _read_activation(traced)
        return None if result is None or result.gated != module.has_gate else result

    return everywhere(ask, (SIZES[0], (1,)))


def _width_between(module: nn.Module) -> int:
    """Number of outputs of the first matrix for each row."""
    experts = get_experts(module)
    return experts.shape(module, experts.projections[0])[1]


def _read_activation(traced: Traced) -> Activation | None:
    """The activation whose formula a trace is; None if it is none of the operators'."""
    (x,), result = traced.inputs, traced.result
    if not isinstance(result, fx.Node) or tensor_of(result).dtype != tensor_of(x).dtype:
        return None
    for name, form in ACTIVATION_FORMS:
        bound = match(form.format(G="G", U="U"), result)
        if bound is None:
            continue
        if "U" not in bound and uncast(bound["G"]) is x:
            return Activation(name, gated=False)
        halves = halves_of(x, bound["G"], bound["U"]) if "U" in bound else None
        if halves is not None and (numbers := numbers_of(bound)) is not None:
            return activation_with(name, *numbers, interleaved=halves == "every_other")
    return None


def halves_of(whole: fx.Node, gate: Any, up: Any) -> str | None:
    """ "one by one" for [gate; up] in the last dimension, "every_other" for interleaved, None otherwise."""
    gate, up = uncast(gate), uncast(up)
    if not all(isinstance(item, fx.Node) and memory_of(item) is memory_of(whole) for item in (gate, up)):
        return None
    *rows, width = tensor_of(whole).shape
    *strides, _ = tensor_of(whole).stride()
    for name, step, start in (("one by one", 1, width // 2), ("every_other", 2, 1)):
        expected = [
            ([*rows, width // 2], [*strides, step], tensor_of(whole).storage_offset() + offset)
            for offset in (0, start)
        ]
        result = [(list(a), list(b), c) for a, b, c in map(geometry, map(tensor_of, (gate, up)))]
        if result == expected:
            return name
    return None


def activation_with(name: str, alpha: float | None, limit: float | None, **flags: bool) -> Activation:
    """An activation with these numbers: silu with infinite limits is silu."""
    if limit == math.inf and name in ("silu_clamped", "silu_capped"):
        name, limit = "silu", None
    return Activation(name, alpha, limit, **flags)


def numbers_of(bound: dict[str, Any]) -> tuple[float | None, float | None] | None:
    """alpha and limit of an activation, if a formula has them; None if they are not the operators'."""
    alpha, limit, low = (bound.get(name) for name in ("ALPHA", "LIMIT", "LOW"))
    if any(isinstance(number, fx.Node) for number in (alpha, limit, low)):
        return None
    if limit is not None and low != -limit:
        return None
    return None if alpha is None else float(alpha), None if limit is None else float(limit)


def runs_eager(module: nn.Module, *inputs: object) -> bool:
    """True for calls that run the eager forward: training, needed gradients, autocast and float64.

    So does a call without a tensor among its inputs. Gradients are needed where an input or a parameter asks
    for them; forward-mode gradients (torch.func.jvp) wherever a level of dual numbers is open.
    """
    if module.training or forward_ad._current_level >= 0:
        return True
    autocast, found = torch._C._is_any_autocast_enabled(), False
    for x in inputs:  # a comprehension would be another call of Python, for each module of each token
        if x is not None and isinstance(x, Tensor):
            found = True
            if x.dtype is torch.float64 or (autocast and _is_cast(x)):
                return True
    if not found or not torch.is_grad_enabled():
        return not found
    return any(isinstance(x, Tensor) and x.requires_grad for x in (*inputs, *module.parameters()))


def _is_cast(x: Tensor) -> bool:
    """True if operators of torch would cast a tensor."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def is_seen(experts: nn.Module) -> bool:
    """True if a hook, or a forward of its own, sees a module that the operators do not call."""
    guards: Kept | None = state_in(experts).guards
    return guards is not None and bool(guards.called) and is_observed(*guards.called)


def require_heard(module: nn.Module) -> None:
    """Raises: ValueError if the code of packed experts has changed beyond what the operators follow, or if a
    hook sees what they leave out: no code of their own can run in their place."""
    _activation(module)
    code = get_experts(module).code
    if not code.is_recognised or not is_seen(module):
        return
    called = {id(part) for part in state_in(module).guards.called}
    for name, part in module.named_modules():
        is_heard = name in (code.act_fn, *code.heard)
        if id(part) in called and is_observed(part) and not is_heard:
            raise ValueError(f"{REFUSED.format(type(module).__name__)}, got a hook or a forward on {name}")


def pinned_config(experts: nn.Module) -> Any:
    """A config that only these quantised experts have: no other implementation reads their weights.

    The model's config may name another one, for its dense experts or for another model with the same config.
    """
    config = copy.deepcopy(vars(experts).get("config"))
    if config is not None:
        config._experts_implementation = NAME
    return config


def are_served(model: nn.Module) -> bool:
    """True if experts of a model dispatch to the operators."""
    return any(getattr(vars(module).get("config"), EXPERTS, None) == NAME for module in model.modules())


def prepare(module: nn.Module) -> Activation | None:
    """The activation of an experts module, stored in its state with guards; None if eager code activates."""
    activation, is_known = None, True
    with recording(of_misses=True) as guards:
        try:
            activation = activation_of(module)
        except Unsupported:
            is_known = False
    state = state_of(module)
    state.formula = None if not is_known else () if activation is None else activation
    state.guards = guards.kept()
    return activation


@torch.compiler.assume_constant_result
def _activation(module: nn.Module) -> tuple | None:
    """The fields of the activation, without any if the module's own code activates; None if all of it runs.

    It is a plain tuple, because torch.compile takes that as a constant.
    """
    if (guards := state_in(module).guards) is None or not are_unchanged(guards):
        prepare(module)
    activation = state_in(module).formula
    return None if activation is None else tuple(activation)


def described(module: nn.Module) -> list[Done]:
    """The operators that serve an experts module."""
    experts, activation = get_experts(module), prepare(module)
    if activation is None or not experts.is_one_operator:
        product = "expert_qmm" if experts.is_packed else "expert_mm"
        how = f"{product}, own activation" if experts.code.act_fn else product
        return [Done(product, how), Done("moe_weighted_reduce"), *experts.code.runs]
    how = "moe_experts_quantized" if experts.is_packed else "moe_experts"
    details = [activation.activation]
    details += ["not gated"] if not activation.gated else []
    details += ["interleaved"] if activation.interleaved else []
    details += dict.fromkeys(map(str, experts.formats.values()))
    return [Done(f"_{how}", f"{how} ({', '.join(details)})"), *experts.code.runs]


def unsupported(module: nn.Module) -> str | None:
    """Why an experts module is left alone; None if it is served."""
    experts = get_experts(module)
    if experts.is_packed:
        return None
    dtypes = {stack_of(module, p, values=False).dtype for p in experts.projections}
    if not dtypes <= set(ACTIVATION_DTYPES) or len(dtypes) > 1:
        return f"its weights are {', '.join(sorted(map(str, dtypes)))}"
    if not experts.code.is_recognised and _dispatching(type(module)) is None:
        return "its class does not dispatch to experts implementations"
    return None


# --- what runs


class OperatorCall(NamedTuple):
    """A call of experts by operators.

    Attributes:
        experts: of the module.
        activation: its fields; empty if the module's eager code activates.
        in_steps: whether each matrix has an operator of its own, even where one could compute both.
        dense: dense tensors of the module, as far as they were read.
    """

    experts: Experts
    activation: tuple
    in_steps: bool
    dense: Sequence[Tensor] = ()


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The forward that transformers calls for experts_implementation="moe_mps"."""
    fits = hidden_states.dim() == 2 and top_k_index.shape[-1] <= MAX_TOP_K
    call = operator_call(self, hidden_states, top_k_weights, fits)
    if call is None:
        own = _own_forward(self, hidden_states.dtype)
        return own(self, hidden_states, top_k_index.long(), top_k_weights)
    return combined(self, hidden_states, top_k_index, top_k_weights, call)


def rows_forward(self: Any, rows: Tensor) -> Tensor:
    """[E * n, H] -> [E * n, H]: n rows for each expert."""
    experts = get_experts(self)
    if experts.can_run_eager and on_disk_of(self) is None:
        return _own_forward(self, rows.dtype)(self, rows)
    count: Any = experts.number  # on the disk its weights are slots
    ids = torch.arange(count, device=rows.device).repeat_interleave(rows.shape[0] // count)[:, None]
    return experts_forward(self, rows, ids, torch.ones_like(ids, dtype=rows.dtype))


def operator_call(
    self: nn.Module, x: Tensor, weights: Tensor | None = None, fits: bool = True
) -> OperatorCall | None:
    """The operators for a call of experts; None if the class's eager code runs.

    Eager code runs in training, autocast and float64, where gradients are needed, where a hook sees a
    module that the operators do not call, where its code has changed, and for arguments that no operator
    takes.

    Args:
        fits: False for other arguments than operators take.

    Raises: ValueError if eager code would have to run, but does not read the weights that the module has.
    """
    experts, on_disk = get_experts(self), self.__dict__.get(ON_DISK)
    if on_disk is not None and runs_eager(self, x, weights):
        on_disk.refuse(_IN_MEMORY)
    activation, seen = _activation(self), is_seen(self)
    if on_disk is not None and (seen or activation is None):
        on_disk.refuse("a hook on act_fn, or another forward of it, needs all experts in memory")
    if not experts.is_packed:
        return _call_of_dense(self, experts, x, weights, activation if fits else None, seen)
    if seen:
        require_heard(self)
        return OperatorCall(experts, (), True)
    in_steps = bool(self.__dict__.get(STATE, EMPTY_STATE).adapters)
    if not in_steps and torch.is_grad_enabled():  # gradients reach the inputs of each of the steps
        in_steps = x.requires_grad or (weights is not None and weights.requires_grad)
    return OperatorCall(experts, activation or (), in_steps)


def _call_of_dense(
    self: nn.Module, experts: Experts, x: Tensor, weights: Tensor | None, activation: tuple | None, seen: bool
) -> OperatorCall | None:
    """`operator_call` of experts with dense stacks."""
    # Parametrised weights, as PEFT's are, need gradients that no parameter of the module asks for.
    tensors = experts.tensors(self)
    fits = activation is not None and x.dtype == tensors[0].dtype and x.device == tensors[0].device
    is_eager = seen or not fits or runs_eager(self, x, weights, *tensors)
    if experts.can_run_eager and ON_DISK not in self.__dict__:
        if is_eager or activation is None:
            return None
        fields = activation if experts.is_one_operator else ()  # no copy joins gate and up
        return OperatorCall(experts, fields, False, tensors)
    if is_eager:
        require_heard(self)
    return OperatorCall(experts, () if seen else activation or (), is_eager)


def combined(self: nn.Module, x: Tensor, ids: Tensor, weights: Tensor, call: OperatorCall) -> Tensor:
    """[T, H] -> [T, H]: the weighted sum of the experts' outputs, in memory or on the disk."""
    if (on_disk := self.__dict__.get(ON_DISK)) is not None:
        with slots_lock:
            module, ids = on_disk.ready(self, ids)
            return _in_memory(module, x, ids, weights, *call)
    return _in_memory(self, x, ids, weights, *call)


def _in_memory(
    self: nn.Module,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: Experts,
    activation: tuple,
    in_steps: bool,
    dense: Sequence[Tensor],
) -> Tensor:
    """`combined` of weights in memory; a CPU decodes packed ones once."""
    if not x.is_cpu or not experts.is_packed:
        return experts.combine(self, x, ids, weights, activation, in_steps, dense)
    packed = [tensor for _, stack in experts.stacks for each in stack.tensors(self) for tensor in each]
    return with_decoded_weights(
        partial(experts.combine, self, x, ids, weights, activation, in_steps), self, *packed
    )


def multiplied(self: nn.Module, projection: str, x: Tensor, ids: Tensor) -> Tensor:
    """[T, C] or [T, K, C] -> [T, K, R]: each row times the matrices of its experts ids [T, K]."""
    if (on_disk := on_disk_of(self)) is None:
        return get_experts(self).multiply(self, projection, x, ids)
    if runs_eager(self, x):
        on_disk.refuse(_IN_MEMORY)
    with slots_lock:
        module, ids = on_disk.ready(self, ids)
        return get_experts(module).multiply(module, projection, x, ids)


def activated_rows(self: nn.Module, x: Tensor, ids: Tensor) -> Tensor:
    """[T, H] -> [T, K, I]: what the second matrix of each of a token's experts is multiplied with."""
    activation = _activation(self)
    return get_experts(self).activated(self, x, ids, () if is_seen(self) else activation or ())


def _own_forward(experts: Any, dtype: torch.dtype) -> Callable[..., Tensor]:
    """The implementation of before `accelerate`; in float64, which few take, the class's code."""
    if get_experts(experts).code.is_recognised:
        record = made_as(type(experts), KIND)
        return type(experts).forward if record is None else record.own
    eager_forward = _dispatching(type(experts)).__wrapped__
    name = getattr(plain_config(experts.config), EXPERTS)
    is_chosen = name != NAME and dtype in ACTIVATION_DTYPES
    return ALL_EXPERTS_FUNCTIONS.get(name, eager_forward) if is_chosen else eager_forward


def _dispatching(cls: type) -> Any:
    """The forward that dispatches to implementations, and wraps the eager one; None without one.

    A class on top of the one of the model may have a forward of its own.
    """
    forwards = (vars(base).get("forward") for base in cls.__mro__)
    return next((each for each in forwards if getattr(each, "__globals__", {}) is _DISPATCH), None)
