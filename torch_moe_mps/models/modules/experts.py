"""The experts implementation "moe_mps", for every class with the experts interface of transformers."""

import copy
import math
import sys
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd import forward_ad

from ...ops._activations import Activation
from ...ops._checks import ACTIVATION_DTYPES, MAX_TOP_K
from ...ops._decoded import with_cache
from ...ops.families.experts import _moe_experts
from ...ops.families.quantized import _moe_experts_quantized
from ...ops.families.slots import using_slots
from ...quantization import TENSORS
from ..basics.configs import EXPERTS, plain_config
from ..basics.guards import Kept, are_unchanged, is_observed, recording
from ..basics.interface import (
    FORM,
    KIND,
    ON_DISK,
    Experts,
    ExpertsForm,
    are_apart,
    form_of,
    formats_of,
    is_experts,
    is_quantized,
    is_settled,
    is_transposed,
    numbers_in,
    parts_of,
    projections,
    stack_of,
)
from ..basics.report import Done
from ..basics.state import (
    NOTHING,
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
# From so many pairs on, those of an expert are put together, so that they read the adapter's factors once.
# Untuned.
_FEW_PAIRS = 64

REFUSED = "moe_mps::accelerate: packed {} must compute what they did when they were packed"

# The names of the tensors of a quantised projection, made once instead of in each call.
_PACKED = {name: [f"{name}_{part}" for part in TENSORS] for name in ("gate_up_proj", "up_proj", "down_proj")}
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
    """The activation if the operators know it; None if the eager forward must compute it."""
    if (form := vars(module).get(FORM)) is not None:
        return _activation_of_form(module, form)
    try:
        return _activation_traced(module)
    except Unsupported:
        return None


def _activation_of_form(module: nn.Module, form: ExpertsForm) -> Activation | None:
    """The activation of recognised experts, with their numbers as they are now; None for another one.

    Raises: ValueError if their code computes something else, and does not read the weights that they have.
    """
    reason = None
    try:
        now = form_of(module)
    except Unsupported as unsupported:
        now, reason = None, str(unsupported)
    numbers = numbers_in(module)
    if (
        now is not None
        and now._replace(activation=form.activation, given=form.given, numbers=numbers) == form
    ):
        return now.activation
    if is_quantized(module) or is_settled(module):
        state_of(module).guards = None  # the change may be undone
        changed = "other code or attributes" if reason is None else reason
        raise ValueError(f"{REFUSED.format(type(module).__name__)}, got {changed}")
    return None


def is_interleaved(module: Any) -> bool:
    """True if rows of the gate and of the up projection take turns in the first matrix."""
    activation = activation_of(module) if is_experts(module) else None
    return not getattr(module, "is_concatenated", True) if activation is None else activation.interleaved


@remembered
def _activation_traced(module: Any) -> Activation | None:
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


def shape_of(module: Experts, projection: str) -> tuple[int, int, int]:
    """[experts, rows, columns] of a stack of quantised experts; gate and up projections are one stack."""
    packed = getattr(module, _PACKED[projection][0])
    rows = packed.shape[1] if projection == "down_proj" else _width_between(module)
    return packed.shape[0], rows, formats_of(module)[projection].columns(packed.shape[2])


def _width_between(module: Any) -> int:
    """Number of outputs of the first matrix for each row."""
    first, _ = projections(module)
    if not is_quantized(module):
        return int(stack_of(module, first, values=False).shape[2 if is_transposed(module) else 1])
    rows = int(getattr(module, _PACKED[first][0]).shape[1])
    return rows if vars(module).get("up_quantization") is None else 2 * rows


def _read_activation(traced: Traced) -> Activation | None:
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


def require_heard(experts: nn.Module) -> None:
    """Raises: ValueError if the code of packed experts has changed beyond what the operators follow, or if a
    hook sees what they leave out: no code of their own can run in their place."""
    _activation(experts)
    if not is_seen(experts):
        return
    form: ExpertsForm = vars(experts)[FORM]
    called = {id(module) for module in state_in(experts).guards.called}
    for name, module in experts.named_modules():
        is_heard = name in (form.act_fn, *form.heard)
        if id(module) in called and is_observed(module) and not is_heard:
            raise ValueError(f"{REFUSED.format(type(experts).__name__)}, got a hook or a forward on {name}")


def act_fn_of(experts: nn.Module) -> Any:
    """The activation of experts, wherever their class has it."""
    form: ExpertsForm | None = vars(experts).get(FORM)
    return attrgetter("act_fn" if form is None else form.act_fn)(experts)


def pinned_config(experts: Experts) -> Any:
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
    """Finds out how an experts module works; its state has that, and what it rests on."""
    with recording(of_misses=True) as guards:
        activation = activation_of(module)
    state_of(module).formula = activation
    state_of(module).guards = guards.kept()
    return activation


@torch.compiler.assume_constant_result
def _activation(module: nn.Module) -> tuple | None:
    """The fields of the activation, a plain tuple because torch.compile takes it as a constant."""
    if (guards := state_in(module).guards) is None or not are_unchanged(guards):
        prepare(module)
    activation = state_in(module).formula
    return None if activation is None else tuple(activation)


def activation_arguments(activation: tuple) -> dict[str, Any]:
    """Arguments of the operators for an activation, without defaults: the dispatcher takes time for each."""
    name, alpha, limit, gated, interleaved = activation
    arguments: dict[str, Any] = {}
    if name != "silu":
        arguments["activation"] = name
    if not gated:
        arguments["gated"] = False
    if interleaved:
        arguments["interleaved"] = True
    if alpha is not None:
        arguments["alpha"] = alpha
    if limit is not None:
        arguments["limit"] = limit
    return arguments


def described(module: Experts) -> list[Done]:
    """The operators that serve an experts module."""
    quantization = getattr(module, "quantization", None)
    activation = prepare(module)
    if vars(module).get("up_quantization") is not None:
        activation = None  # gate and up projections are two matrices
    form: ExpertsForm | None = vars(module).get(FORM)
    beside = () if form is None else form.runs
    if activation is None:
        product = "expert_mm" if quantization is None else "expert_qmm"
        how = product if form is not None and form.activation is None else f"{product}, own activation"
        return [Done(product, how), Done("moe_weighted_reduce"), *beside]
    how = "moe_experts" if quantization is None else "moe_experts_quantized"
    details = [activation.activation]
    details += ["not gated"] if not activation.gated else []
    details += ["interleaved"] if activation.interleaved else []
    if quantization is not None:
        details += dict.fromkeys(map(str, formats_of(module).values()))
    return [Done(f"_{how}", f"{how} ({', '.join(details)})"), *beside]


def unsupported(module: nn.Module) -> str | None:
    """Why an experts module is left alone; None if it is served."""
    first, second = projections(module)
    if is_quantized(module):
        return None
    dtypes = {stack_of(module, p, values=False).dtype for p in (first, second)}
    if not dtypes <= set(ACTIVATION_DTYPES) or len(dtypes) > 1:
        return f"its weights are {', '.join(sorted(map(str, dtypes)))}"
    if FORM not in vars(module) and _dispatching(type(module)) is None:
        return "its class does not dispatch to experts implementations"
    return None


def experts_forward(
    self: Experts, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The forward that transformers calls for experts_implementation="moe_mps"."""
    if (on_disk := self.__dict__.get(ON_DISK)) is None:
        return _forward(self, hidden_states, top_k_index, top_k_weights)
    if runs_eager(self, hidden_states, top_k_weights):
        on_disk.refuse("training, gradients, autocast and float64 need all experts in memory")
    _activation(self)
    if is_seen(self):
        on_disk.refuse("a hook on act_fn, or another forward of it, needs all experts in memory")
    with using_slots:
        module, ids = on_disk.ready(self, top_k_index)
        return _forward(module, hidden_states, ids, top_k_weights)


def _forward(self: Experts, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """[T, H] -> [T, H]: the combined output of experts in memory."""
    if self.__dict__.get("quantization") is not None:  # getattr of a missing attribute is slow on modules
        compute = partial(_quantized_forward, self, hidden_states, top_k_index, top_k_weights)
        return with_cache(compute, self, *_all_packed(self)) if hidden_states.is_cpu else compute()
    return _dense_forward(self, hidden_states, top_k_index, top_k_weights)


def _dense_forward(
    self: Experts, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """`_forward` of dense experts, which run eager code for arguments that no operator takes."""
    first, biases = (
        self.gate_up_proj if self.has_gate else self.up_proj,
        _biases(self) if self.has_bias else {},
    )
    activation, form = _activation(self), self.__dict__.get(FORM)
    # Parametrised weights, as PEFT's are, need gradients that no parameter of the module asks for.
    read = hidden_states, top_k_weights, first, self.down_proj, *biases.values()
    is_eager = runs_eager(self, *read) or is_seen(self)
    if is_eager or not _fits(hidden_states, first, top_k_index):
        if form is not None and form.stacks:  # its own code reads other parameters
            require_heard(self)
            return _in_steps(self, hidden_states, top_k_index, top_k_weights)
        return _own_forward(self, hidden_states.dtype)(self, hidden_states, top_k_index.long(), top_k_weights)
    if activation is None and form is not None and not form.stacks:
        return _own_forward(self, hidden_states.dtype)(self, hidden_states, top_k_index.long(), top_k_weights)
    if activation is None:
        return _in_steps(self, hidden_states, top_k_index, top_k_weights)
    options = activation_arguments(activation)
    if is_transposed(self):
        options["transposed"] = True
    options |= biases
    if form is not None and len(first) > len(self.down_proj):
        first = first[: len(self.down_proj)]
    if form is not None and form.has_identity:
        options["has_identity"] = True
    return _moe_experts(hidden_states, top_k_weights, top_k_index, first, self.down_proj, **options)


def rows_forward(self: Experts, rows: Tensor) -> Tensor:
    """[E * n, H] -> [E * n, H]: n rows for each expert."""
    if not is_quantized(self) and ON_DISK not in self.__dict__:
        return _own_forward(self, rows.dtype)(self, rows)
    count = self.__dict__[FORM].experts  # on the disk its weights are slots
    ids = torch.arange(count, device=rows.device).repeat_interleave(rows.shape[0] // count)[:, None]
    return experts_forward(self, rows, ids, torch.ones_like(ids, dtype=rows.dtype))


def _with_identity(self: Experts, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The sum of the experts, with the input for ids beyond them, where a module computes so."""
    form = self.__dict__.get(FORM)
    if form is None or not form.has_identity:
        return out
    return with_identity(out, x, ids, weights, form.experts)


def with_identity(out: Tensor, x: Tensor, ids: Tensor, weights: Tensor, experts: int) -> Tensor:
    """out [T, H] + x * the sum of the weights of ids beyond the experts."""
    share = weights.masked_fill(ids < experts, 0.0).sum(-1, keepdim=True)
    return torch.addcmul(out, x, share.to(x.dtype))


def _own_forward(experts: Experts, dtype: torch.dtype) -> Callable[..., Tensor]:
    """The implementation of before `accelerate`; in float64, which few take, the class's code."""
    if FORM in vars(experts):
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


def _quantized_forward(self: Experts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """[T, H] -> [T, H]: one operator for quantised experts, or one for each matrix where a step is seen."""
    attributes = self.__dict__
    in_steps = attributes.get("up_quantization") is not None or attributes.get(STATE, NOTHING).adapters
    if FORM in attributes:
        require_heard(self)
    else:
        _activation(self)
    in_steps = in_steps or is_seen(self)
    if torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad):
        in_steps = True  # gradients reach the inputs of each of the steps
    activation = None if in_steps else _activation(self)
    if activation is None:
        return _in_steps(self, x, ids, weights)
    format, down_format = self.quantization, self.down_quantization
    projection, down_projection = projections(self)
    first, second = _packed(self, projection), _packed(self, down_projection)
    options = activation_arguments(activation)
    if self.has_bias:
        options |= _biases(self)
    if down_format is not format:
        options["down_format"] = down_format.name
    if FORM in attributes and attributes[FORM].has_identity:
        options["has_identity"] = True
    return _moe_experts_quantized(x, weights, ids, *first, *second, format.name, **options)


def _biases(self: Experts) -> dict[str, Tensor]:
    first = self.gate_up_proj_bias if self.has_gate else self.up_proj_bias
    return {"gate_up_bias": first, "down_bias": self.down_proj_bias}


def activated_rows(self: Experts, x: Tensor, ids: Tensor) -> Tensor:
    """[T, H] -> [T, K, I]: what the second matrix of each slot's expert is multiplied with."""
    return _activated(self, _multiplied(self, projections(self)[0], x, ids, _buckets(self, ids)))


def _buckets(self: Experts, ids: Tensor) -> tuple[Tensor, Tensor] | tuple[()]:
    """The pairs by expert, where adapters of many pairs read them."""
    adapters = self.__dict__.get(STATE, NOTHING).adapters
    if not adapters or (ids.numel() < _FEW_PAIRS and not torch.is_grad_enabled()):
        return ()
    most = max(adapter.experts for those in adapters.values() for adapter in those)
    order, offsets = ops.moe_bucket(ids, most)
    return order, offsets


def _activated(self: Experts, rows: Tensor) -> Tensor:
    if are_apart(self):  # its state is that of a rule
        activation = activation_of(self)
    else:
        activation = _activation(self)
        activation = None if is_seen(self) else activation
    if activation is None:
        return self._apply_gate(rows) if self.has_gate else act_fn_of(self)(rows)
    out: Tensor = ops.expert_activation(rows, **activation_arguments(activation))
    return out


def _in_steps(self: Experts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Runs the activation between two operators for one matrix each."""
    buckets, (first, second) = _buckets(self, ids), projections(self)
    rows = _activated(self, _multiplied(self, first, x, ids, buckets))
    slots = _multiplied(self, second, rows, ids, buckets)
    if getattr(self, "has_post_expert_norm", False):
        slots = self.post_expert_norm(slots)
    return _with_identity(self, ops.moe_weighted_reduce(slots, weights), x, ids, weights)


def multiplied(self: Experts, projection: str, x: Tensor, ids: Tensor) -> Tensor:
    """[T, C] or [T, K, C] -> [T, K, R]: each row times the matrices of its experts ids [T, K]."""
    if (on_disk := self.__dict__.get(ON_DISK)) is None:
        return _multiplied(self, projection, x, ids, _buckets(self, ids))
    if runs_eager(self, x):
        on_disk.refuse("training, gradients, autocast and float64 need all experts in memory")
    with using_slots:
        module, ids = on_disk.ready(self, ids)
        return _multiplied(module, projection, x, ids)


def _multiplied(
    self: Experts, projection: str, x: Tensor, ids: Tensor, buckets: tuple[Tensor, ...] = ()
) -> Tensor:
    """[T, K, rows]: products with the matrix of each slot's expert, with bias and adapters."""
    bias = getattr(self, f"{projection}_bias") if self.has_bias else None
    if not is_quantized(self):
        if are_apart(self):
            return torch.cat([ops.expert_mm(x, ids, part) for part in parts_of(self, projection)], -1)
        return ops.expert_mm(x, ids, getattr(self, projection), bias, is_transposed(self))
    formats = formats_of(self)
    names = [projection] if projection == "down_proj" else [name for name in formats if name != "down_proj"]
    biases = [None] * len(names) if bias is None else bias.chunk(len(names), -1)
    outs = [
        ops.expert_qmm(x, ids, *_packed(self, name), formats[name].name, bias_part)
        for name, bias_part in zip(names, biases, strict=True)
    ]
    out = outs[0] if len(outs) == 1 else torch.cat(outs, -1)
    for a, b, experts, scaling in self.__dict__.get(STATE, NOTHING).adapters.get(projection, ()):
        pairs = (buckets[0], buckets[1][: experts + 1]) if buckets else ()
        out = ops.expert_lora(out, x, ids, a, b, experts, *pairs, scaling=scaling)
    return out


def _all_packed(self: Experts) -> list[Tensor | None]:
    return [tensor for projection in formats_of(self) for tensor in _packed(self, projection)]


def _packed(self: nn.Module, projection: str) -> tuple[Tensor, Tensor, Tensor | None]:
    names, tensors = _PACKED[projection], self._parameters | self._buffers
    packed, scales, biases = tensors.get(names[0]), tensors.get(names[1]), tensors.get(names[2])
    if packed is None or scales is None:  # not where `quantize` put them
        return getattr(self, names[0]), getattr(self, names[1]), getattr(self, names[2], None)
    return packed, scales, biases


def _fits(x: Tensor, weight: Tensor, ids: Tensor) -> bool:
    """True if the operators take these arguments; the eager forward runs otherwise, or raises its error."""
    return (
        x.dim() == 2 and x.dtype == weight.dtype and x.device == weight.device and ids.shape[-1] <= MAX_TOP_K
    )
