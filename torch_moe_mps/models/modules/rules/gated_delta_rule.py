"""Linear attention with the gated delta rule (Qwen3-Next), prompts and decode steps.

Its functions are recognised by running them on random numbers. A prompt runs the recurrence as well: for
chunks, torch's MPS backend encodes one triangular solve for each head and chunk.
"""

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ....ops._checks import ACTIVATION_DTYPES, dtype_name
from ....ops.families.gated_delta_rule import MAX_KEY_WIDTH
from ...basics.report import Done
from ...basics.tensors import notes_in, uncommitted_of
from ...trials.comparing import agrees, tried
from ...trials.draws import eager, in_each_draw, normal
from ..functions import InPlace

ops = torch.ops.moe_mps

_L2NORM_EPS = 1e-6
_NAMED = {"weight", "bias", "activation"}  # arguments that a convolution may get by name
_RECORDED = "output_hidden_states"  # a flag of models that may be numbers of layers
ACTIVATIONS = {"silu": "silu", "swish": "silu", None: "none"}


# Functions that run in the place of the model's


def causal_conv(function: Callable, *args: Any, **named: Any) -> Tensor:
    """function(x, conv_state, weight, bias, activation), which updates conv_state in place."""
    known = len(args) > 1 and named.keys() <= _NAMED
    out = _convolved(*args, **named) if known else None
    if out is None and len(args) > 1:
        _refuse_pending(function, args[1], args[0])
    return function(*args, **named) if out is None else out


def _refuse_pending(function: Callable, state: Tensor | None, tensor: Tensor) -> None:
    """Raises: RuntimeError for a state with uncommitted tokens, which the eager function would not see."""
    if state is None or not uncommitted_of(state, 1):
        return
    name = getattr(function, "__name__", type(function).__name__)
    raise RuntimeError(
        f"torch_moe_mps: {name} must get what the operator takes while its state has uncommitted draft "
        f"tokens, got {dtype_name(tensor.dtype)} {[*tensor.shape]} on {tensor.device} and other arguments "
        'that only eager code takes: generate without draft tokens (speculative=None, "--speculative none")'
    )


def _convolved(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor | None:
    """None where the operator does not apply."""
    name = ACTIVATIONS.get(activation)
    present = [tensor for tensor in (x, conv_state, weight, bias) if tensor is not None]
    known = all(tensor.dtype in ACTIVATION_DTYPES and tensor.device == x.device for tensor in present)
    if name is None or not known or conv_state.shape[-1] < weight.shape[-1] - 1:
        return None
    pending = uncommitted_of(conv_state, x.shape[-1])
    return ops.causal_conv1d_update_(x.mT, conv_state, weight, bias, activation=name, **pending).mT


def causal_conv_of_prompt(function: Callable, *args: Any, **options: Any) -> Tensor:
    """function(x, weight, bias, activation, **options), which sees nothing in front of x but what x knows."""
    named = {name: value for name, value in options.items() if name in _NAMED}
    plain = all(name in named or _is_flag(name, value) for name, value in options.items())
    out = _convolved_prompt(*args, **named) if plain and args else None
    if out is None and args:
        _refuse_pending(function, notes_in(args[0]).before, args[0])
    return function(*args, **options) if out is None else out


def _convolved_prompt(x: Tensor, weight: Tensor, *rest: Any, **named: Any) -> Tensor | None:
    before = notes_in(x).before
    state = x.new_zeros(x.shape[0], *weight.shape) if before is None else before
    return _convolved(x, state, weight, *rest, **named)


def delta_rule(function: Callable, *args: Any, **options: Any) -> tuple:
    """function(q, k, v, g=, beta=, **options), and the state, which is another tensor than the given one.

    A state with uncommitted tokens is written in place.
    """
    g, beta, state = (options.get(name) for name in ("g", "beta", "initial_state"))
    if len(args) != 3 or g is None or beta is None or not _known(options) or not _fits(*args, state):
        if args:
            _refuse_pending(function, state, args[0])
        return function(*args, **options)
    q, k, v = args
    pending = {} if state is None else uncommitted_of(state, v.shape[1])
    eps = _L2NORM_EPS if options.get("use_qk_l2norm_in_kernel") else None
    if state is None:
        state = q.new_zeros((v.shape[0], v.shape[2], q.shape[3], v.shape[3]), dtype=torch.float32)
    elif not pending:
        state = state.clone()
    out = ops._gated_delta_rule_(
        *(q, k, v, g, state), scale=q.shape[-1] ** -0.5, beta=beta, l2norm_eps=eps, **pending
    )
    return out, state if options.get("output_final_state") else None


def _known(options: dict) -> bool:
    """True if the operator knows all options."""
    names = ("g", "beta", "initial_state")
    return all(name in names or _is_flag(name, value) for name, value in options.items())


def _is_flag(name: str, value: Any) -> bool:
    """True if an option is a flag of the model, as use_cache: forwards pass them on to every function."""
    return name == _RECORDED or isinstance(value, (bool, type(None)))


def _fits(q: Tensor, k: Tensor, v: Tensor, state: Tensor | None) -> bool:
    if state is not None and (state.dtype != torch.float32 or state.device != q.device):
        return False
    dtypes = q.dtype in ACTIVATION_DTYPES and q.dtype == k.dtype == v.dtype
    narrow = q.dim() == 4 and q.shape[-1] <= MAX_KEY_WIDTH
    return dtypes and narrow and q.shape == k.shape and v.shape[2] % q.shape[2] == 0


# Recognising functions by running them


@in_each_draw
def is_causal_conv(function: Callable) -> bool:
    """True if a function of (x, conv_state, weight, bias, activation) is causal_conv1d_update_."""
    return _convolves(function, normal(2, 3, 1), normal(2, 3, 4))


@in_each_draw
def is_conv_of_prompt(function: Callable) -> bool:
    """True if a function of (x, weight, bias, activation) is that with nothing in front of x."""
    return _convolves(function, normal(2, 3, 6))


def _convolves(function: Callable, x: Tensor, *states: Tensor) -> bool:
    weight, bias = normal(3, 4), normal(3)
    for arguments, activation in ((None, "silu"), (bias, None)):
        theirs = [state.clone() for state in states]
        result = tried(eager(function), x, *theirs, weight, arguments, activation=activation)
        ours = states[0].clone() if states else torch.zeros(2, 3, 4)
        expected = ops.causal_conv1d_update_(
            x.mT, ours, weight, arguments, activation=ACTIVATIONS[activation]
        ).mT
        if not agrees(expected, result, 1e-4) or not all(torch.equal(state, ours) for state in theirs):
            return False
    return True


@in_each_draw
def is_delta_rule(function: Callable) -> bool:
    """True if a function of (q, k, v, g, beta, ...) is gated_delta_rule_: one of steps or one of chunks."""
    tokens = 66  # more than a chunk
    q, k, v = normal(2, tokens, 2, 8), normal(2, tokens, 2, 8), normal(2, tokens, 4, 3)
    g, beta, state = -normal(2, tokens, 4).abs(), normal(2, tokens, 4).sigmoid(), normal(2, 4, 8, 3)
    for normed, initial in ((True, state), (False, state), (True, None)):
        keys = k if normed else F.normalize(k, dim=-1)
        ours = torch.zeros_like(state) if initial is None else state.clone()
        options = {"initial_state": None if initial is None else state.clone(), "output_final_state": True}
        result = tried(eager(function), q, keys, v, g=g, beta=beta, use_qk_l2norm_in_kernel=normed, **options)
        eps = _L2NORM_EPS if normed else None
        expected = ops._gated_delta_rule_(q, keys, v, g, ours, scale=8**-0.5, beta=beta, l2norm_eps=eps)
        if not agrees((expected, ours), result, 1e-4):
            return False
    return True


# Functions that forwards call


def convolution_in_place(function: types.FunctionType) -> InPlace | None:
    """Replacement of a causal convolution, of a step or of a prompt."""
    if not inspect.signature(function).parameters.keys() >= _NAMED:
        return None
    for is_one, run in ((is_causal_conv, causal_conv), (is_conv_of_prompt, causal_conv_of_prompt)):
        if is_one(function):
            return InPlace(functools.partial(run, function), Done("causal_conv1d_update_"))
    return None


def delta_rule_in_place(function: types.FunctionType) -> InPlace | None:
    """Replacement of the recurrence, of one of steps or of one of chunks."""
    takes = inspect.signature(function).parameters.keys() >= {"g", "beta", "initial_state"}
    if not takes or not is_delta_rule(function):
        return None
    return InPlace(functools.partial(delta_rule, function), Done("_gated_delta_rule_"))
